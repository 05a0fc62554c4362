// SPDX-License-Identifier: Apache-2.0
//
// verify_attention: a few query rows of each request over a paged cache, in one launch.
//
// Traffic: the keys and values of a request once per KV head, whatever the number of query tokens
// and heads of its group: R L 2 Hkv D bytes of the cache's type, everything else is small. Floor:
// these bytes at the speed of memory (R = 32, L = 4096, 8 heads of 128 in bf16: 537 MB, 125 us of
// an H200). The rows are multiplied in tiles of 16, so that few rows leave the arithmetic far below
// the memory; all SMs read equal shares of the bytes, whatever the lengths are (plan.cuh); a row
// that several CTAs have keys of is merged by them in the same launch: through the workspace
// (exchange.cuh), or, where the tiles are few, by a cluster in its shared memory (cluster.cuh).
//
// Few keys are a matter of latencies: what depends on nothing is asked for together. Lengths first;
// then pages and queries; then keys; and what other requests need is done behind the work.
//
// A `Compute` (tile_mma.cuh, tile_plain.cuh) goes over some keys of a tile and leaves a part
// (results.cuh) in shared memory; all else is here.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_KERNEL_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_KERNEL_CUH_

#include "cuda/verify_attention/cluster.cuh"
#include "cuda/verify_attention/exchange.cuh"
#include "cuda/verify_attention/plan.cuh"
#include "cuda/verify_attention/results.cuh"

namespace dspark::cuda::attention {

// Shared memory before the Compute's.
struct Header {
  PlanState plan;
  Exchange::State exchange;
  unsigned char* own_slots[2];  // of the results
  int32_t pending;
  int32_t bad;     // a cluster's: this CTA has met a bad page
  Tile shared[2];  // tiles that this CTA shares with the one before and the one behind
};
constexpr uint32_t kHeaderBytes = 1024;
static_assert(sizeof(Header) <= kHeaderBytes, "");

// Requests that need no attention, those that fall to this CTA. Whole CTA.
__device__ __forceinline__ void settle(const Args& args, const Plan& plan, bool usable) {
  if (args.config.cluster == 0) {
    settle_requests(args.p, usable);
  } else if (!plan.tile().q.works() &&
             blockIdx.x % (args.config.cluster * plan.tiles_of_request()) == 0) {
    settle_request(args.p, plan.tile().request, plan.tile().q);
  }
}

constexpr int32_t kInSplit = (1 << kSplitShift) - 1;

/// False where the instructions of a Compute do not exist: an empty kernel, never chosen.
template <class Compute>
constexpr bool kCompiled = true;

template <class Compute>
__device__ __forceinline__ void run_launch(const Args& args) {
  DSPARK_DYNAMIC_SHARED(memory);
  Header& header = *reinterpret_cast<Header*>(memory);
  Exchange exchange(args, header.exchange);
  exchange.open();
  Plan plan(args, header.plan);
  if (args.config.cluster > 0) start_cluster(args, plan.first_request());
  plan.read();
  if (threadIdx.x == 0) {
    header.own_slots[0] = memory + args.config.run_offset;
    header.own_slots[1] = Results::own_slot(args);
    header.pending = 0;
  }
  const bool usable = usable_scales(args.p);
  plan.form(usable);
  exchange.ask();
  if (!plan.takes_part()) {
    settle(args, plan, usable);
    return;
  }
  Compute compute(args, memory + kHeaderBytes, exchange);
  const Results results(args, header.own_slots);
  const bool clustered = args.config.cluster > 0 && plan.tile().sharers > 1;
  for (; plan.more(); plan.next()) {
    const Tile& tile = plan.tile();
    if (plan.from() >= plan.to()) continue;
    bool bad = false;  // a page that other rows of the request need counts too
    if (plan.from() == 0 && tile.rows < tile.q.q_len * header.plan.group) {
      const int32_t low = tile.q.low(args.p, 0), high = tile.q.high(args.p, tile.q.q_len - 1);
      bad = __syncthreads_or(bad_pages(args.p, tile.request, low, high)) != 0;
    }
    compute.load_queries(tile);
    const int32_t end = plan.key(plan.to());
    int32_t unit = plan.from(), from = plan.key(unit), to = end;
    do {  // all of them are one part, or each split is
      if (args.config.invariant) to = min(end, (from | kInSplit) + 1);
      bad |= compute.accumulate(tile, from, to);
      if (clustered) break;
      const bool alone = !args.config.invariant || (plan.shared() && plan.splits());
      results.keep(tile, compute.view(), {from, to, unit, bad}, plan.shared(), alone);
      __syncthreads();
      from = to;
      if (from >= plan.key(unit + 1)) ++unit;
    } while (from < end);
    if (clustered) {
      if (threadIdx.x == 0) header.bad = bad;
      break;
    }
    if (!plan.shared()) continue;
    exchange.admit();
    if (exchange.arrive(tile.owner, tile.sharers)) {
      if (threadIdx.x == 0) header.shared[header.pending++] = tile;
    }
  }
  if (clustered) {
    merge_cluster(args, results, plan.tile(), compute.view(), plan.from() < plan.to(), &header.bad);
    return;
  }
  if (args.config.cluster > 0) return;
  settle(args, plan, usable);  // while the others' parts are on their way
  // Everybody arrives before anybody waits.
  __syncthreads();
  for (int i = 0; i < header.pending; ++i) {
    const Tile& tile = header.shared[i];
    if (exchange.waits()) exchange.wait(tile.owner, tile.sharers);
    const int32_t slice = exchange.waits() ? static_cast<int32_t>(blockIdx.x) - tile.owner : 0;
    results.merge(tile, slice, exchange.waits() ? tile.sharers : 1, plan.splits());
  }
  if (plan.participants() > 1 && !plan.whole()) exchange.close(plan.participants());
}

template <class Compute>
__global__ void __launch_bounds__(Compute::kMaxThreads, Compute::kMinBlocks)
    attention_kernel(const __grid_constant__ Args args) {
  if constexpr (kCompiled<Compute>) run_launch<Compute>(args);
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_KERNEL_CUH_
