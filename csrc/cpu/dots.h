// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CPU_DOTS_H_
#define DSPARK_CPU_DOTS_H_

#include <stdint.h>

namespace dspark::cpu {

/// One job of cpu/simd/dots.h: out[v * out_stride + i] = row_i . vectors[v].
struct Dots {
  const void* matrix;           // [num_rows, length], element type `dtype` (int8 without scale)
  int32_t dtype;                // a dspark_dtype
  int64_t row_stride;           // elements between rows
  int32_t num_rows;             //
  int32_t length;               // elements of a row and of a vector
  const float* const* vectors;  // [num_vectors] pointers to fp32 vectors
  int32_t num_vectors;          //
  float* out;                   // [num_vectors, num_rows]
  int64_t out_stride;           // floats between vectors
};

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_DOTS_H_
