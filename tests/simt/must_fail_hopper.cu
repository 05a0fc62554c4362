// SPDX-License-Identifier: Apache-2.0
//
// Kernels of Hopper's primitives with one fault each, and the same kernels without it. Most faults
// are planted in one small pipeline, the shape of every kernel for wgmma: a producer copies the
// boxes of A into a ring, a warpgroup multiplies them by a B that it has stored itself.
#include <string.h>

#include "core/dtype.h"
#include "core/problems.h"
#include "cuda/prim/barrier.h"
#include "cuda/prim/bulk.h"
#include "cuda/prim/cluster.h"
#include "cuda/prim/launch.h"
#include "cuda/prim/mbarrier.h"
#include "cuda/prim/wgmma.h"

namespace dspark::simt {
namespace {

constexpr int kRows = 64, kColumns = 8, kBoxes = 6, kStages = 2;
constexpr int kBoxBytes = kRows * prim::kBoxRowBytes;
constexpr int kThreads = 160;  // a warpgroup, and the producer's warp
constexpr int kSharedBytes = kStages * kBoxBytes + kBoxes * kColumns * prim::kBoxRowBytes;

enum Fault {
  kNone,
  kNoFullWait,       // multiplies before the box is there
  kNoEmptyWait,      // copies over a box that is being multiplied
  kFreedEarly,       // frees the stage before wgmma has read it
  kBytesMissing,     // expects half a box
  kBytesTooMany,     // expects more than a box
  kNoProxyFence,     // B by ordinary stores, not fenced
  kNoBarrier,        // B fenced, but without a barrier behind it
  kLateBarrier,      // B fenced, the barrier only before the wait
  kNoInitFence,      // the copy engine does not know the mbarriers
  kNoInit,           // one of the mbarriers is not initialised
  kStaleParity,      // waits for the phase before, which has ended
  kNextParity,       // waits for a phase that never ends
  kArrivesTooOften,  // every thread instead of one a warp
  kNoWgmmaFence,     // accumulators were written just before
  kReadEarly,        // accumulators are read before the wait
  kNoWait,           // the block ends while wgmma is under way
  kNoCommit,         // the group is not closed, so the wait does not see it
  kCopyLeft,         // the block ends while a copy is under way
  kBarrierStored     // an ordinary store over an mbarrier
};

struct Ring {
  unsigned char* boxes;  // [kStages] of kBoxBytes
  unsigned char* b;      // [kBoxes] of kColumns rows of 128 bytes
  uint64_t* full;
  uint64_t* empty;
};

/// B[column, k], small integers.
__host__ __device__ float element_b(int column, int k) {
  return static_cast<float>((column * 5 + k * 3) % 7 - 3);
}

template <Fault kFault>
__device__ void store_b(const Ring& ring) {
  for (int i = static_cast<int>(threadIdx.x); i < kColumns * kBoxes * 64; i += 128) {
    const int column = i / (kBoxes * 64), k = i % (kBoxes * 64);
    const int offset = column * prim::kBoxRowBytes + k % 64 * 2;
    unsigned char* box = ring.b + k / 64 * kColumns * prim::kBoxRowBytes;
    const uint16_t value = f32_to_bf16(element_b(column, k));
    *reinterpret_cast<uint16_t*>(box + (offset ^ (column & 7) << 4)) = value;
  }
  if (kFault != kNoProxyFence) prim::fence_proxy_async();
}

template <Fault kFault>
__device__ void produce(const prim::TensorMap& a, const Ring& ring) {
  for (int i = 0; i < kBoxes; ++i) {
    const int stage = i % kStages;
    const uint32_t phase = static_cast<uint32_t>(i / kStages) & 1;
    if (kFault != kNoEmptyWait) prim::mbarrier_wait(&ring.empty[stage], phase ^ 1);
    const uint32_t bytes = kFault == kBytesMissing   ? kBoxBytes / 2
                           : kFault == kBytesTooMany ? kBoxBytes + 16
                                                     : kBoxBytes;
    prim::mbarrier_expect(&ring.full[stage], bytes);
    prim::tensor_load_2d(ring.boxes + stage * kBoxBytes, a, &ring.full[stage], i * 64, 0,
                         prim::CacheHint::kNormal);
  }
}

template <Fault kFault>
__device__ void multiply(const Ring& ring, float (&d)[kColumns / 2]) {
  for (int i = 0; i < kBoxes; ++i) {
    const int stage = i % kStages;
    const uint32_t phase = static_cast<uint32_t>(i / kStages) & 1;
    const bool last = i == kBoxes - 1;
    if (kFault != kNoFullWait) {
      prim::mbarrier_wait(&ring.full[stage], kFault == kStaleParity && last ? phase ^ 1 : phase);
    }
    if (kFault == kNextParity && last) prim::mbarrier_wait(&ring.full[stage], phase ^ 1);
    if (kFault != kNoWgmmaFence) prim::wgmma_fence();
    const uint64_t a = prim::wgmma_descriptor(ring.boxes + stage * kBoxBytes);
    const uint64_t b = prim::wgmma_descriptor(ring.b + i * kColumns * prim::kBoxRowBytes);
    for (uint32_t k = 0; k < 4; ++k) {
      prim::wgmma_bf16<kColumns>(d, prim::wgmma_advance(a, 32 * k), prim::wgmma_advance(b, 32 * k),
                                 i + static_cast<int>(k) > 0);
    }
    if (kFault != kNoCommit) prim::wgmma_commit();
    const bool signals = threadIdx.x % 32 == 0 || kFault == kArrivesTooOften;
    if (kFault == kFreedEarly && signals) prim::mbarrier_arrive(&ring.empty[stage]);
    if (kFault == kNoWait && last) return;
    if (kFault == kReadEarly) prim::wgmma_hold(d);
    if (kFault == kLateBarrier && i == 0) prim::barrier_sync(1, 128);
    prim::wgmma_wait<0>();
    prim::wgmma_hold(d);
    if (kFault != kFreedEarly && signals) prim::mbarrier_arrive(&ring.empty[stage]);
  }
}

/// out[row, column] = sum over k of A[row, k] B[column, k].
template <Fault kFault>
__global__ void pipeline(const __grid_constant__ prim::TensorMap a, float* out) {
  DSPARK_DYNAMIC_SHARED(memory);
  __shared__ uint64_t barriers[2 * kStages];
  const Ring ring{memory, memory + kStages * kBoxBytes, barriers, barriers + kStages};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      prim::mbarrier_init(&ring.full[s], 1);
      if (kFault != kNoInit || s == 0) prim::mbarrier_init(&ring.empty[s], 4);
    }
    if (kFault == kBarrierStored) ring.full[1] = 0;
    if (kFault != kNoInitFence) prim::mbarrier_init_fence();
  }
  constexpr bool kLate = kFault == kNoBarrier || kFault == kLateBarrier;
  if (threadIdx.x < 128 && !kLate) store_b<kFault>(ring);
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128) produce<kFault>(a, ring);
    return;
  }
  if (kLate) store_b<kFault>(ring);
  float d[kColumns / 2];
  multiply<kFault>(ring, d);
  if (kFault == kCopyLeft) {
    prim::barrier_sync(1, 128);  // from here on nobody waits, so a late copy lands behind the end
    if (threadIdx.x == 0) {
      prim::mbarrier_expect(ring.full, kBoxBytes);
      prim::tensor_load_2d(ring.boxes, a, ring.full, 0, 0, prim::CacheHint::kNormal);
    }
  }
  const int row = static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
  const int column = static_cast<int>(threadIdx.x % 4 * 2);
  for (int e = 0; e < 4; ++e) out[(row + e / 2 * 8) * kColumns + column + e % 2] = d[e];
}

