// SPDX-License-Identifier: Apache-2.0
//
// The parts of dspark/device.h behind the C functions.
#ifndef DSPARK_CORE_DEVICE_H_
#define DSPARK_CORE_DEVICE_H_

#include "dspark/device.h"

namespace dspark {

/// Whether code compiled for `archs` ("80-real 90a-real 100-virtual") runs on compute capability
/// major.minor: a cubin on its own major version and from its minor one on, a cubin of an `a`
/// architecture on exactly that one, PTX (`virtual`) on everything newer.
bool archs_serve(const char* archs, int major, int minor) noexcept;

namespace cuda {

// Defined in cuda/device.cu, present only in a build with CUDA.

/// Fill everything of `info` that the driver knows, and the reason if CUDA cannot be used.
void query(dspark_cuda_info* info) noexcept;

/// Fill `info` for device `index`.
dspark_status describe(int32_t index, dspark_cuda_device_info* info) noexcept;

/// Run the pattern kernel on device `index` and check what it wrote.
dspark_status probe(int32_t index) noexcept;

}  // namespace cuda
}  // namespace dspark

#endif  // DSPARK_CORE_DEVICE_H_
