// SPDX-License-Identifier: Apache-2.0
//
// top-k and top-p of one row, without sorting it. The order is total (logit descending, id
// ascending), so what is kept is everything before one place in it: a key and, among the ids with
// that key, the last one. The place is found by three counting passes over the bits of the logit.
//
// top-p weighs an id by the integer floor(exp((z - max z) / T) 2^40). Integer sums do not depend on
// their order, so every backend cuts at the same id; an id keeps its place while the mass before it
// is below p times the mass that was left by top-k.
//
// Included only by cpu/simd/*_loops.cpp.
#ifndef DSPARK_CPU_SIMD_TRUNCATE_H_
#define DSPARK_CPU_SIMD_TRUNCATE_H_

#include <stdint.h>

#include "core/math.h"
#include "core/sampler.h"
#include "cpu/truncate.h"

namespace dspark::cpu::DSPARK_SIMD {

/// What a row keeps: keys above `key`, and of the ids with exactly that key those up to `last`.
struct Cut {
  uint32_t key;
  int32_t last;
};

// -inf has the key 0x007fffff; a cut there keeps every id that has mass.
static inline Cut keep_all() { return Cut{0x007fffffu, -1}; }

static inline bool kept(const Cut& cut, uint32_t key, int32_t id) {
  return key > cut.key || (key == cut.key && id <= cut.last);
}

struct CutRow {
  const float* z;        // [segments, 128] logits without NaN and +inf, -inf past the vocabulary
  const double* maxima;  // [segments] largest logit of every segment
  int32_t segments;      //
  float largest;         // max z
  float temperature;     // of the masses
};

static inline uint64_t mass(const CutRow& row, float z) {
  const float w = exp_f32((z - row.largest) / row.temperature);
  return static_cast<uint64_t>(static_cast<double>(w) * 1099511627776.0);
}

static inline void masses(const CutRow& row, const float* z, uint64_t* m) {
  float w[kSegment];
  for (int i = 0; i < kSegment; ++i) w[i] = exp_f32((z[i] - row.largest) / row.temperature);
  for (int i = 0; i < kSegment; ++i) {
    m[i] = static_cast<uint64_t>(static_cast<double>(w[i]) * 1099511627776.0);
  }
}

// One counting pass: bins of the `bits` key bits above `shift`, over the kept ids whose higher key
// bits equal `prefix`. Segments whose largest logit is below all of these are skipped.
static void count_pass(const CutRow& row, const Cut& limit, bool by_mass, int shift, int bits,
                       uint32_t prefix, uint64_t* bins) {
  const uint32_t mask = (1u << bits) - 1u;
  for (uint32_t b = 0; b <= mask; ++b) bins[b] = 0;
  const uint64_t lowest = static_cast<uint64_t>(prefix) << (shift + bits);
  for (int32_t s = 0; s < row.segments; ++s) {
    const float top = static_cast<float>(row.maxima[s]);
    const uint32_t top_key = ordered_f32(top);
    if (top_key < lowest || top_key < limit.key || (by_mass && mass(row, top) == 0)) continue;
    const float* z = row.z + static_cast<int64_t>(s) * kSegment;
    uint64_t m[kSegment];
    if (by_mass) masses(row, z, m);
    for (int32_t i = 0; i < kSegment; ++i) {
      const uint32_t key = ordered_f32(z[i]);
      const bool match = static_cast<uint64_t>(key) >> (shift + bits) == prefix;
      if (!match || !kept(limit, key, s * kSegment + i)) continue;
      bins[key >> shift & mask] += by_mass ? m[i] : 1;
    }
  }
}

// At least k ids reach the k-th largest segment maximum: nothing below it is in the top k.
static Cut bound_of_top_k(const CutRow& row, int32_t top_k, uint64_t* bins) {
  if (top_k > row.segments) return keep_all();
  uint64_t before = 0;
  uint32_t bin = 2047;
  for (uint32_t b = 0; b <= bin; ++b) bins[b] = 0;
  for (int32_t s = 0; s < row.segments; ++s) {
    bins[ordered_f32(static_cast<float>(row.maxima[s])) >> 21] += 1;
  }
  while (before + bins[bin] < static_cast<uint64_t>(top_k)) before += bins[bin--];
  const uint32_t key = bin << 21;  // the lowest key of the bin that holds the k-th maximum
  return key > keep_all().key ? Cut{key, INT32_MAX} : keep_all();
}

// The cut that keeps ids, in order, while what is before them is below the target: `amount` ids, or
// the share `amount` of the mass. All of `limit` when the target is not reached.
static Cut find_cut(const CutRow& row, const Cut& limit, bool by_mass, double amount,
                    uint64_t* bins) {
  constexpr int kShift[] = {21, 10, 0};
  constexpr int kBits[] = {11, 11, 10};
  uint64_t before = 0;
  uint32_t prefix = 0;
  double target = amount;
  for (int level = 0; level < 3; ++level) {
    count_pass(row, limit, by_mass, kShift[level], kBits[level], prefix, bins);
    int32_t bin = (1 << kBits[level]) - 1;
    if (level == 0 && by_mass) {
      uint64_t total = 0;
      for (int32_t b = 0; b <= bin; ++b) total += bins[b];
      target = amount * static_cast<double>(total);
    }
    while (bin >= 0 && static_cast<double>(before + bins[bin]) < target) before += bins[bin--];
    if (bin < 0) return limit;
    prefix = prefix << kBits[level] | static_cast<uint32_t>(bin);
  }
  Cut cut{prefix, -1};
  for (int32_t s = 0; s < row.segments; ++s) {
    if (ordered_f32(static_cast<float>(row.maxima[s])) < prefix) continue;
    const float* z = row.z + static_cast<int64_t>(s) * kSegment;
    for (int32_t i = 0; i < kSegment; ++i) {
      const int32_t id = s * kSegment + i;
      if (ordered_f32(z[i]) != prefix || !kept(limit, prefix, id)) continue;
      if (static_cast<double>(before) >= target) return cut;
      cut.last = id;
      before += by_mass ? mass(row, z[i]) : 1;
    }
  }
  return cut;
}

/// top-k (k <= 0: off), then top-p on the mass that is left (p >= 1: off).
static Cut truncate(const CutRow& row, int32_t top_k, float top_p, uint64_t* bins) {
  Cut cut = keep_all();
  if (top_k > 0) cut = find_cut(row, bound_of_top_k(row, top_k, bins), false, top_k, bins);
  if (top_p < 1.0f) cut = find_cut(row, cut, true, static_cast<double>(top_p), bins);
  return cut;
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_TRUNCATE_H_
