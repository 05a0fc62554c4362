// SPDX-License-Identifier: Apache-2.0
//
// Tiles of up to 128 rows on Hopper's tensor cores (wgmma, sm_90a): caches of bf16 and f16, head
// sizes 64, 128 and 256. For many rows of a KV head (prefill, one KV head for many query heads),
// where tile_mma.cuh would pass over the cache once per 32 to 128 rows and be slower at it.
//
// Two warpgroups of 64 rows share a ring of blocks of 64 keys and values (wgmma_ring.cuh). Scores =
// queries x keys, both in shared memory; weights become the A operand in registers as they come out
// of the first product, values are the B operand as they lie. The products of a warpgroup are
// asynchronous: while block b's weights are made, the product of block b - 1's with their values is
// under way, and the other warpgroup, which comes to the same point at another time, has the tensor
// cores meanwhile. A row's maximum, sum and values stay in the registers of four lanes: 128
// accumulators at D = 256.
//
// At 4 D operations a row and key and 4 D bytes a key, 128 rows make 128 operations a byte: just
// below what memory and tensor cores of an H200 can do side by side (190), so a tile is still bound
// by memory, and further tiles read what the first has left in L2.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_TILE_WGMMA_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_TILE_WGMMA_CUH_

#include "cuda/prim/barrier.h"
#include "cuda/prim/wgmma.h"
#include "cuda/verify_attention/exchange.cuh"
#include "cuda/verify_attention/tile_rows.cuh"
#include "cuda/verify_attention/wgmma_ring.cuh"

namespace dspark::cuda::attention {

template <int kDim>
class WgmmaTile {
  using Sizes = WgmmaSizes<kDim>;
  static constexpr int kSteps = kWgmmaKeys / 16;  // of a product with values

 public:
  static constexpr int kMaxThreads = kWgmmaThreads;
  static constexpr int kMinBlocks = 1;

  __device__ WgmmaTile(const Args& args, unsigned char* memory, const Exchange& exchange)
      : args_(args),
        p_(args.p),
        exchange_(exchange),
        memory_(memory),
        ring_(args, memory + Sizes::kRingAt,
              reinterpret_cast<uint64_t*>(memory + Sizes::kBarriersAt), *range()) {}

  /// The rows' queries, zeros for rows that do not exist, and which keys each row sees.
  __device__ void load_queries(const Tile& t) {
    const int32_t group = p_.num_q_heads / p_.num_kv_heads;
    const int32_t rows = t.rows > kWgmmaRows / 2 ? kWgmmaRows : kWgmmaRows / 2;
    for (int32_t i = threadIdx.x; i < rows * (kDim / 8); i += kWgmmaThreads) {
      const int32_t row = i / (kDim / 8), d = i % (kDim / 8) * 8;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (row < t.rows) {
        const int64_t at = query_offset(p_, t, row, group) + d;
        words = load_eight(static_cast<const uint16_t*>(p_.q) + at, args_.config.vectors);
      }
      unsigned char* line = memory_ + row / 64 * Sizes::kSlotBytes +
                            d / kWgmmaColumns * kWgmmaColumnBytes + row % 64 * prim::kBoxRowBytes;
      *reinterpret_cast<uint4*>(line + ((d % kWgmmaColumns / 8) ^ (row & 7)) * 16) = words;
    }
    describe_rows(p_, t, ranges(), *state());
  }

  /// Keys [from, to) of the tile. Whole CTA; afterwards view() is the part. True for a bad page.
  __device__ bool accumulate(const Tile& t, int32_t from, int32_t to) {
    prim::fence_proxy_async();  // queries, and the last part, where the slots are
    if (threadIdx.x == 0) *range() = {from, to};
    __syncthreads();
    ring_.open(t);
    Sums sums;
    clear(sums);
    bool poison = false;
    // The shuffle tells the compiler that the branch is one of whole warps.
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (ring_.blocks() > 0 && t.rows > static_cast<int32_t>(warpgroup) * 64) {
      const bool f16 = p_.cache_dtype == DSPARK_F16;
      poison = f16 ? work<DSPARK_F16>(sums) : work<DSPARK_BF16>(sums);
    } else {
      poison = follow();
    }
    __syncthreads();
    store(sums);
    const bool bad = __syncthreads_or(ring_.bad()) != 0;
    if (__syncthreads_or(poison)) {
      add_poison(p_, t, from, to, kWgmmaKeys, *state(), ranges(), values(), Sizes::kValuePitch);
    }
    return bad;
  }

  __device__ View view() const { return {values(), 1, Sizes::kValuePitch, 0, softmax()}; }

 private:
  // Of lane (g, t): rows g and g + 8 of the warp's sixteen.
  struct Sums {
    float value[kDim / 2];
    float max[2], sum[2];
  };

  static_assert(sizeof(TileState) + sizeof(RingKeys) <= 32, "WgmmaSizes::kBarriersAt");

