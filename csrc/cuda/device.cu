// SPDX-License-Identifier: Apache-2.0
//
// Devices, and a probe that shows a kernel of this build running.
//
// The runtime is linked statically and the driver is loaded by it on first use, so every function
// here also runs on a machine without a GPU or a driver, where the first call of the runtime
// answers cudaErrorInsufficientDriver (no driver) or cudaErrorNoDevice (a driver, no device).
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "core/device.h"
#include "core/problems.h"

namespace dspark::cuda {
namespace {

constexpr int kThreads = 128;
// Not a multiple of the block: the tail check of the kernel is exercised too.
constexpr int kWords = 1000;

/// The value expected at index i: a bijection of 32-bit integers, so that every word differs.
__host__ __device__ uint32_t pattern(uint32_t i) {
  const uint32_t x = (i + 1) * 0x9E3779B9u;
  return x ^ (x >> 16);
}

/// out[i] = pattern(i), i in [0, count).
__global__ void write_pattern(uint32_t* out, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) out[i] = pattern(static_cast<uint32_t>(i));
}

/// Select a device, and put the caller's choice back at the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int index) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = -1;
    error_ = cudaSetDevice(index);
  }
  ~DeviceScope() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int previous_ = -1;
  cudaError_t error_ = cudaSuccess;
};

dspark_status cuda_failed(cudaError_t error, int line, const char* call) {
  cudaGetLastError();  // an error that is not sticky must not surface in the caller's next call
  return failed_status(DSPARK_CUDA_ERROR, __FILE__, line, "%s: %s (%s)", call,
                       cudaGetErrorString(error), cudaGetErrorName(error));
}

#define DSPARK_RETURN_IF_CUDA_FAILED(call)                                  \
  do {                                                                      \
    const cudaError_t error_ = (call);                                      \
    if (error_ != cudaSuccess) return cuda_failed(error_, __LINE__, #call); \
  } while (0)

/// Why there is no device, for a person: the runtime's own text ("driver version is insufficient")
/// misleads where there is no driver at all.
void explain(char* text, size_t size, cudaError_t error) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  cudaRuntimeGetVersion(&runtime);
  if (error == cudaErrorInsufficientDriver && driver == 0) {
    std::snprintf(text, size, "this machine has no CUDA driver (%s)", cudaGetErrorName(error));
  } else if (error == cudaErrorInsufficientDriver) {
    std::snprintf(text, size, "the driver serves CUDA up to %d.%d, dspark needs %d.%d (%s)",
                  driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10,
                  cudaGetErrorName(error));
  } else {
    std::snprintf(text, size, "no CUDA device can be used: %s (%s)", cudaGetErrorString(error),
                  cudaGetErrorName(error));
  }
  cudaGetLastError();
}

dspark_status check_index(const char* function, int32_t index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    char text[256];
    explain(text, sizeof text, error);
    return failed_status(DSPARK_CUDA_ERROR, __FILE__, __LINE__, "%s: %s", function, text);
  }
  if (index < 0 || index >= count) {
    return failed_status(DSPARK_INVALID_ARGUMENT, __FILE__, __LINE__,
                         "%s:\n  index: got %d, expected 0 <= index < %d devices", function,
                         static_cast<int>(index), count);
  }
  return ok_status();
}

/// Whether the compiled code runs on device `index`; creates no context.
bool serves(int index) {
  int major = 0, minor = 0;
  const bool known =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) == cudaSuccess;
  return known && archs_serve(DSPARK_CUDA_ARCHS, major, minor);
}

/// Memory and stream of the probe, released on every way out.
struct Probe {
  uint32_t* data = nullptr;  // [kWords], device
  cudaStream_t stream = nullptr;
  ~Probe() {
    if (stream != nullptr) cudaStreamDestroy(stream);
    if (data != nullptr) cudaFree(data);
  }
};

dspark_status run_probe() {
  Probe probe;
  uint32_t host[kWords] = {};
  DSPARK_RETURN_IF_CUDA_FAILED(cudaMalloc(&probe.data, sizeof host));
  DSPARK_RETURN_IF_CUDA_FAILED(cudaStreamCreateWithFlags(&probe.stream, cudaStreamNonBlocking));
  DSPARK_RETURN_IF_CUDA_FAILED(cudaMemsetAsync(probe.data, 0, sizeof host, probe.stream));
  write_pattern<<<(kWords + kThreads - 1) / kThreads, kThreads, 0, probe.stream>>>(probe.data,
                                                                                   kWords);
  DSPARK_RETURN_IF_CUDA_FAILED(cudaGetLastError());
  DSPARK_RETURN_IF_CUDA_FAILED(
      cudaMemcpyAsync(host, probe.data, sizeof host, cudaMemcpyDeviceToHost, probe.stream));
  DSPARK_RETURN_IF_CUDA_FAILED(cudaStreamSynchronize(probe.stream));
  for (int i = 0; i < kWords; ++i) {
    if (host[i] != pattern(static_cast<uint32_t>(i))) {
      return failed_status(DSPARK_CUDA_ERROR, __FILE__, __LINE__,
                           "the probe kernel wrote 0x%08x at word %d, expected 0x%08x", host[i], i,
                           pattern(static_cast<uint32_t>(i)));
    }
  }
  return ok_status();
}

}  // namespace

void query(dspark_cuda_info* info) noexcept {
  cudaRuntimeGetVersion(&info->runtime_version);
  if (cudaDriverGetVersion(&info->driver_version) != cudaSuccess) info->driver_version = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    explain(info->reason, sizeof info->reason, error);
    return;
  }
  info->num_devices = count;
  for (int i = 0; i < count && info->usable == 0; ++i) info->usable = serves(i) ? 1 : 0;
  if (info->usable == 0) {
    std::snprintf(info->reason, sizeof info->reason,
                  "none of the %d CUDA devices runs code compiled for %s", count,
                  DSPARK_CUDA_ARCHS);
  }
}

dspark_status describe(int32_t index, dspark_cuda_device_info* info) noexcept {
  const dspark_status checked = check_index("dspark_cuda_device", index);
  if (checked.code != DSPARK_OK) return checked;
  cudaDeviceProp properties{};
  DSPARK_RETURN_IF_CUDA_FAILED(cudaGetDeviceProperties(&properties, index));
  *info = dspark_cuda_device_info{};
  info->struct_size = sizeof *info;
  info->index = index;
  info->major = properties.major;
  info->minor = properties.minor;
  info->num_multiprocessors = properties.multiProcessorCount;
  info->shared_bytes_per_block = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  info->l2_bytes = properties.l2CacheSize;
  info->memory_bytes = properties.totalGlobalMem;
  std::snprintf(info->name, sizeof info->name, "%s", properties.name);
  return ok_status();
}

dspark_status probe(int32_t index) noexcept {
  const dspark_status checked = check_index("dspark_cuda_probe", index);
  if (checked.code != DSPARK_OK) return checked;
  DeviceScope scope(index);
  DSPARK_RETURN_IF_CUDA_FAILED(scope.error());
  return run_probe();
}

}  // namespace dspark::cuda
