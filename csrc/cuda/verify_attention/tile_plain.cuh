// SPDX-License-Identifier: Apache-2.0
//
// Any element type, any head size, any strides: one thread a key for the scores, one a column for
// the values. For what the tensor cores do not serve; float32 throughout.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_TILE_PLAIN_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_TILE_PLAIN_CUH_

#include "cuda/verify_attention/exchange.cuh"
#include "cuda/verify_attention/kernels.h"
#include "cuda/verify_attention/results.cuh"

namespace dspark::cuda::attention {

constexpr int kPlainKeys = 64;      // keys of a block, at multiples of it
constexpr int kPlainRows = 16;      // rows of a tile, at most
constexpr int kPlainThreads = 128;  // of a CTA
static_assert(kPlainRows == kMaxPlainRows, "");

/// Bytes of shared memory of a tile of `rows` rows.
DSPARK_HD int64_t plain_bytes(int64_t rows, int64_t width) {
  return kPlainKeys * 8 + rows * (kPlainKeys + 2 * width + 5) * 4;
}

class PlainTile {
 public:
  static constexpr int kMaxThreads = kPlainThreads;
  static constexpr int kMinBlocks = 4;  // of a multiprocessor: 128 registers

  __device__ PlainTile(const Args& args, unsigned char* memory, const Exchange& exchange)
      : args_(args), p_(args.p), exchange_(exchange), width_(args.config.width) {
    const int64_t rows = args.config.rows;
    offsets_ = reinterpret_cast<int64_t*>(memory);
    softmax_ = reinterpret_cast<float2*>(offsets_ + kPlainKeys);
    range_ = reinterpret_cast<int2*>(softmax_ + rows);
    values_ = reinterpret_cast<float*>(range_ + rows);
    q_ = values_ + rows * width_;
    scores_ = q_ + rows * width_;
    rescale_ = scores_ + rows * kPlainKeys;
  }

  __device__ void load_queries(const Tile& t) {
    const int32_t group = p_.num_q_heads / p_.num_kv_heads;
    for (int32_t i = threadIdx.x; i < t.rows * width_; i += kPlainThreads) {
      const int32_t row = i / width_, d = i - row * width_;
      const int32_t m = t.row + row, token = m / group;
      const int64_t at = (t.q.first + token) * p_.q_token_stride +
                         (t.head * group + m - token * group) * p_.q_head_stride + d;
      q_[i] = d < p_.head_dim ? load_f32(p_.q, p_.dtype, at) : 0.0f;
    }
  }

  __device__ bool accumulate(const Tile& t, int32_t from, int32_t to) {
    for (int32_t i = threadIdx.x; i < t.rows * width_; i += kPlainThreads) values_[i] = 0.0f;
    if (static_cast<int32_t>(threadIdx.x) < t.rows) {
      softmax_[threadIdx.x] = make_float2(-kInfinity, 0.0f);
    }
    __syncthreads();
    bool bad = false;
    for (int64_t key = from & ~(kPlainKeys - 1); key < to; key += kPlainKeys) {
      if (key % (8 * kPlainKeys) == 0) exchange_.answer();
      bad |= locate(t, key, from, to);
      __syncthreads();
      score(t);
      __syncthreads();
      soften(t);
      __syncthreads();
      add_values(t);
      __syncthreads();
    }
    return __syncthreads_or(bad) != 0;
  }

  __device__ View view() const { return {values_, 1, width_, 0, softmax_}; }

 private:
  // Where the rows of the block's keys lie, -1 for those that are not there, and which of the keys
  // each row of the tile sees. True for a bad page.
  __device__ bool locate(const Tile& t, int64_t key, int64_t from, int64_t to) {
    const int32_t i = static_cast<int32_t>(threadIdx.x);
    if (i < t.rows) {
      const int32_t token = (t.row + i) / (p_.num_q_heads / p_.num_kv_heads);
      const int64_t low = max64(t.q.low(p_, token), from) - key;
      const int64_t high = min64(t.q.high(p_, token), to) - key;
      range_[i] = make_int2(static_cast<int>(max64(0, min64(low, kPlainKeys))),
                            static_cast<int>(max64(0, min64(high, kPlainKeys))));
    }
    if (i >= kPlainKeys) return false;
    const int64_t position = key + i;
    offsets_[i] = -1;
    if (position < from || position >= to) return false;
    const int32_t page = p_.page_table[t.request * p_.page_table_stride + position / p_.page_size];
    if (page < 0 || page >= p_.num_pages) return true;
    offsets_[i] =
        page * p_.page_stride + position % p_.page_size * p_.row_stride + t.head * p_.head_stride;
    return false;
  }

