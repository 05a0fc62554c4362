// SPDX-License-Identifier: Apache-2.0
//
// From dot products to the champion: the sampling half of a pass.
//
// A warp finishes up to eight (segment, row) pairs. Of the 128 ids of a pair lane l holds l, l +
// 32, l + 64 and l + 96, so that the halving tree of core/sampler.h is two additions and a
// butterfly: the same bits as on the CPU. Then lane j takes pair j, and what costs float64
// logarithms (the log-mass and the Gumbel noise) is done once for all eight pairs. A pair that
// beats the best of its row draws its candidate token while its z are still in shared memory.
//
// The base logits of a pass are read before its matrix products, straight from where they lie, two
// or four bytes a lane: any alignment of rows, and each is read once, so nothing is kept in L1 or,
// longer than needed, in L2.
#ifndef DSPARK_CUDA_MARKOV_LOOP_EPILOGUE_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_EPILOGUE_CUH_

#include "core/dtype.h"
#include "core/philox.h"
#include "core/sampler.h"
#include "cuda/markov_loop/exchange.cuh"
#include "cuda/markov_loop/shared.cuh"

namespace dspark::cuda::markov {

/// One pass of one group: `segments` from `position` on, rows first_row .. first_row + count - 1.
struct Tile {
  int32_t step;
  int32_t position, segments;
  int32_t first_row, count;
};

/// Which pairs a warp finishes; lane j < size knows pair j.
struct Pairs {
  int32_t size;     // of this warp
  int32_t pair;     // segment_index * count + row_index: its place in the bias buffer
  int32_t row;      // row index in the group
  int32_t segment;  // the segment itself
  int32_t entry;    // champion's place
};

// Few rows: pairs are dealt out to all warps, each of which keeps a champion of its own. Otherwise
// a row belongs to one warp, with all its segments.
template <class Source>
__device__ __forceinline__ Pairs deal(const Tile& t, int32_t rows, const Source& source) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool few = rows <= kWarps;
  Pairs q;
  int32_t s;
  if (few) {
    const int32_t total = t.segments * t.count;
    q.size = (total - warp + kWarps - 1) / kWarps;
    q.pair = warp + kWarps * lane;
    s = q.pair / t.count;
    q.row = q.pair - s * t.count;
    q.entry = warp * kWarps + t.first_row + q.row;
  } else {
    const int32_t mine = (t.count - warp + kWarps - 1) / kWarps;  // rows
    const int32_t i = lane / t.segments;
    s = lane - i * t.segments;
    q.size = mine * t.segments;
    q.row = warp + kWarps * i;
    q.pair = s * t.count + q.row;
    q.entry = t.first_row + q.row;
  }
  if (q.size < 0) q.size = 0;
  if (lane >= q.size) q.pair = q.row = q.entry = s = 0;
  q.segment = source.segment(t.position + s);
  return q;
}

/// U of a warp's pairs, as it lies in memory.
struct BaseLogits {
  uint32_t bits[kPairsPerWarp][4];
};

__device__ __forceinline__ int32_t column_of(int32_t segment, int q) {
  return segment * kSegment + static_cast<int32_t>(threadIdx.x % 32) + 32 * q;
}

__device__ __forceinline__ void load_base(const Params& p, const Shared& s, const Tile& t,
                                          const Pairs& pairs, BaseLogits& u) {
#pragma unroll
  for (int j = 0; j < kPairsPerWarp; ++j) {
    if (j >= pairs.size) break;
    const int32_t row = t.first_row + __shfl_sync(~0u, pairs.row, j);
    const int32_t segment = __shfl_sync(~0u, pairs.segment, j);
    const int64_t at = s.request[row] * p.base_request_stride + t.step * p.base_slot_stride;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int32_t column = column_of(segment, q);
      if (column >= p.draft_vocab_size) {
        u.bits[j][q] = 0;
      } else if (p.base_dtype == DSPARK_F32) {
        u.bits[j][q] = prim::ld_stream(static_cast<const uint32_t*>(p.base_logits) + at + column);
      } else {
        u.bits[j][q] = prim::ld_stream(static_cast<const uint16_t*>(p.base_logits) + at + column);
      }
    }
  }
}

