// SPDX-License-Identifier: Apache-2.0
//
// What the tiles on tensor cores (tile_mma.cuh, tile_wgmma.cuh) have in common: which keys the rows
// of a tile see, scores, a row's maximum, and infinities and NaN among the values.
//
// Values that a row does not see have weight 0, but 0 times an infinity or NaN is NaN. So a step
// that is masked and has such a value (poisoned) is multiplied without it, and the rows that do see
// it get it at the end.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_TILE_ROWS_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_TILE_ROWS_CUH_

#include "cuda/prim/thread.h"
#include "cuda/verify_attention/results.cuh"

namespace dspark::cuda::attention {

/// What all threads know of the tile; it lies in shared memory.
struct TileState {
  int2 all_see;  // keys that all rows see
  float scale;   // of the scores, the keys' own included
  int32_t rows;

  /// Whether a row does not see one of `keys` keys from `key` on.
  __device__ __forceinline__ bool masks(int32_t key, int32_t keys) const {
    return key < all_see.x || key > all_see.y - keys;
  }
};

/// Which keys each row sees, to `ranges`, and the state. Whole CTA.
__device__ __forceinline__ void describe_rows(const Params& p, const Tile& t, int2* ranges,
                                              TileState& state) {
  const int32_t group = p.num_q_heads / p.num_kv_heads;
  for (int32_t row = prim::thread_index(); row < t.rows; row += blockDim.x) {
    const int32_t token = (t.row + row) / group;
    ranges[row] = make_int2(t.q.low(p, token), t.q.high(p, token));
  }
  if (prim::thread_index() != 0) return;
  const int32_t last = (t.row + t.rows - 1) / group;
  state.all_see = make_int2(t.q.low(p, last), t.q.high(p, t.row / group));
  state.scale = p.scale * kv_scale(p.k_scale, p.k_scale_stride, t.head);
  state.rows = t.rows;
}

/// Where the query of row `row` of the tile lies, in elements.
__device__ __forceinline__ int64_t query_offset(const Params& p, const Tile& t, int32_t row,
                                                int32_t group) {
  const int32_t m = t.row + row, token = m / group;
  return (t.q.first + token) * p.q_token_stride +
         (t.head * group + m - token * group) * p.q_head_stride;
}

/// Eight elements of two bytes; at a multiple of 16 bytes if `vectors`.
__device__ __forceinline__ uint4 load_eight(const uint16_t* from, bool vectors) {
  if (vectors) return *reinterpret_cast<const uint4*>(from);
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  return make_uint4(w[0], w[1], w[2], w[3]);
}

/// Scores in units of log 2 from dot products, with a soft cap or without.
struct Scores {
  float factor, cap;  // cap: in units of log 2; 0 for none

  __device__ __forceinline__ Scores(const Params& p, float scale)
      : factor(scale * (p.soft_cap > 0.0f ? 2.0f / p.soft_cap : 1.0f) * kLog2OfE),
        cap(p.soft_cap > 0.0f ? p.soft_cap * kLog2OfE : 0.0f) {}

  /// `own`: the factor of the row.
  __device__ __forceinline__ float of(float dot, float own) const {
    const float x = dot * own;
    if (cap == 0.0f) return x;
    return cap - 2.0f * cap * prim::reciprocal_approx(1.0f + prim::exp2_approx(x));  // tanh
  }
};

/// How the maximum of a row has risen.
struct Rise {
  float base;    // what scores are weighed against: the maximum, or 0 if there is no key
  float factor;  // of what has been summed so far
  bool risen;
};

/// The row's maximum with that of some scores, spread over four lanes.
__device__ __forceinline__ Rise raise(float& max, float found) {
  found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 1));
  found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, 2));
  const float now = fmaxf(max, found), base = now == -kInfinity ? 0.0f : now;
  const Rise rise = {base, prim::exp2_approx(max - base), now > max};
  max = now;
  return rise;
}

/// Whether one of two elements is an infinity or NaN; `exponent`: its field.
__device__ __forceinline__ bool is_poison(uint32_t word, uint32_t exponent) {
  const uint32_t high = exponent << 16;
  return (word & exponent) == exponent || (word & high) == high;
}

/// Two elements with zeros for infinities and NaN.
__device__ __forceinline__ uint32_t without_poison(uint32_t word, uint32_t exponent) {
  const uint32_t high = exponent << 16;
  if ((word & exponent) == exponent) word &= 0xffff0000u;
  if ((word & high) == high) word &= 0xffffu;
  return word;
}

/// What the products have left out: infinities and NaN of masked steps of `step` keys, to the rows
/// that see them, in the part's values [rows][pitch]. A weight does not change what comes of them.
/// Whole CTA, behind a barrier; ends with one.
__device__ __forceinline__ void add_poison(const Params& p, const Tile& t, int32_t from, int32_t to,
                                           int32_t step, const TileState& state, const int2* ranges,
                                           float* values, int32_t pitch) {
  for (int32_t key = from; key < to; ++key) {
    if (!state.masks(key / step * step, step)) continue;
    const int32_t page = p.page_table[t.request * p.page_table_stride + key / p.page_size];
    if (page < 0 || page >= p.num_pages) continue;
    const int64_t at =
        page * p.page_stride + key % p.page_size * p.row_stride + t.head * p.head_stride;
    for (int32_t d = prim::thread_index(); d < p.head_dim; d += blockDim.x) {
      const float v = load_kv(p.v_cache, p.cache_dtype, at + d);
      if (v - v == 0.0f) continue;
      for (int32_t row = 0; row < t.rows; ++row) {
        if (key < ranges[row].x || key >= ranges[row].y) continue;
        values[row * pitch + d] += v;
      }
    }
  }
  __syncthreads();
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_TILE_ROWS_CUH_
