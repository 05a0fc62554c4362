// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {
namespace {

void result_fields(py::class_<dspark_rejection_sampler_params>& cls) {
  using P = dspark_rejection_sampler_params;
  field(cls, "num_accepted", &P::num_accepted);
  field(cls, "num_emitted", &P::num_emitted);
  field(cls, "tokens", &P::tokens);
  field(cls, "next_anchor", &P::next_anchor);
  field(cls, "logprob", &P::logprob);
  field(cls, "logprob_raw", &P::logprob_raw);
  field(cls, "top_ids", &P::top_ids);
  field(cls, "top_logprob", &P::top_logprob);
  field(cls, "top_ids_raw", &P::top_ids_raw);
  field(cls, "top_logprob_raw", &P::top_logprob_raw);
  field(cls, "accepted", &P::accepted);
  field(cls, "finish", &P::finish);
  field(cls, "status", &P::status);
}

}  // namespace

void register_rejection_sampler(py::module_& m) {
  using P = dspark_rejection_sampler_params;
  auto cls = params_class<P>(m, "RejectionSamplerParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "gamma", &P::gamma);
  field(cls, "vocab_size", &P::vocab_size);
  field(cls, "draft_vocab_size", &P::draft_vocab_size);
  field(cls, "num_rows", &P::num_rows);
  field(cls, "num_stop_ids", &P::num_stop_ids);
  field(cls, "top_logprobs", &P::top_logprobs);
  field(cls, "num_threads", &P::num_threads);
  field(cls, "target_logits", &P::target_logits);
  field(cls, "target_dtype", &P::target_dtype);
  field(cls, "target_stride", &P::target_stride);
  field(cls, "target_logit", &P::target_logit);
  field(cls, "target_lse", &P::target_lse);
  field(cls, "target_lse_raw", &P::target_lse_raw);
  field(cls, "draft_tokens", &P::draft_tokens);
  field(cls, "draft_tokens_stride", &P::draft_tokens_stride);
  field(cls, "draft_len", &P::draft_len);
  field(cls, "cu_seqlens", &P::cu_seqlens);
  field(cls, "seed", &P::seed);
  field(cls, "position", &P::position);
  field(cls, "rule", &P::rule);
  field(cls, "synthetic_acceptance", &P::synthetic_acceptance);
  field(cls, "temperature", &P::temperature);
  field(cls, "top_k", &P::top_k);
  field(cls, "top_p", &P::top_p);
  field(cls, "min_p", &P::min_p);
  field(cls, "logit_bias", &P::logit_bias);
  field(cls, "logit_bias_stride", &P::logit_bias_stride);
  field(cls, "token_mask", &P::token_mask);
  field(cls, "mask_row_stride", &P::mask_row_stride);
  field(cls, "mask_request_stride", &P::mask_request_stride);
  field(cls, "repetition_penalty", &P::repetition_penalty);
  field(cls, "presence_penalty", &P::presence_penalty);
  field(cls, "frequency_penalty", &P::frequency_penalty);
  field(cls, "output_counts", &P::output_counts);
  field(cls, "output_counts_stride", &P::output_counts_stride);
  field(cls, "prompt_mask", &P::prompt_mask);
  field(cls, "prompt_mask_stride", &P::prompt_mask_stride);
  field(cls, "anchor", &P::anchor);
  field(cls, "min_tokens_left", &P::min_tokens_left);
  field(cls, "draft_logit", &P::draft_logit);
  field(cls, "draft_lse", &P::draft_lse);
  field(cls, "draft_logits", &P::draft_logits);
  field(cls, "support_ids", &P::support_ids);
  field(cls, "support_logits", &P::support_logits);
  field(cls, "support_size", &P::support_size);
  field(cls, "draft_dtype", &P::draft_dtype);
  field(cls, "draft_request_stride", &P::draft_request_stride);
  field(cls, "draft_slot_stride", &P::draft_slot_stride);
  field(cls, "draft_temperature", &P::draft_temperature);
  field(cls, "draft_to_target", &P::draft_to_target);
  field(cls, "stop_ids", &P::stop_ids);
  field(cls, "stop_ids_stride", &P::stop_ids_stride);
  field(cls, "max_new_tokens", &P::max_new_tokens);
  field(cls, "active", &P::active);
  field(cls, "debug_uniform", &P::debug_uniform);
  result_fields(cls);
  family(m, "rejection_sampler", &dspark_rejection_sampler, &dspark_rejection_sampler_workspace);
}

}  // namespace dspark::bindings
