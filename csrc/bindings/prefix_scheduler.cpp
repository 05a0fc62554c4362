// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {

void register_prefix_scheduler(py::module_& m) {
  using P = dspark_prefix_scheduler_params;
  auto cls = params_class<P>(m, "PrefixSchedulerParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "gamma", &P::gamma);
  field(cls, "mode", &P::mode);
  field(cls, "num_threads", &P::num_threads);
  field(cls, "survival", &P::survival);
  field(cls, "survival_stride", &P::survival_stride);
  field(cls, "conditional", &P::conditional);
  field(cls, "conditional_stride", &P::conditional_stride);
  field(cls, "lagged", &P::lagged);
  field(cls, "lagged_stride", &P::lagged_stride);
  field(cls, "cost_ms", &P::cost_ms);
  field(cls, "cost_size", &P::cost_size);
  field(cls, "draft_ms", &P::draft_ms);
  field(cls, "ms_per_kv_token", &P::ms_per_kv_token);
  field(cls, "kv_len", &P::kv_len);
  field(cls, "budget", &P::budget);
  field(cls, "threshold", &P::threshold);
  field(cls, "fixed_len", &P::fixed_len);
  field(cls, "capacity", &P::capacity);
  field(cls, "padded_tokens", &P::padded_tokens);
  field(cls, "min_len", &P::min_len);
  field(cls, "max_len", &P::max_len);
  field(cls, "weight", &P::weight);
  field(cls, "active", &P::active);
  field(cls, "anchor", &P::anchor);
  field(cls, "draft_tokens", &P::draft_tokens);
  field(cls, "draft_tokens_stride", &P::draft_tokens_stride);
  field(cls, "position", &P::position);
  field(cls, "length", &P::length);
  field(cls, "cu_seqlens", &P::cu_seqlens);
  field(cls, "total_tokens", &P::total_tokens);
  field(cls, "theta", &P::theta);
  field(cls, "row_to_request", &P::row_to_request);
  field(cls, "row_offset", &P::row_offset);
  field(cls, "token_ids", &P::token_ids);
  field(cls, "positions", &P::positions);
  field(cls, "work", &P::work);
  field(cls, "work_size", &P::work_size);
  field(cls, "status", &P::status);
  family(m, "prefix_scheduler", &dspark_prefix_scheduler, &dspark_prefix_scheduler_workspace);
  m.def("prefix_scheduler_max_tokens", &dspark_prefix_scheduler_max_tokens, py::arg("params"));
}

}  // namespace dspark::bindings
