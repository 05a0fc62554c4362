// SPDX-License-Identifier: Apache-2.0
//
// Shared by the programs that measure a GPU's constants: errors end the program, times are medians
// between events, results are one JSON object a line.
#ifndef DSPARK_BENCH_CONSTANTS_COMMON_H_
#define DSPARK_BENCH_CONSTANTS_COMMON_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/problems.h"
#include "cuda/prim/launch.h"

namespace dspark::bench {

constexpr int kNoDevice = 3;  // exit code where there is nothing to measure

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
inline void require(const dspark_status& status) {
  if (status.code == DSPARK_OK) return;
  std::fprintf(stderr, "%s\n", status.message);
  std::exit(1);
}

/// The device's limits; the program ends where there is none.
inline prim::DeviceLimits device_or_exit() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    std::exit(kNoDevice);
  }
  prim::DeviceLimits limits;
  require(prim::device_limits(&limits));
  return limits;
}

template <class T>
T* device_array(size_t count) {
  T* data = nullptr;
  require(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
  require(cudaMemset(data, 1, count * sizeof(T)), "cudaMemset");
  return data;
}

/// Median seconds of `run()` on the default stream; before each, L2 is filled with other data.
template <class Run>
double median_seconds(const Run& run, int repeats = 11) {
  static char* other = device_array<char>(size_t{256} << 20);
  cudaEvent_t start, end;
  require(cudaEventCreate(&start), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int i = 0; i <= repeats; ++i) {
    require(cudaMemsetAsync(other, i, size_t{256} << 20), "cudaMemsetAsync");
    require(cudaEventRecord(start), "cudaEventRecord");
    run();
    require(cudaEventRecord(end), "cudaEventRecord");
    require(cudaEventSynchronize(end), "a kernel");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, start, end), "cudaEventElapsedTime");
    if (i > 0) times.push_back(ms);  // the first one loads the module
  }
  cudaEventDestroy(start);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return 1e-3 * times[times.size() / 2];
}

}  // namespace dspark::bench

#endif  // DSPARK_BENCH_CONSTANTS_COMMON_H_
