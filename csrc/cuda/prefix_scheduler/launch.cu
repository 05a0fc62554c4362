// SPDX-License-Identifier: Apache-2.0
#include "core/families.h"
#include "cuda/prefix_scheduler/kernel.cuh"
#include "cuda/prim/launch.h"

namespace dspark::cuda {
namespace {

// Candidates that every device's shared memory holds twice: 64 KB. With more, and on a device that
// has no room for them, the workspace is used.
constexpr int64_t kSharedCandidates = 4096;

int64_t candidates(const dspark_prefix_scheduler_params& p) {
  return static_cast<int64_t>(p.num_requests) * p.gamma;
}

}  // namespace

dspark_status prefix_scheduler_workspace(const dspark_prefix_scheduler_params& p, size_t* bytes) {
  const int64_t n = candidates(p);
  *bytes = n > kSharedCandidates ? static_cast<size_t>(2 * n) * sizeof(uint64_t) : 0;
  return ok_status();
}

dspark_status prefix_scheduler(const dspark_prefix_scheduler_params& p, void* scratch,
                               void* stream) {
  const int64_t n = candidates(p);
  const size_t item_bytes = static_cast<size_t>(2 * n) * sizeof(uint64_t);
  prim::DeviceLimits device;
  const dspark_status limits = prim::device_limits(&device);
  if (limits.code != DSPARK_OK) return limits;
  const size_t room = static_cast<size_t>(device.shared_bytes_per_block) -
                      sizeof(schedule::BlockScratch) -
                      1024;  // for the alignment of the dynamic part
  const bool shared = n <= kSharedCandidates || item_bytes <= room;
  schedule::Args args{p, shared ? nullptr : static_cast<uint64_t*>(scratch)};
  prim::LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(schedule::kThreads);
  config.shared_bytes = shared ? item_bytes : 0;
  config.stream = stream;
  return prim::launch("prefix_scheduler", schedule::prefix_scheduler_kernel, config, args);
}

}  // namespace dspark::cuda
