// SPDX-License-Identifier: Apache-2.0
#include "dspark/markov_loop.h"

#include "core/dispatch.h"
#include "core/families.h"
#include "core/sampler.h"

namespace {

using Params = dspark_markov_loop_params;

// A packed key has 19 bits for the segment.
constexpr int32_t kMaxVocabulary = dspark::kSegment << 19;

// Everything a workspace size depends on.
void check_sizes(dspark::Problems& problems, const Params& p) {
  dspark::check_gamma(problems, p.gamma);
  DSPARK_REQUIRE(problems, p.vocab_size >= 1, "vocab_size: got %d, expected >= 1", p.vocab_size);
  DSPARK_REQUIRE(problems, p.draft_vocab_size >= 1 && p.draft_vocab_size <= kMaxVocabulary,
                 "draft_vocab_size: got %d, expected 1..%d", p.draft_vocab_size, kMaxVocabulary);
  DSPARK_REQUIRE(problems, p.draft_vocab_size <= p.vocab_size,
                 "draft_vocab_size: got %d, expected at most vocab_size = %d", p.draft_vocab_size,
                 p.vocab_size);
  DSPARK_REQUIRE(problems, p.rank >= 1, "rank: got %d, expected >= 1", p.rank);
  DSPARK_REQUIRE(problems, p.hidden_size >= 0, "hidden_size: got %d, expected >= 0", p.hidden_size);
  DSPARK_REQUIRE(problems, p.head >= DSPARK_HEAD_VANILLA && p.head <= DSPARK_HEAD_RNN,
                 "head: got %d, expected a dspark_head (0..2)", p.head);
  DSPARK_REQUIRE(problems, p.topk_support >= 0 && p.topk_support <= DSPARK_MAX_SUPPORT,
                 "topk_support: got %d, expected 0..%d", p.topk_support, DSPARK_MAX_SUPPORT);
}

void check_weights(dspark::Problems& problems, const Params& p) {
  dspark::check_pointer(problems, "w1", p.w1);
  dspark::check_float_dtype(problems, "w1_dtype", p.w1_dtype);
  dspark::check_pointer(problems, "w2", p.w2);
  if (p.w2_dtype != DSPARK_I8) dspark::check_float_dtype(problems, "w2_dtype", p.w2_dtype);
  DSPARK_REQUIRE(problems, (p.w2_scale != nullptr) == (p.w2_dtype == DSPARK_I8),
                 "w2_scale: got %s with w2_dtype %d, expected scales exactly with int8",
                 p.w2_scale == nullptr ? "NULL" : "scales", p.w2_dtype);
  const bool vanilla = p.head == DSPARK_HEAD_VANILLA;
  DSPARK_REQUIRE(problems, (p.head_weight == nullptr) == vanilla,
                 "head_weight: got %s with head %d, expected it exactly with gated and rnn",
                 p.head_weight == nullptr ? "NULL" : "weights", p.head);
  DSPARK_REQUIRE(problems, (p.head_bias == nullptr) == vanilla,
                 "head_bias: got %s with head %d, expected it exactly with gated and rnn",
                 p.head_bias == nullptr ? "NULL" : "biases", p.head);
  const bool confidence = p.confidence_weight != nullptr;
  DSPARK_REQUIRE(problems, (vanilla && !confidence) || (p.hidden != nullptr && p.hidden_size > 0),
                 "hidden: got %s with hidden_size %d, expected hidden states for the gated and rnn "
                 "heads and for the confidence logit",
                 p.hidden == nullptr ? "NULL" : "an array", p.hidden_size);
  DSPARK_REQUIRE(problems,
                 !confidence || p.confidence_size == p.hidden_size ||
                     p.confidence_size == p.hidden_size + p.rank,
                 "confidence_size: got %d, expected hidden_size = %d or hidden_size + rank = %d",
                 p.confidence_size, p.hidden_size, p.hidden_size + p.rank);
  DSPARK_REQUIRE(problems, confidence == (p.confidence_logit != nullptr),
                 "confidence_logit: got %s, expected it exactly with confidence_weight",
                 p.confidence_logit == nullptr ? "NULL" : "an array");
}

// The screen serves calls whose law is one-hot and whose results are tokens and logits alone.
void check_screen(dspark::Problems& problems, const Params& p) {
  const bool screen = p.w2_screen != nullptr;
  DSPARK_REQUIRE(problems, (p.lse == nullptr) == screen,
                 "lse: got %s with%s w2_screen, expected NULL exactly with it",
                 p.lse == nullptr ? "NULL" : "an array", screen ? "" : "out");
  DSPARK_REQUIRE(problems, screen == (p.screen_scale != nullptr),
                 "w2_screen, screen_scale: got one of them, expected both or NULL");
  if (!screen) return;
  DSPARK_REQUIRE(problems, p.w2_dtype == DSPARK_BF16,
                 "w2_screen: got bytes with w2_dtype %d, expected a bf16 W2", p.w2_dtype);
  DSPARK_REQUIRE(problems, p.temperature == nullptr,
                 "w2_screen: got bytes with temperatures, expected an all-greedy call "
                 "(temperature NULL)");
  DSPARK_REQUIRE(problems, p.logits == nullptr && p.topk_support == 0,
                 "w2_screen: got bytes with %s, expected neither logits nor topk_support",
                 p.logits == nullptr ? "topk_support" : "logits");
}

void check_support(dspark::Problems& problems, const Params& p) {
  DSPARK_REQUIRE(problems, (p.support_ids == nullptr) == (p.support_logits == nullptr),
                 "support_ids, support_logits: got one of them, expected both or NULL");
  DSPARK_REQUIRE(problems, p.support_ids == nullptr || p.topk_support > 0,
                 "support_ids: got an array with topk_support 0, expected NULL");
}

void check(dspark::Problems& problems, const Params& p) {
  if (p.num_requests == 0) return;
  dspark::check_pointer(problems, "base_logits", p.base_logits);
  dspark::check_float_dtype(problems, "base_dtype", p.base_dtype);
  check_weights(problems, p);
  DSPARK_REQUIRE(problems, p.draft_to_target != nullptr || p.draft_vocab_size == p.vocab_size,
                 "draft_to_target: got NULL with draft_vocab_size %d and vocab_size %d, expected a "
                 "map or equal sizes",
                 p.draft_vocab_size, p.vocab_size);
  dspark::check_pointer(problems, "anchor", p.anchor);
  dspark::check_pointer(problems, "seed", p.seed);
  dspark::check_pointer(problems, "position", p.position);
  dspark::check_pointer(problems, "tokens", p.tokens);
  dspark::check_pointer(problems, "logit", p.logit);
  check_screen(problems, p);
  dspark::check_pointer(problems, "status", p.status);
  check_support(problems, p);
  DSPARK_REQUIRE(problems,
                 p.logits == nullptr || p.gamma == 1 || p.logits_slot_stride >= p.draft_vocab_size,
                 "logits_slot_stride: got %lld, expected at least draft_vocab_size = %d",
                 static_cast<long long>(p.logits_slot_stride), p.draft_vocab_size);
}

constexpr dspark::Backends<Params> kBackends = DSPARK_BACKENDS(markov_loop);

}  // namespace

extern "C" {

dspark_status dspark_markov_loop_workspace(dspark_device device, const Params* params,
                                           size_t* bytes) {
  dspark::Problems problems("dspark_markov_loop_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, *params);
  return dspark::finish_workspace(problems, kBackends, device, *params, bytes);
}

dspark_status dspark_markov_loop(dspark_device device, const Params* params,
                                 dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_markov_loop");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, *params);
  check(problems, *params);
  return dspark::finish_call(problems, kBackends, device, *params, workspace, stream);
}

}  // extern "C"
