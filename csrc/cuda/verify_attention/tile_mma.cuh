// SPDX-License-Identifier: Apache-2.0
//
// Tiles on the tensor cores of sm_80 and later (mma.m16n8k16): caches of bf16, f16 or e4m3,
// head sizes 64, 128 and 256. One-byte elements become binary16 on their way from shared memory to
// the product, exactly; their scales are factors of the scores and of the result.
//
// Four warps take turns along the keys, a step at a time (ring.cuh); which warp has which keys
// follows from their positions alone. A warp multiplies all rows of its group with the step: scores
// = rows x keys, weights 2^(score - maximum so far), sums += weights x values, where the weights
// are the A operand as they come out of the first product. It keeps maximum, sum and values of its
// own keys in registers and talks to nobody; at the end the four are merged through shared memory,
// which the ring then no longer needs.
//
// The accumulators of a warp are 128 registers: 256 / kDim tiles of 16 rows, of which those
// without rows are left out. Twice as many rows take a second set of four warps, which share
// the rings of the first. Arithmetic beside the products is little: the sums are rescaled only
// when a maximum has risen, and masks are applied only to steps that some row sees in part.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_TILE_MMA_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_TILE_MMA_CUH_

#include "cuda/prim/thread.h"
#include "cuda/verify_attention/exchange.cuh"
#include "cuda/verify_attention/queries.cuh"

namespace dspark::cuda::attention {

template <class Element, int kDim>
class MmaTile : public MmaQueries<Element, kDim> {
  using Base = MmaQueries<Element, kDim>;
  using Sizes = typename Base::Sizes;
  using TheRing = Ring<Element::kBytes, kDim>;
  static constexpr int kKeys = TheRing::kKeys;
  static constexpr int kTiles = Sizes::kTiles;
  static constexpr int kColumns = kDim / 8;      // tiles of 8 columns
  static constexpr int kScoreTiles = kKeys / 8;  // tiles of 8 keys
  static constexpr int kKeySteps = kKeys / 16;   // of a product with values
  static constexpr int kKeyUnroll = kKeys > 16 ? 1 : kTiles > 2 ? 2 : kDim / 16;

 public:
  static constexpr int kMaxThreads = 256;
  static constexpr int kMinBlocks = 1;

  __device__ MmaTile(const Args& args, unsigned char* memory, const Exchange& exchange)
      : Base(args, memory),
        exchange_(exchange),
        element_(args.p.cache_dtype),
        ring_(args, rings() + key_group_ * args.config.ring_bytes, Base::state_.full[key_group_],
              key_group_, row_group_) {}

  /// Keys [from, to) of the tile. Whole CTA; afterwards view() is the part. True for a bad page.
  __device__ bool accumulate(const Tile& t, int32_t from, int32_t to) {
    Sums sums;
    Weights weights;
    bool any_poison = false;
    clear(sums);
    ring_.release();
    __syncthreads();  // queries are there; nobody reads the last part any more
    ring_.open(t, from, to);
#pragma unroll 1
    for (int32_t h = -ring_.lead(); h < ring_.half_steps(); ++h) {
      const unsigned char* slot = ring_.turn(h);
      if (h < 0) continue;
      const int32_t key = ring_.key(h);
      const bool masked = state()->masks(key, kKeys);
      if (h % 2 == 0) {
        multiply_keys(slot, weights.score);
        scale(weights.score);
        if (masked) mask(weights.score, key);
        soften(weights, sums);
        if (h % 128 == 16) exchange_.answer();
      } else {
        const bool poisoned = masked && has_poison(slot);
        multiply_values(slot, weights, sums, poisoned);
        any_poison |= poisoned;
      }
    }
    const bool bad = merge(sums, ring_.bad());
    if (__syncthreads_or(any_poison)) {
      add_poison(p_, t, from, to, kKeys, *state(), ranges(), reinterpret_cast<float*>(rings()),
                 Sizes::kValuePitch);
    }
    return bad;
  }

  __device__ View view() const {
    return {reinterpret_cast<const float*>(rings()), kKeyGroups, Sizes::kValuePitch,
            args_.config.ring_bytes / 4, softmax() + kKeyGroups * all_rows()};
  }

 private:
  // Of lane (g, t): rows g and g + 8 of each tile.
  struct Sums {
    float value[kTiles][kColumns][4];
    float max[kTiles][2], sum[kTiles][2];
  };
  struct Weights {
    float score[kTiles][kScoreTiles][4];
    uint32_t packed[kTiles][kKeySteps][4];  // the A operand of the product with values
  };

