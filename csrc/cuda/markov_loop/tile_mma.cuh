// SPDX-License-Identifier: Apache-2.0
//
// Tile source on the tensor cores of sm_80 and later: bf16 or f16 W2, r a multiple of 16.
//
// W2 is the M side of mma.m16n8k16, 16 ids a warp, streaming through the warp's ring
// (tile_ring.cuh) or resident; the r-vectors of the group are the N side. Rows of the vectors have
// 16 bytes behind them: no bank conflicts under ldmatrix.
//
// A vector that is a row of W1 of the same dtype goes in as it is. Any other fp32 vector goes in as
// the exact sum of three 16-bit parts (bf16: 8 bits each; f16: after scaling by a power of two),
// one product each. Sums are fp32; even and odd steps of 16 columns have an accumulator each (two
// mma in flight), added at the end: the same order for any number of rows.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_MMA_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_MMA_CUH_

#include "cuda/markov_loop/tile_ring.cuh"
#include "cuda/prim/mma.h"

namespace dspark::cuda::markov {

/// kGroup: config.group, a multiple of 8.
template <int kGroup>
class MmaSource : public W2Ring<2> {
 public:
  __device__ MmaSource(const Args& args, const Shared& shared, int32_t)
      : W2Ring<2>(args, shared), scaled_(args.p.w2_dtype == DSPARK_F16 && !args.config.plain) {}

  __device__ void open() {
    const int32_t words = args_.config.parts * kGroup * stride() / 2;
    for (int32_t i = threadIdx.x; i < words; i += kThreads) {
      reinterpret_cast<uint32_t*>(vectors())[i] = 0;  // columns of rows that do not exist
    }
    open_ring();
  }

  __device__ void load_vectors(int32_t first_row, int32_t count) {
    if (args_.config.direct) {
      copy_rows(first_row, count);
    } else {
      for (int32_t i = threadIdx.x / 32; i < count; i += kWarps) split_row(first_row + i, i);
    }
  }
  __device__ void vectors_ready() {
    if (args_.config.direct) prim::cp_async_wait<0>();
  }

  __device__ void dots(int32_t position, int32_t segments, int32_t count, bool last) {
    const bool half = args_.p.w2_dtype == DSPARK_F16;
    if (args_.config.parts == 1) {
      half ? pass<true, false>(position, segments, count, last)
           : pass<false, false>(position, segments, count, last);
    } else {
      half ? pass<true, true>(position, segments, count, last)
           : pass<false, true>(position, segments, count, last);
    }
  }

  __device__ float bias(float word, int32_t, int32_t) const { return word; }

 private:
  using Accumulators = float[2][kGroup / 8][4];

  __device__ int32_t stride() const { return args_.p.rank + kVectorPadding; }
  __device__ uint16_t* vectors() const {
    return reinterpret_cast<uint16_t*>(s_.source + args_.config.slots * kSlotBytes);
  }
  __device__ float* scales() const {  // [kGroup] what undoes the scaling of a vector
    return reinterpret_cast<float*>(vectors() + args_.config.parts * kGroup * stride());
  }

  // Rows of W1 as they are.
  __device__ void copy_rows(int32_t first_row, int32_t count) {
    const Params& p = args_.p;
    const int32_t pieces = p.rank / 8;
    for (int32_t q = threadIdx.x; q < count * pieces; q += kThreads) {
      const int32_t i = q / pieces, piece = q - i * pieces;
      const int32_t id = s_.previous[first_row + i];
      const bool there = known(p, id);
      const uint16_t* from =
          static_cast<const uint16_t*>(p.w1) + (there ? id * p.w1_stride + piece * 8 : 0);
      prim::cp_async_16(vectors() + i * stride() + piece * 8, from, there ? 16 : 0);
    }
    prim::cp_async_commit();
  }

