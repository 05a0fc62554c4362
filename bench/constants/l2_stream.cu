// SPDX-License-Identifier: Apache-2.0
//
// How fast multiprocessors read again what they alone have read before: the part of W2 that stays
// in L2 between the steps of the Markov loop. Each CTA owns a slice of the set and reads it eight
// times through a ring of bulk copies, forwards or in alternating directions, with each hint for
// L2. The time of a pass is that of the last seven: (t(8) - t(1)) / 7.
#include "common.h"
#include "cuda/prim/bulk.h"
#include "cuda/prim/mbarrier.h"

namespace dspark::bench {
namespace {

constexpr uint32_t kTile = 16 << 10;
constexpr int kRing = 8;  // 128 KB of copies in flight on every multiprocessor
constexpr int kPasses = 8;

struct Reads {
  const unsigned char* data;  // [tiles, kTile]
  int tiles;
  int passes;
  int alternate;  // odd passes go backwards
  prim::CacheHint hint;
};

// The i-th tile that a CTA with tiles [first, first + count) reads.
__device__ int tile_at(const Reads& r, int first, int count, int i) {
  const int pass = i / count;
  const int j = i - pass * count;
  return first + (r.alternate != 0 && pass % 2 == 1 ? count - 1 - j : j);
}

__global__ void __launch_bounds__(32, 1) read_again(const __grid_constant__ Reads r) {
  DSPARK_DYNAMIC_SHARED(ring);
  __shared__ uint64_t full[kRing];
  if (threadIdx.x != 0) return;
  const int first = static_cast<int>(int64_t{r.tiles} * blockIdx.x / gridDim.x);
  const int count = static_cast<int>(int64_t{r.tiles} * (blockIdx.x + 1) / gridDim.x) - first;
  const int total = count * r.passes;
  for (int s = 0; s < kRing; ++s) prim::mbarrier_init(full + s, 1);
  prim::mbarrier_init_fence();
  for (int i = 0; i < total + kRing; ++i) {
    const int slot = i % kRing;
    if (i >= kRing) prim::mbarrier_wait(full + slot, (i / kRing - 1) & 1);
    if (i >= total) continue;
    prim::mbarrier_expect(full + slot, kTile);
    const int64_t at = tile_at(r, first, count, i);
    prim::bulk_load(ring + slot * kTile, r.data + at * kTile, kTile, full + slot, r.hint);
  }
}

double seconds(Reads r, int passes, const prim::DeviceLimits& device) {
  r.passes = passes;
  prim::LaunchConfig launch;
  launch.grid = dim3(device.multiprocessors);
  launch.block = dim3(32);
  launch.shared_bytes = kRing * kTile;
  return median_seconds([&] { require(prim::launch("read_again", read_again, launch, r)); });
}

void measure(const prim::DeviceLimits& device) {
  const int largest = 134;
  unsigned char* data = device_array<unsigned char>(size_t{largest} * 1000000 + kTile);
  const struct {
    const char* name;
    prim::CacheHint hint;
  } hints[] = {{"normal", prim::CacheHint::kNormal},
               {"evict_last", prim::CacheHint::kEvictLast},
               {"evict_first", prim::CacheHint::kEvictFirst}};
  for (const int megabytes : {8, 20, 34, 44, 60, 78, largest}) {
    for (const int alternate : {0, 1}) {
      for (const auto& hint : hints) {
        Reads r{};
        r.data = data;
        r.tiles = static_cast<int>(int64_t{megabytes} * 1000000 / kTile);
        r.alternate = alternate;
        r.hint = hint.hint;
        const double first = seconds(r, 1, device);
        const double again = (seconds(r, kPasses, device) - first) / (kPasses - 1);
        const double bytes = double{kTile} * r.tiles;
        std::printf(
            "{\"constant\": \"l2_stream\", \"megabytes\": %d, \"order\": \"%s\", \"hint\": \"%s\", "
            "\"first_us\": %.2f, \"again_us\": %.2f, \"again_bytes_per_second\": %.4g}\n",
            megabytes, alternate != 0 ? "alternating" : "forward", hint.name, 1e6 * first,
            1e6 * again, bytes / again);
      }
    }
  }
}

}  // namespace
}  // namespace dspark::bench

int main() {
  const dspark::prim::DeviceLimits device = dspark::bench::device_or_exit();
  if (device.major < 9) {
    std::fprintf(stderr, "bulk copies need compute capability 9.0\n");
    return dspark::bench::kNoDevice;
  }
  dspark::bench::measure(device);
  return 0;
}
