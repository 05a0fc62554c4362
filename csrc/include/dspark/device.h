// SPDX-License-Identifier: Apache-2.0
//
// What this build and this machine can do with CUDA. All of it is answered without a CUDA library
// on the machine: a library built with CUDA loads everywhere and says here why it cannot run.
#ifndef DSPARK_DEVICE_H_
#define DSPARK_DEVICE_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The build, the driver and the devices, filled by dspark_cuda_query().
typedef struct dspark_cuda_info {
  uint32_t struct_size;     ///< sizeof(dspark_cuda_info), set by the caller
  int32_t compiled;         ///< 1 if the library was built with CUDA
  int32_t usable;           ///< 1 if at least one device can run what was compiled
  int32_t num_devices;      ///< devices that the driver shows; 0 without a driver
  int32_t driver_version;   ///< newest CUDA that the driver serves, 13000 for 13.0; 0 without one
  int32_t runtime_version;  ///< CUDA runtime linked into the library; 0 when built without CUDA
  char archs[128];          ///< compiled architectures, CMake's notation, blanks between
  char reason[512];         ///< why `usable` is 0, for a person; empty when it is 1
} dspark_cuda_info;

/// One device, filled by dspark_cuda_device().
typedef struct dspark_cuda_device_info {
  uint32_t struct_size;            ///< sizeof(dspark_cuda_device_info), set by the caller
  int32_t index;                   ///< the device that was asked for
  int32_t major;                   ///< compute capability, before the point
  int32_t minor;                   ///< compute capability, behind the point
  int32_t num_multiprocessors;     ///< streaming multiprocessors
  int32_t shared_bytes_per_block;  ///< most shared memory a block may ask for
  int32_t l2_bytes;                ///< size of the level-2 cache
  uint64_t memory_bytes;           ///< size of the device memory
  char name[256];                  ///< name of the device
} dspark_cuda_device_info;

/// Describe the build and the machine, creating no context on any device. Fails only if `info` is
/// NULL or of another size; a machine without CUDA is an answer, not an error.
DSPARK_API dspark_status dspark_cuda_query(dspark_cuda_info* info);

/// Describe one device. DSPARK_UNSUPPORTED when built without CUDA, DSPARK_INVALID_ARGUMENT for an
/// index out of range, DSPARK_CUDA_ERROR with the runtime's words when it refuses.
DSPARK_API dspark_status dspark_cuda_device(int32_t index, dspark_cuda_device_info* info);

/// Show that kernels of this build run on a device: launch one that writes a known pattern, copy it
/// back and compare every word. For installation checks, not for a hot path: it allocates, creates
/// a stream and waits. Errors as for dspark_cuda_device(), and DSPARK_CUDA_ERROR for a wrong word.
DSPARK_API dspark_status dspark_cuda_probe(int32_t index);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_DEVICE_H_
