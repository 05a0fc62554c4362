// SPDX-License-Identifier: Apache-2.0
//
// The emulated device: DSPARK_SIMT_SMS multiprocessors (default 6) of compute capability
// DSPARK_SIMT_CAPABILITY (default 90); DSPARK_SIMT_COOPERATIVE=2: without cooperative launches;
// 3: it has them, but every one, and every cluster, is refused when it is tried.
#ifndef DSPARK_TESTS_SIMT_LIMITS_H_
#define DSPARK_TESTS_SIMT_LIMITS_H_

#include <string>

#include "cuda/prim/launch.h"

namespace dspark::simt {

/// Why a device would not start this launch; empty if it would.
std::string refuse_launch(const prim::LaunchConfig& config);
/// Whether the reason is that the blocks of a cooperative launch or a cluster cannot run together.
bool too_crowded(const prim::LaunchConfig& config);

}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_LIMITS_H_
