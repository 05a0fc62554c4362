// SPDX-License-Identifier: Apache-2.0
//
// Candidates in the order of the contract: key descending, then position, then request ascending.
//
// An item is (order << 32 | position * R + request), order = the bits of the largest key minus the
// bits of this one. Items are written position-major, so that a stable sort of the upper half
// settles all ties. What is no candidate sorts behind everything.
//
// tau of every prefix is a sum of integers, so its bits depend on no thread count, and Theta of
// every prefix is one sequence of float64 operations on them: all prefixes are priced at once, and
// what the sequential algorithm would do at its first stop is a minimum over indices.
#ifndef DSPARK_CUDA_PREFIX_SCHEDULER_CANDIDATES_CUH_
#define DSPARK_CUDA_PREFIX_SCHEDULER_CANDIDATES_CUH_

#include "cuda/prefix_scheduler/requests.cuh"

namespace dspark::cuda::schedule {

constexpr uint32_t kNoCandidate = 0xffffffffu;
constexpr int32_t kNever = 0x7fffffff;

struct Candidates {
  uint64_t* items;  // [gamma, R], sorted
  int32_t count;    // candidates at their front
};

__device__ __forceinline__ uint32_t order_of(float key) {
  return bits_f32(DSPARK_MAX_WEIGHT) - bits_f32(key);
}
__device__ __forceinline__ float key_of(uint64_t item) {
  return float_from_bits(bits_f32(DSPARK_MAX_WEIGHT) - static_cast<uint32_t>(item >> 32));
}

/// Sort the candidates behind the lengths that are admitted already. Ends with a barrier.
__device__ __forceinline__ Candidates sort_candidates(const Params& p, const float* survival,
                                                      int64_t stride, uint64_t* items,
                                                      uint64_t* other, BlockScratch& scratch) {
  int32_t count = 0;
  for_requests(p, [&](int32_t r) {
    const bool active = is_active(p, r);
    int32_t status = 0;
    const RequestLimits limits = request_limits(p, r, &status);
    const int32_t from = p.length[r];
    status = 0;
    const auto put = [&](int32_t j, uint32_t order) {
      const uint32_t place = static_cast<uint32_t>(j) * static_cast<uint32_t>(p.num_requests) +
                             static_cast<uint32_t>(r);
      items[place] = static_cast<uint64_t>(order) << 32 | place;
    };
    if (!active) {
      for (int32_t j = 0; j < p.gamma; ++j) put(j, kNoCandidate);
      return;
    }
    for_survivals(p, survival + r * stride, &status, [&](int32_t j, float least) {
      const bool candidate = j >= from && j < limits.cap && least > 0.0f;
      put(j, candidate ? order_of(limits.weight * least) : kNoCandidate);
      count += candidate ? 1 : 0;
    });
    p.status[r] |= status;
  });
  Candidates c{items, block_sum(count, scratch)};
  sort_items(items, other, p.num_requests * p.gamma, scratch);
  return c;
}

/// The first `n` candidates become admitted. Ends with a barrier.
__device__ __forceinline__ void admit(const Params& p, const Candidates& c, int64_t n) {
  const int32_t end = static_cast<int32_t>(n < c.count ? n : c.count);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    const uint32_t place = static_cast<uint32_t>(c.items[i]);
    const uint32_t requests = static_cast<uint32_t>(p.num_requests);
    atomicMax(p.length + place % requests, static_cast<int32_t>(place / requests) + 1);
  }
  __syncthreads();
}

/// What a walk through the prefixes in order would meet.
struct Walk {
  int32_t unpriced;  // first index whose batch has no price, kNever
  int32_t falls;     // first index at which Theta does not rise, kNever
  Best best;         // largest Theta before `unpriced`, lowest index
};

/// Price the prefixes that admit 1 .. n candidates behind `tau` and `batch`. Whole block.
__device__ __forceinline__ Walk walk(const StepCost& cost, const Candidates& c, int32_t n,
                                     uint64_t tau, int64_t batch, BlockScratch& scratch) {
  const int32_t each = (n + kThreads - 1) / kThreads;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * each;
  const int32_t end = first + each < n ? first + each : n;
  uint64_t sum = 0, total;
  for (int32_t i = first; i < end; ++i) sum += to_grid(key_of(c.items[i]));
  uint64_t prefix = tau + exclusive_sum(sum, scratch, &total);
  Walk w{kNever, kNever, Best{-1.0, kNever}};
  double before = 0.0;
  if (first < end && has_price(cost, batch + first)) {
    before = theta_of(cost, prefix, batch + first);
  }
  for (int32_t i = first; i < end; ++i) {
    prefix += to_grid(key_of(c.items[i]));
    if (!has_price(cost, batch + i + 1)) {
      w.unpriced = i;
      break;
    }
    const double theta = theta_of(cost, prefix, batch + i + 1);
    if (!(theta > before) && w.falls == kNever) w.falls = i;
    const Best here{theta, i};
    if (better(here, w.best)) w.best = here;
    before = theta;
  }
  w.unpriced = block_min(w.unpriced, scratch);
  w.falls = block_min(w.falls, scratch);
  // A thread behind the first batch without a price has nothing to say.
  if (first > w.unpriced) w.best = Best{-1.0, kNever};
  w.best = block_best(w.best, scratch);
  return w;
}

__device__ __forceinline__ int32_t within(const Candidates& c, int64_t room) {
  return static_cast<int32_t>(room < c.count ? room : c.count);
}

/// How many of the candidates to admit beyond the floors, at most `room`. With `causal` what
/// Algorithm 1 admits: up to the first Theta that does not rise. Otherwise the best Theta of all,
/// the fewest on ties: for lagged survivals only. Whole block.
__device__ __forceinline__ int64_t best_prefix(const Params& p, const StepCost& cost,
                                               const Candidates& c, uint64_t tau, int64_t batch,
                                               int64_t room, bool causal, BlockScratch& scratch) {
  const int32_t n = within(c, room);
  const Walk w = walk(cost, c, n, tau, batch, scratch);
  const bool meets_end = w.unpriced != kNever && (!causal || w.unpriced <= w.falls);
  if (meets_end) priced(p, cost, batch + w.unpriced + 1);  // says so where it must
  if (!causal) return w.best.value > theta_of(cost, tau, batch) ? w.best.index + INT64_C(1) : 0;
  const int32_t stop = w.falls < w.unpriced ? w.falls : w.unpriced;
  return stop < n ? stop : n;
}

}  // namespace dspark::cuda::schedule

#endif  // DSPARK_CUDA_PREFIX_SCHEDULER_CANDIDATES_CUH_
