// SPDX-License-Identifier: Apache-2.0
//
// What one exchange of the Markov loop costs: every CTA publishes a key and a candidate a row, all
// wait, all read the winner. With the class that the kernel uses, on a grid of one CTA a
// multiprocessor. Then the same with what follows in the loop, the winner's row of W1, read from
// memory or asked for in L2 by the CTA that proposed it. The time of a step is
// (t(520) - t(8)) / 512; every CTA must have seen the same winners.
#include "common.h"
#include "cuda/markov_loop/exchange.cuh"

namespace dspark::bench {
namespace {

using namespace cuda::markov;

constexpr int kFewSteps = 8, kManySteps = 520;
constexpr int kRowWords = 32;        // a row of W1: 512 bytes, 16 a lane
constexpr int kVocabulary = 151936;  // 78 MB of W1: most rows are not in L2
enum Gather { kNone, kPlain, kPrefetched };

struct Steps {
  Workspace work;
  Config config;
  const uint4* w1;  // [kVocabulary, kRowWords]
  uint32_t* seen;   // [grid] digest of the winners that a CTA saw
  int rows, steps;
  Gather gather;
};

__device__ uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

__device__ void propose(const Steps& a, int step, Exchange& exchange) {
  for (int n = static_cast<int>(threadIdx.x); n < a.rows; n += kThreads) {
    const uint32_t luck = mix(mix(mix(step + 1) + n) + blockIdx.x);
    const int32_t token = static_cast<int32_t>(mix(luck) % kVocabulary);
    // The winner's CTA is in the key, as the segment is in the kernel's.
    const uint64_t key = (uint64_t{luck} << 32 | blockIdx.x) + 1;
    exchange.publish(step, n, key, pack_pick(token, 0.0f));
    if (a.gather != kPrefetched) continue;
    const uint4* row = a.w1 + int64_t{token} * kRowWords;
    for (int i = 0; i < kRowWords; i += 8) prim::prefetch_l2(row + i);
  }
}

__global__ void __launch_bounds__(kThreads, 1) exchange_steps(const __grid_constant__ Steps a) {
  __shared__ int32_t tokens[kMaxRows];
  Exchange exchange(a.work, a.config, a.rows);
  exchange.open(true);
  uint32_t digest = 0;
  for (int step = 0; step < a.steps; ++step) {
    exchange.recycle(step);
    exchange.admit();
    propose(a, step, exchange);
    exchange.arrive();
    exchange.wait();
    for (int n = static_cast<int>(threadIdx.x); n < a.rows; n += kThreads) {
      const int cta = static_cast<int>((exchange.key(step, n) - 1) & 0xffffffffu);
      tokens[n] = pick_token(exchange.pick(step, n, cta));
      digest += mix(tokens[n] + step);
    }
    if (a.gather == kNone) continue;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < a.rows * kRowWords; i += kThreads) {
      const uint4 v = a.w1[int64_t{tokens[i / kRowWords]} * kRowWords + i % kRowWords];
      digest += (v.x ^ v.y ^ v.z ^ v.w) & 0xffu;
    }
    __syncthreads();
  }
  atomicAdd(a.seen + blockIdx.x, digest);
}

Workspace workspace(int rows, int grid) {
  Params p{};
  p.num_requests = rows;
  p.gamma = 1;
  p.rank = 16;
  p.draft_vocab_size = grid * kSegment;
  const size_t bytes = carve(p, nullptr).bytes;
  return carve(p, device_array<char>(bytes));
}

void check(const std::vector<uint32_t>& seen) {
  for (const uint32_t digest : seen) {
    if (digest == seen[0]) continue;
    std::fprintf(stderr, "CTAs saw different winners\n");
    std::exit(1);
  }
}

void measure(const prim::DeviceLimits& device) {
  const int grid = device.multiprocessors < kMaxGrid ? device.multiprocessors : kMaxGrid;
  Steps a{};
  a.config.grid = grid;
  a.config.num_segments = grid;
  a.config.cooperative = true;
  a.w1 = device_array<uint4>(size_t{kVocabulary} * kRowWords);
  a.seen = device_array<uint32_t>(grid);
  prim::LaunchConfig launch;
  launch.grid = dim3(grid);
  launch.block = dim3(kThreads);
  launch.cooperative = true;
  const char* names[] = {"none", "w1", "w1_prefetched"};
  for (const int rows : {1, 8, 64}) {
    a.work = workspace(rows, grid);
    a.rows = rows;
    for (const Gather gather : {kNone, kPlain, kPrefetched}) {
      a.gather = gather;
      const auto seconds = [&](int steps) {
        a.steps = steps;
        return median_seconds(
            [&] { require(prim::launch("exchange_steps", exchange_steps, launch, a)); });
      };
      require(cudaMemset(a.seen, 0, grid * sizeof(uint32_t)), "cudaMemset");
      const double few = seconds(kFewSteps);
      const double step = (seconds(kManySteps) - few) / (kManySteps - kFewSteps);
      std::vector<uint32_t> seen(grid);
      require(cudaMemcpy(seen.data(), a.seen, grid * sizeof(uint32_t), cudaMemcpyDeviceToHost),
              "cudaMemcpy");
      check(seen);
      std::printf(
          "{\"constant\": \"exchange\", \"rows\": %d, \"grid\": %d, \"gather\": \"%s\", "
          "\"step_us\": %.3f}\n",
          rows, grid, names[gather], 1e6 * step);
    }
  }
}

}  // namespace
}  // namespace dspark::bench

int main() {
  const dspark::prim::DeviceLimits device = dspark::bench::device_or_exit();
  if (!device.cooperative) {
    std::fprintf(stderr, "the device has no cooperative launches\n");
    return dspark::bench::kNoDevice;
  }
  dspark::bench::measure(device);
  return 0;
}