/// U + B of a warp's pairs, in place of their dot products.
template <bool kHalf, class Source>
__device__ __forceinline__ void add_base(const Params& p, const Shared& s, const Pairs& pairs,
                                         const BaseLogits& u, const Source& source) {
  const int shift = p.base_dtype == DSPARK_BF16 ? 16 : 0;
#pragma unroll
  for (int j = 0; j < kPairsPerWarp; ++j) {
    if (j >= pairs.size) break;
    const int32_t i = __shfl_sync(~0u, pairs.row, j);
    const int32_t segment = __shfl_sync(~0u, pairs.segment, j);
    float* z = s.bias + __shfl_sync(~0u, pairs.pair, j) * kBiasStride + threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t bits = u.bits[j][q];
      const float base =
          kHalf ? f16_to_f32(static_cast<uint16_t>(bits)) : float_from_bits(bits << shift);
      z[32 * q] = base + source.bias(z[32 * q], i, column_of(segment, q));
    }
  }
}

/// z = round(U + B), NaN as -inf, +inf as the largest finite value.
__device__ __forceinline__ void form(int32_t dtype, float (&z)[4], bool* nan) {
  const float largest = largest_finite(dtype);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    *nan |= z[q] != z[q];
    z[q] = z[q] != z[q] ? kMinusInf : z[q];
  }
  if (dtype == DSPARK_BF16) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t u = bits_f32(z[q]);
      z[q] = float_from_bits((u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
    }
  } else if (dtype == DSPARK_F16) {
#pragma unroll
    for (int q = 0; q < 4; ++q) z[q] = f16_to_f32(f32_to_f16(z[q]));
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) z[q] = z[q] > largest ? largest : z[q];
}

/// z of a warp's pairs to the caller.
__device__ __forceinline__ void store_pairs(const Params& p, const Shared& s, const Tile& t,
                                            const Pairs& pairs) {
#pragma unroll 1
  for (int j = 0; j < pairs.size; ++j) {
    const int32_t r = s.request[t.first_row + __shfl_sync(~0u, pairs.row, j)];
    const int32_t segment = __shfl_sync(~0u, pairs.segment, j);
    const float* z = s.bias + __shfl_sync(~0u, pairs.pair, j) * kBiasStride + threadIdx.x % 32;
    const int64_t at = r * p.logits_request_stride + t.step * p.logits_slot_stride;
#pragma unroll 1
    for (int q = 0; q < 4; ++q) {
      const int32_t column = column_of(segment, q);
      if (column < p.draft_vocab_size) store_f32(p.logits, p.base_dtype, at + column, z[32 * q]);
    }
  }
}

/// What a lane knows of its pair.
struct Mass {
  float largest;
  float sum;   // of exp((z - largest) / T)
  int32_t id;  // greedy rows: the lowest id of the segment that has `largest`
};

