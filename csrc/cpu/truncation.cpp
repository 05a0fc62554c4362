// SPDX-License-Identifier: Apache-2.0
//
// min-p, top-k and top-p keep a prefix of the total order (logit descending, id ascending), so a
// truncation is its last member. Only ids that can matter are looked at: segment maxima bound the
// top-k, and mass per logit interval (integers, hence independent of any order) finds the interval
// in which top-p crosses; only that interval is sorted.
#include <algorithm>

#include "cpu/rejection_sampler.h"

namespace dspark::cpu {
namespace {

constexpr float kNegInf = -__builtin_inff();
class Finder {
 public:
  Finder(const RejectionLoops& loops, const RowView& row, int32_t segments, float top, double mass)
      : loops_(loops), row_(row), segments_(segments), top_(top), mass_(mass) {}

  Cut find() {
    const RowLaw& law = row_.law;
    float low = law.min_p > 0.0f ? smallest_kept(top_, law.temperature, law.min_p)
                                 : -largest_finite(DSPARK_F32);
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
  uint64_t mass_of(uint64_t key) const {
    const float scale = weight_scale(row_.law.temperature);
    return grid_mass(cut_at(key).z, top_, scale, mass_grid(row_.law.vocab));
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
          row_.scratch.order[n++] = rank_key(z[i], s * kSegment + i);
        }
      }
    }
    return n;
  }

  // Index of the last of n sorted keys that top-p keeps: its predecessors hold less than top_p.
  size_t nucleus_of(size_t n) const {
    const uint64_t* keys = row_.scratch.order;
    uint64_t total = 0;
    for (size_t i = 0; i < n; ++i) total += mass_of(keys[i]);
    const double limit = static_cast<double>(row_.law.top_p) * static_cast<double>(total);
    uint64_t through = 0;
    size_t i = 0;
    for (; i + 1 < n; ++i) {
      through += mass_of(keys[i]);
      if (!(static_cast<double>(through) < limit)) break;
    }
    return i;
  }

  // Top-p alone: the interval of logits where the mass crosses, near the top first.
  Cut nucleus_of_all() const {
    const double limit = static_cast<double>(row_.law.top_p) * mass_ * mass_grid(row_.law.vocab);
    for (double nats : {10.0, 40.0}) {
      const float scale =
          static_cast<float>(kBuckets / (nats * static_cast<double>(row_.law.temperature)));
      const RowScratch& t = row_.scratch;
      std::fill(t.histogram, t.histogram + kBuckets, uint64_t{0});
      loops_.histogram(row_, top_, scale, 0, segments_);
      uint64_t before = 0;
      for (int32_t b = 0; b < kBuckets; ++b) {
        const uint64_t after = before + t.histogram[b];
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
        if (in) keys[n++] = rank_key(z[i], s * kSegment + i);
      }
    }
    std::sort(keys, keys + n);
    size_t i = 0;
    for (; i + 1 < n; ++i) {
      before += mass_of(keys[i]);
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
