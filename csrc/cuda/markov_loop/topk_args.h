// SPDX-License-Identifier: Apache-2.0
//
// The Markov loop with a draft law on the M largest base logits (topk_support), on CUDA: sizes,
// workspace and the argument block of its kernels.
//
//   head     (gated, rnn, confidence) what does not depend on a token, for all slots  topk_head.cuh
//   scan     one pass over U: every slice of a row keeps its M largest columns      topk_select.cuh
//   settle   a row's slices become its support, in ascending order                  topk_select.cuh
//   walk     a CTA a request: gamma steps over M rows of W2, no exchange             topk_walk.cuh
//
// The order of launches in the stream is all the synchronisation between CTAs.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TOPK_ARGS_H_
#define DSPARK_CUDA_MARKOV_LOOP_TOPK_ARGS_H_

#include <stddef.h>
#include <stdint.h>

#include "core/sampler.h"
#include "dspark/markov_loop.h"

namespace dspark::cuda::topk {

using Params = dspark_markov_loop_params;

constexpr int kThreads = 256;  // of a CTA, in every kernel
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 8 * kThreads;                // columns that a CTA looks at together
constexpr int kRoom = DSPARK_MAX_SUPPORT + kBatch;  // candidates that a CTA has room for
constexpr int kSliceColumns = 4 * kBatch;           // a slice is at least this long
constexpr int kScanBlocks = 768;                    // about six CTAs on each of 132 multiprocessors
constexpr int kMergeCandidates = 2048;              // of all slices of a row together

static_assert(kMergeCandidates <= kRoom, "settle holds the candidates of a row");
static_assert(DSPARK_MAX_SUPPORT <= 4 * kThreads, "four members a thread");

/// A member of a slot's support.
struct alignas(16) Member {
  int32_t column;
  float u;        // its base logit, NaN as -inf
  double gumbel;  // noise of its segment; 0 on greedy and forced rows
};

/// How a call is cut; a function of its sizes alone.
struct Plan {
  int32_t rows;     // R * gamma: slots of all requests
  int32_t members;  // min(M, V_d)
  int32_t slices;   // of a row of U
  int32_t columns;  // of a slice
  int32_t units;    // rows of a head's linear layer, and 1 for the confidence logit
};

/// The workspace. Its contents before a call do not matter.
struct Workspace {
  uint64_t* candidates;  // [rows, slices, M] key << 32 | ~column, 0 behind the last
  uint32_t* nan;         // [rows, slices] whether U has a NaN there
  Member* members;       // [rows, members] ascending columns
  double* log_mass;      // [rows, members] of a segment at its first member, else -inf
  float* hidden_part;    // [rows, units] what of the head depends on h_k alone
  size_t bytes;
};

struct Args {
  Params p;
  Plan plan;
  Workspace work;
};

inline int32_t head_rows(const Params& p) {
  if (p.head == DSPARK_HEAD_VANILLA) return 0;
  return p.head == DSPARK_HEAD_GATED ? p.rank : 3 * p.rank;
}

inline Plan make_plan(const Params& p) {
  Plan plan{};
  plan.rows = p.num_requests * p.gamma;
  plan.members = p.topk_support < p.draft_vocab_size ? p.topk_support : p.draft_vocab_size;
  const int32_t rows = plan.rows < 1 ? 1 : plan.rows;
  int32_t slices = kScanBlocks / rows;
  const int32_t longest = (p.draft_vocab_size + kSliceColumns - 1) / kSliceColumns;
  if (slices > longest) slices = longest;
  if (slices > kMergeCandidates / p.topk_support) slices = kMergeCandidates / p.topk_support;
  plan.slices = slices < 1 ? 1 : slices;
  plan.columns = (p.draft_vocab_size + plan.slices - 1) / plan.slices;
  plan.units = head_rows(p) + (p.confidence_size > 0 ? 1 : 0);
  return plan;
}

/// Lay the workspace out over `data`; with NULL the sizes alone.
inline Workspace carve(const Params& p, const Plan& plan, void* data) {
  Workspace w{};
  const auto take = [&](auto& array, int64_t count) {
    using T = decltype(+array);
    if (data != nullptr) array = reinterpret_cast<T>(static_cast<char*>(data) + w.bytes);
    w.bytes += (static_cast<size_t>(count) * sizeof(*array) + 255) / 256 * 256;
  };
  const int64_t rows = plan.rows;
  take(w.candidates, rows * plan.slices * p.topk_support);
  take(w.nan, rows * plan.slices);
  take(w.members, rows * plan.members);
  take(w.log_mass, rows * plan.members);
  take(w.hidden_part, rows * plan.units);
  return w;
}

}  // namespace dspark::cuda::topk

#endif  // DSPARK_CUDA_MARKOV_LOOP_TOPK_ARGS_H_
