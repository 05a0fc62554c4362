// SPDX-License-Identifier: Apache-2.0
#include "dspark/paged_kv.h"

#include "core/dispatch.h"
#include "core/families.h"

namespace {

void check_sizes(dspark::Problems& problems, const dspark_paged_kv_params* p) {
  dspark::check_positive(problems, "num_kv_heads", p->num_kv_heads);
  dspark::check_positive(problems, "head_dim", p->head_dim);
  dspark::check_positive(problems, "page_size", p->page_size);
  dspark::check_not_negative(problems, "num_pages", p->num_pages);
  dspark::check_not_negative(problems, "max_pages", p->max_pages);
  dspark::check_not_negative(problems, "num_tokens", p->num_tokens);
  dspark::check_float_dtype(problems, "dtype", p->dtype);
  dspark::check_kv_dtype(problems, "cache_dtype", p->cache_dtype);
  dspark::check_kv_scale(problems, "k_scale", p->k_scale, p->k_scale_stride, p->cache_dtype);
  dspark::check_kv_scale(problems, "v_scale", p->v_scale, p->v_scale_stride, p->cache_dtype);
  DSPARK_REQUIRE(problems, p->rope_theta >= 0.0 && p->rope_theta - p->rope_theta == 0.0,
                 "rope_theta: got %g, expected 0 or a positive finite base", p->rope_theta);
  if (p->rope_theta == 0.0) return;
  DSPARK_REQUIRE(problems, p->rope_dim != 0 || p->head_dim % 2 == 0,
                 "head_dim: got %d, expected an even size, or a rope_dim", p->head_dim);
  DSPARK_REQUIRE(problems, p->rope_dim >= 0 && p->rope_dim <= p->head_dim && p->rope_dim % 2 == 0,
                 "rope_dim: got %d, expected an even number in 0..%d", p->rope_dim, p->head_dim);
  DSPARK_REQUIRE(problems, p->rope_amplitude >= 0.0 && p->rope_amplitude - p->rope_amplitude == 0.0,
                 "rope_amplitude: got %g, expected 0 or a positive finite factor",
                 p->rope_amplitude);
}

void check_pointers(dspark::Problems& problems, const dspark_paged_kv_params* p) {
  if (p->num_requests == 0) return;
  dspark::check_pointer(problems, "kv_len", p->kv_len);
  dspark::check_pointer(problems, "cu_seqlens", p->cu_seqlens);
  dspark::check_pointer(problems, "status", p->status);
  if (p->max_pages > 0) dspark::check_pointer(problems, "page_table", p->page_table);
  if (p->num_tokens == 0) return;
  dspark::check_pointer(problems, "k", p->k);
  dspark::check_pointer(problems, "v", p->v);
  if (p->num_pages == 0) return;
  dspark::check_pointer(problems, "k_cache", p->k_cache);
  dspark::check_pointer(problems, "v_cache", p->v_cache);
}

constexpr dspark::Backends<dspark_paged_kv_params> kBackends = DSPARK_BACKENDS(paged_kv);

}  // namespace

extern "C" {

dspark_status dspark_paged_kv_workspace(dspark_device device, const dspark_paged_kv_params* params,
                                        size_t* bytes) {
  dspark::Problems problems("dspark_paged_kv_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, params);
  return dspark::finish_workspace(problems, kBackends, device, *params, bytes);
}

dspark_status dspark_paged_kv(dspark_device device, const dspark_paged_kv_params* params,
                              dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_paged_kv");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, params);
  check_pointers(problems, params);
  return dspark::finish_call(problems, kBackends, device, *params, workspace, stream);
}

dspark_status dspark_paged_kv_commit(dspark_device device,
                                     const dspark_paged_kv_commit_params* params, void* stream) {
  dspark::Problems problems("dspark_paged_kv_commit");
  if (!dspark::check_header(problems, params)) return problems.status();
  dspark::check_device(problems, device);
  if (params->num_requests > 0) {
    dspark::check_pointer(problems, "kv_len", params->kv_len);
    dspark::check_pointer(problems, "position", params->position);
    dspark::check_pointer(problems, "num_emitted", params->num_emitted);
  }
  if (!problems.none()) return problems.status();
#ifdef DSPARK_WITH_CUDA
  if (device == DSPARK_CUDA) return dspark::cuda::paged_kv_commit(*params, stream);
#else
  (void)stream;
#endif
  dspark::cpu::paged_kv_commit(*params);
  return problems.status();
}

}  // extern "C"
