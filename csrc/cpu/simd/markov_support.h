// SPDX-License-Identifier: Apache-2.0
//
// A draft law on the M largest base logits (topk_support). The M columns of every slot are known
// before the loop, from one pass over U; a step then touches M rows of W2 only. The draw is that of
// a full row whose other logits are -inf: only segments with a member take part, and those without
// mass add nothing to the lse, so the bits are the same.
//
// Included only by cpu/simd/markov_loop_loops.cpp.
#ifndef DSPARK_CPU_SIMD_MARKOV_SUPPORT_H_
#define DSPARK_CPU_SIMD_MARKOV_SUPPORT_H_

#include "cpu/markov_loop_loops.h"
#include "cpu/simd/markov_draw.h"
#include "cpu/simd/markov_logits.h"
#include "cpu/simd/truncate.h"

namespace dspark::cpu::DSPARK_SIMD {

// Put `value` in the place of heap[0] and restore the order: the smallest of `size` is at 0.
static void sift_down(uint64_t* heap, int32_t size, uint64_t value) {
  int32_t hole = 0;
  for (;;) {
    int32_t child = 2 * hole + 1;
    if (child >= size) break;
    if (child + 1 < size) child += heap[child + 1] < heap[child];
    if (heap[child] >= value) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = value;
}

static void sift_up(uint64_t* heap, int32_t hole, uint64_t value) {
  while (hole > 0 && heap[(hole - 1) / 2] > value) {
    heap[hole] = heap[(hole - 1) / 2];
    hole = (hole - 1) / 2;
  }
  heap[hole] = value;
}

// The `wanted` first columns of one row of U in the order (logit descending, column ascending), NaN
// as -inf, into heap [wanted] as key << 32 | ~column, unsorted. Returns whether there was a NaN.
static int32_t select_support(const dspark_markov_loop_params& p, int64_t offset, int32_t wanted,
                              uint64_t* heap) {
  int32_t size = 0;
  int32_t nan = 0;
  for (int32_t first = 0; first < p.draft_vocab_size; first += kSegment) {
    const int32_t left = p.draft_vocab_size - first;
    const int32_t count = left < kSegment ? left : kSegment;
    alignas(64) float u[kSegment];
    load_base(p, offset + first, count, u);
    for (int32_t i = count; i < kSegment; ++i) u[i] = kMinusInf;
    for (int i = 0; i < kSegment; ++i) {
      nan |= u[i] != u[i];
      u[i] = u[i] != u[i] ? kMinusInf : u[i];
    }
    // Columns come in ascending order: one that ties with the last member stays outside.
    if (size == wanted && ordered_f32(segment_max(u)) <= heap[0] >> 32) continue;
    for (int32_t i = 0; i < count; ++i) {
      const uint64_t key =
          static_cast<uint64_t>(ordered_f32(u[i])) << 32 | ~static_cast<uint32_t>(first + i);
      if (size < wanted) {
        sift_up(heap, size++, key);
      } else if (key > heap[0]) {
        sift_down(heap, size, key);
      }
    }
  }
  return nan;
}

// z of the members, spread over the segments that have one: s.z [segments, 128], s.segment,
// s.maxima. Returns the number of segments.
static int32_t form_support(const MarkovStep& step, int32_t r, const int32_t* columns,
                            int32_t count, const MarkovSupport& s, int32_t* nan) {
  const dspark_markov_loop_params& p = *step.params;
  const MarkovRow& row = step.rows[r];
  biases(step, p.w2, columns, count, 0, r, 1, s.bias);
  const int64_t base = row.request * p.base_request_stride + step.slot * p.base_slot_stride;
  const float largest = largest_finite(p.base_dtype);
  int32_t segments = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t column = columns[i];
    if (segments == 0 || s.segment[segments - 1] != column / kSegment) {
      s.segment[segments] = column / kSegment;
      float* fresh = s.z + static_cast<int64_t>(segments) * kSegment;
      for (int j = 0; j < kSegment; ++j) fresh[j] = kMinusInf;
      ++segments;
    }
    const float u = load_f32(p.base_logits, p.base_dtype, base + column);
    float z = u + (p.w2_scale == nullptr ? s.bias[i]
                                         : int8_bias(s.bias[i], row.quantum, p.w2_scale[column]));
    *nan |= z != z;
    z = z != z ? kMinusInf : round_to_dtype(z, p.base_dtype);
    s.z[static_cast<int64_t>(segments - 1) * kSegment + column % kSegment] =
        z > largest ? largest : z;
  }
  for (int32_t i = 0; i < segments; ++i) {
    s.maxima[i] = static_cast<double>(segment_max(s.z + static_cast<int64_t>(i) * kSegment));
  }
  return segments;
}

// top-k and top-p among the members: what is cut becomes -inf. Places among the kept segments order
// like the columns, so ties are cut as in a full row.
static void truncate_support(const MarkovRow& row, int32_t segments, const MarkovSupport& s,
                             uint64_t* bins) {
  double largest = s.maxima[0];
  for (int32_t i = 1; i < segments; ++i) largest = s.maxima[i] > largest ? s.maxima[i] : largest;
  if (!(largest > static_cast<double>(kMinusInf))) return;
  const CutRow whole{s.z, s.maxima, segments, static_cast<float>(largest), row.temperature};
  const Cut cut = truncate(whole, row.top_k, row.top_p, bins);
  for (int32_t i = 0; i < segments; ++i) {
    float* z = s.z + static_cast<int64_t>(i) * kSegment;
    for (int j = 0; j < kSegment; ++j) {
      z[j] = kept(cut, ordered_f32(z[j]), i * kSegment + j) ? z[j] : kMinusInf;
    }
  }
}

static void store_support(const MarkovStep& step, const MarkovRow& row, const int32_t* columns,
                          int32_t count, const MarkovSupport& s) {
  const dspark_markov_loop_params& p = *step.params;
  const int64_t full = row.request * p.logits_request_stride + step.slot * p.logits_slot_stride;
  const int64_t at = (static_cast<int64_t>(row.request) * p.gamma + step.slot) * p.topk_support;
  if (p.logits != nullptr) {
    for (int32_t c = 0; c < p.draft_vocab_size; ++c) {
      store_f32(p.logits, p.base_dtype, full + c, kMinusInf);
    }
  }
  int32_t segment = -1;
  for (int32_t i = 0; i < p.topk_support; ++i) {
    int32_t id = -1;
    float z = kMinusInf;
    if (i < count) {
      const int32_t column = columns[i];
      if (segment < 0 || s.segment[segment] != column / kSegment) ++segment;
      z = s.z[static_cast<int64_t>(segment) * kSegment + column % kSegment];
      id = p.draft_to_target == nullptr ? column : p.draft_to_target[column];
      if (p.logits != nullptr) store_f32(p.logits, p.base_dtype, full + column, z);
    }
    if (p.support_ids == nullptr) continue;
    p.support_ids[at + i] = id;
    store_f32(p.support_logits, p.base_dtype, at + i, z);
  }
}

// One step of one row: `columns` [count] ascending.
static MarkovPick support(const MarkovStep& step, int32_t r, const int32_t* columns, int32_t count,
                          const MarkovThread& thread) {
  const MarkovRow& row = step.rows[r];
  const MarkovSupport& s = thread.support;
  MarkovBest* best = &thread.best[r];
  int32_t nan = 0;
  const int32_t segments = form_support(step, r, columns, count, s, &nan);
  if (row.truncated) truncate_support(row, segments, s, thread.bins);
  store_support(step, row, columns, count, s);
  Philox4 noise{};
  int32_t drawn = -1;  // segments >> 2 of the noise at hand
  for (int32_t i = 0; i < segments; ++i) {
    const int32_t segment = s.segment[i];
    if (drawn != segment >> 2 && !row.greedy && !row.forced) {
      drawn = segment >> 2;
      noise = draw(stream(step, row, kDraftSegment), static_cast<uint32_t>(drawn));
    }
    const float* z = s.z + static_cast<int64_t>(i) * kSegment;
    s.log_mass[i] = offer(row, segment, z, segment_max(z), noise.w[segment & 3], best);
  }
  return conclude(step, row, *best, nan, s.log_mass, segments);
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_MARKOV_SUPPORT_H_