/// z of each pair, in place; its maximum, sum of weights and first maximum; NaN bits.
__device__ __forceinline__ Mass weigh_pairs(const Params& p, const Shared& s, const Tile& t,
                                            const Pairs& pairs) {
  const int32_t lane = threadIdx.x % 32;
  Mass mine{kMinusInf, 0.0f, 0};
#pragma unroll 2
  for (int j = 0; j < pairs.size; ++j) {
    const int32_t row = t.first_row + __shfl_sync(~0u, pairs.row, j);
    const int32_t segment = __shfl_sync(~0u, pairs.segment, j);
    float* place = s.bias + __shfl_sync(~0u, pairs.pair, j) * kBiasStride + lane;
    float z[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      z[q] = column_of(segment, q) < p.draft_vocab_size ? place[32 * q] : kMinusInf;
    }
    bool nan = false;
    form(p.base_dtype, z, &nan);
    if (nan) atomicOr(s.status + row, static_cast<uint32_t>(DSPARK_NAN_DRAFT));
#pragma unroll
    for (int q = 0; q < 4; ++q) place[32 * q] = z[q];
    const float t_row = s.temperature[row];
    const float a = z[0], b = z[1], c = z[2], d = z[3];
    const float ab = a > b ? a : b, cd = c > d ? c : d;
    const uint32_t top = __reduce_max_sync(~0u, ordered_f32(ab > cd ? ab : cd));
    // The inverse of ordered_f32: +0 where the maximum is either zero, as on the CPU.
    const float largest = float_from_bits(top >> 31 ? top ^ 0x80000000u : ~top);
    Mass pair{largest, 0.0f, 0};
    if (largest > kMinusInf) {
      float x[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) x[q] = z[q] - largest;
      if (t_row != 0.0f && t_row != 1.0f) {  // dividing by 1 changes nothing but the time it takes
#pragma unroll
        for (int q = 0; q < 4; ++q) x[q] /= t_row;
      }
      const float ac = exp_f32(x[0]) + exp_f32(x[2]);
      const float bd = exp_f32(x[1]) + exp_f32(x[3]);
      pair.sum = ac + bd;
#pragma unroll
      for (int e = 16; e > 0; e /= 2) pair.sum += __shfl_xor_sync(~0u, pair.sum, e);
      if (t_row == 0.0f) {
        const uint32_t first = a == largest   ? 0
                               : b == largest ? 32
                               : c == largest ? 64
                               : d == largest ? 96
                                              : 128;
        pair.id = static_cast<int32_t>(__reduce_min_sync(~0u, first + lane));
      }
    }
    if (lane == j) mine = pair;
  }
  return mine;
}

/// The stream of draws of a row at a step.
__device__ __forceinline__ DrawStream stream_of(const Params& p, int32_t request, int32_t step,
                                                DrawKind kind) {
  const uint32_t distance = static_cast<uint32_t>(step) + 1;
  return DrawStream{p.seed[request], p.position[request] + distance, distance, kind};
}

/// Log-mass of a lane's pair to the workspace; its key, 0 for none.
__device__ __forceinline__ uint64_t rank_pair(const Args& args, const Shared& s, const Tile& t,
                                              const Pairs& pairs, const Mass& mass) {
  const Params& p = args.p;
  const int32_t row = t.first_row + pairs.row;
  const float t_row = s.temperature[row];
  double log_mass = static_cast<double>(kMinusInf);
  uint64_t key = 0;
  if (mass.largest > kMinusInf) {
    const double scale = t_row == 0.0f ? 1.0 : static_cast<double>(t_row);
    log_mass = static_cast<double>(mass.largest) / scale + log_f64(static_cast<double>(mass.sum));
    if (t_row == 0.0f) {
      const uint32_t id = static_cast<uint32_t>(pairs.segment * kSegment + mass.id);
      key = static_cast<uint64_t>(ordered_f32(mass.largest)) << 32 | static_cast<uint32_t>(~id);
    } else {
      double noisy = log_mass;
      if (p.debug_uniform == nullptr) {
        const DrawStream stream = stream_of(p, s.request[row], t.step, kDraftSegment);
        noisy += segment_gumbel(stream, static_cast<uint32_t>(pairs.segment));
      }
      key = pack_key(noisy, static_cast<uint32_t>(pairs.segment));
    }
  }
  const int64_t set = t.step % 3 * int64_t{p.num_requests};
  args.work.log_mass[(set + row) * args.config.num_segments + pairs.segment] = log_mass;
  return key;
}

