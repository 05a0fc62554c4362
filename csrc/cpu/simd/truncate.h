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
  const float* z;     // [n] logits without NaN and +inf
  int32_t n;          //
  float largest;      // max z
  float temperature;  // of the masses
};

static inline uint64_t mass(const CutRow& row, float z) {
  const float w = exp_f32((z - row.largest) / row.temperature);
  return static_cast<uint64_t>(static_cast<double>(w) * 1099511627776.0);
}

// One counting pass: bins of the `bits` key bits above `shift`, over the kept ids whose higher key
// bits equal `prefix`.
static void count_pass(const CutRow& row, const Cut& limit, bool by_mass, int shift, int bits,
                       uint32_t prefix, uint64_t* bins) {
  const uint32_t mask = (1u << bits) - 1u;
  for (uint32_t b = 0; b <= mask; ++b) bins[b] = 0;
  for (int32_t i = 0; i < row.n; ++i) {
    const uint32_t key = ordered_f32(row.z[i]);
    const bool match = static_cast<uint64_t>(key) >> (shift + bits) == prefix;
    if (!match || !kept(limit, key, i)) continue;
    bins[key >> shift & mask] += by_mass ? mass(row, row.z[i]) : 1;
  }
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
  for (int32_t i = 0; i < row.n && static_cast<double>(before) < target; ++i) {
    if (ordered_f32(row.z[i]) != prefix || !kept(limit, prefix, i)) continue;
    cut.last = i;
    before += by_mass ? mass(row, row.z[i]) : 1;
  }
  return cut;
}

/// top-k (k <= 0: off), then top-p on the mass that is left (p >= 1: off).
static Cut truncate(const CutRow& row, int32_t top_k, float top_p, uint64_t* bins) {
  Cut cut = keep_all();
  if (top_k > 0) cut = find_cut(row, cut, false, top_k, bins);
  if (top_p < 1.0f) cut = find_cut(row, cut, true, static_cast<double>(top_p), bins);
  return cut;
}

}  // namespace dspark::cpu::DSPARK_SIMD

#endif  // DSPARK_CPU_SIMD_TRUNCATE_H_
