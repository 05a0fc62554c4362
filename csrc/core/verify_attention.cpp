// SPDX-License-Identifier: Apache-2.0
#include "dspark/verify_attention.h"

#include "core/dispatch.h"
#include "core/families.h"
#include "core/work_plan.h"

namespace {

// Elements of one token's queries: offsets inside a tile of rows then fit in 32 bits.
constexpr int64_t kMaxRow = INT64_C(1) << 24;

bool finite(float x) { return x - x == 0.0f; }

void check_sizes(dspark::Problems& problems, const dspark_verify_attention_params* p) {
  dspark::check_positive(problems, "num_q_heads", p->num_q_heads);
  dspark::check_positive(problems, "num_kv_heads", p->num_kv_heads);
  DSPARK_REQUIRE(problems, p->num_kv_heads < 1 || p->num_q_heads % p->num_kv_heads == 0,
                 "num_q_heads: got %d, expected a multiple of num_kv_heads = %d", p->num_q_heads,
                 p->num_kv_heads);
  dspark::check_positive(problems, "head_dim", p->head_dim);
  const int64_t row = static_cast<int64_t>(p->num_q_heads) * p->head_dim;
  DSPARK_REQUIRE(problems, row <= kMaxRow,
                 "num_q_heads * head_dim: got %lld, expected at most %lld elements a token",
                 static_cast<long long>(row), static_cast<long long>(kMaxRow));
  dspark::check_positive(problems, "page_size", p->page_size);
  dspark::check_not_negative(problems, "num_pages", p->num_pages);
  dspark::check_not_negative(problems, "max_pages", p->max_pages);
  dspark::check_not_negative(problems, "num_tokens", p->num_tokens);
  dspark::check_not_negative(problems, "max_q_len", p->max_q_len);
  dspark::check_not_negative(problems, "window", p->window);
  dspark::check_float_dtype(problems, "dtype", p->dtype);
  dspark::check_kv_dtype(problems, "cache_dtype", p->cache_dtype);
  dspark::check_kv_scale(problems, "k_scale", p->k_scale, p->k_scale_stride, p->cache_dtype);
  dspark::check_kv_scale(problems, "v_scale", p->v_scale, p->v_scale_stride, p->cache_dtype);
  DSPARK_REQUIRE(problems, finite(p->scale), "scale: got %g, expected a finite number",
                 static_cast<double>(p->scale));
  DSPARK_REQUIRE(problems, finite(p->soft_cap) && p->soft_cap >= 0.0f,
                 "soft_cap: got %g, expected 0 or a positive finite number",
                 static_cast<double>(p->soft_cap));
  const int64_t needed = dspark::work_plan_size(p->num_requests);
  DSPARK_REQUIRE(problems, p->work == nullptr || p->work_size >= needed,
                 "work_size: got %d, expected at least %lld", p->work_size,
                 static_cast<long long>(needed));
}

void check_pointers(dspark::Problems& problems, const dspark_verify_attention_params* p) {
  if (p->num_requests == 0) return;
  dspark::check_pointer(problems, "kv_len", p->kv_len);
  dspark::check_pointer(problems, "cu_seqlens", p->cu_seqlens);
  dspark::check_pointer(problems, "status", p->status);
  if (p->max_pages > 0) dspark::check_pointer(problems, "page_table", p->page_table);
  if (p->num_tokens == 0) return;
  dspark::check_pointer(problems, "q", p->q);
  dspark::check_pointer(problems, "out", p->out);
  if (p->num_pages == 0) return;
  dspark::check_pointer(problems, "k_cache", p->k_cache);
  dspark::check_pointer(problems, "v_cache", p->v_cache);
}

constexpr dspark::Backends<dspark_verify_attention_params> kBackends =
    DSPARK_BACKENDS(verify_attention);

}  // namespace

extern "C" {

dspark_status dspark_verify_attention_workspace(dspark_device device,
                                                const dspark_verify_attention_params* params,
                                                size_t* bytes) {
  dspark::Problems problems("dspark_verify_attention_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, params);
  return dspark::finish_workspace(problems, kBackends, device, *params, bytes);
}

dspark_status dspark_verify_attention(dspark_device device,
                                      const dspark_verify_attention_params* params,
                                      dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_verify_attention");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, params);
  check_pointers(problems, params);
  return dspark::finish_call(problems, kBackends, device, *params, workspace, stream);
}

}  // extern "C"
