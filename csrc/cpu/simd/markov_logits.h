// SPDX-License-Identifier: Apache-2.0
//
// z of the Markov loop: biases from rows of W2, U added, one rounding to U's dtype, the rules for
// NaN and infinity, and the way to the caller's array.
//
// Included only by cpu/simd/markov_loop_loops.cpp.
#ifndef DSPARK_CPU_SIMD_MARKOV_LOGITS_H_
#define DSPARK_CPU_SIMD_MARKOV_LOGITS_H_

#include "core/int8.h"
#include "cpu/markov_loop_loops.h"
#include "cpu/simd/dots.h"
#include "cpu/simd/int_dots.h"
#include "cpu/simd/segment.h"

namespace dspark::cpu::DSPARK_SIMD {

// U of one segment as fp32; only columns below V_d are read.
template <class T>
static void widen_base(const void* base, int64_t offset, int count, float* z) {
  const T* u = static_cast<const T*>(base) + offset;
  int i = 0;
  for (; i + 16 <= count; i += 16) store(z + i, load(u + i));
  if (i < count) store(z + i, load_part(u + i, count - i));
}

static void load_base(const dspark_markov_loop_params& p, int64_t offset, int count, float* z) {
  if (p.base_dtype == DSPARK_F32) widen_base<float>(p.base_logits, offset, count, z);
  if (p.base_dtype == DSPARK_BF16) widen_base<Bf16>(p.base_logits, offset, count, z);
  if (p.base_dtype == DSPARK_F16) widen_base<Half>(p.base_logits, offset, count, z);
}

static void round_all(int32_t dtype, float* z) {
  if (dtype == DSPARK_BF16) {
    for (int i = 0; i < kSegment; ++i) {
      const uint32_t u = bits_f32(z[i]);
      z[i] = float_from_bits((u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
    }
  }
  if (dtype == DSPARK_F16) {
    for (int i = 0; i < kSegment; i += 16) store(z + i, round_half(load(z + i)));
  }
}

// z = round(U + B) of one segment, NaN as -inf, +inf as the largest finite value, -inf past the
// vocabulary. Returns whether there was a NaN.
static int32_t form(const MarkovStep& step, const MarkovRow& row, int32_t segment,
                    const float* bias, float* z) {
  const dspark_markov_loop_params& p = *step.params;
  const int32_t first = segment * kSegment;
  const int32_t left = p.draft_vocab_size - first;
  const int32_t count = left < kSegment ? left : kSegment;
  load_base(p, row.request * p.base_request_stride + step.slot * p.base_slot_stride + first, count,
            z);
  if (p.w2_scale != nullptr) {
    for (int32_t i = 0; i < count; ++i) {
      z[i] += int8_bias(bias[i], row.quantum, p.w2_scale[first + i]);
    }
  } else {
    for (int32_t i = 0; i < count; ++i) z[i] += bias[i];
  }
  for (int32_t i = count; i < kSegment; ++i) z[i] = kMinusInf;
  int32_t nan = 0;
  for (int i = 0; i < kSegment; ++i) {
    nan |= z[i] != z[i];
    z[i] = z[i] != z[i] ? kMinusInf : z[i];
  }
  round_all(p.base_dtype, z);
  const float largest = largest_finite(p.base_dtype);
  for (int i = 0; i < kSegment; ++i) z[i] = z[i] > largest ? largest : z[i];
  return nan;
}

static void store_logits(const MarkovStep& step, const MarkovRow& row, int32_t segment,
                         const float* z) {
  const dspark_markov_loop_params& p = *step.params;
  if (p.logits == nullptr) return;
  const int32_t first = segment * kSegment;
  const int32_t left = p.draft_vocab_size - first;
  const int32_t count = left < kSegment ? left : kSegment;
  const int64_t at =
      row.request * p.logits_request_stride + step.slot * p.logits_slot_stride + first;
  if (p.base_dtype == DSPARK_F32) {
    float* out = static_cast<float*>(p.logits) + at;
    for (int32_t i = 0; i < count; ++i) out[i] = z[i];
  } else if (p.base_dtype == DSPARK_BF16) {
    uint16_t* out = static_cast<uint16_t*>(p.logits) + at;
    for (int32_t i = 0; i < count; ++i) out[i] = static_cast<uint16_t>(bits_f32(z[i]) >> 16);
  } else {
    uint16_t* out = static_cast<uint16_t*>(p.logits) + at;
    for (int32_t i = 0; i < count; ++i) out[i] = f32_to_f16(z[i]);
  }
}

constexpr int32_t kAhead = 16;  // rows of the next segment that are asked for while this one ends

// Rows of W2 against the vectors [first, first + count) of the step: biases, or with an int8 W2
// float(dot). The next call reads up to num_ahead rows that follow in memory.
static void biases(const MarkovStep& step, const void* w2, const int32_t* gather, int32_t num_rows,
                   int32_t num_ahead, int32_t first, int32_t count, float* out) {
  const dspark_markov_loop_params& p = *step.params;
  if (p.w2_dtype == DSPARK_I8) {
    IntDots d{};
    d.matrix = static_cast<const int8_t*>(w2);
    d.row_stride = p.w2_stride;
    d.gather = gather;
    d.num_rows = num_rows;
    d.length = p.rank;
    d.vectors = step.quantised + first * step.quantised_stride;
    d.vector_stride = step.quantised_stride;
    d.num_vectors = count;
    d.out = out;
    d.out_stride = kSegment;
    int_dots(d);
    return;
  }
  Dots d{};
  d.matrix = w2;
  d.dtype = p.w2_dtype;
  d.row_stride = p.w2_stride;
  d.gather = gather;
  d.num_rows = num_rows;
  d.length = p.rank;
  d.vectors = step.vectors + first;
  d.num_vectors = count;
  d.out = out;
  d.out_stride = kSegment;
  d.num_ahead = num_ahead < kAhead ? num_ahead : kAhead;
  dots(d);
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_MARKOV_LOGITS_H_
