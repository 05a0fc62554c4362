// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler reads of a request, and the lengths that need no order among candidates:
// floors, and the rules threshold, fixed and off. Thread t has requests t, t + 512, ...: a
// request's status and length have one writer.
#ifndef DSPARK_CUDA_PREFIX_SCHEDULER_REQUESTS_CUH_
#define DSPARK_CUDA_PREFIX_SCHEDULER_REQUESTS_CUH_

#include "core/schedule.h"
#include "cuda/prefix_scheduler/block.cuh"

namespace dspark::cuda::schedule {

using Params = dspark_prefix_scheduler_params;

__device__ __forceinline__ bool is_active(const Params& p, int32_t r) {
  return p.active == nullptr || p.active[r] != 0;
}

/// Call `body(r)` for each request of this thread.
template <class Body>
__device__ __forceinline__ void for_requests(const Params& p, const Body& body) {
  for (int32_t r = static_cast<int32_t>(threadIdx.x); r < p.num_requests; r += kThreads) body(r);
}

/// Set a status bit on every active request.
__device__ __forceinline__ void flag_active(const Params& p, int32_t bit) {
  for_requests(p, [&](int32_t r) {
    if (is_active(p, r)) p.status[r] |= bit;
  });
}

/// Call `body(j, least)` for each draft of a request, `least` the running minimum of its clean
/// survivals. What the values say of NaN goes to `status`.
template <class Body>
__device__ __forceinline__ void for_survivals(const Params& p, const float* row, int32_t* status,
                                              const Body& body) {
  float least = 1.0f;
  for (int32_t j = 0; j < p.gamma; ++j) {
    const float a = clean_probability(row[j], status);
    least = a < least ? a : least;
    body(j, least);
  }
}

/// Zero lengths and first status words; the number of active requests. Ends with a barrier.
__device__ __forceinline__ int32_t read_requests(const Params& p, BlockScratch& scratch) {
  int32_t active = 0;
  for_requests(p, [&](int32_t r) {
    int32_t status = 0;
    if (is_active(p, r)) {
      request_limits(p, r, &status);
      ++active;
    }
    p.status[r] = status;
    p.length[r] = 0;
  });
  return block_sum(active, scratch);
}

__device__ __forceinline__ StepCost read_cost(const Params& p, BlockScratch& scratch) {
  StepCost cost = {p.cost_ms, p.cost_size, p.draft_ms, 0.0};
  if (p.kv_len == nullptr) return cost;
  int64_t total = 0;
  for_requests(p, [&](int32_t r) {
    if (!is_active(p, r)) return;
    if (p.kv_len[r] < 0) {
      p.status[r] |= DSPARK_BAD_PARAM;
    } else {
      total += p.kv_len[r];
    }
  });
  cost.kv_ms = p.ms_per_kv_token * static_cast<double>(block_sum(total, scratch));
  return cost;
}

/// Whether `batch` is priced; a bad price inside the table is everybody's trouble. Whole block.
__device__ __forceinline__ bool priced(const Params& p, const StepCost& cost, int64_t batch) {
  if (has_price(cost, batch)) return true;
  if (batch > 0 && batch < cost.size) flag_active(p, DSPARK_BAD_PARAM);
  return false;
}

__device__ __forceinline__ int64_t admitted(const Params& p, BlockScratch& scratch) {
  int64_t total = 0;
  for_requests(p, [&](int32_t r) { total += p.length[r]; });
  return block_sum(total, scratch);
}

/// sum w_r (1 + sum over the admitted drafts of a), on the grid; the order does not matter.
__device__ __forceinline__ uint64_t expected_tokens(const Params& p, const float* survival,
                                                    int64_t stride, BlockScratch& scratch) {
  uint64_t tau = 0;
  for_requests(p, [&](int32_t r) {
    if (!is_active(p, r)) return;
    int32_t status = 0;
    const float weight = request_limits(p, r, &status).weight;
    const int32_t length = p.length[r];
    tau += to_grid(weight);
    for_survivals(p, survival + r * stride, &status, [&](int32_t j, float least) {
      if (j < length) tau += to_grid(weight * least);
    });
  });
  return block_sum(tau, scratch);
}

/// Raise length[r] towards goal(r), position-major, until `room` drafts more are admitted; what is
/// left of the room. No barrier behind it: before the sort, a length is read by its writer alone.
template <class Goal>
__device__ __forceinline__ int64_t raise_lengths(const Params& p, const Goal& goal, int64_t room,
                                                 BlockScratch& scratch) {
  int64_t wanted = 0;
  for_requests(p, [&](int32_t r) {
    const int32_t more = goal(r) - p.length[r];
    if (more > 0) wanted += more;
  });
  wanted = block_sum(wanted, scratch);
  if (wanted <= room) {
    for_requests(p, [&](int32_t r) {
      const int32_t end = goal(r);
      if (end > p.length[r]) p.length[r] = end;
    });
    return room - wanted;
  }
  const int32_t tiles = (p.num_requests + kThreads - 1) / kThreads;
#pragma unroll 1
  for (int32_t j = 0; j < p.gamma; ++j) {
#pragma unroll 1
    for (int32_t tile = 0; tile < tiles && room > 0; ++tile) {
      const int32_t r = tile * kThreads + static_cast<int32_t>(threadIdx.x);
      const bool next = r < p.num_requests && p.length[r] == j && goal(r) > j;
      int32_t total;
      const int32_t before = exclusive_sum(next ? 1 : 0, scratch, &total);
      if (next && before < room) p.length[r] = j + 1;
      room -= total < room ? total : room;
    }
  }
  return room;
}

/// The floor of a request, cut to its cap.
__device__ __forceinline__ int32_t floor_of(const Params& p, int32_t r) {
  int32_t status = 0;
  return is_active(p, r) ? request_limits(p, r, &status).floor : 0;
}

/// The length that threshold, fixed or off asks for; says what is wrong with c.
__device__ __forceinline__ int32_t rule_length(const Params& p, int32_t r, int32_t* status) {
  if (!is_active(p, r)) return 0;
  int32_t ignored = 0;
  const int32_t cap = request_limits(p, r, &ignored).cap;
  int32_t wanted = p.mode == DSPARK_SCHEDULE_FIXED ? p.fixed_len : p.gamma;
  if (p.mode == DSPARK_SCHEDULE_THRESHOLD) {
    const float* c = p.conditional + r * p.conditional_stride;
    for (int32_t j = p.gamma - 1; j >= 0; --j) {
      if (clean_probability(c[j], status) < p.threshold) wanted = j;
    }
  }
  return wanted < cap ? wanted : cap;
}

}  // namespace dspark::cuda::schedule

#endif  // DSPARK_CUDA_PREFIX_SCHEDULER_REQUESTS_CUH_
