// SPDX-License-Identifier: Apache-2.0
//
// The host side of a kernel: how it starts, and what the device offers. Every launch goes through
// prim::launch; nothing here allocates, waits or uses the default stream unasked, and everything
// may be called while a stream is being captured.
#ifndef DSPARK_CUDA_PRIM_LAUNCH_H_
#define DSPARK_CUDA_PRIM_LAUNCH_H_

#include "core/problems.h"
#include "cuda/prim/platform.h"

namespace dspark::prim {

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;    ///< dynamic shared memory of a block
  void* stream = nullptr;     ///< a cudaStream_t
  bool cooperative = false;   ///< all blocks run at once, so they may wait for each other
  bool programmatic = false;  ///< may start before the kernel ahead of it in the stream has ended
  unsigned cluster = 0;       ///< blocks in a cluster along x, 2..16; 0: no cluster
};

/// What the current device offers.
struct DeviceLimits {
  int multiprocessors;
  int shared_bytes_per_block;  ///< most dynamic and static shared memory together
  int major, minor;            ///< compute capability
  bool cooperative;            ///< cooperative launches work
};

namespace detail {

/// Start `kernel`; `arguments` holds the address of each of its parameters.
dspark_status launch(const char* name, const void* kernel, const LaunchConfig& config,
                     void** arguments);
dspark_status max_resident_blocks(const void* kernel, int threads, size_t shared_bytes,
                                  int* blocks_per_multiprocessor);
int max_resident_clusters(const void* kernel, int threads, size_t shared_bytes, int cluster);

}  // namespace detail

/// The limits of the current device.
dspark_status device_limits(DeviceLimits* limits);

/// Set `bytes` bytes to zero, in stream order.
dspark_status fill_zero_async(void* data, size_t bytes, void* stream);

/// How many blocks of `kernel` fit on a multiprocessor at once.
template <class... P>
dspark_status max_resident_blocks(void (*kernel)(P...), int threads, size_t shared_bytes,
                                  int* blocks_per_multiprocessor) {
  return detail::max_resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared_bytes,
                                     blocks_per_multiprocessor);
}

/// How many clusters of `cluster` blocks (more than 8 only where the device allows it) fit on the
/// device at once; 0 where it has none of that size. The device is asked once for each kernel.
template <class... P>
int max_resident_clusters(void (*kernel)(P...), int threads, size_t shared_bytes, int cluster) {
  return detail::max_resident_clusters(reinterpret_cast<const void*>(kernel), threads, shared_bytes,
                                       cluster);
}

}  // namespace dspark::prim

#ifdef DSPARK_SIMT
#include "simt/prim_launch.h"
#else

namespace dspark::prim {

/// Start `kernel`. `name` stands in the message of a status that is not DSPARK_OK. A cooperative
/// launch whose blocks do not fit on the device together, or a cluster that does not, is
/// DSPARK_UNSUPPORTED: a part of the device may be all that the caller's context has, which no
/// limit tells.
template <class... P, class... A>
dspark_status launch(const char* name, void (*kernel)(P...), const LaunchConfig& config,
                     A... arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter");
  return [&](P... values) {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&values))..., nullptr};
    return detail::launch(name, reinterpret_cast<const void*>(kernel), config, addresses);
  }(static_cast<P>(arguments)...);
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_LAUNCH_H_
