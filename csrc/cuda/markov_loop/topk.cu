// SPDX-License-Identifier: Apache-2.0
#include "core/problems.h"
#include "cuda/markov_loop/topk.h"
#include "cuda/markov_loop/topk_args.h"
#include "cuda/markov_loop/topk_head.cuh"
#include "cuda/markov_loop/topk_select.cuh"
#include "cuda/markov_loop/topk_walk.cuh"
#include "cuda/prim/launch.h"

namespace dspark::cuda::topk {
namespace {

prim::LaunchConfig config(int64_t blocks, void* stream) {
  prim::LaunchConfig c;
  c.grid = dim3(static_cast<unsigned>(blocks));
  c.block = dim3(kThreads);
  c.stream = stream;
  return c;
}

}  // namespace

size_t workspace(const Params& p) { return carve(p, make_plan(p), nullptr).bytes; }

dspark_status run(const Params& p, void* scratch, void* stream) {
  Args args{};
  args.p = p;
  if (p.confidence_weight == nullptr) args.p.confidence_size = 0;
  args.plan = make_plan(args.p);
  args.work = carve(args.p, args.plan, scratch);
  prim::DeviceLimits device;
  dspark_status status = prim::device_limits(&device);
  if (status.code != DSPARK_OK) return status;
  WalkShared unused;
  const uint32_t bytes = carve_walk(unused, nullptr, args.plan.members, p.rank, head_rows(p));
  Problems problems("dspark_markov_loop");
  DSPARK_SUPPORTED(problems, bytes <= static_cast<uint32_t>(device.shared_bytes_per_block),
                   "rank: got %d with topk_support %d; a request needs %u bytes of shared memory, "
                   "the device has %d",
                   p.rank, p.topk_support, bytes, device.shared_bytes_per_block);
  if (!problems.none()) return problems.status();
  if (args.plan.units > 0) {
    const int64_t items =
        int64_t{args.plan.units} * ((args.plan.rows + kHeadSlots - 1) / kHeadSlots);
    const int64_t blocks = (items + kThreads / 16 - 1) / (kThreads / 16);
    status = prim::launch("markov_loop head", head_kernel, config(blocks, stream), args);
  }
  if (status.code == DSPARK_OK) {
    const int64_t blocks = int64_t{args.plan.rows} * args.plan.slices;
    const auto kernel = p.base_dtype == DSPARK_F32    ? scan_kernel<DSPARK_F32>
                        : p.base_dtype == DSPARK_BF16 ? scan_kernel<DSPARK_BF16>
                                                      : scan_kernel<DSPARK_F16>;
    status = prim::launch("markov_loop scan", kernel, config(blocks, stream), args);
  }
  // The two that follow start early and wait inside: their launch overlaps the kernel before.
  prim::LaunchConfig settle = config(args.plan.rows, stream);
  prim::LaunchConfig walk = config(p.num_requests, stream);
  settle.programmatic = walk.programmatic = device.major >= 9;
  walk.shared_bytes = bytes;
  if (status.code == DSPARK_OK) {
    status = prim::launch("markov_loop settle", settle_kernel, settle, args);
  }
  if (status.code == DSPARK_OK) status = prim::launch("markov_loop walk", walk_kernel, walk, args);
  return status;
}

}  // namespace dspark::cuda::topk
