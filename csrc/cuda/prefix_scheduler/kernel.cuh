// SPDX-License-Identifier: Apache-2.0
//
// prefix_scheduler in one launch of one block (paper section 3.2.2 and 5.2).
//
// The sequential algorithm admits one candidate after the other. Here all candidates are sorted at
// once (a stable radix sort, four passes of eight bits over shared memory; requests' candidates
// are written position-major, so stability is the tie order), the expected tokens of every prefix
// come from one scan over 64-bit integers, and the stop is the smallest index at which the
// sequential algorithm would have stopped. Integers and one fixed sequence of float64 operations:
// lengths and Theta have the bits of the CPU backend.
//
// Traffic: R gamma survivals in, B rows out, under 300 KB at R gamma = 8192: nothing. The time is
// the latency of some 30 block-wide steps: predicted, not measured, 3 us at R gamma <= 1024 and 6
// to 8 us at 8192 on an H200. Above what shared memory holds the items lie in the workspace, in L2.
//
// Only `causal` lets live survivals decide how much is admitted; the full search is handed lagged
// ones. A draft's own survival never decides more than the sequential algorithm lets it, because
// prefixes behind the first stop are priced but not looked at.
#ifndef DSPARK_CUDA_PREFIX_SCHEDULER_KERNEL_CUH_
#define DSPARK_CUDA_PREFIX_SCHEDULER_KERNEL_CUH_

#include "cuda/prefix_scheduler/candidates.cuh"
#include "cuda/prefix_scheduler/layout.cuh"

namespace dspark::cuda::schedule {

/// Where the items lie: `shared` bytes of dynamic shared memory, or the workspace with 0.
struct Args {
  Params p;
  uint64_t* workspace;  // [2, R gamma], or NULL
};

__device__ __forceinline__ int64_t drafts_that_fit(const Params& p, int64_t active) {
  const bool searches = p.mode == DSPARK_SCHEDULE_TWO_PHASE && p.budget < 0;
  int64_t limit = active * (p.gamma + INT64_C(1));
  if (p.capacity >= 0 && p.capacity < limit) limit = p.capacity;
  if (limit < active) flag_active(p, DSPARK_BAD_PARAM);
  if ((searches || p.mode == DSPARK_SCHEDULE_CAUSAL) && p.cost_size - 1 < limit) {
    limit = p.cost_size - 1;
  }
  return limit > active ? limit - active : 0;
}

// Say what is wrong with the live survivals of a mode that only reports Theta from them.
__device__ __forceinline__ void inspect_survivals(const Params& p) {
  for_requests(p, [&](int32_t r) {
    if (!is_active(p, r)) return;
    int32_t status = 0;
    for_survivals(p, p.survival + r * p.survival_stride, &status, [](int32_t, float) {});
    p.status[r] |= status;
  });
}

// causal and two_phase: drafts beyond the floors, by the order of their keys.
__device__ __forceinline__ void admit_by_key(const Args& args, uint64_t* items,
                                             const StepCost& cost, int64_t batch, int64_t room,
                                             int64_t budget, BlockScratch& scratch) {
  const Params& p = args.p;
  uint64_t* other = items + p.num_requests * p.gamma;
  const bool causal = p.mode == DSPARK_SCHEDULE_CAUSAL;
#pragma unroll 1
  for (bool live = causal || p.budget >= 0;; live = true) {
    const float* survival = live ? p.survival : p.lagged;
    const int64_t stride = live ? p.survival_stride : p.lagged_stride;
    const Candidates c = sort_candidates(p, survival, stride, items, other, scratch);
    if (causal || !live) {  // live survivals decide in causal alone
      budget = 0;
      if (priced(p, cost, batch)) {
        const uint64_t tau = expected_tokens(p, survival, stride, scratch);
        budget = best_prefix(p, cost, c, tau, batch, room, causal, scratch);
      }
    }
    if (!live) continue;
    budget = budget < room ? budget : room;
    admit(p, c, budget > 0 ? budget : 0);
    return;
  }
}

__device__ __forceinline__ void choose_lengths(const Args& args, uint64_t* items,
                                               const StepCost& cost, int64_t active,
                                               BlockScratch& scratch) {
  const Params& p = args.p;
  const bool by_key = p.mode == DSPARK_SCHEDULE_CAUSAL || p.mode == DSPARK_SCHEDULE_TWO_PHASE;
  const int64_t all_room = drafts_that_fit(p, active);
  int64_t room = all_room;
#pragma unroll 1
  for (int rule = 0; rule <= (by_key ? 0 : 1); ++rule) {  // floors first, in every mode
    if (rule == 1 && p.survival != nullptr) inspect_survivals(p);
    const auto goal = [&](int32_t r) {
      return rule == 0 ? floor_of(p, r) : rule_length(p, r, p.status + r);
    };
    room = raise_lengths(p, goal, room, scratch);
  }
  if (!by_key) return;
  const int64_t floors = all_room - room;
  admit_by_key(args, items, cost, active + floors, room, p.budget - floors, scratch);
}

__global__ void __launch_bounds__(kThreads, 1)
    prefix_scheduler_kernel(const __grid_constant__ Args args) {
  DSPARK_DYNAMIC_SHARED(memory);
  __shared__ BlockScratch scratch;
  const Params& p = args.p;
  uint64_t* items =
      args.workspace != nullptr ? args.workspace : reinterpret_cast<uint64_t*>(memory);
  const int32_t active = read_requests(p, scratch);
  const StepCost cost = read_cost(p, scratch);
  choose_lengths(args, items, cost, active, scratch);
  write_layout(p, scratch);
  write_theta(p, cost, active, scratch);
}

}  // namespace dspark::cuda::schedule

#endif  // DSPARK_CUDA_PREFIX_SCHEDULER_KERNEL_CUH_
