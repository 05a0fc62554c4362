// SPDX-License-Identifier: Apache-2.0
//
// Sums, minima and a stable sort by one block of 512 threads.
#ifndef DSPARK_CUDA_PREFIX_SCHEDULER_BLOCK_CUH_
#define DSPARK_CUDA_PREFIX_SCHEDULER_BLOCK_CUH_

#include "cuda/prim/platform.h"

namespace dspark::cuda::schedule {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 256;  // of one pass of the sort

/// Shared memory of the functions below.
struct BlockScratch {
  uint64_t warp[kWarps];
  uint32_t histogram[kWarps * kDigits];  // [digit, warp], so that one scan gives all places
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

/// Sum of `x` over the threads before this one; `*total` is everybody's. Ends with a barrier.
template <class T>
__device__ __forceinline__ T exclusive_sum(T x, BlockScratch& scratch, T* total) {
  T through = x;
  for (int d = 1; d < 32; d *= 2) {
    const T below = __shfl_up_sync(~0u, through, d);
    if (lane_id() >= d) through += below;
  }
  if (lane_id() == 31) scratch.warp[warp_id()] = static_cast<uint64_t>(through);
  __syncthreads();
  T before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp_id()) before = all;
    all += static_cast<T>(scratch.warp[w]);
  }
  __syncthreads();  // the scratch is free again
  *total = all;
  return before + through - x;
}

template <class T>
__device__ __forceinline__ T block_sum(T x, BlockScratch& scratch) {
  T total;
  exclusive_sum(x, scratch, &total);
  return total;
}

/// The larger of two (value, index): value first, then the lower index.
struct Best {
  double value;
  int32_t index;
};
__device__ __forceinline__ bool better(const Best& a, const Best& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

__device__ __forceinline__ Best block_best(Best x, BlockScratch& scratch) {
  for (int d = 16; d > 0; d /= 2) {
    const Best other{__shfl_xor_sync(~0u, x.value, d), __shfl_xor_sync(~0u, x.index, d)};
    if (better(other, x)) x = other;
  }
  double* values = reinterpret_cast<double*>(scratch.warp);
  if (lane_id() == 0) {
    values[warp_id()] = x.value;
    scratch.histogram[warp_id()] = static_cast<uint32_t>(x.index);
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    const Best other{values[w], static_cast<int32_t>(scratch.histogram[w])};
    if (better(other, x)) x = other;
  }
  __syncthreads();
  return x;
}

__device__ __forceinline__ int32_t block_min(int32_t x, BlockScratch& scratch) {
  x = __reduce_min_sync(~0u, x);
  if (lane_id() == 0) scratch.histogram[warp_id()] = static_cast<uint32_t>(x);
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    const int32_t other = static_cast<int32_t>(scratch.histogram[w]);
    x = other < x ? other : x;
  }
  __syncthreads();
  return x;
}

// Lanes of this warp whose digit is the same as this lane's, among those with `valid`.
__device__ __forceinline__ uint32_t same_digit(uint32_t digit, bool valid) {
  uint32_t peers = __ballot_sync(~0u, valid);
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) {
    const uint32_t ones = __ballot_sync(~0u, digit >> bit & 1u);
    peers &= digit >> bit & 1u ? ones : ~ones;
  }
  return peers;
}

// One pass: items ordered by 8 bits of their upper half, equal ones in the order they had. A warp
// walks a stretch of its own, 32 items at a time, first to count, then to place.
__device__ __forceinline__ void sort_pass(const uint64_t* from, uint64_t* to, int32_t n, int shift,
                                          BlockScratch& scratch) {
  uint32_t* histogram = scratch.histogram;
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kDigits; i += kThreads) {
    histogram[i] = 0;
  }
  __syncthreads();
  const int32_t stretch = (n + kThreads - 1) / kThreads * 32;
  const int32_t first = warp_id() * stretch;
  const int32_t end = first + stretch < n ? first + stretch : n;
  for (int32_t i = first; i < end; i += 32) {
    const bool valid = i + lane_id() < end;
    const uint32_t digit =
        valid ? static_cast<uint32_t>(from[i + lane_id()] >> shift) % kDigits : 0;
    const uint32_t peers = same_digit(digit, valid);
    const bool leads = valid && (peers & ((1u << lane_id()) - 1)) == 0;
    if (leads) histogram[digit * kWarps + warp_id()] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  // Counts to places: thread t has 8 consecutive counters.
  constexpr int kEach = kWarps * kDigits / kThreads;
  uint32_t* mine = histogram + threadIdx.x * kEach;
  uint32_t sum = 0, total = 0;
  for (int i = 0; i < kEach; ++i) sum += mine[i];
  uint32_t place = exclusive_sum(sum, scratch, &total);
  for (int i = 0; i < kEach; ++i) {
    const uint32_t count = mine[i];
    mine[i] = place;
    place += count;
  }
  __syncthreads();
  for (int32_t i = first; i < end; i += 32) {
    const bool valid = i + lane_id() < end;
    const uint64_t item = valid ? from[i + lane_id()] : 0;
    const uint32_t digit = static_cast<uint32_t>(item >> shift) % kDigits;
    const uint32_t peers = same_digit(digit, valid);
    const uint32_t before = __popc(peers & ((1u << lane_id()) - 1));
    const uint32_t base = valid ? histogram[digit * kWarps + warp_id()] : 0;
    __syncwarp();  // everybody has read the counters
    if (valid) to[base + before] = item;
    if (valid && before == 0) histogram[digit * kWarps + warp_id()] = base + __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

/// Sort `n` items by their upper 32 bits, ascending and stable; the result is in `items` again.
/// Both arrays may lie in shared or global memory. Ends with a barrier.
__device__ __forceinline__ void sort_items(uint64_t* items, uint64_t* other, int32_t n,
                                           BlockScratch& scratch) {
#pragma unroll 1
  for (int shift = 32; shift < 64; shift += 8) {
    sort_pass(items, other, n, shift, scratch);
    uint64_t* sorted = other;
    other = items;
    items = sorted;
  }
}

}  // namespace dspark::cuda::schedule

#endif  // DSPARK_CUDA_PREFIX_SCHEDULER_BLOCK_CUH_
