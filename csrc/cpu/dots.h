// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CPU_DOTS_H_
#define DSPARK_CPU_DOTS_H_

#include <stdint.h>

namespace dspark::cpu {

/// One job of cpu/simd/dots.h: out[v * out_stride + i] = row_i . vectors[v].
struct Dots {
  const void* matrix;           // [num_rows, length], element type `dtype`
  int32_t dtype;                // f32, bf16 or f16
  int64_t row_stride;           // elements between rows
  int32_t num_rows;             //
  int32_t length;               // elements of a row and of a vector
  const float* const* vectors;  // [num_vectors] pointers to fp32 vectors
  int32_t num_vectors;          //
  float* out;                   // [num_vectors, num_rows]
  int64_t out_stride;           // floats between vectors
  const int32_t* gather;        // [num_rows] rows of the matrix to take, or NULL: the first ones
  int32_t num_ahead;            // rows behind the last one that the next job reads: worth fetching
};

/// Vectors of IntDots are followed by zeros up to a multiple of this many elements.
constexpr int kIntPadding = 32;

/// One job of cpu/simd/int_dots.h: out[v * out_stride + i] = float(row_i . vector_v), exact sums.
struct IntDots {
  const int8_t* matrix;    // [num_rows, length]
  int64_t row_stride;      // elements between rows
  int32_t num_rows;        //
  int32_t length;          // elements of a row and of a vector
  const int16_t* vectors;  // [num_vectors, vector_stride] q of core/int8.h
  int64_t vector_stride;   // a multiple of kIntPadding
  int32_t num_vectors;     //
  float* out;              // [num_vectors, num_rows]
  int64_t out_stride;      // floats between vectors
  const int32_t* gather;   // [num_rows] rows of the matrix to take, or NULL: the first ones
};

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_DOTS_H_
