// SPDX-License-Identifier: Apache-2.0
//
// The pass over a row that reads it from memory: two numbers a segment, and whether there is a NaN.
//
// A warp takes four segments at a time, their 16 loads under way together and the next 16 behind
// them. Reductions over the warp are paid for all four at once: lanes first swap what they reduce,
// then reduce, so that eight lanes end with one segment.
//
// A weight is 12 operations (core/math.h, exp2_weight): it is what the pass costs, more than the
// memory does once many rows are scanned. So nothing here is computed twice, and a row's numbers at
// T = 1 are made only when a law differs from them.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_SCAN_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_SCAN_CUH_

#include "cuda/prim/memory.h"
#include "cuda/rejection_sampler/row.cuh"

namespace dspark::cuda::verify {

struct MaxOf {
  __device__ __forceinline__ float operator()(float a, float b) const { return max_f32(a, b); }
};
struct SumOf {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

/// x[j] of all lanes combined in the order 16, 8, 4, 2, 1, for each j: lanes 8 j .. 8 j + 7 get
/// that of j.
template <class Op>
__device__ __forceinline__ float reduce_four(const float (&x)[kBatch], Op op) {
  const bool upper = (lane_id() & 16) != 0, odd = (lane_id() & 8) != 0;
  float a = upper ? x[2] : x[0], b = upper ? x[3] : x[1];
  a = op(a, __shfl_xor_sync(~0u, upper ? x[0] : x[2], 16));
  b = op(b, __shfl_xor_sync(~0u, upper ? x[1] : x[3], 16));
  float mine = odd ? b : a;
  mine = op(mine, __shfl_xor_sync(~0u, odd ? a : b, 8));
#pragma unroll
  for (int d = 4; d > 0; d /= 2) mine = op(mine, __shfl_xor_sync(~0u, mine, d));
  return mine;
}

struct BatchNumbers {
  float max;  // of the segment of these eight lanes
  float sum;
};

__device__ __forceinline__ void clean_batch(float (&z)[4 * kBatch], float largest) {
#pragma unroll
  for (int e = 0; e < 4 * kBatch; ++e) z[e] = clean_logit(z[e], largest);
}

/// Maxima and weight sums of a batch. A NaN in it weighs nothing, and +inf, which hardly ever
/// comes, is looked for in the maxima alone.
__device__ __forceinline__ BatchNumbers weigh_batch(float (&z)[4 * kBatch], float scale,
                                                    float largest) {
  float x[kBatch];
  BatchNumbers n;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      x[j] = max_f32(z[4 * j], kMinusInf);
#pragma unroll
      for (int q = 1; q < 4; ++q) x[j] = max_f32(z[4 * j + q], x[j]);
    }
    n.max = reduce_four(x, MaxOf{}) + 0.0f;  // +0 and -0 are equal logits: keep one of them
    if (__any_sync(~0u, n.max > largest) == 0) break;
    clean_batch(z, largest);
  }
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const float m = __shfl_sync(~0u, n.max, 8 * j);
    float w[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) w[q] = exp2_weight((z[4 * j + q] - m) * scale);
    x[j] = (w[0] + w[2]) + (w[1] + w[3]);
  }
  const float sum = reduce_four(x, SumOf{});
  n.sum = n.max == kMinusInf ? 0.0f : sum;
  return n;
}

__device__ __forceinline__ void keep_batch(const Row& row, int32_t s, const Batch& b) {
  const int32_t at = (s - row.first) * kSegment + lane_id();
#pragma unroll
  for (int e = 0; e < 4 * kBatch; ++e) {
    if (s + e / 4 >= row.end) break;
    if (row.keep == Keep::kFloat || row.law.dtype == DSPARK_F32) {
      static_cast<uint32_t*>(row.kept)[at + 32 * e] = b.bits[e / 4][e % 4];
    } else {
      static_cast<uint16_t*>(row.kept)[at + 32 * e] = static_cast<uint16_t>(b.bits[e / 4][e % 4]);
    }
  }
}