/// Two CTAs: each reads what the other has in shared memory.
enum ClusterFault { kClusterNone, kNoClusterBarrier, kPeerLeft, kUnpaired };

template <ClusterFault kFault>
__global__ void neighbours(const __grid_constant__ prim::TensorMap, float* out) {
  __shared__ float mine[kThreads];
  mine[threadIdx.x] = static_cast<float>(threadIdx.x + 1000 * prim::cluster_rank());
  if (kFault != kNoClusterBarrier) prim::cluster_arrive();
  if (kFault == kUnpaired) prim::cluster_arrive();
  if (kFault != kNoClusterBarrier) prim::cluster_wait();
  if (kFault == kPeerLeft && prim::cluster_rank() == 1) return;
  if (kFault == kPeerLeft) {
    // Long enough for the other CTA to leave.
    for (int i = 0; i < 4096; ++i) __syncthreads();
  }
  const float* theirs = prim::map_shared(mine, prim::cluster_rank() ^ 1);
  const float read = theirs[kThreads - 1 - threadIdx.x];
  if (kFault != kPeerLeft) {
    prim::cluster_arrive();  // nobody leaves while another may still read
    prim::cluster_wait();
  }
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  if (i < kRows * kColumns) out[i] = read;
}

struct Case {
  const char* name;
  void (*kernel)(prim::TensorMap, float*);
  unsigned cluster = 0;
};

