// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {

void register_markov_loop(py::module_& m) {
  using P = dspark_markov_loop_params;
  auto cls = params_class<P>(m, "MarkovLoopParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "gamma", &P::gamma);
  field(cls, "vocab_size", &P::vocab_size);
  field(cls, "draft_vocab_size", &P::draft_vocab_size);
  field(cls, "rank", &P::rank);
  field(cls, "hidden_size", &P::hidden_size);
  field(cls, "head", &P::head);
  field(cls, "topk_support", &P::topk_support);
  field(cls, "num_threads", &P::num_threads);
  field(cls, "base_logits", &P::base_logits);
  field(cls, "base_dtype", &P::base_dtype);
  field(cls, "base_request_stride", &P::base_request_stride);
  field(cls, "base_slot_stride", &P::base_slot_stride);
  field(cls, "w1", &P::w1);
  field(cls, "w1_dtype", &P::w1_dtype);
  field(cls, "w1_stride", &P::w1_stride);
  field(cls, "w2", &P::w2);
  field(cls, "w2_dtype", &P::w2_dtype);
  field(cls, "w2_stride", &P::w2_stride);
  field(cls, "w2_scale", &P::w2_scale);
  field(cls, "w2_screen", &P::w2_screen);
  field(cls, "w2_screen_stride", &P::w2_screen_stride);
  field(cls, "screen_scale", &P::screen_scale);
  field(cls, "head_weight", &P::head_weight);
  field(cls, "head_bias", &P::head_bias);
  field(cls, "hidden", &P::hidden);
  field(cls, "hidden_request_stride", &P::hidden_request_stride);
  field(cls, "hidden_slot_stride", &P::hidden_slot_stride);
  field(cls, "confidence_weight", &P::confidence_weight);
  field(cls, "confidence_size", &P::confidence_size);
  field(cls, "confidence_bias", &P::confidence_bias);
  field(cls, "anchor", &P::anchor);
  field(cls, "seed", &P::seed);
  field(cls, "position", &P::position);
  field(cls, "temperature", &P::temperature);
  field(cls, "top_k", &P::top_k);
  field(cls, "top_p", &P::top_p);
  field(cls, "draft_to_target", &P::draft_to_target);
  field(cls, "active", &P::active);
  field(cls, "debug_uniform", &P::debug_uniform);
  field(cls, "tokens", &P::tokens);
  field(cls, "logit", &P::logit);
  field(cls, "lse", &P::lse);
  field(cls, "confidence_logit", &P::confidence_logit);
  field(cls, "logits", &P::logits);
  field(cls, "logits_request_stride", &P::logits_request_stride);
  field(cls, "logits_slot_stride", &P::logits_slot_stride);
  field(cls, "support_ids", &P::support_ids);
  field(cls, "support_logits", &P::support_logits);
  field(cls, "status", &P::status);
  family(m, "markov_loop", &dspark_markov_loop, &dspark_markov_loop_workspace);
}

}  // namespace dspark::bindings
