// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {
namespace {

// One call instead of twelve: a decoder attends once a layer.
void arrays_at_once(py::class_<dspark_verify_attention_params>& cls) {
  using P = dspark_verify_attention_params;
  cls.def("set_arrays",
          [](P& p, uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t page_table,
             uintptr_t kv_len, uintptr_t cu_seqlens, uintptr_t k_scale, uintptr_t v_scale,
             uintptr_t work, uintptr_t out, uintptr_t lse, uintptr_t status) {
            p.q = reinterpret_cast<const void*>(q);
            p.k_cache = reinterpret_cast<const void*>(k_cache);
            p.v_cache = reinterpret_cast<const void*>(v_cache);
            p.page_table = reinterpret_cast<const int32_t*>(page_table);
            p.kv_len = reinterpret_cast<const int32_t*>(kv_len);
            p.cu_seqlens = reinterpret_cast<const int32_t*>(cu_seqlens);
            p.k_scale = reinterpret_cast<const float*>(k_scale);
            p.v_scale = reinterpret_cast<const float*>(v_scale);
            p.work = reinterpret_cast<const int32_t*>(work);
            p.out = reinterpret_cast<void*>(out);
            p.lse = reinterpret_cast<float*>(lse);
            p.status = reinterpret_cast<int32_t*>(status);
          });
}

}  // namespace

void register_verify_attention(py::module_& m) {
  using P = dspark_verify_attention_params;
  auto cls = params_class<P>(m, "VerifyAttentionParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "num_q_heads", &P::num_q_heads);
  field(cls, "num_kv_heads", &P::num_kv_heads);
  field(cls, "head_dim", &P::head_dim);
  field(cls, "page_size", &P::page_size);
  field(cls, "num_pages", &P::num_pages);
  field(cls, "max_pages", &P::max_pages);
  field(cls, "num_tokens", &P::num_tokens);
  field(cls, "max_q_len", &P::max_q_len);
  field(cls, "causal", &P::causal);
  field(cls, "window", &P::window);
  field(cls, "batch_invariant", &P::batch_invariant);
  field(cls, "num_threads", &P::num_threads);
  field(cls, "scale", &P::scale);
  field(cls, "soft_cap", &P::soft_cap);
  field(cls, "dtype", &P::dtype);
  field(cls, "cache_dtype", &P::cache_dtype);
  field(cls, "q", &P::q);
  field(cls, "q_token_stride", &P::q_token_stride);
  field(cls, "q_head_stride", &P::q_head_stride);
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
  field(cls, "work", &P::work);
  field(cls, "work_size", &P::work_size);
  field(cls, "out", &P::out);
  field(cls, "lse", &P::lse);
  field(cls, "status", &P::status);
  arrays_at_once(cls);
  family(m, "verify_attention", &dspark_verify_attention, &dspark_verify_attention_workspace);
}

}  // namespace dspark::bindings
