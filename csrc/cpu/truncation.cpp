// SPDX-License-Identifier: Apache-2.0
//
// min-p, top-k and top-p keep a prefix of the total order (logit descending, id ascending), so a
// truncation is its last member. Only ids that can matter are looked at: segment maxima bound the
// top-k, and mass per logit interval (integers, hence independent of any order) finds the interval
// in which top-p crosses; only that interval is sorted.
#include <algorithm>

#include "core/dtype.h"
#include "core/math.h"
#include "cpu/rejection_sampler.h"

namespace dspark::cpu {
namespace {

constexpr float kNegInf = -__builtin_inff();
constexpr double kGrid = 1099511627776.0;  // 2^40: a row of 2^23 ids stays below 2^63

// Ascending keys = descending logits, then ascending ids. -0 equals +0.
uint64_t order_key(float z, int32_t id) {
  const uint32_t u = bits_f32(z + 0.0f);
  const uint32_t ascending = u >> 31 != 0 ? ~u : u | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}
Cut cut_at(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  const uint32_t u = ascending >> 31 != 0 ? ascending & 0x7fffffffu : ~ascending;
  return Cut{float_from_bits(u), static_cast<int32_t>(key & 0xffffffffu)};
}

class Finder {
 public:
  Finder(const RejectionLoops& loops, const RowView& row, int32_t segments, float top, double mass)
      : loops_(loops), row_(row), segments_(segments), top_(top), mass_(mass) {}

  Cut find() {
    const RowLaw& law = row_.law;
    float low = law.min_p > 0.0f ? smallest_kept() : -largest_finite(DSPARK_F32);
    if (law.top_k <= 0 && law.top_p >= 1.0f) return Cut{low, INT32_MAX};
    if (law.top_k <= 0 && law.min_p <= 0.0f) return nucleus_of_all();
    if (law.top_k > 0) low = std::max(low, top_k_bound());
    uint64_t* keys = row_.scratch.order;
    size_t n = collect(low, top_);
    const size_t k = static_cast<size_t>(law.top_k);
    if (law.top_k > 0 && k < n) {
      std::nth_element(keys, keys + (k - 1), keys + n);
      n = k;
    }
    if (law.top_p >= 1.0f) return cut_at(*std::max_element(keys, keys + n));
    std::sort(keys, keys + n);
    return cut_at(keys[nucleus_of(n)]);
  }

 private:
  double weight(float z) const {
    const double x = static_cast<double>(z) - static_cast<double>(top_);
    return exp_f64(x / static_cast<double>(row_.law.temperature));
  }

  // Smallest float whose weight reaches min_p: the weight is monotone in z, so halving the ordered
  // integers finds it in 32 steps.
  float smallest_kept() const {
    const double wanted = static_cast<double>(row_.law.min_p);
    uint64_t good = order_key(top_, 0) >> 32;  // keys descend in z: good <= answer < none
    uint64_t none = order_key(kNegInf, 0) >> 32;
    while (none - good > 1) {
      const uint64_t middle = good + (none - good) / 2;
      if (weight(cut_at(middle << 32).z) >= wanted) {
        good = middle;
      } else {
        none = middle;
      }
    }
    return cut_at(good << 32).z;
  }

  // At least k ids reach the k-th largest segment maximum.
  float top_k_bound() const {
    const int32_t k = row_.law.top_k;
    if (k > segments_) return -largest_finite(DSPARK_F32);
    float* copy = row_.scratch.residual;
    std::copy(row_.scratch.max, row_.scratch.max + segments_, copy);
    std::nth_element(copy, copy + (k - 1), copy + segments_,
                     [](float a, float b) { return a > b; });
    return std::max(copy[k - 1], -largest_finite(DSPARK_F32));
  }

  // Keys of the ids with low <= z <= high.
  size_t collect(float low, float high) const {
    size_t n = 0;
    for (int32_t s = 0; s < segments_; ++s) {
      if (row_.scratch.max[s] < low) continue;
      const float* z = row_.scratch.z + static_cast<int64_t>(s) * kSegment;
      for (int32_t i = 0; i < kSegment; ++i) {
        if (z[i] >= low && z[i] <= high) {
          row_.scratch.order[n++] = order_key(z[i], s * kSegment + i);
        }
      }
    }
    return n;
  }

  // Index of the last of n sorted keys that top-p keeps: its predecessors hold less than top_p.
  size_t nucleus_of(size_t n) const {
    const uint64_t* keys = row_.scratch.order;
    double total = 0.0;
    for (size_t i = 0; i < n; ++i) total += weight(cut_at(keys[i]).z);
    const double limit = static_cast<double>(row_.law.top_p) * total;
    double before = 0.0;
    size_t i = 0;
    for (; i + 1 < n; ++i) {
      before += weight(cut_at(keys[i]).z);
      if (!(before < limit)) break;
    }
    return i;
  }

  // Top-p alone: the interval of logits where the mass crosses, near the top first.
  Cut nucleus_of_all() const {
    const double limit = static_cast<double>(row_.law.top_p) * mass_ * kGrid;
    for (double nats : {10.0, 40.0}) {
      const float scale =
          static_cast<float>(kBuckets / (nats * static_cast<double>(row_.law.temperature)));
      const RowScratch& t = row_.scratch;
      std::fill(t.histogram_mass, t.histogram_mass + kBuckets, uint64_t{0});
      std::fill(t.histogram_count, t.histogram_count + kBuckets, 0u);
      loops_.histogram(row_, top_, scale, 0, segments_);
      uint64_t before = 0;
      for (int32_t b = 0; b < kBuckets; ++b) {
        const uint64_t after = before + t.histogram_mass[b];
        if (static_cast<double>(after) >= limit) return cross(scale, b, before, limit);
        before = after;
      }
    }
    return cross(0.0f, 0, 0, limit);
  }

  // Sorts bucket b (scale 0: every id) and walks it from `before` to the limit.
  Cut cross(float scale, int32_t bucket, uint64_t before, double limit) const {
    uint64_t* keys = row_.scratch.order;
    size_t n = 0;
    for (int32_t s = 0; s < segments_; ++s) {
      const float* z = row_.scratch.z + static_cast<int64_t>(s) * kSegment;
      if (!((top_ - row_.scratch.max[s]) * scale < static_cast<float>(bucket + 1))) continue;
      for (int32_t i = 0; i < kSegment; ++i) {
        const float at = (top_ - z[i]) * scale;
        const bool in = z[i] > kNegInf && at >= static_cast<float>(bucket) &&
                        at < static_cast<float>(bucket + 1);
        if (in) keys[n++] = order_key(z[i], s * kSegment + i);
      }
    }
    std::sort(keys, keys + n);
    const float inverse = 1.0f / row_.law.temperature;
    size_t i = 0;
    for (; i + 1 < n; ++i) {
      const float w = exp_f32((cut_at(keys[i]).z - top_) * inverse);
      before += static_cast<uint64_t>(static_cast<double>(w) * kGrid);
      if (!(static_cast<double>(before) < limit)) break;
    }
    return cut_at(keys[i]);
  }

  const RejectionLoops& loops_;
  const RowView& row_;
  int32_t segments_;
  float top_;
  double mass_;
};

}  // namespace

Cut find_cut(const RejectionLoops& loops, const RowView& row, int32_t segments, float top,
             double mass) {
  return Finder(loops, row, segments, top, mass).find();
}

}  // namespace dspark::cpu
