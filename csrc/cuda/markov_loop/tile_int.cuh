// SPDX-License-Identifier: Apache-2.0
//
// Tile source for every int8 W2: any r, any alignment, any device. The integers of core/int8.h in
// 64-bit sums; a half-warp has four rows of W2 and four vectors at a time, as in tile_scalar.cuh.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_INT_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_INT_CUH_

#include "core/int8.h"
#include "cuda/markov_loop/tile_source.h"

namespace dspark::cuda::markov {

class IntSource {
 public:
  __device__ IntSource(const Args& args, const Shared& shared, int32_t)
      : args_(args), s_(shared), first_(first_segment(args.config, blockIdx.x)) {}

  __device__ void open() {}
  __device__ void begin_step(int32_t) {}
  __device__ int32_t segment(int32_t position) const { return first_ + position; }

  __device__ void load_vectors(int32_t first_row, int32_t count) {
    const int32_t r = args_.p.rank;
    for (int32_t i = threadIdx.x / 32; i < count; i += kWarps) {
      uint32_t largest = 0;
      for (int32_t j = threadIdx.x % 32; j < r; j += 32) {
        largest = max(largest, int8_magnitude(vector_element(args_, s_, first_row + i, j)));
      }
      const float quantum = int8_quantum(__reduce_max_sync(~0u, largest));
      const float inverse = int8_inverse(quantum);
      if (threadIdx.x % 32 == 0) quanta()[i] = quantum;
      for (int32_t j = threadIdx.x % 32; j < r; j += 32) {
        vectors()[i * r + j] = int8_quantise(vector_element(args_, s_, first_row + i, j), inverse);
      }
    }
  }
  __device__ void vectors_ready() {}

  __device__ void dots(int32_t position, int32_t segments, int32_t count, bool) {
    for (int32_t k = 0; k < segments; ++k) {
      segment_dots(segment(position + k), count, s_.bias + k * count * kBiasStride);
    }
  }

  __device__ void end_pass(int32_t, int32_t) {}
  __device__ float bias(float word, int32_t, int32_t) const { return word; }
  __device__ void close() {}

 private:
  static constexpr int kRows = 4;     // of W2 at a time
  static constexpr int kVectors = 4;  // 16 sums a lane

  __device__ float* quanta() const { return reinterpret_cast<float*>(s_.source); }
  __device__ int32_t* vectors() const {
    return reinterpret_cast<int32_t*>(s_.source) + args_.config.group;
  }

  __device__ void segment_dots(int32_t segment, int32_t count, float* out) {
    const Params& p = args_.p;
    const int32_t last = p.draft_vocab_size - 1;
    for (int32_t id = threadIdx.x / 16 * kRows; id < kSegment; id += kThreads / 16 * kRows) {
      int32_t rows[kRows];
#pragma unroll
      for (int a = 0; a < kRows; ++a) rows[a] = min(segment * kSegment + id + a, last);
      for (int32_t i = 0; i < count; i += kVectors) dot_block(rows, id, i, count, out);
    }
  }

  __device__ void dot_block(const int32_t (&rows)[kRows], int32_t id, int32_t i, int32_t count,
                            float* out) {
    const Params& p = args_.p;
    const int32_t r = p.rank, lane = threadIdx.x % 16;
    int64_t sum[kRows][kVectors] = {};
    for (int32_t j = lane; j < r; j += 16) {
      int32_t w[kRows];
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
        w[a] = static_cast<const int8_t*>(p.w2)[rows[a] * p.w2_stride + j];
      }
#pragma unroll
      for (int b = 0; b < kVectors; ++b) {
        const int32_t q = vectors()[min(i + b, count - 1) * r + j];
#pragma unroll
        for (int a = 0; a < kRows; ++a) sum[a][b] += w[a] * q;
      }
    }
#pragma unroll
    for (int b = 0; b < kVectors; ++b) {
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
        int64_t total = sum[a][b];
        for (int d = 8; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
        if (lane != 0 || i + b >= count) continue;
        out[(i + b) * kBiasStride + id + a] =
            int8_bias(static_cast<float>(total), quanta()[i + b], p.w2_scale[rows[a]]);
      }
    }
  }

  const Args& args_;
  const Shared& s_;
  int32_t first_;
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_INT_CUH_
