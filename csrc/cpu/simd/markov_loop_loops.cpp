// SPDX-License-Identifier: Apache-2.0
//
// The pass over W2 and U, which is the Markov loop's whole traffic: per step W2 once (whatever the
// number of requests) and one row of U per request. A thread takes four segments of 128 ids at a
// time: biases by dot products, logits rounded to U's dtype, the segment's log-mass and key, and
// the champion so far with its 128 logits, from which the token is drawn at the end of the step.
#include "cpu/markov_loop_loops.h"

#include "core/int8.h"
#include "cpu/simd/dots.h"
#include "cpu/simd/int_dots.h"
#include "cpu/simd/markov_heads.h"
#include "cpu/simd/segment.h"
#include "cpu/simd/truncate.h"

namespace dspark::cpu::DSPARK_SIMD {
namespace {

using Params = dspark_markov_loop_params;

// U of one segment as fp32; only columns below V_d are read.
template <class T>
void widen_base(const void* base, int64_t offset, int count, float* z) {
  const T* u = static_cast<const T*>(base) + offset;
  int i = 0;
  for (; i + 16 <= count; i += 16) store(z + i, load(u + i));
  if (i < count) store(z + i, load_part(u + i, count - i));
}

void load_base(const Params& p, int64_t offset, int count, float* z) {
  if (p.base_dtype == DSPARK_F32) widen_base<float>(p.base_logits, offset, count, z);
  if (p.base_dtype == DSPARK_BF16) widen_base<Bf16>(p.base_logits, offset, count, z);
  if (p.base_dtype == DSPARK_F16) widen_base<Half>(p.base_logits, offset, count, z);
}

void round_all(int32_t dtype, float* z) {
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
int32_t form(const MarkovStep& step, const MarkovRow& row, int32_t segment, const float* bias,
             float* z) {
  const Params& p = *step.params;
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

void store_logits(const MarkovStep& step, const MarkovRow& row, int32_t segment, const float* z) {
  const Params& p = *step.params;
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

void keep_champion(MarkovBest* best, uint64_t key, const float* z) {
  if (key <= best->key) return;
  best->key = key;
  for (int i = 0; i < kSegment; ++i) best->z[i] = z[i];
}

// The larger logit wins, then the lower id.
void offer_greedy(MarkovBest* best, int32_t segment, const float* z, float largest) {
  const uint64_t high = ordered_f32(largest);
  if (high < best->key >> 32) return;
  int i = 0;
  while (z[i] != largest) ++i;
  const uint32_t id = static_cast<uint32_t>(segment * kSegment + i);
  keep_champion(best, high << 32 | static_cast<uint32_t>(~id), z);
}

// Log-mass and key of one segment of a row whose law is what `z` holds.
void offer(const MarkovStep& step, int32_t r, int32_t segment, const float* z, float largest,
           uint32_t noise, MarkovBest* best) {
  const MarkovRow& row = step.rows[r];
  const double log_mass = segment_log_mass(z, largest, row.temperature);
  step.log_mass[static_cast<int64_t>(r) * step.num_segments + segment] = log_mass;
  if (largest == kMinusInf) return;
  if (row.greedy) {
    offer_greedy(best, segment, z, largest);
  } else {
    const double key = row.forced ? log_mass : log_mass + gumbel(noise);
    keep_champion(best, pack_key(key, static_cast<uint32_t>(segment)), z);
  }
}

DrawStream stream(const MarkovStep& step, const MarkovRow& row, DrawKind kind) {
  const Params& p = *step.params;
  const uint32_t distance = static_cast<uint32_t>(step.slot) + 1;
  return DrawStream{p.seed[row.request], p.position[row.request] + distance, distance, kind};
}

void one_segment(const MarkovStep& step, int32_t r, int32_t segment, const MarkovThread& thread) {
  const MarkovRow& row = step.rows[r];
  MarkovBest* best = &thread.best[r];
  alignas(64) float z[kSegment];
  best->nan |= form(step, row, segment, thread.bias + r * kSegment, z);
  const float largest = segment_max(z);
  if (row.truncated) {  // the law is not known before the whole row is
    const int64_t at = static_cast<int64_t>(r) * step.num_segments + segment;
    step.log_mass[at] = static_cast<double>(largest);
    float* kept = step.row_z + at * kSegment;
    for (int i = 0; i < kSegment; ++i) kept[i] = z[i];
    return;
  }
  store_logits(step, row, segment, z);
  offer(step, r, segment, z, largest, thread.noise[r].w[segment & 3], best);
}

// Rows of W2 against the vectors [first, first + count) of the step: biases, or with an int8 W2
// float(dot).
void biases(const MarkovStep& step, const void* w2, const int32_t* gather, int32_t num_rows,
            int32_t first, int32_t count, float* out) {
  const Params& p = *step.params;
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
  dots(d);
}

void chunk(const MarkovStep& step, int64_t chunk, const MarkovThread& thread) {
  const Params& p = *step.params;
  for (int32_t r = 0; r < step.num_rows; ++r) {
    const MarkovRow& row = step.rows[r];
    if (row.greedy || row.truncated || row.forced) continue;
    thread.noise[r] = draw(stream(step, row, kDraftSegment), static_cast<uint32_t>(chunk));
  }
  for (int32_t i = 0; i < kMarkovChunk; ++i) {
    const int32_t segment = static_cast<int32_t>(chunk) * kMarkovChunk + i;
    if (segment >= step.num_segments) return;
    const int32_t first = segment * kSegment;
    const int32_t left = p.draft_vocab_size - first;
    biases(step, advance(p.w2, p.w2_dtype, first * p.w2_stride), nullptr,
           left < kSegment ? left : kSegment, 0, step.num_rows, thread.bias);
    for (int32_t r = 0; r < step.num_rows; ++r) one_segment(step, r, segment, thread);
  }
}

// Cut the law of a truncated row, then offer its segments one after the other.
void sample_truncated(const MarkovStep& step, int32_t r, MarkovBest* best, uint64_t* bins) {
  const MarkovRow& row = step.rows[r];
  const int64_t base = static_cast<int64_t>(r) * step.num_segments;
  const double* maxima = step.log_mass + base;
  double largest = maxima[0];
  for (int32_t s = 1; s < step.num_segments; ++s) {
    largest = maxima[s] > largest ? maxima[s] : largest;
  }
  float* z = step.row_z + base * kSegment;
  const CutRow whole{z, maxima, step.num_segments, static_cast<float>(largest), row.temperature};
  const Cut cut = largest > static_cast<double>(kMinusInf)
                      ? truncate(whole, row.top_k, row.top_p, bins)
                      : keep_all();
  Philox4 noise{};
  for (int32_t s = 0; s < step.num_segments; ++s, z += kSegment) {
    const bool reached = ordered_f32(static_cast<float>(maxima[s])) >= cut.key;
    for (int i = 0; i < kSegment; ++i) {
      z[i] = reached && kept(cut, ordered_f32(z[i]), s * kSegment + i) ? z[i] : kMinusInf;
    }
    store_logits(step, row, s, z);
    const float top = segment_max(z);
    if (top > kMinusInf && !row.forced) {
      noise = draw(stream(step, row, kDraftSegment), static_cast<uint32_t>(s) >> 2);
    }
    offer(step, r, s, z, top, noise.w[s & 3], best);
  }
}

MarkovPick finish(const MarkovStep& step, int32_t r, const MarkovThread* threads,
                  int32_t num_threads, uint64_t* bins) {
  const MarkovRow& row = step.rows[r];
  MarkovBest* best = &threads[0].best[r];
  int32_t nan = 0;
  for (int32_t t = 0; t < num_threads; ++t) {
    nan |= threads[t].best[r].nan;
    if (threads[t].best[r].key > best->key) best = &threads[t].best[r];
  }
  if (row.truncated) sample_truncated(step, r, best, bins);
  if (best->key == 0) return MarkovPick{0, nan, true, kMinusInf, kMinusInf};
  int32_t column;
  if (row.greedy) {
    column = static_cast<int32_t>(~static_cast<uint32_t>(best->key));
  } else {
    alignas(64) float w[kSegment];
    segment_weights(best->z, segment_max(best->z), row.temperature, w);
    const uint64_t u53 = row.forced ? row.u53 : draw_u53(stream(step, row, kDraftInner));
    // The largest weight of a segment is 1, so its integers never all vanish.
    column = static_cast<int32_t>(packed_segment(best->key)) * kSegment + inner_pick(w, u53);
  }
  const double lse =
      log_sum(step.log_mass + static_cast<int64_t>(r) * step.num_segments, step.num_segments);
  return MarkovPick{column, nan, false, best->z[column % kSegment], static_cast<float>(lse)};
}

}  // namespace

const MarkovLoops kMarkovLoops = {&dots, &gate, &recur, &chunk, &finish};

}  // namespace dspark::cpu::DSPARK_SIMD
