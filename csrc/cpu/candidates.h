// SPDX-License-Identifier: Apache-2.0
//
// Candidates of the prefix scheduler in their total order, one at a time. Each request's row is
// sorted already (survivals do not rise), so this is a merge of R runs through a binary heap: a
// schedule that stops after n admissions costs R + n log R, and nothing is ever sorted in full.
#ifndef DSPARK_CPU_CANDIDATES_H_
#define DSPARK_CPU_CANDIDATES_H_

#include "core/schedule.h"

namespace dspark::cpu {

class Candidates {
 public:
  /// `heap` has room for R entries; `key` [R, gamma] holds float32(w a), not rising in a row.
  /// Request r takes part with its 0-based positions floor[r] .. reach[r] - 1.
  Candidates(uint64_t* heap, const float* key, int gamma, const int32_t* floor,
             const int32_t* reach, int64_t num_requests)
      : heap_(heap), key_(key), reach_(reach), gamma_(gamma) {
    for (int64_t r = 0; r < num_requests; ++r) {
      if (floor[r] < reach[r])
        heap_[size_++] = pack_candidate(key[r * gamma + floor[r]], floor[r], r);
    }
    for (int64_t i = size_ / 2 - 1; i >= 0; --i) sift_down(i, heap_[i]);
  }

  bool empty() const { return size_ == 0; }
  float key() const { return candidate_key(heap_[0]); }
  int position() const { return candidate_position(heap_[0]); }
  int64_t request() const { return candidate_request(heap_[0]); }

  /// Go on to the next candidate in the order.
  void pop() {
    const int64_t r = request();
    const int next = position() + 1;
    if (next < reach_[r]) {
      sift_down(0, pack_candidate(key_[r * gamma_ + next], next, r));
    } else if (--size_ > 0) {
      sift_down(0, heap_[size_]);
    }
  }

 private:
  void sift_down(int64_t hole, uint64_t value) {
    for (;;) {
      int64_t child = 2 * hole + 1;
      if (child >= size_) break;
      if (child + 1 < size_) child += heap_[child + 1] > heap_[child];
      if (heap_[child] <= value) break;
      heap_[hole] = heap_[child];
      hole = child;
    }
    heap_[hole] = value;
  }

  uint64_t* heap_;
  const float* key_;
  const int32_t* reach_;
  int gamma_;
  int64_t size_ = 0;
};

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_CANDIDATES_H_