const Case kCases[] = {
    {"right", &pipeline<kNone>},
    {"full_wait", &pipeline<kNoFullWait>},
    {"empty_wait", &pipeline<kNoEmptyWait>},
    {"freed_early", &pipeline<kFreedEarly>},
    {"bytes_missing", &pipeline<kBytesMissing>},
    {"bytes_too_many", &pipeline<kBytesTooMany>},
    {"proxy_fence", &pipeline<kNoProxyFence>},
    {"operand_barrier", &pipeline<kNoBarrier>},
    {"late_barrier", &pipeline<kLateBarrier>},
    {"init_fence", &pipeline<kNoInitFence>},
    {"init", &pipeline<kNoInit>},
    {"stale_parity", &pipeline<kStaleParity>},
    {"next_parity", &pipeline<kNextParity>},
    {"arrives_too_often", &pipeline<kArrivesTooOften>},
    {"wgmma_fence", &pipeline<kNoWgmmaFence>},
    {"read_early", &pipeline<kReadEarly>},
    {"wgmma_left", &pipeline<kNoWait>},
    {"wgmma_commit", &pipeline<kNoCommit>},
    {"copy_left", &pipeline<kCopyLeft>},
    {"barrier_stored", &pipeline<kBarrierStored>},
    {"cluster_right", &neighbours<kClusterNone>, 2},
    {"cluster_barrier", &neighbours<kNoClusterBarrier>, 2},
    {"cluster_peer_left", &neighbours<kPeerLeft>, 2},
    {"cluster_unpaired", &neighbours<kUnpaired>, 2},
};

}  // namespace
}  // namespace dspark::simt

extern "C" {

/// Run the case `name`. matrix: [64, 384] bf16, A. out: [64, 8].
DSPARK_API dspark_status dspark_simt_hopper_case(const char* name, const uint16_t* matrix,
                                                 float* out) {
  using namespace dspark;
  using namespace dspark::simt;
  for (const Case& c : kCases) {
    if (strcmp(c.name, name) != 0) continue;
    prim::TensorMap map;
    const dspark_status made = prim::make_tensor_map_2d(&map, prim::TensorType::kBf16, matrix,
                                                        kRows, kBoxes * 64, kBoxes * 64 * 2, kRows);
    if (made.code != DSPARK_OK) return made;
    prim::LaunchConfig config;
    config.grid = dim3(c.cluster == 0 ? 1 : 2 * c.cluster);
    config.block = dim3(kThreads);
    config.shared_bytes = kSharedBytes;
    config.cluster = c.cluster;
    return prim::launch(name, c.kernel, config, map, out);
  }
  return failed_status(DSPARK_INVALID_ARGUMENT, __FILE__, __LINE__, "no case %s", name);
}

/// The names of the cases, then NULL.
DSPARK_API const char* dspark_simt_hopper_case_name(int i) {
  const int count = static_cast<int>(sizeof dspark::simt::kCases / sizeof dspark::simt::kCases[0]);
  return i < count ? dspark::simt::kCases[i].name : nullptr;
}

}  // extern "C"
