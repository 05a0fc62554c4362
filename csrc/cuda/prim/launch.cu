// SPDX-License-Identifier: Apache-2.0
#include "cuda/prim/launch.h"

namespace dspark::prim {
namespace {

// Without the attribute a block gets at most this much dynamic shared memory.
constexpr size_t kPlainSharedBytes = 48 * 1024;

dspark_status failed(const char* name, const char* call, cudaError_t error, int line) {
  cudaGetLastError();  // an error that is not sticky must not surface in the caller's next call
  const bool crowded = error == cudaErrorCooperativeLaunchTooLarge ||
                       error == cudaErrorInvalidClusterSize || error == cudaErrorNotSupported;
  return failed_status(crowded ? DSPARK_UNSUPPORTED : DSPARK_CUDA_ERROR, __FILE__, line,
                       "%s: %s: %s (%s)", name, call, cudaGetErrorString(error),
                       cudaGetErrorName(error));
}

#define DSPARK_RETURN_IF_FAILED(name, call)                                  \
  do {                                                                       \
    const cudaError_t error_ = (call);                                       \
    if (error_ != cudaSuccess) return failed(name, #call, error_, __LINE__); \
  } while (0)

cudaError_t allow_shared_bytes(const void* kernel, size_t bytes) {
  if (bytes <= kPlainSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace

namespace detail {

dspark_status launch(const char* name, const void* kernel, const LaunchConfig& config,
                     void** arguments) {
  DSPARK_RETURN_IF_FAILED(name, allow_shared_bytes(kernel, config.shared_bytes));
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (config.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (config.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster != 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = config.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t launch = {};
  launch.gridDim = config.grid;
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(config.stream);
  launch.attrs = attributes;
  launch.numAttrs = count;
  DSPARK_RETURN_IF_FAILED(name, cudaLaunchKernelExC(&launch, kernel, arguments));
  return ok_status();
}

dspark_status max_resident_blocks(const void* kernel, int threads, size_t shared_bytes,
                                  int* blocks_per_multiprocessor) {
  DSPARK_RETURN_IF_FAILED("max_resident_blocks", allow_shared_bytes(kernel, shared_bytes));
  DSPARK_RETURN_IF_FAILED("max_resident_blocks",
                          cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                              blocks_per_multiprocessor, kernel, threads, shared_bytes));
  return ok_status();
}

}  // namespace detail

dspark_status device_limits(DeviceLimits* limits) {
  int device = 0, cooperative = 0;
  DSPARK_RETURN_IF_FAILED("device_limits", cudaGetDevice(&device));
  const struct {
    int* value;
    cudaDeviceAttr attribute;
  } wanted[] = {{&limits->multiprocessors, cudaDevAttrMultiProcessorCount},
                {&limits->shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                {&limits->major, cudaDevAttrComputeCapabilityMajor},
                {&limits->minor, cudaDevAttrComputeCapabilityMinor},
                {&cooperative, cudaDevAttrCooperativeLaunch}};
  for (const auto& entry : wanted) {
    DSPARK_RETURN_IF_FAILED("device_limits",
                            cudaDeviceGetAttribute(entry.value, entry.attribute, device));
  }
  limits->cooperative = cooperative != 0;
  return ok_status();
}

dspark_status fill_zero_async(void* data, size_t bytes, void* stream) {
  DSPARK_RETURN_IF_FAILED("fill_zero_async",
                          cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream)));
  return ok_status();
}

}  // namespace dspark::prim
