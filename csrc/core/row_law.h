// SPDX-License-Identifier: Apache-2.0
//
// The law of one row of target logits as every backend of the rejection sampler sees it, and the
// arithmetic that fixes its bits.
//
// A segment of 128 ids leaves its largest logit m and the halving sum of its weights
// exp((z - m) / T). All the rest of a row works on these two numbers per segment. Sums over
// segments, and the masses that top-p compares, are exact: they do not depend on how a row was
// divided over SIMD lanes, threads, blocks or ranks.
#ifndef DSPARK_CORE_ROW_LAW_H_
#define DSPARK_CORE_ROW_LAW_H_

#include <stdint.h>

#include "core/dtype.h"
#include "core/macros.h"
#include "core/math.h"
#include "core/sampler.h"

namespace dspark {

/// Segments of a row of `vocab` ids, the last one perhaps cut short.
DSPARK_HD int32_t segments_of(int32_t vocab) { return (vocab + kSegment - 1) / kSegment; }

/// Penalties of one row, and the tokens they count.
struct Penalties {
  float repetition;        // 1 = off
  float presence;          // 0 = off
  float frequency;         // 0 = off
  const int32_t* counts;   // [V] or null
  const uint32_t* prompt;  // [ceil(V / 32)] bit 1 = in the prompt, or null
  const int32_t* drafts;   // [num_drafts] drafts of this round before the row
  int32_t num_drafts;
  int32_t anchor;  // -1 = not counted
};

/// What decides the law of one row. Equal fields mean an equal law, whichever request asks.
struct RowLaw {
  const void* logits;    // [V]
  const uint32_t* mask;  // [ceil(V / 32)] bit 1 = allowed, or null
  const float* bias;     // [V] or null
  const int32_t* stops;  // [num_stops] ids that min-tokens forbids
  int32_t num_stops;
  Penalties penalties;
  int32_t dtype;
  int32_t vocab;
  float temperature;  // of the weights: T, or 1 on greedy rows
  float min_p;        // 0 = off
  float top_p;        // 1 = off
  int32_t top_k;      // <= 0 off
};

DSPARK_HD bool truncated(const RowLaw& law) {
  return law.min_p > 0.0f || law.top_p < 1.0f || law.top_k > 0;
}
DSPARK_HD bool penalised(const Penalties& p) {
  return p.repetition != 1.0f || p.presence != 0.0f || p.frequency != 0.0f;
}
DSPARK_HD bool processed(const RowLaw& law) {
  return law.mask != nullptr || law.bias != nullptr || law.num_stops > 0 ||
         penalised(law.penalties);
}
/// The log-probability of the unprocessed row needs sums of its own.
DSPARK_HD bool raw_differs(const RowLaw& law) { return processed(law) || law.temperature != 1.0f; }

/// The ids that keep their mass: a prefix of the order (logit descending, id ascending), given by
/// its last member.
struct Cut {
  float z;
  int32_t id;
};
DSPARK_HD Cut no_cut() { return Cut{-__builtin_inff(), INT32_MAX}; }
DSPARK_HD bool inside(const Cut& cut, float z, int32_t id) {
  return z > cut.z || (z == cut.z && id <= cut.id);
}

/// The law of one draft slot: log q(v) = z / T - lse on the columns of the draft vocabulary.
struct DraftRow {
  const void* logits;      // [V_d]
  const int32_t* targets;  // [V_d] strictly increasing target ids, or null when V_d = V
  int32_t dtype;
  int32_t vocab;       // V_d
  double temperature;  // T of the draft
  double lse;
};

/// x without NaN and +inf, as every logit counts.
DSPARK_HD float clean_logit(float x, float largest) {
  const float number = x != x ? -__builtin_inff() : x;
  return number > largest ? largest : number;
}

/// A logit behind the penalties: `count` times in the output, or in the prompt only.
DSPARK_HD float penalise_logit(const Penalties& p, float x, int32_t count, bool prompt) {
  const float divided = x / p.repetition;
  const float multiplied = x * p.repetition;
  const float repeated = x > 0.0f ? divided : multiplied;
  const float once = count > 0 || prompt ? repeated : x;
  const float less = once - p.frequency * static_cast<float>(count) - p.presence;
  return count > 0 ? less : once;
}

/// What z - m is multiplied by to be an exponent of 2.
DSPARK_HD float weight_scale(float temperature) { return 1.44269504f / temperature; }

/// exp((z - m) / T) for z <= m, m finite; scale = weight_scale(T). -inf gives 0.
DSPARK_HD float weight_of(float z, float m, float scale) {
  const float x = (z - m) * scale;
  return x < kSmallestExponent ? 0.0f : exp2_weight(x);
}

/// A sum of numbers in [0, 128] that is the same whatever their order and grouping: each is cut to
/// multiples of 2^-57 in two parts, and up to 2^19 of them add without rounding.
struct ExactSum {
  double high;
  double low;
};
DSPARK_HD void add_exactly(double x, double* high, double* low) {
  const double kHigh = 805306368.0;  // 1.5 * 2^29: adding it rounds to multiples of 2^-23
  const double kLow = 0.046875;      // 1.5 * 2^-5: multiples of 2^-57
  const double h = (x + kHigh) - kHigh;
  *high += h;
  *low += ((x - h) + kLow) - kLow;
}

/// Mass of a segment relative to the largest logit of the row: below 2^7.
DSPARK_HD double relative_mass(float sum, float m, float top, double temperature) {
  const double x = (static_cast<double>(m) - static_cast<double>(top)) / temperature;
  return static_cast<double>(sum) * exp_f64_nonpositive(x);
}

/// log of a mass; -inf of none.
DSPARK_HD double log_mass_of(double mass) { return mass == 0.0 ? -__builtin_inf() : log_f64(mass); }

/// Smallest logit that min-p keeps: the smallest float with (z - top) / T >= log(min_p).
DSPARK_HD float smallest_kept(float top, float temperature, float min_p) {
  const float smallest = -largest_finite(DSPARK_F32);
  const double t = static_cast<double>(temperature);
  const double bound = log_f64(static_cast<double>(min_p));
  const double exact = static_cast<double>(top) + t * bound;
  if (!(exact > static_cast<double>(smallest))) return smallest;
  // A rounding or two away from the answer; ordered integers step from float to float.
  uint32_t key = ordered_f32(static_cast<float>(exact));
  const auto keeps = [&](uint32_t k) {
    const double z = static_cast<double>(from_ordered_f32(k));
    return (z - static_cast<double>(top)) / t >= bound;
  };
  while (!keeps(key)) ++key;
  while (key > ordered_f32(smallest) && keeps(key - 1)) --key;
  return from_ordered_f32(key);
}

/// Grid of the masses that top-p compares: a row of 2^26 ids stays below 2^63.
DSPARK_HD double mass_grid(int32_t vocab) {
  return vocab <= 1 << 23 ? 1099511627776.0 : 68719476736.0;  // 2^40, 2^36
}
/// Mass of an id for top-p: whole steps of the grid, relative to the largest logit.
DSPARK_HD uint64_t grid_mass(float z, float top, float scale, double grid) {
  return static_cast<uint64_t>(static_cast<double>(weight_of(z, top, scale)) * grid);
}

/// A sortable pair: ascending keys are descending logits, then ascending ids.
DSPARK_HD uint64_t rank_key(float z, int32_t id) {
  return static_cast<uint64_t>(~ordered_f32(z)) << 32 | static_cast<uint32_t>(id);
}
DSPARK_HD Cut cut_at(uint64_t key) {
  return Cut{from_ordered_f32(~static_cast<uint32_t>(key >> 32)),
             static_cast<int32_t>(key & 0xffffffffu)};
}

}  // namespace dspark

#endif  // DSPARK_CORE_ROW_LAW_H_
