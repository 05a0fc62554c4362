// SPDX-License-Identifier: Apache-2.0
#include "dspark/rejection_sampler.h"

#include "core/dispatch.h"
#include "core/families.h"
#include "core/rejection_sampler.h"
#include "core/sampler.h"

namespace {

using Params = dspark_rejection_sampler_params;

// 19 bits of a packed key number the segments.
constexpr int32_t kMaxVocab = DSPARK_SEGMENT << 19;

void check_sizes(dspark::Problems& problems, const Params* p) {
  dspark::check_gamma(problems, p->gamma);
  DSPARK_REQUIRE(problems, p->vocab_size >= 1 && p->vocab_size <= kMaxVocab,
                 "vocab_size: got %d, expected 1..%d", p->vocab_size, kMaxVocab);
}

void check_outputs(dspark::Problems& problems, const Params* p) {
  dspark::check_pointer(problems, "num_accepted", p->num_accepted);
  dspark::check_pointer(problems, "num_emitted", p->num_emitted);
  dspark::check_pointer(problems, "tokens", p->tokens);
  dspark::check_pointer(problems, "next_anchor", p->next_anchor);
  dspark::check_pointer(problems, "logprob", p->logprob);
  dspark::check_pointer(problems, "logprob_raw", p->logprob_raw);
  dspark::check_pointer(problems, "accepted", p->accepted);
  const int lists = (p->top_ids != nullptr) + (p->top_logprob != nullptr) +
                    (p->top_ids_raw != nullptr) + (p->top_logprob_raw != nullptr);
  DSPARK_REQUIRE(problems, p->top_logprobs == 0 || lists == 4,
                 "top_ids, top_logprob, top_ids_raw, top_logprob_raw: got %d of them, expected all "
                 "four with top_logprobs > 0",
                 lists);
  dspark::check_pointer(problems, "finish", p->finish);
  dspark::check_pointer(problems, "status", p->status);
}

void check_draft_law(dspark::Problems& problems, const Params* p, int32_t vocab) {
  const bool top_m = p->support_ids != nullptr || p->support_logits != nullptr;
  DSPARK_REQUIRE(problems, !top_m || (p->support_ids != nullptr && p->support_logits != nullptr),
                 "support_ids, support_logits: got one of them, expected both or none");
  DSPARK_REQUIRE(problems, !top_m || p->draft_logits == nullptr,
                 "draft_logits: got an array beside support_ids, expected one of the two laws");
  const int given = (p->draft_logit != nullptr) + (p->draft_lse != nullptr) +
                    (top_m || p->draft_logits != nullptr);
  DSPARK_REQUIRE(problems, given == 0 || given == 3,
                 "draft_logit, draft_lse, draft_logits (or support_ids, support_logits): got %d of "
                 "them, expected all three (stored law) or none (one-hot)",
                 given);
  if (given == 0) return;
  dspark::check_float_dtype(problems, "draft_dtype", p->draft_dtype);
  const int32_t v_d = p->draft_vocab_size;
  if (top_m) {
    dspark::check_positive(problems, "support_size", p->support_size);
  } else if (p->draft_to_target == nullptr) {
    DSPARK_REQUIRE(problems, v_d == p->vocab_size,
                   "draft_vocab_size: got %d, expected vocab_size %d without draft_to_target", v_d,
                   p->vocab_size);
  } else {
    DSPARK_REQUIRE(problems, v_d >= 1 && v_d <= vocab, "draft_vocab_size: got %d, expected 1..%d",
                   v_d, vocab);
  }
}

}  // namespace

void dspark::check_rejection_sampler(Problems& problems, const Params* p, int32_t vocab) {
  check_sizes(problems, p);
  DSPARK_REQUIRE(problems, p->top_logprobs >= 0 && p->top_logprobs <= DSPARK_MAX_TOP_LOGPROBS,
                 "top_logprobs: got %d, expected 0..%d", p->top_logprobs, DSPARK_MAX_TOP_LOGPROBS);
  if (p->num_requests == 0) return;
  DSPARK_REQUIRE(problems, p->num_rows >= 0, "num_rows: got %d, expected >= 0", p->num_rows);
  dspark::check_float_dtype(problems, "target_dtype", p->target_dtype);
  DSPARK_REQUIRE(problems, p->target_logits != nullptr || p->num_rows == 0,
                 "target_logits: got NULL, expected an array");
  const bool told = p->target_logit != nullptr && p->target_lse != nullptr;
  const bool any =
      p->target_logit != nullptr || p->target_lse != nullptr || p->target_lse_raw != nullptr;
  DSPARK_REQUIRE(problems, told || !any,
                 "target_logit, target_lse: got one of them, expected both or none");
  dspark::check_pointer(problems, "draft_tokens", p->draft_tokens);
  dspark::check_pointer(problems, "draft_len", p->draft_len);
  dspark::check_pointer(problems, "cu_seqlens", p->cu_seqlens);
  dspark::check_pointer(problems, "seed", p->seed);
  dspark::check_pointer(problems, "position", p->position);
  DSPARK_REQUIRE(problems, p->stop_ids == nullptr || p->num_stop_ids >= 0,
                 "num_stop_ids: got %d, expected >= 0", p->num_stop_ids);
  DSPARK_REQUIRE(problems, p->anchor == nullptr || p->anchor != p->next_anchor,
                 "anchor: got the array of next_anchor, expected another one");
  check_draft_law(problems, p, vocab);
  check_outputs(problems, p);
}

namespace {

constexpr dspark::Backends<Params> kBackends = DSPARK_BACKENDS(rejection_sampler);

}  // namespace

extern "C" {

dspark_status dspark_rejection_sampler_workspace(dspark_device device, const Params* params,
                                                 size_t* bytes) {
  dspark::Problems problems("dspark_rejection_sampler_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, params);
  return dspark::finish_workspace(problems, kBackends, device, *params, bytes);
}

dspark_status dspark_rejection_sampler(dspark_device device, const Params* params,
                                       dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_rejection_sampler");
  if (!dspark::check_header(problems, params)) return problems.status();
  dspark::check_rejection_sampler(problems, params, params->vocab_size);
  return dspark::finish_call(problems, kBackends, device, *params, workspace, stream);
}

}  // extern "C"
