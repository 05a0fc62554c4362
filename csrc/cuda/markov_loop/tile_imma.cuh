// SPDX-License-Identifier: Apache-2.0
//
// Tile source for an int8 W2 on the tensor cores of sm_80 and later: r a multiple of 16, up to 512.
//
// W2 is the M side of mma.m16n8k32, 16 ids a warp, streaming through the warp's ring
// (tile_ring.cuh) or resident: half the bytes of bf16, so at V = 151,936 and r = 256 the 39 MB are
// nearly on chip, 27 MB in the shared memory of 132 multiprocessors and the rest in L2. Predicted 4
// us a step at R
// <= 8 instead of 7 (model of one H200, not measured).
//
// The r-vectors are 16-bit integers q = 256 high + low (core/int8.h), two planes of bytes on the N
// side, one product each. Sums are exact in 32 bits, so the biases are those of the CPU backend and
// of the reference, bit for bit. Rows of the planes have 16 bytes behind them: no bank conflicts
// under ldmatrix, which brings both planes of eight vectors at once.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_IMMA_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_IMMA_CUH_

#include "core/int8.h"
#include "cuda/markov_loop/tile_ring.cuh"
#include "cuda/prim/mma.h"

namespace dspark::cuda::markov {

/// kGroup: config.group, a multiple of 8.
template <int kGroup>
class ImmaSource : public W2Ring<1> {
 public:
  __device__ ImmaSource(const Args& args, const Shared& shared, int32_t)
      : W2Ring<1>(args, shared) {}

  __device__ void open() {
    for (int32_t i = threadIdx.x; i < 2 * plane() / 4; i += kThreads) {
      reinterpret_cast<uint32_t*>(planes())[i] = 0;  // vectors that do not exist, columns behind r
    }
    open_ring();
  }

  __device__ void load_vectors(int32_t first_row, int32_t count) {
    for (int32_t i = threadIdx.x / 32; i < count; i += kWarps) quantise_row(first_row + i, i);
  }
  __device__ void vectors_ready() {}

  __device__ void dots(int32_t position, int32_t segments, int32_t count, bool last) {
    const int32_t id = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    for (int32_t k = 0; k < segments; ++k) {
      Place at = place_of(position + k);
      const int32_t column = segment(position + k) * kSegment + id;
      const float scale[2] = {row_scale(column), row_scale(column + 8)};  // early: from L2
      Accumulators sum = {};
      for (int32_t c = 0; c < chunks_; ++c) {
        wait_chunk(at, c);
        chunk_dots(c, at.slot, sum);
        chunk_done(at, last);
      }
      store(sum, scale, s_.bias + k * count * kBiasStride, count);
    }
  }

  __device__ float bias(float word, int32_t, int32_t) const { return word; }

 protected:
  using Accumulators = int32_t[2][kGroup / 8][4];  // high and low plane

  __device__ int32_t stride() const { return int8_vector_stride(args_.p.rank); }
  __device__ int32_t plane() const { return kGroup * stride(); }
  __device__ unsigned char* planes() const { return s_.source + args_.config.slots * kSlotBytes; }
  __device__ float* quanta() const { return reinterpret_cast<float*>(planes() + 2 * plane()); }

  __device__ float row_scale(int32_t column) const {
    return column < args_.p.draft_vocab_size ? args_.p.w2_scale[column] : 0.0f;
  }

  // One vector as two planes, by a warp: four neighbouring elements a lane at a time.
  __device__ void quantise_row(int32_t row, int32_t i) {
    const int32_t lane = threadIdx.x % 32, r = args_.p.rank;
    uint32_t largest = 0;
    for (int32_t j = lane; j < r; j += 32) {
      largest = max(largest, int8_magnitude(vector_element(args_, s_, row, j)));
    }
    const float quantum = int8_quantum(__reduce_max_sync(~0u, largest));
    const float inverse = int8_inverse(quantum);
    if (lane == 0) quanta()[i] = quantum;
    for (int32_t j = 4 * lane; j < r; j += 128) {
      uint32_t high = 0, low = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t q = int8_quantise(vector_element(args_, s_, row, j + e), inverse);
        high |= (static_cast<uint32_t>(int8_high(q)) & 0xffu) << 8 * e;
        low |= (static_cast<uint32_t>(int8_low(q)) & 0xffu) << 8 * e;
      }
      unsigned char* to = planes() + i * stride() + j;
      *reinterpret_cast<uint32_t*>(to) = high;
      *reinterpret_cast<uint32_t*>(to + plane()) = low;
    }
  }

  // Products of one chunk: up to four steps of 32 columns.
  __device__ __forceinline__ void chunk_dots(int32_t chunk, int32_t slot, Accumulators& sum) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t left = (args_.p.rank - chunk * 128 + 31) / 32;
    const int32_t steps = left < 4 ? left : 4;
    const int32_t row = lane % 16;
    const unsigned char* tile = s_.source + slot * kSlotBytes + warp * 2048 + row * 128;
    // Lanes 0..15 point to the high plane, 16..31 to the low one: row lane % 8 of eight vectors,
    // its first or second 16 bytes.
    const unsigned char* vector =
        planes() + lane / 16 * plane() + lane % 8 * stride() + chunk * 128 + lane / 8 % 2 * 16;
#pragma unroll 2
    for (int32_t k = 0; k < steps; ++k) {
      uint32_t a[4];
      prim::ldmatrix_x4(a, tile + ((2 * k + lane / 16) ^ (row & 7)) * 16);
#pragma unroll
      for (int n = 0; n < kGroup / 8; ++n) {
        uint32_t both[4];
        prim::ldmatrix_x4(both, vector + 8 * n * stride() + 32 * k);
        const uint32_t high[2] = {both[0], both[1]}, low[2] = {both[2], both[3]};
        prim::mma_s8(sum[0][n], a, high);
        prim::mma_s8(sum[1][n], a, low);
      }
    }
  }

  // 256 high + low is the dot product: below 2^31, so wrapping on the way does not matter.
  __device__ __forceinline__ void store(const Accumulators& sum, const float (&scale)[2],
                                        float* out, int32_t count) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t id = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < kGroup / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t i = 8 * n + lane % 4 * 2 + e % 2;
        if (i >= count) continue;
        const uint32_t high = static_cast<uint32_t>(sum[0][n][e]);
        const uint32_t dot = 256u * high + static_cast<uint32_t>(sum[1][n][e]);
        out[i * kBiasStride + id + e / 2 * 8] =
            int8_bias(static_cast<float>(static_cast<int32_t>(dot)), quanta()[i], scale[e / 2]);
      }
    }
  }
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_IMMA_CUH_
