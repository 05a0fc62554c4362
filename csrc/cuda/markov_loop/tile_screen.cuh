// SPDX-License-Identifier: Apache-2.0
//
// The exact greedy screen: W2 in bytes finds the ids that can be the argmax, the bf16 W2 decides.
//
// Every z has an interval. With x the r-vector, q s its integers (core/int8.h), B8 the bias of the
// bytes and c the scale of a row:
//
//   |w_j - c w8_j| <= (1/2 + 2^-16) c        so against x:  (1/2 + 2^-16) c sum|x_j|
//   |x_j - q_j s|  <= s / 2, |w8_j| <= 128   so against c w8:  64 r s c
//   the fp32 sums of the bf16 product        at most r 2^-21 sum|w_j x_j| <= 127.5 r 2^-21 c
//   sum|x_j|
//     (a rounding of 17 terms in each of 3 r / 16 products of tensor cores, with room to spare)
//   the roundings of B8 and of its interval  at most 128 2^-21 c sum|x_j|
//
// all of them c times a number of the vector, `reach`. z = round(U + B) is monotone in B, so U + B8
// - reach c and U + B8 + reach c, rounded to U's dtype, bound z as it is compared: ties included.
//
// A warp raises the row's bound from below by its 128 ids and lists those whose bound from above
// reaches it. At the end of the step the list is cut by the final bound, and what is left, two or
// three ids a CTA on random logits, is computed from the bf16 W2: 16 ids at a time, gathered, by
// the products of tile_mma.cuh in their order, so with its bits. When the list overflows (all
// logits equal, a vector that is not finite) the CTA computes all of its ids.
//
// Traffic of a step: V r bytes instead of 2 V r, a few rows of 2 r bytes, and one latency of HBM
// for them. Predicted 30 us at R = 1, gamma = 7, V = 151,936, r = 256, instead of 61 (model, not
// measured). There is no lse: it would need every z.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_SCREEN_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_SCREEN_CUH_

#include "cuda/markov_loop/epilogue.cuh"
#include "cuda/markov_loop/tile_imma.cuh"

namespace dspark::cuda::markov {

/// An id that may be the argmax: bound from above << 32 | row << 23 | id from the CTA's first on.
DSPARK_HD uint64_t pack_survivor(uint32_t bound, int32_t row, int32_t offset) {
  return static_cast<uint64_t>(bound) << 32 | static_cast<uint32_t>(row << kScreenOffsetBits) |
         static_cast<uint32_t>(offset);
}
DSPARK_HD uint32_t survivor_bound(uint64_t survivor) {
  return static_cast<uint32_t>(survivor >> 32);
}
DSPARK_HD int32_t survivor_row(uint64_t survivor) {
  return static_cast<int32_t>(static_cast<uint32_t>(survivor) >> kScreenOffsetBits);
}
DSPARK_HD int32_t survivor_offset(uint64_t survivor) {
  return static_cast<int32_t>(static_cast<uint32_t>(survivor) & ((1u << kScreenOffsetBits) - 1));
}

/// z as it is compared; NaN stays NaN.
__device__ __forceinline__ float comparable(float z, int32_t dtype) {
  const float rounded = z != z ? z : round_to_dtype(z, dtype);
  const float largest = largest_finite(dtype);
  return rounded > largest ? largest : rounded;
}

template <int kGroup>
class ScreenSource : public ImmaSource<kGroup> {
  using Base = ImmaSource<kGroup>;
  using Base::args_;
  using Base::first_;
  using Base::s_;

 public:
  __device__ ScreenSource(const Args& args, const Shared& shared, int32_t rows)
      : Base(args, shared, rows) {
    unsigned char* memory = shared.source + args.config.screen_at;
    list_ = reinterpret_cast<uint64_t*>(memory);
    lower_ = reinterpret_cast<uint32_t*>(list_ + kScreenRoom);
    reach_ = reinterpret_cast<float*>(lower_ + args.p.num_requests);
    count_ = reinterpret_cast<uint32_t*>(reach_ + args.p.num_requests);
  }

  __device__ void begin_step(int32_t step) {
    Base::begin_step(step);
    step_now_ = step;
    rows_ = *s_.count;
    for (int32_t n = threadIdx.x; n < rows_; n += kThreads) lower_[n] = 0;
    if (threadIdx.x == 0) *count_ = 0;
  }

  __device__ void load_vectors(int32_t first_row, int32_t count) {
    Base::load_vectors(first_row, count);
    const float r = static_cast<float>(args_.p.rank);
    for (int32_t i = threadIdx.x / 32; i < count; i += kWarps) {
      float norm = 0.0f, largest = 0.0f;
      for (int32_t j = threadIdx.x % 32; j < args_.p.rank; j += 32) {
        const float x = vector_element(args_, s_, first_row + i, j);
        const float magnitude = x < 0.0f ? -x : x;  // NaN stays
        norm += magnitude;
        largest = magnitude > largest ? magnitude : largest;
      }
      for (int d = 16; d > 0; d /= 2) {
        norm += __shfl_xor_sync(~0u, norm, d);
        const float other = __shfl_xor_sync(~0u, largest, d);
        largest = other > largest ? other : largest;
      }
      const float factor = 0.5f + 0x1p-16f + 0x1p-14f + r * 127.5f * 0x1p-21f;
      const float quantum = int8_quantum(int8_magnitude(largest));
      const float reach = (norm * factor + 64.0f * r * quantum) * (1.0f + 0x1p-10f);
      if (threadIdx.x % 32 == 0) reach_[first_row + i] = reach < __builtin_inff() ? reach : -1.0f;
    }
  }

