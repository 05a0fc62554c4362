// SPDX-License-Identifier: Apache-2.0
//
// What csrc/cuda/device.cu and csrc/cuda/prim/launch.cu are on a GPU: the emulated device. A block
// may use as much memory and as many threads as one of that compute capability.
#include "core/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "core/problems.h"
#include "cuda/prim/launch.h"
#include "simt/limits.h"

namespace dspark {
namespace {

constexpr int kThreadsPerBlock = 1024;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kReservedBytes = 1024;  // of shared memory, that each block pays besides its own
constexpr int kClusterBlocks = 16;
constexpr int kProbeThreads = 64;

int from_environment(const char* name, int fallback) {
  const char* text = getenv(name);
  const int value = text != nullptr ? atoi(text) : 0;
  return value > 0 ? value : fallback;
}

int capability() { return from_environment("DSPARK_SIMT_CAPABILITY", 90); }
int multiprocessors() { return from_environment("DSPARK_SIMT_SMS", 6); }

/// Shared memory of a multiprocessor: the CUDA programming guide's table of compute capabilities.
int shared_bytes_per_multiprocessor() {
  const int kilobytes = from_environment("DSPARK_SIMT_SHARED_KB", 0);
  if (kilobytes > 0) return kilobytes * 1024;
  const int c = capability();
  if (c == 86 || c == 89 || c >= 120) return 100 * 1024;
  return c < 90 ? 164 * 1024 : 228 * 1024;
}

int threads_per_multiprocessor() {
  const int c = capability();
  return c == 86 || c == 89 || c >= 120 ? 1536 : 2048;
}

int shared_bytes_per_block() { return shared_bytes_per_multiprocessor() - kReservedBytes; }

int resident_blocks(int threads, size_t shared_bytes) {
  const int bytes = static_cast<int>(shared_bytes) + kReservedBytes;
  const int by_memory = shared_bytes_per_multiprocessor() / bytes;
  const int by_threads = threads_per_multiprocessor() / ((threads + 31) / 32 * 32);
  return std::min({by_memory, by_threads, kBlocksPerMultiprocessor});
}

/// out[i] = i + 1.
__global__ void write_numbers(int32_t* out) {
  out[threadIdx.x] = static_cast<int32_t>(threadIdx.x) + 1;
}

}  // namespace

namespace simt {

// Blocks that can run together.
uint64_t room(const prim::LaunchConfig& config) {
  if (from_environment("DSPARK_SIMT_COOPERATIVE", 1) == 3) return 0;
  const int threads = static_cast<int>(config.block.x * config.block.y * config.block.z);
  return static_cast<uint64_t>(resident_blocks(threads, config.shared_bytes)) * multiprocessors();
}

bool too_crowded(const prim::LaunchConfig& config) {
  const uint64_t blocks = uint64_t{config.grid.x} * config.grid.y * config.grid.z;
  return (config.cooperative && blocks > room(config)) || config.cluster > room(config);
}

std::string refuse_launch(const prim::LaunchConfig& config) {
  const uint64_t threads = uint64_t{config.block.x} * config.block.y * config.block.z;
  const uint64_t blocks = uint64_t{config.grid.x} * config.grid.y * config.grid.z;
  if (threads == 0 || threads > kThreadsPerBlock || blocks == 0 || config.block.z > 64) {
    return "invalid configuration: " + std::to_string(blocks) + " blocks of " +
           std::to_string(threads) + " threads";
  }
  if (config.shared_bytes > static_cast<size_t>(shared_bytes_per_block())) {
    return "too much shared memory: " + std::to_string(config.shared_bytes) +
           " bytes, a block has " + std::to_string(shared_bytes_per_block());
  }
  if (config.cluster > kClusterBlocks ||
      (config.cluster > 1 && config.grid.x % config.cluster != 0)) {
    return "invalid cluster of " + std::to_string(config.cluster) + " blocks in a grid of " +
           std::to_string(config.grid.x);
  }
  if (too_crowded(config) && !config.cooperative) {
    return "cluster too large: " + std::to_string(config.cluster) + " blocks, " +
           std::to_string(room(config)) + " can be resident";
  }
  if (too_crowded(config)) {
    return "cooperative launch too large: " + std::to_string(blocks) + " blocks, " +
           std::to_string(room(config)) + " can be resident";
  }
  return "";
}

}  // namespace simt

namespace prim {

namespace detail {

dspark_status max_resident_blocks(const void*, int threads, size_t shared_bytes,
                                  int* blocks_per_multiprocessor) {
  *blocks_per_multiprocessor = resident_blocks(threads, shared_bytes);
  return ok_status();
}

// The multiprocessors are one group, so a cluster fits wherever its blocks do.
int max_resident_clusters(const void*, int threads, size_t shared_bytes, int cluster) {
  if (capability() < 90 || cluster > kClusterBlocks) return 0;
  return resident_blocks(threads, shared_bytes) * multiprocessors() / cluster;
}

}  // namespace detail

dspark_status device_limits(DeviceLimits* limits) {
  limits->multiprocessors = multiprocessors();
  limits->shared_bytes_per_block = shared_bytes_per_block();
  limits->major = capability() / 10;
  limits->minor = capability() % 10;
  limits->cooperative = from_environment("DSPARK_SIMT_COOPERATIVE", 1) != 2;
  return ok_status();
}

dspark_status fill_zero_async(void* data, size_t bytes, void*) {
  memset(data, 0, bytes);
  return ok_status();
}

}  // namespace prim

namespace cuda {

void query(dspark_cuda_info* info) noexcept {
  info->usable = 1;
  info->num_devices = 1;
}

dspark_status describe(int32_t index, dspark_cuda_device_info* info) noexcept {
  if (index != 0) {
    return failed_status(DSPARK_INVALID_ARGUMENT, __FILE__, __LINE__,
                         "dspark_cuda_device:\n  index: got %d, expected 0", index);
  }
  *info = dspark_cuda_device_info{};
  info->struct_size = sizeof *info;
  info->major = capability() / 10;
  info->minor = capability() % 10;
  info->num_multiprocessors = multiprocessors();
  info->shared_bytes_per_block = shared_bytes_per_block();
  snprintf(info->name, sizeof info->name, "CPU, as a CUDA device");
  return ok_status();
}

dspark_status probe(int32_t) noexcept {
  int32_t numbers[kProbeThreads] = {};
  prim::LaunchConfig config;
  config.block = dim3(kProbeThreads);
  const dspark_status status = prim::launch("probe", &write_numbers, config, &numbers[0]);
  if (status.code != DSPARK_OK) return status;
  for (int i = 0; i < kProbeThreads; ++i) {
    if (numbers[i] != i + 1) {
      return failed_status(DSPARK_CUDA_ERROR, __FILE__, __LINE__, "the probe kernel wrote %d at %d",
                           numbers[i], i);
    }
  }
  return ok_status();
}

}  // namespace cuda
}  // namespace dspark
