// SPDX-License-Identifier: Apache-2.0
#include <mutex>

#include "cuda/prim/launch.h"

namespace dspark::prim {
namespace {

// Without the attribute a block gets at most this much dynamic shared memory.
constexpr size_t kPlainSharedBytes = 48 * 1024;
constexpr unsigned kPortableCluster = 8;  // blocks; larger ones need an attribute of the kernel

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

cudaError_t allow_cluster(const void* kernel, unsigned cluster) {
  if (cluster <= kPortableCluster) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

cudaLaunchAttribute cluster_attribute(unsigned cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

/// What a device has answered about clusters of a kernel.
struct ClusterAnswer {
  const void* kernel;
  size_t shared_bytes;
  int device, threads, cluster;
  int clusters;

  bool same(const ClusterAnswer& other) const {
    return kernel == other.kernel && shared_bytes == other.shared_bytes && device == other.device &&
           threads == other.threads && cluster == other.cluster;
  }
};

/// Clusters of `question`; 0 if the device has none of that size.
int ask_for_clusters(const ClusterAnswer& question) {
  cudaLaunchAttribute attribute = cluster_attribute(static_cast<unsigned>(question.cluster));
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(question.cluster));
  launch.blockDim = dim3(static_cast<unsigned>(question.threads));
  launch.dynamicSmemBytes = question.shared_bytes;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  int clusters = 0;
  if (allow_shared_bytes(question.kernel, question.shared_bytes) != cudaSuccess ||
      allow_cluster(question.kernel, static_cast<unsigned>(question.cluster)) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, question.kernel, &launch) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

}  // namespace

namespace detail {

dspark_status launch(const char* name, const void* kernel, const LaunchConfig& config,
                     void** arguments) {
  DSPARK_RETURN_IF_FAILED(name, allow_shared_bytes(kernel, config.shared_bytes));
  DSPARK_RETURN_IF_FAILED(name, allow_cluster(kernel, config.cluster));
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
  if (config.cluster != 0) attributes[count++] = cluster_attribute(config.cluster);
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

int max_resident_clusters(const void* kernel, int threads, size_t shared_bytes, int cluster) {
  constexpr int kAnswers = 64;  // a few kernels of a few configurations; the oldest makes room
  static ClusterAnswer answers[kAnswers];
  static int next = 0;
  static std::mutex mutex;
  ClusterAnswer question{kernel, shared_bytes, 0, threads, cluster, 0};
  if (cudaGetDevice(&question.device) != cudaSuccess) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const ClusterAnswer& answer : answers) {
    if (answer.same(question)) return answer.clusters;
  }
  question.clusters = ask_for_clusters(question);
  answers[next] = question;
  next = (next + 1) % kAnswers;
  return question.clusters;
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