// Inverse CDF inside one segment (core/sampler.h, inner_pick): lane l has ids 4l .. 4l + 3, one
// scan of 64-bit integers finds the lane. Returns the offset in the segment to all lanes.
__device__ __forceinline__ int32_t draw_inside(const float* z, float largest, float temperature,
                                               uint64_t u53) {
  const int32_t lane = threadIdx.x % 32;
  const float4 four = *reinterpret_cast<const float4*>(z + 4 * lane);
  const uint64_t w0 = weight_integer(exp_f32((four.x - largest) / temperature));
  const uint64_t w1 = w0 + weight_integer(exp_f32((four.y - largest) / temperature));
  const uint64_t w2 = w1 + weight_integer(exp_f32((four.z - largest) / temperature));
  const uint64_t w3 = w2 + weight_integer(exp_f32((four.w - largest) / temperature));
  uint64_t through = w3;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t below = __shfl_up_sync(~0u, through, d);
    if (lane >= d) through += below;
  }
  const uint64_t before = through - w3;
  const uint64_t target = cdf_target(u53, __shfl_sync(~0u, through, 31));
  const uint64_t rest = target - before;
  const int32_t offset = 4 * lane + (rest < w0 ? 0 : rest < w1 ? 1 : rest < w2 ? 2 : 3);
  const uint32_t here = __ballot_sync(~0u, before <= target && target < through);
  return __shfl_sync(~0u, offset, __ffs(static_cast<int>(here)) - 1);
}

/// Pairs that beat the best of their row so far take its place, with a candidate drawn now.
__device__ __forceinline__ void offer_pairs(const Shared& s, const Tile& t, const Pairs& pairs,
                                            const Mass& mass, uint64_t key) {
  const int32_t lane = threadIdx.x % 32;
  uint32_t better = __ballot_sync(~0u, lane < pairs.size && key > s.best_key[pairs.entry]);
  for (; better != 0; better &= better - 1) {
    const int j = __ffs(static_cast<int>(better)) - 1;
    const uint64_t offered = __shfl_sync(~0u, key, j);
    const int32_t entry = __shfl_sync(~0u, pairs.entry, j);
    if (offered <= s.best_key[entry]) continue;  // another segment of the row came first
    const int32_t row = t.first_row + __shfl_sync(~0u, pairs.row, j);
    const float* z = s.bias + __shfl_sync(~0u, pairs.pair, j) * kBiasStride;
    const float largest = __shfl_sync(~0u, mass.largest, j);
    int32_t offset = __shfl_sync(~0u, mass.id, j);
    if (s.temperature[row] != 0.0f) {
      offset = draw_inside(z, largest, s.temperature[row], s.u53[row]);
    }
    const int32_t column = __shfl_sync(~0u, pairs.segment, j) * kSegment + offset;
    __syncwarp();  // everybody has compared with the old champion
    if (lane == 0) {
      s.best_key[entry] = offered;
      s.best_pick[entry] = pack_pick(column, z[offset]);
    }
    __syncwarp();
  }
}

/// All of it, for one pass of one group. Behind the barrier that completes the dot products.
template <class Source>
__device__ __forceinline__ void finish_tile(const Args& args, const Shared& s, const Tile& t,
                                            const Pairs& pairs, const BaseLogits& u,
                                            const Source& source) {
  const Params& p = args.p;
  if (p.base_dtype == DSPARK_F16) {
    add_base<true>(p, s, pairs, u, source);
  } else {
    add_base<false>(p, s, pairs, u, source);
  }
  const Mass mass = weigh_pairs(p, s, t, pairs);
  __syncwarp();
  if (p.logits != nullptr) store_pairs(p, s, t, pairs);
  const bool mine = static_cast<int32_t>(threadIdx.x % 32) < pairs.size;
  const uint64_t key = mine ? rank_pair(args, s, t, pairs, mass) : 0;
  offer_pairs(s, t, pairs, mass, key);
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_EPILOGUE_CUH_