/// Scan this CTA's slice: its numbers, and what to combine over the team.
__device__ __forceinline__ Tops scan_slice(const Row& row) {
  const RowLaw& law = row.law;
  const float scale = weight_scale(law.temperature), one = weight_scale(1.0f);
  const float largest = largest_finite(law.dtype);
  const float beyond = processed(law) ? largest_finite(DSPARK_F32) : largest;
  const bool changed = processed(law), raw = raw_differs(law);
  const bool keeps = row.kept != nullptr && row.keep == Keep::kFloat;
  bool nan = false;
  Tops tops{};
  int32_t s = row.first + warp_id() * kBatch;
  Batch next = load_batch(law.logits, law.dtype, law.vocab, s, row.end);
#pragma unroll 1
  for (; s < row.end; s += kWarps * kBatch) {
    Batch b = next;
    next = load_batch(law.logits, law.dtype, law.vocab, s + kWarps * kBatch, row.end);
    if (row.kept != nullptr && row.keep == Keep::kRaw) keep_batch(row, s, b);
    widen_batch(b, law.dtype);
    float z[4 * kBatch];
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) {
      const float x = float_from_bits(b.bits[e / 4][e % 4]);
      nan |= x != x;
      z[e] = x;
    }
    if (changed || keeps) clean_batch(z, largest);
    const int32_t mine = s + lane_id() / 8 - row.first;
    const bool writes = lane_id() % 8 == 0 && mine < row.end - row.first;
    if (raw) {
      const BatchNumbers n = weigh_batch(z, one, largest);
      if (writes) {
        row.stats.raw_max[mine] = n.max;
        row.stats.raw_sum[mine] = n.sum;
      }
      tops.raw = ordered_f32(n.max) > tops.raw && writes ? ordered_f32(n.max) : tops.raw;
      if (changed) process_ids(law, id_of(s, 0), z, &nan);
    }
    if (keeps) {
#pragma unroll
      for (int e = 0; e < 4 * kBatch; ++e) b.bits[e / 4][e % 4] = bits_f32(z[e]);
      keep_batch(row, s, b);
    }
    const BatchNumbers n = weigh_batch(z, scale, beyond);
    if (!writes) continue;
    row.stats.max[mine] = n.max;
    row.stats.sum[mine] = n.sum;
    const uint64_t key =
        static_cast<uint64_t>(ordered_f32(n.max)) << 32 | ~static_cast<uint32_t>(mine + row.first);
    tops.key = key > tops.key ? key : tops.key;
  }
  tops.found = nan ? kTargetNan : 0u;
  return tops;
}

/// This thread's part of the mass of the row, and of that of the unprocessed row.
__device__ __forceinline__ Masses slice_masses(const Row& row, const float* sums, bool raw) {
  Masses m{};
  const double temperature = static_cast<double>(row.law.temperature);
  const int32_t count = row.end - row.first;
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
    if (row.top > kMinusInf) {
      add_exactly(relative_mass(sums[i], row.stats.max[i], row.top, temperature), &m.high, &m.low);
    }
    if (raw && row.raw_top > static_cast<double>(kMinusInf)) {
      const float top = static_cast<float>(row.raw_top);
      const double mass = relative_mass(row.stats.raw_sum[i], row.stats.raw_max[i], top, 1.0);
      add_exactly(mass, &m.raw_high, &m.raw_low);
    }
  }
  return m;
}

/// Ask for segments first .. end of target row `number` in L2: thread `thread` of `threads`.
__device__ __forceinline__ void prefetch_slice(const Params& p, int64_t number, int32_t first,
                                               int32_t end, int32_t thread, int32_t threads) {
  const char* logits =
      static_cast<const char*>(advance(p.target_logits, p.target_dtype, number * p.target_stride));
  const int64_t from = static_cast<int64_t>(first) * kSegment * dtype_bytes(p.target_dtype);
  const int32_t last = end * kSegment < p.vocab_size ? end * kSegment : p.vocab_size;
  const int64_t until = static_cast<int64_t>(last) * dtype_bytes(p.target_dtype);
  for (int64_t at = from + 128 * static_cast<int64_t>(thread); at < until; at += 128 * threads) {
    prim::prefetch_l2(logits + at);
  }
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_SCAN_CUH_
