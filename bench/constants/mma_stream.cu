// SPDX-License-Identifier: Apache-2.0
//
// How fast W2 streams from shared memory through the tensor cores of one warp instruction: what
// bounds the part of W2 that is resident. 192 KB a multiprocessor, rows of 128 bytes, swizzled as
// the copy engine leaves them; per 512 bytes one ldmatrix and one mma.sync (W2 is A: 16 ids by 16
// columns; eight requests are B). Then each of the two alone.
#include "common.h"
#include "cuda/prim/mma.h"

namespace dspark::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kBytes = 192 << 10;
constexpr int kRowBytes = 128;
constexpr int kBlocks = kBytes / (16 * kRowBytes);  // of 16 rows
constexpr int kPasses = 64;
enum Mode { kBoth, kLoads, kProducts };

template <Mode kMode>
__global__ void __launch_bounds__(kThreads, 1)
    stream_shared(uint32_t* out, unsigned long long* cycles) {
  DSPARK_DYNAMIC_SHARED(memory);
  for (int i = static_cast<int>(threadIdx.x); i < kBytes / 4; i += kThreads) {
    reinterpret_cast<uint32_t*>(memory)[i] = 0x3f803f80u;  // ones
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row = lane % 16;
  const uint32_t b[2] = {0x3f803f80u, 0x3f803f80u};
  float sums[4][4] = {};
  uint32_t a[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  uint32_t folded = 0;
  const long long start = clock64();
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int block = warp; block < kBlocks; block += kThreads / 32) {
      const unsigned char* rows = memory + block * 16 * kRowBytes + row * kRowBytes;
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // 16 columns: two pieces of 16 bytes
        const int piece = 2 * c + lane / 16;
        if (kMode != kProducts) prim::ldmatrix_x4(a, rows + ((piece ^ (row & 7)) * 16));
        if (kMode != kLoads) prim::mma_bf16(sums[c], a, b);
        if (kMode == kLoads) folded ^= a[0] ^ a[1] ^ a[2] ^ a[3];
      }
    }
  }
  __syncthreads();
  const long long end = clock64();
  float total = 0.0f;
  for (int c = 0; c < 4; ++c) total += sums[c][0] + sums[c][1] + sums[c][2] + sums[c][3];
  out[blockIdx.x * kThreads + threadIdx.x] = folded + __float_as_uint(total);
  if (threadIdx.x == 0) cycles[blockIdx.x] = static_cast<unsigned long long>(end - start);
}

template <Mode kMode>
void measure(const char* name, const prim::DeviceLimits& device, uint32_t* out,
             unsigned long long* cycles) {
  prim::LaunchConfig launch;
  launch.grid = dim3(device.multiprocessors);
  launch.block = dim3(kThreads);
  launch.shared_bytes = kBytes;
  const double seconds = median_seconds(
      [&] { require(prim::launch("stream_shared", stream_shared<kMode>, launch, out, cycles)); });
  std::vector<unsigned long long> host(device.multiprocessors);
  require(cudaMemcpy(host.data(), cycles, host.size() * sizeof(host[0]), cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  std::sort(host.begin(), host.end());
  const double bytes = double{kBytes} * kPasses;
  std::printf(
      "{\"constant\": \"mma_stream\", \"mode\": \"%s\", \"bytes_per_clock\": %.1f, "
      "\"bytes_per_second\": %.4g}\n",
      name, bytes / static_cast<double>(host[host.size() / 2]),
      bytes * device.multiprocessors / seconds);
}

}  // namespace
}  // namespace dspark::bench

int main() {
  using namespace dspark::bench;
  const dspark::prim::DeviceLimits device = device_or_exit();
  if (device.shared_bytes_per_block < kBytes) {
    std::fprintf(stderr, "a block has less than %d bytes of shared memory\n", kBytes);
    return kNoDevice;
  }
  uint32_t* out = device_array<uint32_t>(static_cast<size_t>(device.multiprocessors) * kThreads);
  auto* cycles = device_array<unsigned long long>(device.multiprocessors);
  measure<kBoth>("ldmatrix and mma", device, out, cycles);
  measure<kLoads>("ldmatrix", device, out, cycles);
  measure<kProducts>("mma", device, out, cycles);
  return 0;
}
