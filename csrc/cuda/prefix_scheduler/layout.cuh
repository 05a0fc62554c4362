// SPDX-License-Identifier: Apache-2.0
//
// The target's batch: cu_seqlens, the flattened rows, the work plan of verify_attention, Theta.
#ifndef DSPARK_CUDA_PREFIX_SCHEDULER_LAYOUT_CUH_
#define DSPARK_CUDA_PREFIX_SCHEDULER_LAYOUT_CUH_

#include "core/work_plan.h"
#include "cuda/prefix_scheduler/requests.cuh"

namespace dspark::cuda::schedule {

__device__ __forceinline__ void write_rows(const Params& p, int32_t r, int32_t first) {
  const int64_t anchor = p.position == nullptr ? 0 : p.position[r];
  for (int32_t j = 0; j <= p.length[r]; ++j) {
    const int32_t row = first + j;
    p.row_to_request[row] = r;
    p.row_offset[row] = j;
    if (p.token_ids != nullptr) {
      p.token_ids[row] = j == 0 ? p.anchor[r] : p.draft_tokens[r * p.draft_tokens_stride + j - 1];
    }
    if (p.positions != nullptr) p.positions[row] = anchor + j;
  }
}

/// Everything that follows from the lengths. Whole block.
__device__ __forceinline__ void write_layout(const Params& p, BlockScratch& scratch) {
  int32_t row = 0, entry = 0;
  const int32_t tiles = (p.num_requests + kThreads - 1) / kThreads;
#pragma unroll 1
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t r = tile * kThreads + static_cast<int32_t>(threadIdx.x);
    const bool there = r < p.num_requests;
    const bool active = there && is_active(p, r);
    const uint32_t rows = active ? 1u + static_cast<uint32_t>(p.length[r]) : 0u;
    // Entry and row in one scan: at most 2^17 of each.
    uint64_t total;
    const uint64_t before =
        exclusive_sum(static_cast<uint64_t>(active) << 32 | rows, scratch, &total);
    const int32_t first = row + static_cast<int32_t>(before & 0xffffffffu);
    if (there) p.cu_seqlens[r] = first;
    if (active) {
      write_rows(p, r, first);
      const int32_t place = entry + static_cast<int32_t>(before >> 32);
      if (p.work != nullptr) {
        write_work_entry(p.work, place, WorkEntry{r, first, static_cast<int32_t>(rows)});
      }
    }
    row += static_cast<int32_t>(total & 0xffffffffu);
    entry += static_cast<int32_t>(total >> 32);
  }
  if (threadIdx.x == 0) {
    p.cu_seqlens[p.num_requests] = row;
    *p.total_tokens = row;
    if (p.work != nullptr) write_work_header(p.work, p.num_requests, entry, row);
  }
  for (int32_t i = entry + static_cast<int32_t>(threadIdx.x);
       p.work != nullptr && i < p.num_requests; i += kThreads) {
    write_work_entry(p.work, i, WorkEntry{0, 0, 0});
  }
  for (int32_t i = row + static_cast<int32_t>(threadIdx.x); i < p.padded_tokens; i += kThreads) {
    p.row_to_request[i] = p.row_offset[i] = -1;
    if (p.token_ids != nullptr) p.token_ids[i] = 0;
    if (p.positions != nullptr) p.positions[i] = 0;
  }
}

/// Theta of the lengths chosen and the live survivals. Whole block.
__device__ __forceinline__ void write_theta(const Params& p, const StepCost& cost, int32_t active,
                                            BlockScratch& scratch) {
  const double nan = double_from_bits(UINT64_C(0x7ff8000000000000));
  double theta = p.cost_ms != nullptr ? 0.0 : nan;
  if (active > 0) {
    const int64_t batch = active + admitted(p, scratch);
    const bool known = p.survival != nullptr && priced(p, cost, batch);
    theta = nan;
    if (known) {
      const uint64_t tau = expected_tokens(p, p.survival, p.survival_stride, scratch);
      theta = theta_of(cost, tau, batch);
    }
  }
  if (threadIdx.x == 0) *p.theta = theta;
}

}  // namespace dspark::cuda::schedule

#endif  // DSPARK_CUDA_PREFIX_SCHEDULER_LAYOUT_CUH_
