// SPDX-License-Identifier: Apache-2.0
//
// The ends of a step: what came out of the exchange, what goes in, and what nobody waits for.
#ifndef DSPARK_CUDA_MARKOV_LOOP_STEPS_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_STEPS_CUH_

#include "core/philox.h"
#include "cuda/markov_loop/epilogue.cuh"
#include "cuda/markov_loop/exchange.cuh"
#include "cuda/markov_loop/shared.cuh"
#include "cuda/markov_loop/vectors.cuh"

namespace dspark::cuda::markov {

/// The tokens of a step become the previous tokens; every row's owner writes its results. Behind
/// the wait of that step.
__device__ __forceinline__ void collect(const Args& args, const Shared& s, int32_t rows,
                                        int32_t step, const Exchange& exchange) {
  const Params& p = args.p;
  for (int32_t n = threadIdx.x; n < rows; n += kThreads) {
    const uint64_t key = exchange.key(step, n);
    int32_t token = p.draft_to_target == nullptr ? 0 : p.draft_to_target[0];
    float logit = kMinusInf;
    if (key != 0) {
      const int32_t segment = s.temperature[n] == 0.0f
                                  ? static_cast<int32_t>(~static_cast<uint32_t>(key)) / kSegment
                                  : static_cast<int32_t>(packed_segment(key));
      const uint64_t pick = exchange.pick(step, n, owner_of(args.config, segment));
      token = pick_token(pick);
      logit = pick_logit(pick);
    }
    s.previous[n] = token;
    if (!owns_row(n)) continue;
    const int64_t at = int64_t{s.request[n]} * p.gamma + step;
    p.tokens[at] = token;
    p.logit[at] = logit;
    if (key == 0) s.status[n] |= DSPARK_EMPTY_SUPPORT;
    if (step + 1 < p.gamma && !known(p, token)) s.status[n] |= DSPARK_BAD_DRAFT_ID;
  }
}

/// What a step needs and no token decides: its inner draws, and no champions. Not while the
/// champions of the step before are still to be read; a barrier follows.
__device__ __forceinline__ void prepare_step(const Params& p, const Shared& s, int32_t rows,
                                             int32_t step) {
  for (int32_t n = threadIdx.x; n < rows; n += kThreads) {
    const int64_t r = s.request[n];
    if (p.debug_uniform != nullptr) {
      s.u53[n] = p.debug_uniform[r * p.gamma + step];
    } else if (s.temperature[n] != 0.0f) {
      s.u53[n] = draw_u53(stream_of(p, static_cast<int32_t>(r), step, kDraftInner));
    }
  }
  for (int32_t e = threadIdx.x; e < num_entries(rows); e += kThreads) s.best_key[e] = 0;
}

/// Best key and candidate of every row; behind the barrier that completes them.
__device__ __forceinline__ void publish(const Args& args, const Shared& s, int32_t rows,
                                        int32_t step, Exchange& exchange) {
  const Params& p = args.p;
  for (int32_t n = threadIdx.x; n < rows; n += kThreads) {
    int32_t best = n;
    if (rows <= kWarps) {
      for (int32_t w = 1; w < kWarps; ++w) {
        const int32_t e = w * kWarps + n;
        if (s.best_key[e] > s.best_key[best]) best = e;
      }
    }
    const uint64_t key = s.best_key[best];
    if (key == 0) continue;
    const int32_t column = pick_token(s.best_pick[best]);
    const int32_t token = p.draft_to_target == nullptr ? column : p.draft_to_target[column];
    exchange.publish(step, n, key, pack_pick(token, pick_logit(s.best_pick[best])));
    // The row of W1 that everybody reads next, if this CTA wins, comes from HBM: ask for it now.
    // With many rows that would be more traffic than it saves.
    if (rows > 32 || step + 1 == p.gamma || !known(p, token)) continue;
    const char* row = static_cast<const char*>(advance(p.w1, p.w1_dtype, token * p.w1_stride));
    const int64_t bytes = p.rank * dtype_bytes(p.w1_dtype);
    for (int64_t b = 0; b < bytes; b += 128) prim::prefetch_l2(row + b);
  }
}

/// Ask for the base logits of a step: this CTA's columns of every row.
__device__ __forceinline__ void prefetch_base(const Args& args, const Shared& s, int32_t rows,
                                              int32_t step) {
  const Params& p = args.p;
  const int32_t first = first_segment(args.config, blockIdx.x) * kSegment;
  const int32_t end = first_segment(args.config, blockIdx.x + 1) * kSegment;
  const int64_t columns = (end < p.draft_vocab_size ? end : p.draft_vocab_size) - first;
  const int64_t bytes = columns * dtype_bytes(p.base_dtype);
  const int32_t lines = static_cast<int32_t>((bytes + 127) / 128);
  for (int32_t i = threadIdx.x; i < rows * lines; i += kThreads) {
    const int32_t n = i / lines;
    const int64_t at = s.request[n] * p.base_request_stride + step * p.base_slot_stride + first;
    const char* line = static_cast<const char*>(advance(p.base_logits, p.base_dtype, at));
    prim::prefetch_l2(line + int64_t{i - n * lines} * 128);
  }
}

constexpr int kHeldMasses =
    5;  // of a thread, in registers: 1,280 segments, 163,840 ids, at one reading

/// lse of one row of a step from the log-masses of all segments, in float64, in an order that
/// depends on neither grid nor batch. Whole CTA.
__device__ __forceinline__ void reduce_row(const Args& args, const Shared& s, int32_t row,
                                           int32_t step) {
  const Params& p = args.p;
  if (p.lse == nullptr) return;
  const int32_t segments = args.config.num_segments;
  const int64_t set = step % 3 * int64_t{p.num_requests};
  const uint64_t* bits =
      reinterpret_cast<const uint64_t*>(args.work.log_mass) + (set + row) * segments;
  double largest = static_cast<double>(kMinusInf);
  double held[kHeldMasses];
  for (int32_t first = threadIdx.x; first < segments; first += kHeldMasses * kThreads) {
#pragma unroll
    for (int i = 0; i < kHeldMasses; ++i) {
      const int32_t at = first + i * kThreads;
      held[i] = at < segments ? double_from_bits(prim::ld_relaxed(bits + at)) : kMinusInf;
    }
#pragma unroll
    for (int i = 0; i < kHeldMasses; ++i) largest = held[i] > largest ? held[i] : largest;
  }
  largest = block_max(largest, s.scratch);
  const bool empty = largest == static_cast<double>(kMinusInf);
  double sum = 0.0;
  for (int32_t first = threadIdx.x; first < segments && !empty; first += kHeldMasses * kThreads) {
    const bool again = segments > kHeldMasses * kThreads;
#pragma unroll
    for (int i = 0; i < kHeldMasses; ++i) {
      const int32_t at = first + i * kThreads;
      if (at >= segments) break;
      if (again) held[i] = double_from_bits(prim::ld_relaxed(bits + at));
      sum += exp_f64(held[i] - largest);
    }
  }
  sum = block_sum(sum, s.scratch);
  if (threadIdx.x != 0) return;
  p.lse[int64_t{s.request[row]} * p.gamma + step] =
      empty ? kMinusInf : static_cast<float>(largest + log_f64(sum));
}

/// lse of a step: a row's CTA changes from step to step, so that the work, which is done while
/// others still compute, does not always hold up the same one.
__device__ __forceinline__ void reduce_lse(const Args& args, const Shared& s, int32_t rows,
                                           int32_t step) {
  for (int32_t row = turn(rows, step); row < rows; row += gridDim.x) {
    reduce_row(args, s, row, step);
  }
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_STEPS_CUH_