  __device__ void end_pass(int32_t position, int32_t segments) {
    const int32_t owned = first_segment(args_.config, blockIdx.x + 1) - first_;
    if (position + segments >= owned) resolve();
  }

  /// Bounds of one pair's 128 ids, four a lane: `word` the biases of the bytes, `u` the base
  /// logits.
  __device__ void offer(int32_t row, int32_t segment, const float (&u)[4],
                        const float* word) const {
    const Params& p = args_.p;
    const float reach = reach_[row];  // -1: there is no bound
    uint32_t above[4], below = 0;
    bool nan = false;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int32_t column = column_of(segment, q);
      above[q] = 0;
      if (column >= p.draft_vocab_size) continue;
      nan |= u[q] != u[q];
      const float scale = p.w2_scale[column];
      const float span = reach * (scale < 0.0f ? -scale : scale);
      float high = comparable(u[q] + (word[32 * q] + span), p.base_dtype);
      float low = comparable(u[q] + (word[32 * q] - span), p.base_dtype);
      if (reach < 0.0f || high != high || low != low) {
        high = largest_finite(p.base_dtype);
        low = kMinusInf;
      }
      if (u[q] != u[q] || high == kMinusInf) continue;  // cannot win
      above[q] = ordered_f32(high);
      below = max(below, ordered_f32(low));
    }
    if (nan) atomicOr(s_.status + row, static_cast<uint32_t>(DSPARK_NAN_DRAFT));
    below = __reduce_max_sync(~0u, below);
    uint32_t known = 0;
    if (threadIdx.x % 32 == 0) known = atomicMax(lower_ + row, below);
    below = max(below, __shfl_sync(~0u, known, 0));
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (above[q] == 0 || above[q] < below) continue;
      const uint32_t at = atomicAdd(count_, 1u);
      const int32_t offset = column_of(segment, q) - first_ * kSegment;
      if (at < kScreenRoom) list_[at] = pack_survivor(above[q], row, offset);
    }
  }

 private:
  struct Candidate {
    int32_t row, column;
  };

  // The exact champion of every row. Whole CTA.
  __device__ void resolve() {
    __syncthreads();  // the list and the bounds are complete
    const uint32_t listed = *count_;
    if (listed > kScreenRoom) {
      resolve_all();
    } else {
      resolve_listed(listed);
    }
    __syncthreads();
    for (int32_t n = threadIdx.x; n < rows_; n += kThreads) {
      const uint64_t key = s_.best_key[n];
      if (key == 0) continue;
      const uint32_t high = static_cast<uint32_t>(key >> 32);
      const float z = float_from_bits(high >> 31 ? high ^ 0x80000000u : ~high);
      s_.best_pick[n] = pack_pick(static_cast<int32_t>(~static_cast<uint32_t>(key)), z);
    }
  }

  __device__ void resolve_listed(uint32_t listed) {
    constexpr int kHeld = kScreenRoom / kThreads;
    uint64_t held[kHeld];
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      const uint32_t i = e * kThreads + threadIdx.x;
      const uint64_t survivor = i < listed ? list_[i] : 0;
      const bool stays = i < listed && survivor_bound(survivor) >= lower_[survivor_row(survivor)];
      held[e] = stays ? survivor : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) *count_ = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      if (held[e] != 0) list_[atomicAdd(count_, 1u)] = held[e];
    }
    __syncthreads();
    const int32_t left = static_cast<int32_t>(*count_);
    for (int32_t first = threadIdx.x / 32 * 16; first < left; first += 16 * kWarps) {
      decide(left - first, [&](int32_t i) {
        const uint64_t survivor = list_[first + i];
        return Candidate{survivor_row(survivor), first_ * kSegment + survivor_offset(survivor)};
      });
    }
  }

  // Every id of this CTA, 16 neighbours of one row at a time.
  __device__ void resolve_all() {
    const int32_t begin = first_ * kSegment;
    const int32_t end =
        min(first_segment(args_.config, blockIdx.x + 1) * kSegment, args_.p.draft_vocab_size);
    const int32_t blocks = (end - begin + 15) / 16;
    for (int32_t b = threadIdx.x / 32; b < blocks * rows_; b += kWarps) {
      const int32_t first = begin + b % blocks * 16, row = b / blocks;
      decide(end - first, [&](int32_t i) { return Candidate{row, first + i}; });
    }
  }

  // z of up to 16 candidates from the bf16 W2, and their keys to the rows. One warp.
  template <class Get>
  __device__ void decide(int32_t count, const Get& get) {
    const int32_t lane = threadIdx.x % 32;
    Candidate mine[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) mine[h] = get(min(lane / 4 + 8 * h, count - 1));
    for (int32_t block = 0; block < rows_; block += 8) {
      const bool wanted = mine[0].row / 8 == block / 8 || mine[1].row / 8 == block / 8;
      if (__ballot_sync(~0u, wanted) == 0) continue;
      float sum[2][4] = {};
      products(mine, block + lane / 4, sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Candidate& c = mine[e / 2];
        const bool here = c.row == block + lane % 4 * 2 + e % 2 && lane / 4 + e / 2 * 8 < count;
        if (here) score(c, sum[0][e] + sum[1][e]);
      }
    }
  }

  // Products of 16 gathered rows of W2 with the vectors of 8 rows, in the order of tile_mma.cuh.
  __device__ void products(const Candidate (&c)[2], int32_t row, float (&sum)[2][4]) const {
    const Params& p = args_.p;
    const int32_t pair = threadIdx.x % 4 * 2;
    const uint16_t* w2 = static_cast<const uint16_t*>(args_.exact_w2);
    const uint16_t* from[2] = {w2 + c[0].column * args_.exact_stride + pair,
                               w2 + c[1].column * args_.exact_stride + pair};
    const bool plain = p.head == DSPARK_HEAD_VANILLA && p.w1_dtype == DSPARK_BF16;
    const int32_t parts = plain ? 1 : 3;
#pragma unroll 2
    for (int32_t k = 0; k < p.rank; k += 32) {
      const bool both = k + 16 < p.rank;
      uint32_t a[2][4];
      float rest[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (h == 1 && !both) break;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[h][e] = *reinterpret_cast<const uint32_t*>(from[e % 2] + k + 16 * h + e / 2 * 8);
          const int32_t j = k + 16 * h + e / 2 * 8 + pair + e % 2;
          rest[h][e] = row < rows_ ? vector_element(args_, s_, row, j) : 0.0f;
        }
      }
#pragma unroll 1
      for (int q = 0; q < parts; ++q) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (h == 1 && !both) break;
          const uint32_t b[2] = {next_part(rest[h][0], rest[h][1]),
                                 next_part(rest[h][2], rest[h][3])};
          prim::mma_bf16(sum[h], a[h], b);
        }
      }
    }
  }

  // Two neighbouring elements as bf16, cut; what they leave stays in `x` and `y`.
  static __device__ __forceinline__ uint32_t next_part(float& x, float& y) {
    const uint32_t low = cut(x), high = cut(y);
    return high << 16 | low;
  }
  static __device__ __forceinline__ uint32_t cut(float& x) {
    const uint32_t bits = bits_f32(x) >> 16 | (x != x ? 0x40u : 0u);
    const bool finite = (bits_f32(x) & 0x7f800000u) != 0x7f800000u;
    x = finite ? x - float_from_bits(bits << 16) : 0.0f;  // exact
    return bits;
  }

  __device__ void score(const Candidate& c, float bias) const {
    const Params& p = args_.p;
    const int64_t at =
        s_.request[c.row] * p.base_request_stride + step_now_ * p.base_slot_stride + c.column;
    const float z = comparable(load_f32(p.base_logits, p.base_dtype, at) + bias, p.base_dtype);
    if (z != z) atomicOr(s_.status + c.row, static_cast<uint32_t>(DSPARK_NAN_DRAFT));
    if (!(z > kMinusInf)) return;
    const uint64_t key = static_cast<uint64_t>(ordered_f32(z)) << 32 |
                         static_cast<uint32_t>(~static_cast<uint32_t>(c.column));
    atomicMax(reinterpret_cast<unsigned long long*>(s_.best_key + c.row),
              static_cast<unsigned long long>(key));
  }

  int32_t rows_ = 0;  // that take part; known when a step begins
  int32_t step_now_ = 0;
  uint64_t* list_;   // [kScreenRoom] survivors
  uint32_t* lower_;  // [rows] ordered bound from below of a row's best z
  float* reach_;     // [rows] see above
  uint32_t* count_;  // of survivors, also of those without room
};

/// The screen's half of a pass in place of sampling.
template <int kGroup>
__device__ __forceinline__ void finish_tile(const Args& args, const Shared& s, const Tile& t,
                                            const Pairs& pairs, const BaseLogits& base,
                                            const ScreenSource<kGroup>& source) {
  const int32_t dtype = args.p.base_dtype;
#pragma unroll
  for (int j = 0; j < kPairsPerWarp; ++j) {
    if (j >= pairs.size) break;
    const int32_t row = t.first_row + __shfl_sync(~0u, pairs.row, j);
    const int32_t segment = __shfl_sync(~0u, pairs.segment, j);
    const float* word = s.bias + __shfl_sync(~0u, pairs.pair, j) * kBiasStride + threadIdx.x % 32;
    float u[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t bits = base.bits[j][q];
      u[q] = dtype == DSPARK_F16 ? f16_to_f32(static_cast<uint16_t>(bits))
                                 : float_from_bits(dtype == DSPARK_BF16 ? bits << 16 : bits);
    }
    source.offer(row, segment, u, word);
  }
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_SCREEN_CUH_
