// SPDX-License-Identifier: Apache-2.0
//
// Tile source for everything: any r, any floating W2, any alignment, any device.
//
// A half-warp has four rows of W2 and four vectors at a time; lane l of 16 adds elements l, l + 16,
// ... and the 16 sums are added by halves. That is the order of the CPU backend: with this source
// all biases, and so all tokens and logits, have the CPU's bits.
//
// W2 is read from global memory, rows beside each other by neighbouring lanes; more groups of
// vectors than one read it again through L2. The fast paths are elsewhere: what is fp32 in W2 has
// no tensor cores in this precision, and its floor is HBM at 4 V r bytes a step.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_SCALAR_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_SCALAR_CUH_

#include "cuda/markov_loop/tile_source.h"

namespace dspark::cuda::markov {

class ScalarSource {
 public:
  __device__ ScalarSource(const Args& args, const Shared& shared, int32_t rows)
      : args_(args), s_(shared), first_(first_segment(args.config, blockIdx.x)) {
    (void)rows;
  }

  __device__ void open() {}
  __device__ void begin_step(int32_t) {}
  __device__ int32_t segment(int32_t position) const { return first_ + position; }

  __device__ void load_vectors(int32_t first_row, int32_t count) {
    const int32_t r = args_.p.rank;
    for (int32_t i = threadIdx.x / 32; i < count; i += kWarps) {
      for (int32_t j = threadIdx.x % 32; j < r; j += 32) {
        vectors()[i * r + j] = vector_element(args_, s_, first_row + i, j);
      }
    }
  }
  __device__ void vectors_ready() {}

  __device__ void dots(int32_t position, int32_t segments, int32_t count, bool) {
    for (int32_t k = 0; k < segments; ++k) {
      float* out = s_.bias + k * count * kBiasStride;
      const int32_t half = threadIdx.x / 16;
      for (int32_t id = half * kRows; id < kSegment; id += kThreads / 16 * kRows) {
        for (int32_t i = 0; i < count; i += kVectors) {
          dot_block(segment(position + k), id, i, count, out);
        }
      }
    }
  }

  __device__ void end_pass(int32_t, int32_t) {}
  __device__ float bias(float word, int32_t, int32_t) const { return word; }
  __device__ void close() {}

 private:
  struct Bf16 {
    uint16_t bits;
  };
  struct Half {
    uint16_t bits;
  };
  static __device__ float widen_element(float x) { return x; }
  static __device__ float widen_element(Bf16 x) { return bf16_to_f32(x.bits); }
  static __device__ float widen_element(Half x) { return f16_to_f32(x.bits); }

  static constexpr int kRows = 4;     // of W2 at a time
  static constexpr int kVectors = 4;  // 16 sums a lane

  __device__ float* vectors() const { return reinterpret_cast<float*>(s_.source); }

  // Rows id .. id + 3 of a segment times vectors i .. i + 3 of the group.
  __device__ void dot_block(int32_t segment, int32_t id, int32_t i, int32_t count, float* out) {
    float sum[kRows][kVectors] = {};
    const int32_t first = segment * kSegment + id, dtype = args_.p.w2_dtype;
    if (dtype == DSPARK_F32) add_products<float>(first, i, count, sum);
    if (dtype == DSPARK_BF16) add_products<Bf16>(first, i, count, sum);
    if (dtype == DSPARK_F16) add_products<Half>(first, i, count, sum);
#pragma unroll
    for (int b = 0; b < kVectors; ++b) {
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
        const float total = sum_half_warp(sum[a][b]);
        if (threadIdx.x % 16 == 0 && i + b < count) out[(i + b) * kBiasStride + id + a] = total;
      }
    }
  }

  // The part of this lane.
  template <class T>
  __device__ void add_products(int32_t first, int32_t i, int32_t count,
                               float (&sum)[kRows][kVectors]) {
    const Params& p = args_.p;
    const T* rows[kRows];
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      const int32_t last = p.draft_vocab_size - 1;
      rows[a] = static_cast<const T*>(p.w2) + (first + a < last ? first + a : last) * p.w2_stride;
    }
    const float* x[kVectors];
#pragma unroll
    for (int b = 0; b < kVectors; ++b) {
      x[b] = vectors() + (i + b < count ? i + b : count - 1) * p.rank;
    }
#pragma unroll 2
    for (int32_t j = threadIdx.x % 16; j < p.rank; j += 16) {
      float w[kRows];
#pragma unroll
      for (int a = 0; a < kRows; ++a) w[a] = widen_element(rows[a][j]);
#pragma unroll
      for (int b = 0; b < kVectors; ++b) {
        const float v = x[b][j];
#pragma unroll
        for (int a = 0; a < kRows; ++a) sum[a][b] = fma_f32(w[a], v, sum[a][b]);
      }
    }
  }

  const Args& args_;
  const Shared& s_;
  int32_t first_;
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_SCALAR_CUH_
