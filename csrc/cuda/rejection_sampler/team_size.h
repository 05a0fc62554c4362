// SPDX-License-Identifier: Apache-2.0
//
// Host: how many CTAs share a request or a row.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_TEAM_SIZE_H_
#define DSPARK_CUDA_REJECTION_SAMPLER_TEAM_SIZE_H_

#include "cuda/prim/launch.h"
#include "cuda/rejection_sampler/args.h"

namespace dspark::cuda::verify {

constexpr int kResident = 2;  // CTAs of a multiprocessor (the kernels' launch bounds)

/// The largest power of two that fills the device with `work` teams, and leaves no CTA without a
/// segment.
inline int32_t team_for(int64_t work, int32_t segments, const prim::DeviceLimits& device) {
  const int64_t places = int64_t{kResident} * device.multiprocessors;
  int32_t team = 1;
  while (team < kMaxTeam && 2 * team * work <= places && 2 * team <= segments) team *= 2;
  return device.major < 9 ? 1 : team;
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_TEAM_SIZE_H_
