// SPDX-License-Identifier: Apache-2.0
//
// y = x W^T for a few rows of x: the products of a language model while it decodes. Not one of the
// six families and not in the C API: a helper for models that run on this CPU backend.
//
// W is read once for all rows, so that verifying a handful of drafts costs little more memory
// traffic than one token. Every dot product has the fixed order of cpu/simd/dots.h: a row's bits do
// not depend on how many rows there are, and greedy speculative decoding can equal plain decoding
// bit for bit.
#ifndef DSPARK_CPU_LINEAR_H_
#define DSPARK_CPU_LINEAR_H_

#include <cstdint>

namespace dspark::cpu {

constexpr int32_t kLinearRows = 64;  // most rows of x in one call

struct Linear {
  const void* weight;   // [columns, length] row-major, element type `dtype`
  int32_t dtype;        // f32, bf16 or f16
  int32_t columns;      // of the result
  int32_t length;       // of a dot product
  const float* x;       // [rows, length]
  int32_t rows;         // 0..kLinearRows
  float* out;           // [rows, columns]
  int32_t num_threads;  // 0 = as many as OpenMP has
};

void linear(const Linear& job) noexcept;

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_LINEAR_H_
