// SPDX-License-Identifier: Apache-2.0
//
// How a row of the Markov loop draws: every segment offers its key, the best one is kept with its
// 128 logits, and at the end the token comes out of those.
//
// Included only by cpu/simd/markov_loop_loops.cpp.
#ifndef DSPARK_CPU_SIMD_MARKOV_DRAW_H_
#define DSPARK_CPU_SIMD_MARKOV_DRAW_H_

#include "cpu/markov_loop_loops.h"
#include "cpu/simd/segment.h"

namespace dspark::cpu::DSPARK_SIMD {

static void keep_champion(MarkovBest* best, uint64_t key, const float* z) {
  if (key <= best->key) return;
  best->key = key;
  for (int i = 0; i < kSegment; ++i) best->z[i] = z[i];
}

// The larger logit wins, then the lower id.
static void offer_greedy(MarkovBest* best, int32_t segment, const float* z, float largest) {
  const uint64_t high = ordered_f32(largest);
  if (high < best->key >> 32) return;
  int i = 0;
  while (z[i] != largest) ++i;
  const uint32_t id = static_cast<uint32_t>(segment * kSegment + i);
  keep_champion(best, high << 32 | static_cast<uint32_t>(~id), z);
}

// Key of one segment of a row whose law is what `z` holds; returns its log-mass.
static double offer(const MarkovRow& row, int32_t segment, const float* z, float largest,
                    uint32_t noise, MarkovBest* best) {
  const double log_mass = segment_log_mass(z, largest, row.temperature);
  if (largest == kMinusInf) return log_mass;
  if (row.greedy) {
    offer_greedy(best, segment, z, largest);
  } else {
    const double key = row.forced ? log_mass : log_mass + gumbel(noise);
    keep_champion(best, pack_key(key, static_cast<uint32_t>(segment)), z);
  }
  return log_mass;
}

static DrawStream stream(const MarkovStep& step, const MarkovRow& row, DrawKind kind) {
  const dspark_markov_loop_params& p = *step.params;
  const uint32_t distance = static_cast<uint32_t>(step.slot) + 1;
  return DrawStream{p.seed[row.request], p.position[row.request] + distance, distance, kind};
}

// The token of a row whose champion is known; `log_mass` [segments] of its law.
static MarkovPick conclude(const MarkovStep& step, const MarkovRow& row, const MarkovBest& best,
                           int32_t nan, const double* log_mass, int32_t segments) {
  if (best.key == 0) return MarkovPick{0, nan, true, kMinusInf, kMinusInf};
  int32_t column;
  if (row.greedy) {
    column = static_cast<int32_t>(~static_cast<uint32_t>(best.key));
  } else {
    alignas(64) float w[kSegment];
    segment_weights(best.z, segment_max(best.z), row.temperature, w);
    const uint64_t u53 = row.forced ? row.u53 : draw_u53(stream(step, row, kDraftInner));
    // The largest weight of a segment is 1, so its integers never all vanish.
    column = static_cast<int32_t>(packed_segment(best.key)) * kSegment + inner_pick(w, u53);
  }
  const double lse = log_sum(log_mass, segments);
  return MarkovPick{column, nan, false, best.z[column % kSegment], static_cast<float>(lse)};
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_MARKOV_DRAW_H_
