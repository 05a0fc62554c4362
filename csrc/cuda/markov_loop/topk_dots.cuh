// SPDX-License-Identifier: Apache-2.0
//
// Biases of the members of a support: rows of W2, gathered, times one r-vector.
//
// Four lanes have a row. Lane g multiplies elements 16 i + 4 g .. 16 i + 4 g + 3 for i = 0, 1, ...:
// four of the row's 16 partial sums (element j goes to sum j % 16), each in ascending order, added
// by halves at the end. That is the order of the CPU backend, so z has its bits; and a lane reads 8
// bytes of bf16 at a time, a row 32 bytes in one go.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TOPK_DOTS_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TOPK_DOTS_CUH_

#include <type_traits>

#include "core/dtype.h"
#include "core/int8.h"
#include "cuda/markov_loop/topk_args.h"
#include "cuda/prim/platform.h"

namespace dspark::cuda::topk {

constexpr int kRowLanes = 4;
constexpr int kRowsAtOnce = kThreads / kRowLanes;  // of a CTA

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
__device__ __forceinline__ float widen_element(float x) { return x; }
__device__ __forceinline__ float widen_element(Bf16 x) { return bf16_to_f32(x.bits); }
__device__ __forceinline__ float widen_element(Half x) { return f16_to_f32(x.bits); }
__device__ __forceinline__ int32_t widen_element(int8_t x) { return x; }

/// Whether rows of W2 may be read four elements at a time.
__device__ __forceinline__ bool rows_aligned(const Params& p) {
  const int64_t bytes = 4 * dtype_bytes(p.w2_dtype);
  return reinterpret_cast<uintptr_t>(p.w2) % bytes == 0 && p.w2_stride % 4 == 0;
}

template <class T>
struct Four {
  T x[4];
};

// Elements j .. j + 3 of a row, zeros from `length` on.
template <class T>
__device__ __forceinline__ Four<T> load_four(const T* row, int32_t j, int32_t length,
                                             bool aligned) {
  Four<T> four{};
  if (aligned && j + 4 <= length) {
    using Word = typename std::conditional<
        sizeof(T) == 4, uint4,
        typename std::conditional<sizeof(T) == 2, uint2, uint32_t>::type>::type;
    const Word word = *reinterpret_cast<const Word*>(row + j);
    __builtin_memcpy(four.x, &word, sizeof word);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (j + e < length) four.x[e] = row[j + e];
    }
  }
  return four;
}

// The row's dot product in all of its four lanes. `x` has zeros up to a multiple of 16.
template <class T>
__device__ __forceinline__ float row_dot(const T* row, const float* x, int32_t length,
                                         bool aligned) {
  const int32_t lane = threadIdx.x % kRowLanes;
  float sum[4] = {};
#pragma unroll 8
  for (int32_t j = 4 * lane; j < length; j += 16) {
    const Four<T> w = load_four(row, j, length, aligned);
    const float4 v = *reinterpret_cast<const float4*>(x + j);
    sum[0] = fma_f32(widen_element(w.x[0]), v.x, sum[0]);
    sum[1] = fma_f32(widen_element(w.x[1]), v.y, sum[1]);
    sum[2] = fma_f32(widen_element(w.x[2]), v.z, sum[2]);
    sum[3] = fma_f32(widen_element(w.x[3]), v.w, sum[3]);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum[e] += __shfl_xor_sync(~0u, sum[e], 2);
    sum[e] += __shfl_xor_sync(~0u, sum[e], 1);
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// float(dot) of an int8 row with q (core/int8.h): 32 bits hold 512 columns, 64 the rest.
__device__ __forceinline__ float row_dot(const int8_t* row, const int32_t* q, int32_t length,
                                         bool aligned) {
  const int32_t lane = threadIdx.x % kRowLanes;
  int64_t total = 0;
  for (int32_t begin = 0; begin < length; begin += kInt8Columns) {
    const int32_t end = begin + kInt8Columns < length ? begin + kInt8Columns : length;
    int32_t sum = 0;
#pragma unroll 8
    for (int32_t j = begin + 4 * lane; j < end; j += 16) {
      const Four<int8_t> w = load_four(row, j, length, aligned);
      const int4 v = *reinterpret_cast<const int4*>(q + j);
      sum += w.x[0] * v.x + w.x[1] * v.y + w.x[2] * v.z + w.x[3] * v.w;
    }
    total += sum;
  }
  total += __shfl_xor_sync(~0u, total, 2);
  total += __shfl_xor_sync(~0u, total, 1);
  return static_cast<float>(total);
}

}  // namespace dspark::cuda::topk

#endif  // DSPARK_CUDA_MARKOV_LOOP_TOPK_DOTS_CUH_