  // Shared memory: queries, then
  __device__ int2* ranges() const { return reinterpret_cast<int2*>(memory_ + Sizes::kQueryBytes); }
  __device__ TileState* state() const {
    return reinterpret_cast<TileState*>(ranges() + kWgmmaRows);
  }
  __device__ RingKeys* range() const { return reinterpret_cast<RingKeys*>(state() + 1); }
  // mbarriers, and the ring; where it was, the part: [rows][kValuePitch] and [rows].
  __device__ float* values() const { return reinterpret_cast<float*>(memory_ + Sizes::kRingAt); }
  __device__ float2* softmax() const {
    return reinterpret_cast<float2*>(values() + kWgmmaRows * Sizes::kValuePitch);
  }
  // This lane's first row.
  static __device__ __forceinline__ int32_t first_row() {
    const int32_t thread = static_cast<int32_t>(prim::thread_index());
    return thread / 32 * 16 + thread % 32 / 4;
  }

  static __device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s.max[h] = -kInfinity;
      s.sum[h] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) s.value[i] = 0.0f;
  }

  // All blocks. True if one had values that were left out. Behind the last one its scores are
  // made once more, for nobody: with a branch the compiler would wait for each wgmma.
  template <int32_t kDtype>
  __device__ __forceinline__ bool work(Sums& s) {
    float score[kWgmmaKeys / 2];
    uint32_t weight[kSteps][4] = {};
    bool poison = false;
    const unsigned char* keys = ring_.keys();
    prim::wgmma_fence();
    multiply_keys<kDtype>(keys, score);
    prim::wgmma_wait<0>();
    prim::wgmma_hold(score);
    ring_.free_keys();
    const int32_t blocks = ring_.blocks();
#pragma unroll 1
    for (int32_t b = 0; b < blocks; ++b) {
      if (b % 64 == 8) exchange_.answer();
      const Factors factors = soften(score, s, ring_.key(b));
      prim::wgmma_wait<0>();  // for the values of the block before
      hold(s, weight);
      if (b > 0) ring_.free_values();
      rescale(s, factors);
      pack<kDtype>(score, weight);
      unsigned char* values = ring_.values();
      poison |= clean(values, ring_.key(b));
      const bool last = b + 1 == blocks;
      if (!last) keys = ring_.keys();
      prim::wgmma_fence();
      multiply_keys<kDtype>(keys, score);
      multiply_values<kDtype>(values, weight, s);
      if (threadIdx.x < 32) ring_.more(b + 1);
      prim::wgmma_wait<1>();
      prim::wgmma_hold(score);
      if (!last) ring_.free_keys();
    }
    prim::wgmma_wait<0>();
    hold(s, weight);
    ring_.free_values();
    return poison;
  }

  // The same of a warpgroup that has no rows.
  __device__ __forceinline__ bool follow() {
    bool poison = false;
    for (int32_t b = 0; b < ring_.blocks(); ++b) {
      if (b % 64 == 8) exchange_.answer();
      ring_.keys();
      ring_.free_keys();
      poison |= clean(ring_.values(), ring_.key(b));
      ring_.free_values();
    }
    return poison;
  }

  template <int32_t kDtype, int N, class A>
  static __device__ __forceinline__ void multiply(float (&d)[N / 2], const A& a, uint64_t b,
                                                  bool add) {
    if constexpr (kDtype == DSPARK_BF16) {
      prim::wgmma_bf16<N>(d, a, b, add);
    } else {
      prim::wgmma_f16<N>(d, a, b, add);
    }
  }

  // score = queries x keys of the slot, under way when it returns.
  template <int32_t kDtype>
  __device__ __forceinline__ void multiply_keys(const unsigned char* keys,
                                                float (&score)[kWgmmaKeys / 2]) const {
    const uint64_t a =
        prim::wgmma_descriptor(memory_ + prim::thread_index() / 128 * Sizes::kSlotBytes);
    const uint64_t b = prim::wgmma_descriptor(keys);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const uint64_t column = static_cast<uint64_t>(k / 4 * (kWgmmaColumnBytes >> 4));
      multiply<kDtype, kWgmmaKeys>(score, prim::wgmma_advance(a + column, k % 4 * 32),
                                   prim::wgmma_advance(b + column, k % 4 * 32), k > 0);
    }
    prim::wgmma_commit();
  }

  // value += weights x values of the slot, under way when it returns.
  template <int32_t kDtype>
  __device__ __forceinline__ void multiply_values(const unsigned char* values,
                                                  const uint32_t (&weight)[kSteps][4],
                                                  Sums& s) const {
    const uint64_t b = prim::wgmma_descriptor_mn(values, kWgmmaColumnBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      multiply<kDtype, kDim>(s.value, weight[k], prim::wgmma_advance(b, k * 2048), true);
    }
    prim::wgmma_commit();
  }
  static __device__ __forceinline__ void hold(Sums& s, uint32_t (&weight)[kSteps][4]) {
    prim::wgmma_hold(s.value);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) prim::wgmma_hold(weight[k]);
  }

  // What the block has done to the sums so far.
  struct Factors {
    float of[2];
    bool risen;  // for a row of the warp
  };

  // Scores to weights; key: the block's first.
  __device__ __forceinline__ Factors soften(float (&score)[kWgmmaKeys / 2], Sums& s,
                                            int32_t key) const {
    const Scores scores(p_, state()->scale);
#pragma unroll
    for (float& x : score) x = scores.of(x, scores.factor);
    if (state()->masks(key, kWgmmaKeys)) mask(score, key);
    Factors factors{};
    bool risen = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max = -kInfinity;
#pragma unroll
      for (int i = 0; i < kWgmmaKeys / 2; i += 4) {
        max = fmaxf(max, fmaxf(score[i + 2 * h], score[i + 2 * h + 1]));
      }
      const Rise rise = raise(s.max[h], max);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWgmmaKeys / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[i + 2 * h + e];
          x = prim::exp2_approx(x - rise.base);
          sum += x;
        }
      }
      s.sum[h] = fma_f32(s.sum[h], rise.factor, sum);
      factors.of[h] = rise.factor;
      // No sum is negative. Asking for it keeps the compiler from putting off the exponentials: it
      // would first wait for the products that they are to overlap with.
      risen |= rise.risen || sum < 0.0f;
    }
    factors.risen = __any_sync(0xffffffffu, risen) != 0;
    return factors;
  }

  // Keys that a row does not see get the score -infinity, whatever they hold.
  __device__ __forceinline__ void mask(float (&score)[kWgmmaKeys / 2], int32_t key) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = first_row() + 8 * h;
      const int2 range = row < state()->rows ? ranges()[row] : make_int2(0, 0);
