// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {
namespace {

void register_append(py::module_& m) {
  using P = dspark_paged_kv_params;
  auto cls = params_class<P>(m, "PagedKvParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "num_kv_heads", &P::num_kv_heads);
  field(cls, "head_dim", &P::head_dim);
  field(cls, "page_size", &P::page_size);
  field(cls, "num_pages", &P::num_pages);
  field(cls, "max_pages", &P::max_pages);
  field(cls, "num_tokens", &P::num_tokens);
  field(cls, "num_threads", &P::num_threads);
  field(cls, "dtype", &P::dtype);
  field(cls, "cache_dtype", &P::cache_dtype);
  field(cls, "k", &P::k);
  field(cls, "k_token_stride", &P::k_token_stride);
  field(cls, "k_head_stride", &P::k_head_stride);
  field(cls, "v", &P::v);
  field(cls, "v_token_stride", &P::v_token_stride);
  field(cls, "v_head_stride", &P::v_head_stride);
  field(cls, "k_cache", &P::k_cache);
  field(cls, "v_cache", &P::v_cache);
  field(cls, "page_stride", &P::page_stride);
  field(cls, "row_stride", &P::row_stride);
  field(cls, "head_stride", &P::head_stride);
  field(cls, "k_scale", &P::k_scale);
  field(cls, "v_scale", &P::v_scale);
  field(cls, "k_scale_stride", &P::k_scale_stride);
  field(cls, "v_scale_stride", &P::v_scale_stride);
  field(cls, "page_table", &P::page_table);
  field(cls, "page_table_stride", &P::page_table_stride);
  field(cls, "kv_len", &P::kv_len);
  field(cls, "cu_seqlens", &P::cu_seqlens);
  field(cls, "num_new", &P::num_new);
  field(cls, "rope_theta", &P::rope_theta);
  field(cls, "rope_inv_freq", &P::rope_inv_freq);
  field(cls, "rope_amplitude", &P::rope_amplitude);
  field(cls, "rope_dim", &P::rope_dim);
  field(cls, "rope_interleaved", &P::rope_interleaved);
  field(cls, "status", &P::status);
  cls.def("set_arrays",
          [](P& p, uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache,
             uintptr_t page_table, uintptr_t kv_len, uintptr_t cu_seqlens, uintptr_t k_scale,
             uintptr_t v_scale, uintptr_t num_new, uintptr_t status) {
            // One call instead of eleven: a decoder appends once a layer.
            p.k = reinterpret_cast<const void*>(k);
            p.v = reinterpret_cast<const void*>(v);
            p.k_cache = reinterpret_cast<void*>(k_cache);
            p.v_cache = reinterpret_cast<void*>(v_cache);
            p.page_table = reinterpret_cast<const int32_t*>(page_table);
            p.kv_len = reinterpret_cast<const int32_t*>(kv_len);
            p.cu_seqlens = reinterpret_cast<const int32_t*>(cu_seqlens);
            p.k_scale = reinterpret_cast<const float*>(k_scale);
            p.v_scale = reinterpret_cast<const float*>(v_scale);
            p.num_new = reinterpret_cast<const int32_t*>(num_new);
            p.status = reinterpret_cast<int32_t*>(status);
          });
  family(m, "paged_kv", &dspark_paged_kv, &dspark_paged_kv_workspace);
}

void register_commit(py::module_& m) {
  using P = dspark_paged_kv_commit_params;
  auto cls = params_class<P>(m, "PagedKvCommitParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "kv_len", &P::kv_len);
  field(cls, "position", &P::position);
  field(cls, "num_emitted", &P::num_emitted);
  field(cls, "active", &P::active);
  m.def(
      "paged_kv_commit",
      [](int device, const P& params, uintptr_t stream) {
        auto* function = choose(device, &dspark_paged_kv_commit, "dspark_paged_kv_commit");
        raise_if_failed(function(c_device(device), &params, reinterpret_cast<void*>(stream)));
      },
      py::arg("device"), py::arg("params"), py::arg("stream") = 0);
}

}  // namespace

void register_paged_kv(py::module_& m) {
  register_append(m);
  register_commit(m);
}

}  // namespace dspark::bindings