  // One row as 16-bit parts, by a warp.
  __device__ void split_row(int32_t row, int32_t i) {
    const int32_t lane = threadIdx.x % 32, r = args_.p.rank;
    float scale = 1.0f;
    if (scaled_) {
      uint32_t largest = 0;  // bits of the largest finite magnitude: they order like it
      for (int32_t j = lane; j < r; j += 32) {
        const uint32_t bits = bits_f32(vector_element(args_, s_, row, j)) & 0x7fffffffu;
        if (bits < 0x7f800000u && bits > largest) largest = bits;
      }
      // A power of two that puts the largest into [2^14, 2^15), within what float32 can hold.
      const int32_t wanted = 14 + 127 - static_cast<int32_t>(__reduce_max_sync(~0u, largest) >> 23);
      const int32_t exponent = wanted > 100 ? 100 : wanted;
      scale = float_from_bits(static_cast<uint32_t>(127 + exponent) << 23);
      if (lane == 0) scales()[i] = float_from_bits(static_cast<uint32_t>(127 - exponent) << 23);
    }
    uint16_t* part = vectors() + i * stride();
    const int32_t parts = args_.config.parts;
#pragma unroll 1
    for (int32_t j = lane; j < r; j += 32) {
      float rest = vector_element(args_, s_, row, j) * scale;
      for (int32_t q = 0; q < parts; ++q) {
        const uint16_t bits = scaled_ ? f32_to_f16(rest) : cut_bf16(rest);
        part[q * kGroup * stride() + j] = bits;
        const float taken = scaled_ ? f16_to_f32(bits) : bf16_to_f32(bits);
        const bool finite = (bits_f32(rest) & 0x7f800000u) != 0x7f800000u;
        rest = finite ? rest - taken : 0.0f;  // exact; infinities and NaN are in the first part
      }
    }
  }

  // The upper half of a float: its first 8 significant bits. NaN stays NaN.
  static __device__ uint16_t cut_bf16(float x) {
    return static_cast<uint16_t>(bits_f32(x) >> 16 | (x != x ? 0x40u : 0u));
  }

  template <bool kHalf, bool kSplit>
  __device__ __forceinline__ void pass(int32_t position, int32_t segments, int32_t count,
                                       bool last) {
    for (int32_t k = 0; k < segments; ++k) {
      Place at = place_of(position + k);
      Accumulators sum = {};
      for (int32_t c = 0; c < chunks_; ++c) {
        wait_chunk(at, c);
        chunk_dots<kHalf, kSplit>(c, at.slot, sum);
        chunk_done(at, last);
      }
      store(sum, s_.bias + k * count * kBiasStride, count);
    }
  }

  // Products of one chunk: up to four steps of 16 columns, two at a time.
  template <bool kHalf, bool kSplit>
  __device__ __forceinline__ void chunk_dots(int32_t chunk, int32_t slot, Accumulators& sum) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t left = (args_.p.rank - chunk * kChunkColumns) / 16;
    const int32_t steps = left < 4 ? left : 4;
    const int32_t row = lane % 16, parts = kSplit ? args_.config.parts : 1;
    const unsigned char* tile = s_.source + slot * kSlotBytes + warp * 2048 + row * 128;
    // Lane's place in the vectors: row lane % 8 of eight, piece lane / 8 of the 32 columns.
    const uint16_t* vector = vectors() + lane % 8 * stride() + chunk * kChunkColumns + lane / 8 * 8;
#pragma unroll 2
    for (int32_t k = 0; k < steps; k += 2) {
      const bool both = k + 1 < steps;
      uint32_t a[2][4];
      prim::ldmatrix_x4(a[0], tile + ((2 * k + lane / 16) ^ (row & 7)) * 16);
      if (both) prim::ldmatrix_x4(a[1], tile + ((2 * k + 2 + lane / 16) ^ (row & 7)) * 16);
#pragma unroll 1
      for (int q = 0; q < parts; ++q) {
#pragma unroll
        for (int n = 0; n < kGroup / 8; ++n) {
          const uint16_t* from = vector + (q * kGroup + 8 * n) * stride() + k * 16;
          uint32_t b[2][2];
          load_vectors_fragment(b, from, both);
          multiply<kHalf>(sum[0][n], a[0], b[0]);
          if (both) multiply<kHalf>(sum[1][n], a[1], b[1]);
        }
      }
    }
  }

  static __device__ __forceinline__ void load_vectors_fragment(uint32_t (&b)[2][2],
                                                               const uint16_t* from, bool both) {
    if (both) {
      uint32_t four[4];
      prim::ldmatrix_x4(four, from);
      b[0][0] = four[0];
      b[0][1] = four[1];
      b[1][0] = four[2];
      b[1][1] = four[3];
    } else {
      // Lanes 16..31 give no address here, but theirs must not lie outside either.
      prim::ldmatrix_x2(b[0], threadIdx.x % 32 < 16 ? from : from - 16);
    }
  }

  template <bool kHalf>
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    if (kHalf) {
      prim::mma_f16(d, a, b);
    } else {
      prim::mma_bf16(d, a, b);
    }
  }

  __device__ __forceinline__ void store(const Accumulators& sum, float* out, int32_t count) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t id = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < kGroup / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t i = 8 * n + lane % 4 * 2 + e % 2;
        if (i >= count) continue;
        const float total = sum[0][n][e] + sum[1][n][e];
        out[i * kBiasStride + id + e / 2 * 8] = scaled_ ? total * scales()[i] : total;
      }
    }
  }

  bool scaled_;
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_MMA_CUH_