#pragma unroll
      for (int i = 0; i < kWgmmaKeys / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int32_t at = key + 2 * i + static_cast<int32_t>(prim::thread_index() % 4) * 2 + e;
          if (at < range.x || at >= range.y) score[i + 2 * h + e] = -kInfinity;
        }
      }
    }
  }

  // Rescale where a maximum has risen.
  static __device__ __forceinline__ void rescale(Sums& s, const Factors& factors) {
    if (!factors.risen) return;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) s.value[i] *= factors.of[i / 2 % 2];
  }

  template <int32_t kDtype>
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return kDtype == DSPARK_F16 ? prim::pack_f16(low, high) : prim::pack_bf16(low, high);
  }
  // Accumulators of the first product are in the order that the second one's A wants.
  template <int32_t kDtype>
  static __device__ __forceinline__ void pack(const float (&score)[kWgmmaKeys / 2],
                                              uint32_t (&weight)[kSteps][4]) {
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      weight[i / 4][i % 4] = pack<kDtype>(score[2 * i], score[2 * i + 1]);
    }
  }

  // A block that is masked loses the infinities and NaN of its values, for both warpgroups at once.
  // True if it had some.
  __device__ __forceinline__ bool clean(unsigned char* values, int32_t key) const {
    const uint32_t exponent = p_.cache_dtype == DSPARK_F16 ? 0x7c00u : 0x7f80u;
    if (!state()->masks(key, kWgmmaKeys)) return false;
    bool found = false;
    for (int32_t i = prim::thread_index(); i < Sizes::kSlotBytes / 16; i += kWgmmaThreads) {
      uint4& four = reinterpret_cast<uint4*>(values)[i];
      const uint4 v = four;
      if (!is_poison(v.x, exponent) && !is_poison(v.y, exponent) && !is_poison(v.z, exponent) &&
          !is_poison(v.w, exponent)) {
        continue;
      }
      found = true;
      four = make_uint4(without_poison(v.x, exponent), without_poison(v.y, exponent),
                        without_poison(v.z, exponent), without_poison(v.w, exponent));
    }
    prim::fence_proxy_async();
    prim::barrier_sync(1, kWgmmaThreads);
    return found;
  }

  // The sums to where the ring was.
  __device__ __forceinline__ void store(const Sums& s) const {
    const int32_t lane = prim::thread_index() % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t row = first_row() + 8 * h;
      float sum = s.sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane == 0) softmax()[row] = make_float2(s.max[h], sum);
      float* line = values() + row * Sizes::kValuePitch + 2 * lane;
#pragma unroll
      for (int i = 0; i < kDim / 2; i += 4) {
        *reinterpret_cast<float2*>(line + 2 * i) =
            make_float2(s.value[i + 2 * h], s.value[i + 2 * h + 1]);
      }
    }
  }

  const Args& args_;
  const Params& p_;
  const Exchange& exchange_;
  unsigned char* memory_;
  WgmmaRing<kDim> ring_;
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_TILE_WGMMA_CUH_