  static __device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s.max[m][h] = -kInfinity;
        s.sum[m][h] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s.value[m][n][e] = 0.0f;
      }
    }
  }

  // Where this lane's rows begin in a slot of keys, for load_keys().
  static __device__ __forceinline__ int32_t key_place() {
    const int32_t lane = prim::thread_index() % 32;
    if constexpr (Element::kBytes == 1) return TheRing::place(lane, 0);
    return TheRing::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // The B operands of columns 16k to 16k + 15 of the slot's keys, for 8 keys each.
  static __device__ __forceinline__ void load_keys(uint32_t (&b)[kScoreTiles][2],
                                                   const unsigned char* keys, int32_t place,
                                                   int k) {
    uint32_t four[4];
    prim::ldmatrix_x4(four, keys + TheRing::shifted(place, k * Element::kBytes));
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      if constexpr (Element::kBytes == 1) {
        b[n][0] = prim::e4m3_to_f16(four[n]);
        b[n][1] = prim::e4m3_to_f16(four[n] >> 16);
      } else {
        b[n][0] = four[2 * n];
        b[n][1] = four[2 * n + 1];
      }
    }
  }

  // score = rows x keys of the slot.
  __device__ __forceinline__ void multiply_keys(const unsigned char* keys,
                                                float (&score)[kTiles][kScoreTiles][4]) const {
    const int32_t lane = prim::thread_index() % 32;
    const int32_t place = key_place();
    const unsigned char* query = queries_ +
                                 (row_group_ * Sizes::kGroupRows + lane % 16) * Sizes::kQueryPitch +
                                 lane / 16 * 16;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) score[m][n][e] = 0.0f;
      }
    }
