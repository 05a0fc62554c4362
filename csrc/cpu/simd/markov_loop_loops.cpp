// SPDX-License-Identifier: Apache-2.0
//
// The pass over W2 and U, which is the Markov loop's whole traffic: per step W2 once (whatever the
// number of requests) and one row of U per request. A thread takes four segments of 128 ids at a
// time: biases by dot products, logits rounded to U's dtype, the segment's log-mass and key, and
// the champion so far with its 128 logits, from which the token is drawn at the end of the step.
#include "cpu/markov_loop_loops.h"

#include "cpu/simd/markov_draw.h"
#include "cpu/simd/markov_heads.h"
#include "cpu/simd/markov_logits.h"
#include "cpu/simd/markov_support.h"
#include "cpu/simd/truncate.h"

namespace dspark::cpu::DSPARK_SIMD {
namespace {

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
  step.log_mass[static_cast<int64_t>(r) * step.num_segments + segment] =
      offer(row, segment, z, largest, thread.noise[r].w[segment & 3], best);
}

void chunk(const MarkovStep& step, int64_t chunk, const MarkovThread& thread) {
  const dspark_markov_loop_params& p = *step.params;
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
    const int32_t behind = i + 1 < kMarkovChunk && left > kSegment ? left - kSegment : 0;
    biases(step, advance(p.w2, p.w2_dtype, first * p.w2_stride), nullptr,
           left < kSegment ? left : kSegment, behind, 0, step.num_rows, thread.bias);
    for (int32_t r = 0; r < step.num_rows; ++r) one_segment(step, r, segment, thread);
  }
}

// Cut the law of a truncated row, then offer its segments one after the other.
void sample_truncated(const MarkovStep& step, int32_t r, MarkovBest* best, uint64_t* bins) {
  const MarkovRow& row = step.rows[r];
  const int64_t base = static_cast<int64_t>(r) * step.num_segments;
  double* maxima = step.log_mass + base;  // replaced by the log-masses, segment by segment
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
    maxima[s] = offer(row, s, z, top, noise.w[s & 3], best);
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
  const double* log_mass = step.log_mass + static_cast<int64_t>(r) * step.num_segments;
  return conclude(step, row, *best, nan, log_mass, step.num_segments);
}

}  // namespace

const MarkovLoops kMarkovLoops = {&dots, &gate, &recur, &chunk, &finish, &select_support, &support};

}  // namespace dspark::cpu::DSPARK_SIMD