  // Thread (key, half of the rows).
  __device__ void score(const Tile& t) {
    constexpr int kHalf = kPlainRows / 2;
    const int32_t n = threadIdx.x % kPlainKeys, first = threadIdx.x / kPlainKeys;
    const int64_t offset = offsets_[n];
    const float scale = p_.scale * kv_scale(p_.k_scale, p_.k_scale_stride, t.head);
    float sum[kHalf] = {};
    for (int32_t d = 0; offset >= 0 && d < p_.head_dim; ++d) {
      const float k = load_kv(p_.k_cache, p_.cache_dtype, offset + d);
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const int32_t row = first + 2 * i;
        if (row < t.rows) sum[i] = fma_f32(q_[row * width_ + d], k, sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int32_t row = first + 2 * i;
      if (row < t.rows) scores_[row * kPlainKeys + n] = capped(sum[i] * scale) * kLog2OfE;
    }
  }

  __device__ float capped(float x) const {
    if (p_.soft_cap <= 0.0f) return x;
    const float e = prim::exp2_approx(x / p_.soft_cap * (2.0f * kLog2OfE));
    return p_.soft_cap * (1.0f - 2.0f / (1.0f + e));  // tanh; 0 and infinity give its ends
  }

  // A warp for each row: weights of the block, and what the sums so far are worth. Keys that a row
  // does not see, and those on bad pages, have no weight.
  __device__ void soften(const Tile& t) {
    const int lane = threadIdx.x % 32;
    for (int32_t row = threadIdx.x / 32; row < t.rows; row += kPlainThreads / 32) {
      const int2 range = range_[row];
      float* scores = scores_ + row * kPlainKeys;
      float x[2], max = -kInfinity;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = lane + 32 * i;
        const bool sees = n >= range.x && n < range.y && offsets_[n] >= 0;
        x[i] = sees ? scores[n] : -kInfinity;
        max = fmaxf(max, x[i]);
      }
      for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, d));
      const float2 before = softmax_[row];
      const float now = fmaxf(before.x, max), base = now == -kInfinity ? 0.0f : now;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = prim::exp2_approx(x[i] - base);
        scores[lane + 32 * i] = x[i];
        sum += x[i];
      }
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      const float factor = prim::exp2_approx(before.x - base);
      __syncwarp();
      if (lane == 0) {
        rescale_[row] = factor;
        softmax_[row] = make_float2(now, fma_f32(before.y, factor, sum));
      }
    }
  }

  // Thread d: values of column d. A value that a row does not see may be anything.
  __device__ void add_values(const Tile& t) {
    for (int32_t d = threadIdx.x; d < p_.head_dim; d += kPlainThreads) {
      float sum[kPlainRows];
#pragma unroll
      for (int i = 0; i < kPlainRows; ++i) {
        sum[i] = i < t.rows ? values_[i * width_ + d] * rescale_[i] : 0.0f;
      }
      for (int32_t n = 0; n < kPlainKeys; ++n) {
        const int64_t offset = offsets_[n];
        if (offset < 0) continue;
        const float v = load_kv(p_.v_cache, p_.cache_dtype, offset + d);
#pragma unroll
        for (int i = 0; i < kPlainRows; ++i) {
          if (i >= t.rows || n < range_[i].x || n >= range_[i].y) continue;
          sum[i] = fma_f32(scores_[i * kPlainKeys + n], v, sum[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kPlainRows; ++i) {
        if (i < t.rows) values_[i * width_ + d] = sum[i];
      }
    }
  }

  const Args& args_;
  const Params& p_;
  const Exchange& exchange_;
  int32_t width_;
  int64_t* offsets_;  // [keys] elements from the start of the caches
  float2* softmax_;   // [rows] maximum and sum
  int2* range_;       // [rows] keys of the block that the row sees
  float* values_;     // [rows, width]
  float* q_;          // [rows, width]
  float* scores_;     // [rows, keys], then weights
  float* rescale_;    // [rows]
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_TILE_PLAIN_CUH_