#pragma unroll kKeyUnroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t b[kScoreTiles][2];
      load_keys(b, keys, place, k);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (m >= tiles_) continue;
        uint32_t a[4];
        prim::ldmatrix_x4(a, query + m * 16 * Sizes::kQueryPitch + k * 32);
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) element_.multiply(score[m][n], a, b[n]);
      }
    }
  }

  // Scores in units of log 2.
  __device__ __forceinline__ void scale(float (&score)[kTiles][kScoreTiles][4]) const {
    const Scores scores(p_, state()->scale);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= tiles_) continue;
      float factor[2] = {scores.factor, scores.factor};
      if constexpr (Element::kBytes == 1) {
        const float* own =
            factors() + row_group_ * Sizes::kGroupRows + m * 16 + prim::thread_index() % 32 / 4;
        factor[0] *= own[0];
        factor[1] *= own[8];
      }
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[m][n][e];
          x = scores.of(x, factor[e / 2]);
        }
      }
    }
  }

  // Keys that a row does not see get the score -infinity, whatever they hold.
  __device__ __forceinline__ void mask(float (&score)[kTiles][kScoreTiles][4], int32_t key) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= tiles_) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int2 range = range_of(m, h);
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int32_t at = key + 8 * n + static_cast<int32_t>(prim::thread_index() % 4) * 2 + e;
            if (at < range.x || at >= range.y) score[m][n][2 * h + e] = -kInfinity;
          }
        }
      }
    }
  }

  // Scores to weights; what has been summed so far is rescaled where a maximum has risen.
  __device__ __forceinline__ void soften(Weights& w, Sums& s) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= tiles_) continue;
      bool risen = false;
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float max = -kInfinity;
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          max = fmaxf(max, fmaxf(w.score[m][n][2 * h], w.score[m][n][2 * h + 1]));
        }
        const Rise rise = raise(s.max[m][h], max);
        risen |= rise.risen;
        factor[h] = rise.factor;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = w.score[m][n][2 * h + e];
            x = prim::exp2_approx(x - rise.base);
            sum += x;
          }
        }
        s.sum[m][h] = fma_f32(s.sum[m][h], factor[h], sum);
      }
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
        float (&low)[4] = w.score[m][2 * k];
        float (&high)[4] = w.score[m][2 * k + 1];
        w.packed[m][k][0] = element_.pack(low[0], low[1]);
        w.packed[m][k][1] = element_.pack(low[2], low[3]);
        w.packed[m][k][2] = element_.pack(high[0], high[1]);
        w.packed[m][k][3] = element_.pack(high[2], high[3]);
      }
      if (!__any_sync(0xffffffffu, risen)) continue;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s.value[m][n][e] *= factor[e / 2];
      }
    }
  }

  // Where this lane's rows begin in a slot of values, for load_values().
  static __device__ __forceinline__ int32_t value_place() {
    const int32_t lane = prim::thread_index() % 32;
    if constexpr (Element::kBytes == 1) return TheRing::place(lane, 0);
    return TheRing::place(lane % 16, lane / 16);
  }

  // The B operands of 16 columns of the slot's values, tiles of 8 columns 2n and 2n + 1, for 16
  // keys each. One-byte elements come in pairs of columns: the even ones make the first tile.
  static __device__ __forceinline__ void load_values(uint32_t (&b)[2][kKeySteps][2],
                                                     const unsigned char* values, int32_t place,
                                                     int n) {
    uint32_t four[4];
    prim::ldmatrix_x4_trans(four, values + TheRing::shifted(place, n * Element::kBytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Element::kBytes == 1) {
        b[0][i / 2][i % 2] = prim::e4m3_to_f16(__byte_perm(four[i], 0, 0x4420));
        b[1][i / 2][i % 2] = prim::e4m3_to_f16(__byte_perm(four[i], 0, 0x4431));
      } else {
        b[i / 2][0][i % 2] = four[i];
      }
    }
  }

  // value += weights x values of the slot.
  __device__ __forceinline__ void multiply_values(const unsigned char* values, const Weights& w,
                                                  Sums& s, bool poisoned) const {
    const int32_t place = value_place();
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) {
      uint32_t b[2][kKeySteps][2];
      load_values(b, values, place, n);
      if (poisoned) {
#pragma unroll
        for (int i = 0; i < 4 * kKeySteps; ++i) {
          uint32_t& word = b[i / (2 * kKeySteps)][i / 2 % kKeySteps][i % 2];
          word = without_poison(word, element_.exponent());
        }
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        if (m >= tiles_) continue;
#pragma unroll
        for (int k = 0; k < kKeySteps; ++k) {
          element_.multiply(s.value[m][2 * n], w.packed[m][k], b[0][k]);
          element_.multiply(s.value[m][2 * n + 1], w.packed[m][k], b[1][k]);
        }
      }
    }
  }

  // Whether the slot holds an infinity or NaN.
  __device__ __forceinline__ bool has_poison(const unsigned char* values) const {
    bool found = false;
    for (int i = prim::thread_index() % 32; i < kKeys * TheRing::kPieces; i += 32) {
      const uint4 v = reinterpret_cast<const uint4*>(values)[i];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (Element::kBytes == 1) {
          found |= (((words[j] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0;
        } else {
          found |= is_poison(words[j], element_.exponent());
        }
      }
    }
    return __any_sync(0xffffffffu, found) != 0;
  }

  // The four key groups' sums side by side where the rings were, and what each is worth.
  __device__ __forceinline__ bool merge(Sums& s, bool bad) {
    const int32_t lane = prim::thread_index() % 32;
    const int32_t all = all_rows();
    const int32_t first = row_group_ * Sizes::kGroupRows + lane / 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = s.sum[m][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 == 0) {
          softmax()[key_group_ * all + first + m * 16 + h * 8] = make_float2(s.max[m][h], sum);
        }
      }
    }
    const bool any = __syncthreads_or(bad) != 0;
    float* to = reinterpret_cast<float*>(rings() + key_group_ * args_.config.ring_bytes);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      if (m >= tiles_) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t row = first + m * 16 + h * 8;
        const float factor = prim::exp2_approx(s.max[m][h] - base_of(row, all));
        float* line = to + row * Sizes::kValuePitch;
#pragma unroll
        for (int n = 0; n < kColumns / 2; ++n) {
          const float (&even)[4] = s.value[m][2 * n];
          const float (&odd)[4] = s.value[m][2 * n + 1];
          const float x[4] = {even[2 * h] * factor, even[2 * h + 1] * factor, odd[2 * h] * factor,
                              odd[2 * h + 1] * factor};
          if constexpr (Element::kBytes == 1) {
            *reinterpret_cast<float4*>(line + 16 * n + lane % 4 * 4) =
                make_float4(x[0], x[2], x[1], x[3]);
          } else {
            float* pair = line + 16 * n + lane % 4 * 2;
            *reinterpret_cast<float2*>(pair) = make_float2(x[0], x[1]);
            *reinterpret_cast<float2*>(pair + 8) = make_float2(x[2], x[3]);
          }
        }
      }
    }
    for (int32_t row = prim::thread_index(); row < state()->rows; row += blockDim.x) {
      const float base = base_of(row, all);
      float max = -kInfinity, sum = 0.0f;
      for (int w = 0; w < kKeyGroups; ++w) {
        const float2 part = softmax()[w * all + row];
        max = fmaxf(max, part.x);
        sum = fma_f32(part.y, prim::exp2_approx(part.x - base), sum);
      }
      softmax()[kKeyGroups * all + row] = make_float2(max, sum);
    }
    __syncthreads();
    return any;
  }

  // The maximum of a row over the key groups; 0 if it has no key.
  __device__ __forceinline__ float base_of(int32_t row, int32_t all) const {
    float max = -kInfinity;
    for (int w = 0; w < kKeyGroups; ++w) max = fmaxf(max, softmax()[w * all + row].x);
    return max == -kInfinity ? 0.0f : max;
  }

  using Base::all_rows;
  using Base::args_;
  using Base::factors;
  using Base::key_group_;
  using Base::p_;
  using Base::queries_;
  using Base::range_of;
  using Base::ranges;
  using Base::rings;
  using Base::row_group_;
  using Base::softmax;
  using Base::state;
  using Base::tiles_;

  const Exchange& exchange_;
  const Element element_;
  TheRing ring_;
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_TILE_MMA_CUH_
