// SPDX-License-Identifier: Apache-2.0
//
// A team: the CTAs of a cluster, or one CTA alone, that share a request. All of its threads come to
// the same decisions, so whatever steers them is first made equal by a reduction over the team.
//
// An exchange is one cluster barrier: a CTA leaves its contribution in its own shared memory and
// behind the barrier reads those of all. There are two places, used in turn: who writes place k
// again has passed the barrier of place k + 1, which everybody reaches behind the reads of k.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_TEAM_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_TEAM_CUH_

#include "cuda/prim/cluster.h"
#include "cuda/prim/platform.h"
#include "cuda/rejection_sampler/args.h"

namespace dspark::cuda::verify {

constexpr int kWords = 4;  // of 64 bits, the most that a contribution has

struct TeamShared {
  uint64_t warp[kWarps][kWords];
  uint64_t place[2][kWords];
  uint64_t total[kWords];
  uint64_t bins[2][kThreads];  // a contribution of every thread (select.cuh)
};

struct Team {
  TeamShared* shared;
  int32_t size;
  int32_t rank;
  int32_t turn;

  /// A barrier of the team; also one of the block.
  __device__ __forceinline__ void barrier() const {
    if (size == 1) {
      __syncthreads();
      return;
    }
    __syncwarp();  // whole warps arrive
    prim::cluster_arrive();
    prim::cluster_wait();
  }
};

__device__ __forceinline__ int32_t lane_id() { return static_cast<int32_t>(threadIdx.x) % 32; }
__device__ __forceinline__ int32_t warp_id() { return static_cast<int32_t>(threadIdx.x) / 32; }

/// What a look at a row, and at the law of its draft, finds.
enum : uint32_t {
  kTargetNan = 1,
  kDraftNan = 2,
  kDisorder = 4,  // a list that is none
  kListed = 8     // the drafted id has a column
};

/// The largest logit of a row with its segment, that of the unprocessed row, findings.
struct Tops {
  uint64_t key;  // ordered logit, then ~segment
  uint32_t raw;  // ordered
  uint32_t found;
  uint32_t columns;  // of the draft's law
  uint32_t unused;

  __device__ __forceinline__ void add(const Tops& other) {
    key = other.key > key ? other.key : key;
    raw = other.raw > raw ? other.raw : raw;
    found |= other.found;
    columns = other.columns > columns ? other.columns : columns;
  }
};

/// Two exact sums.
struct Masses {
  double high, low;
  double raw_high, raw_low;

  __device__ __forceinline__ void add(const Masses& other) {
    high += other.high;
    low += other.low;
    raw_high += other.raw_high;
    raw_low += other.raw_low;
  }
};

/// The best packed key.
struct Key {
  uint64_t key;

  __device__ __forceinline__ void add(const Key& other) { key = other.key > key ? other.key : key; }
};

/// x combined over `lanes` lanes, a power of two, of each group of so many.
template <class T>
__device__ __forceinline__ T warp_total(T x, int lanes) {
  constexpr int kHalves = sizeof(T) / 4;
#pragma unroll 1
  for (int d = lanes / 2; d > 0; d /= 2) {
    uint32_t words[kHalves];
    __builtin_memcpy(words, &x, sizeof x);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) words[i] = __shfl_xor_sync(~0u, words[i], d);
    T other;
    __builtin_memcpy(&other, words, sizeof x);
    x.add(other);
  }
  return x;
}

template <class T>
__device__ __forceinline__ void put(uint64_t* place, const T& x) {
  uint64_t words[sizeof(T) / 8];
  __builtin_memcpy(words, &x, sizeof x);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 8); ++i) place[i] = words[i];
}
template <class T>
__device__ __forceinline__ T get(const uint64_t* place) {
  uint64_t words[sizeof(T) / 8];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 8); ++i) words[i] = place[i];
  T x;
  __builtin_memcpy(&x, words, sizeof x);
  return x;
}

/// x combined over all threads of the team, to all of them. What a thread of the block wrote before
/// is seen behind it; T{} changes nothing when it is added.
template <class T>
__device__ __forceinline__ T combine(Team& team, T x) {
  static_assert(sizeof(T) % 8 == 0 && sizeof(T) <= 8 * kWords, "whole words");
  TeamShared& s = *team.shared;
  x = warp_total(x, 32);
  if (lane_id() == 0) put(s.warp[warp_id()], x);
  __syncthreads();
  uint64_t* place = team.size == 1 ? s.total : s.place[team.turn];
  if (warp_id() == 0) {
    x = lane_id() < kWarps ? get<T>(s.warp[lane_id()]) : T{};
    x = warp_total(x, kWarps);
    if (lane_id() == 0) put(place, x);
  }
  if (team.size > 1) {
    team.barrier();
    if (warp_id() == 0) {
      const int32_t peer = lane_id() < team.size ? lane_id() : 0;
      x = get<T>(prim::map_shared(place, static_cast<uint32_t>(peer)));
      if (lane_id() >= team.size) x = T{};
      x = warp_total(x, kMaxTeam);
      if (lane_id() == 0) put(s.total, x);
    }
    team.turn ^= 1;
  }
  __syncthreads();
  return get<T>(s.total);
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_TEAM_CUH_
