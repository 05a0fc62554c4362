// SPDX-License-Identifier: Apache-2.0
//
// Candidates of the prefix scheduler in their total order. They are written position-major, so a
// stable sort by key leaves ties in order. What is sorted is the distance of a key's bits from the
// largest key's: the logarithm of a ratio, roughly. 2048 buckets of it, 128 for a factor of two,
// hold a few candidates each, and insertion does the rest; where one of them is crowded, a radix
// sort of eight bits a pass takes over. A merge of the requests' rows through a heap touches fewer
// candidates, and loses from a few dozen admissions on to its mispredicted comparisons.
#ifndef DSPARK_CPU_CANDIDATES_H_
#define DSPARK_CPU_CANDIDATES_H_

#include "core/schedule.h"

namespace dspark::cpu {

class Candidates {
 public:
  /// `room` holds 2 * num_requests * gamma entries; `key` [R, gamma] is float32(w a), not rising in
  /// a row. Request r takes part with its 0-based positions floor[r] .. reach[r] - 1. With `set`
  /// > 0 the first `set` candidates come as a set: those of one request in order, others in any.
  Candidates(uint64_t* room, const float* key, int gamma, const int32_t* floor,
             const int32_t* reach, int64_t num_requests, int64_t set = 0) {
    for (int64_t r = 0; r < num_requests; ++r) {
      const uint32_t first = bits_f32(key[r * gamma]);  // of its row the largest
      top_ = first > top_ ? first : top_;
    }
    uint64_t* end = room;
    for (int j = 0; j < gamma; ++j) {
      for (int64_t r = 0; r < num_requests; ++r) {
        *end = pack(key[r * gamma + j], j, r);
        end += static_cast<uint32_t>(floor[r] <= j) & static_cast<uint32_t>(j < reach[r]);
      }
    }
    at_ = room;
    end_ = end;
    const int64_t count = end - room;
    if (count <= kFew) {
      insert_all(room, end);
    } else if (!spread(room, count, room + num_requests * gamma, set)) {
      radix_sort(room, count, room + num_requests * gamma);
    }
  }

  bool empty() const { return at_ == end_; }
  float key() const { return float_from_bits(top_ - static_cast<uint32_t>(*at_ >> 32)); }
  int position() const { return static_cast<int>(*at_ >> kRequestBits & 15u); }
  int64_t request() const {
    return static_cast<int64_t>(*at_ & ((UINT64_C(1) << kRequestBits) - 1));
  }

  /// Go on to the next candidate in the order.
  void pop() { ++at_; }

 private:
  static constexpr int kRequestBits = 28;
  static constexpr int kFew = 24;
  static constexpr uint32_t kBuckets = 2048;
  static constexpr int kBucketShift = 16;  // of a distance: 2^23 is a factor of two
  static constexpr uint32_t kCrowded = 64;
  static constexpr int kPasses = 4;
  static constexpr int kDigitBits = 8;
  static constexpr int kDigits = 1 << kDigitBits;

  // Ascending integers are the order. Keys are not negative: their bits order like their values,
  // and the largest possible one, DSPARK_MAX_WEIGHT, is below 2^31.
  uint64_t pack(float key, int position, int64_t request) const {
    return static_cast<uint64_t>(top_ - bits_f32(key)) << 32 |
           static_cast<uint64_t>(position) << kRequestBits | static_cast<uint64_t>(request);
  }

  static int digit(uint64_t candidate, int pass) {
    return static_cast<int>(candidate >> (32 + kDigitBits * pass) & (kDigits - 1));
  }

  static void insert_all(uint64_t* from, const uint64_t* end) {
    for (uint64_t* i = from + 1; i < end; ++i) {
      const uint64_t x = *i;
      uint64_t* hole = i;
      for (; hole > from && hole[-1] > x; --hole) *hole = hole[-1];
      *hole = x;
    }
  }

  static uint32_t bucket(uint64_t candidate) {
    const uint32_t b = static_cast<uint32_t>(candidate >> (32 + kBucketShift));
    return b < kBuckets ? b : kBuckets - 1;
  }

  // False, and nothing done, when a bucket is too full for insertion.
  bool spread(const uint64_t* from, int64_t count, uint64_t* to, int64_t set) {
    uint32_t ends[kBuckets] = {};
    uint32_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t b = bucket(from[i]);
      last = b > last ? b : last;
      ++ends[b];
    }
    uint32_t first = 0, most = 0;
    for (uint32_t b = 0; b <= last; ++b) {
      const uint32_t here = ends[b];
      most = here > most ? here : most;
      ends[b] = first;
      first += here;
    }
    if (most > kCrowded) return false;
    for (int64_t i = 0; i < count; ++i) to[ends[bucket(from[i])]++] = from[i];
    if (set > 0 && set < count) {  // only the bucket that the set ends in needs its order
      const uint32_t b = bucket(to[set - 1]);
      insert_all(to + (b > 0 ? ends[b - 1] : 0), to + ends[b]);
    } else if (set == 0) {
      insert_all(to, to + count);
    }
    at_ = to;
    end_ = to + count;
    return true;
  }

  void radix_sort(uint64_t* from, int64_t count, uint64_t* to) {
    uint32_t counts[kPasses][kDigits] = {};
    for (int64_t i = 0; i < count; ++i) {
      for (int pass = 0; pass < kPasses; ++pass) ++counts[pass][digit(from[i], pass)];
    }
    for (int pass = 0; pass < kPasses; ++pass) {
      if (counts[pass][digit(from[0], pass)] == static_cast<uint32_t>(count)) continue;
      uint32_t first = 0;
      for (uint32_t& n : counts[pass]) {
        const uint32_t here = n;
        n = first;
        first += here;
      }
      for (int64_t i = 0; i < count; ++i) to[counts[pass][digit(from[i], pass)]++] = from[i];
      uint64_t* const sorted = to;
      to = from;
      from = sorted;
    }
    at_ = from;
    end_ = from + count;
  }

  uint32_t top_ = 0;  // bits of the largest key
  const uint64_t* at_;
  const uint64_t* end_;
};

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_CANDIDATES_H_
