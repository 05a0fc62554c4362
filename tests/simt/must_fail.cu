// SPDX-License-Identifier: Apache-2.0
//
// Kernels with one fault each, and the same kernels without it (kRight): the runner's own tests ask
// that the first are reported and the second are not.
#include <string.h>

#include "core/problems.h"
#include "cuda/prim/async.h"
#include "cuda/prim/barrier.h"
#include "cuda/prim/dependency.h"
#include "cuda/prim/launch.h"
#include "cuda/prim/memory.h"

namespace dspark::simt {
namespace {

constexpr int kThreads = 64;

/// What every case gets. data: 4 * kThreads floats. words: 16 zeroed words.
struct Arrays {
  float* data;
  uint32_t* words;
};

template <bool kRight>
__global__ void block_barrier(Arrays a) {
  __shared__ float line[kThreads];
  const unsigned t = threadIdx.x;
  line[t] = static_cast<float>(t);
  if (kRight) __syncthreads();
  a.data[t] = line[kThreads - 1 - t];
}

template <bool kRight>
__global__ void second_barrier(Arrays a) {  // the one before the buffer is used again
  __shared__ float line[kThreads];
  const unsigned t = threadIdx.x;
  for (int turn = 0; turn < 2; ++turn) {
    line[t] = static_cast<float>(t + turn);
    __syncthreads();
    a.data[t] = line[kThreads - 1 - t];
    if (kRight) __syncthreads();
  }
}

template <bool kRight>
__global__ void warp_sync(Arrays a) {
  __shared__ float line[kThreads];
  const unsigned t = threadIdx.x;
  line[t] = static_cast<float>(t);
  if (kRight) __syncwarp();
  a.data[t] = line[t ^ 1];
}

template <bool kRight>
__global__ void shuffle_is_no_barrier(Arrays a) {
  __shared__ float line[kThreads];
  const unsigned t = threadIdx.x;
  line[t] = static_cast<float>(t);
  const float x = __shfl_xor_sync(0xffffffffu, line[t], 3);
  if (kRight) __syncwarp();
  a.data[t] = line[t ^ 1] + x;
}

template <bool kRight>
__global__ void named_barrier(Arrays a) {
  __shared__ float line[kThreads];
  const unsigned t = threadIdx.x;
  if (t < 32) {
    line[t] = static_cast<float>(t);
    if (kRight) prim::barrier_arrive(1, kThreads);
  } else {
    if (kRight) prim::barrier_sync(1, kThreads);
    a.data[t] = line[t - 32];
  }
}

// Block 0 writes, block 1 reads behind a flag. kFault: what the wrong version leaves out.
enum Handover { kRelease, kAcquire, kWriterBarrier, kReaderBarrier, kWriterFence, kReaderFence };

template <Handover kFault>
__device__ void send(Arrays a, bool right) {
  const unsigned t = threadIdx.x;
  a.data[t] = static_cast<float>(t);
  if (right || kFault != kWriterBarrier) __syncthreads();
  if (t != 0) return;
  if (kFault == kWriterFence || kFault == kReaderFence) {
    if (right || kFault != kWriterFence) prim::fence_gpu();
    atomicAdd(&a.words[0], 1u);
  } else if (right || kFault != kRelease) {
    prim::red_release_add(&a.words[0], 1);
  } else {
    prim::st_relaxed(&a.words[0], 1);
  }
}

template <Handover kFault>
__device__ void receive(Arrays a, bool right) {
  const unsigned t = threadIdx.x;
  const bool fenced = kFault == kWriterFence || kFault == kReaderFence;
  if (t == 0) {
    if (fenced || (!right && kFault == kAcquire)) {
      while (prim::ld_relaxed(&a.words[0]) == 0) {
      }
      if (fenced && (right || kFault != kReaderFence)) prim::fence_gpu();
    } else {
      while (prim::ld_acquire(&a.words[0]) == 0) {
      }
    }
  }
  if (right || kFault != kReaderBarrier) __syncthreads();
  a.data[kThreads + t] = a.data[kThreads - 1 - t];
}

template <bool kRight, Handover kFault>
__global__ void handover(Arrays a) {
  if (blockIdx.x == 0) {
    send<kFault>(a, kRight);
  } else {
    receive<kFault>(a, kRight);
  }
}

template <bool kRight>
__global__ void two_blocks_write(Arrays a) {
  a.data[kRight ? blockIdx.x * kThreads + threadIdx.x : threadIdx.x] = 1.0f;
}

template <bool kRight>
__global__ void plain_and_atomic(Arrays a) {
  if (threadIdx.x == 0) {
    if (kRight) {
      atomicAdd(&a.words[0], 1u);
    } else {
      a.words[0] += 1;
    }
  } else {
    atomicAdd(&a.words[0], 1u);
  }
}

template <bool kRight>
__global__ void global_bounds(Arrays a) {
  a.data[4 * kThreads - (kRight ? 1 : 0) - (threadIdx.x == 0 ? 0 : threadIdx.x)] = 1.0f;
}

template <bool kRight>
__global__ void shared_bounds(Arrays a) {
  DSPARK_DYNAMIC_SHARED(raw);
  float* line = reinterpret_cast<float*>(raw);
  const unsigned t = threadIdx.x;
  line[t + (kRight ? 0 : 1)] = static_cast<float>(t);
  __syncthreads();
  a.data[t] = line[kRight ? t : t + 1];
}

template <bool kRight>
__global__ void alignment(Arrays a) {
  if (threadIdx.x != 0) return;
  const float4* vector = reinterpret_cast<const float4*>(a.data + (kRight ? 4 : 1));
  *reinterpret_cast<float4*>(a.data + 8) = *vector;
}

template <bool kRight>
__global__ void uninitialised(Arrays a) {
  __shared__ float line[kThreads];
  const unsigned t = threadIdx.x;
  if (kRight || t < 32) line[t] = 1.0f;
  __syncthreads();
  a.data[t] = line[kThreads - 1 - t];
}

template <bool kRight>
__global__ void divergent_barrier(Arrays a) {
  const unsigned t = threadIdx.x;
  if (kRight) {
    __syncthreads();
  } else if (t < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  a.data[t] = 1.0f;
}

template <bool kRight>
__global__ void dead_lock(Arrays a) {
  const unsigned t = threadIdx.x;
  if (kRight || t < 32) {
    __syncthreads();
  } else {
    prim::barrier_sync(2, kThreads);
  }
  a.data[t] = 1.0f;
}

template <bool kRight>
__global__ void live_lock(Arrays a) {
  if (kRight && threadIdx.x == 0) prim::st_release(&a.words[0], 1);
  while (prim::ld_acquire(&a.words[0]) == 0) {
  }
}

template <bool kRight>
__global__ void exited_lane(Arrays a) {
  const unsigned t = threadIdx.x;
  if (t % 32 == 5 && !kRight) return;
  a.data[t] = __shfl_xor_sync(0xffffffffu, static_cast<float>(t), 1);
}

template <bool kRight>
__global__ void lane_outside_mask(Arrays a) {
  const unsigned t = threadIdx.x;
  if (t % 32 < 16) a.data[t] = __shfl_sync(0xffffu, static_cast<float>(t), kRight ? 3 : 17);
}

template <bool kRight>
__global__ void caller_outside_mask(Arrays a) {
  const unsigned t = threadIdx.x;
  if (kRight && t % 32 >= 16) return;
  a.data[t] = __shfl_sync(0xffffu, static_cast<float>(t), 3);
}

template <bool kRight>
__global__ void different_collectives(Arrays a) {
  const unsigned t = threadIdx.x;
  if (kRight || t % 2 == 0) {
    __syncwarp();
  } else {
    a.data[t] = static_cast<float>(__ballot_sync(0xffffffffu, 1));
  }
}

// cp.async: the wrong versions read too early, read what another thread copied, or leave.
enum CopyFault { kWait, kCopyBarrier, kLeave };

template <bool kRight, CopyFault kFault>
__global__ void copies(Arrays a) {
  __shared__ float4 line[kThreads];
  const unsigned t = threadIdx.x;
  prim::cp_async_16(&line[t], a.data + 4 * (t % 32));
  prim::cp_async_commit();
  if (kRight || kFault != kLeave) {
    if (kRight || kFault != kWait) prim::cp_async_wait<0>();
    if (kRight || kFault != kCopyBarrier) __syncthreads();
    a.data[3 * kThreads + t] = line[kThreads - 1 - t].x;
    prim::cp_async_wait<0>();
  }
}

template <bool kRight>
__global__ void copy_over_readers(Arrays a) {
  __shared__ __align__(16) float line[4 * kThreads];
  const unsigned t = threadIdx.x;
  line[t] = 1.0f;
  __syncthreads();
  a.data[3 * kThreads + t] = line[kThreads - 1 - t];
  if (kRight) __syncthreads();
  prim::cp_async_16(&line[4 * t], a.data + 4 * (t % 32));
  prim::cp_async_commit();
  prim::cp_async_wait<0>();
}

template <bool kRight>
__global__ void local_memory(Arrays a) {
  __shared__ float* pointer;
  float mine = static_cast<float>(threadIdx.x);
  if (threadIdx.x == 0) pointer = &mine;
  __syncthreads();
  const float* from = kRight ? &mine : pointer;
  a.data[threadIdx.x] = *from;
  __syncthreads();
}

__device__ float deep(float x, int levels) {
  volatile float pad[1024];
  for (int i = 0; i < 1024; ++i) pad[i] = x;
  return levels == 0 ? pad[0] : deep(x + 1.0f, levels - 1) + pad[levels];
}

template <bool kRight>
__global__ void stack(Arrays a) {
  if (threadIdx.x == 40) a.data[0] = deep(1.0f, kRight ? 8 : 33);
  __syncthreads();
}

// Must pass: threads may leave while others go on to meet in __syncthreads().
template <bool>
__global__ void early_exit(Arrays a) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  if (blockIdx.x == 0) a.data[threadIdx.x] = 1.0f;
}

// The second of two launches, which may start early. One warp waits for all.
__global__ void earlier_launch(Arrays a) { a.data[threadIdx.x] = 1.0f; }

template <bool kRight>
__global__ void early_read(Arrays a) {
  const unsigned t = threadIdx.x;
  a.data[2 * kThreads + t] = 2.0f;  // not the other one's
  if (kRight && t < 32) prim::grid_dependency_wait();
  __syncthreads();
  a.data[kThreads + t] = a.data[t];
}

template <bool kRight>
__global__ void early_write(Arrays a) {
  if (kRight) prim::grid_dependency_wait();
  a.data[kThreads - 1 - threadIdx.x] = 2.0f;
}

struct Case {
  const char* name;
  void (*wrong)(Arrays);
  void (*right)(Arrays);
  unsigned blocks = 1;
  bool cooperative = false;
  bool early = false;  // behind earlier_launch
};

const Case kCases[] = {
    {"block_barrier", &block_barrier<false>, &block_barrier<true>},
    {"second_barrier", &second_barrier<false>, &second_barrier<true>},
    {"warp_sync", &warp_sync<false>, &warp_sync<true>},
    {"shuffle_is_no_barrier", &shuffle_is_no_barrier<false>, &shuffle_is_no_barrier<true>},
    {"named_barrier", &named_barrier<false>, &named_barrier<true>},
    {"release", &handover<false, kRelease>, &handover<true, kRelease>, 2, true},
    {"acquire", &handover<false, kAcquire>, &handover<true, kAcquire>, 2, true},
    {"writer_barrier", &handover<false, kWriterBarrier>, &handover<true, kWriterBarrier>, 2, true},
    {"reader_barrier", &handover<false, kReaderBarrier>, &handover<true, kReaderBarrier>, 2, true},
    {"writer_fence", &handover<false, kWriterFence>, &handover<true, kWriterFence>, 2, true},
    {"reader_fence", &handover<false, kReaderFence>, &handover<true, kReaderFence>, 2, true},
    {"two_blocks_write", &two_blocks_write<false>, &two_blocks_write<true>, 2},
    {"plain_and_atomic", &plain_and_atomic<false>, &plain_and_atomic<true>},
    {"global_bounds", &global_bounds<false>, &global_bounds<true>},
    {"shared_bounds", &shared_bounds<false>, &shared_bounds<true>},
    {"alignment", &alignment<false>, &alignment<true>},
    {"uninitialised", &uninitialised<false>, &uninitialised<true>},
    {"divergent_barrier", &divergent_barrier<false>, &divergent_barrier<true>},
    {"dead_lock", &dead_lock<false>, &dead_lock<true>},
    {"live_lock", &live_lock<false>, &live_lock<true>},
    {"exited_lane", &exited_lane<false>, &exited_lane<true>},
    {"lane_outside_mask", &lane_outside_mask<false>, &lane_outside_mask<true>},
    {"caller_outside_mask", &caller_outside_mask<false>, &caller_outside_mask<true>},
    {"different_collectives", &different_collectives<false>, &different_collectives<true>},
    {"copy_wait", &copies<false, kWait>, &copies<true, kWait>},
    {"copy_barrier", &copies<false, kCopyBarrier>, &copies<true, kCopyBarrier>},
    {"copy_leave", &copies<false, kLeave>, &copies<true, kLeave>},
    {"copy_over_readers", &copy_over_readers<false>, &copy_over_readers<true>},
    {"local_memory", &local_memory<false>, &local_memory<true>},
    {"stack", &stack<false>, &stack<true>},
    {"too_many_blocks", &early_exit<false>, &early_exit<true>, 1000, true},
    {"early_exit", &early_exit<false>, &early_exit<true>},
    {"early_read", &early_read<false>, &early_read<true>, 1, false, true},
    {"early_write", &early_write<false>, &early_write<true>, 1, false, true},
};

}  // namespace
}  // namespace dspark::simt

extern "C" {

/// Run the case `name`, with its fault or without. data: 256 floats, words: 16 words.
DSPARK_API dspark_status dspark_simt_case(const char* name, int right, float* data,
                                          uint32_t* words) {
  using namespace dspark;
  for (const simt::Case& c : simt::kCases) {
    if (strcmp(c.name, name) != 0) continue;
    prim::LaunchConfig config;
    config.grid = dim3(c.blocks > 2 && right != 0 ? 6 : c.blocks);
    config.block = dim3(simt::kThreads);
    config.shared_bytes = simt::kThreads * sizeof(float);
    config.cooperative = c.cooperative;
    const simt::Arrays arrays{data, words};
    if (c.early) {
      const dspark_status first = prim::launch("earlier", simt::earlier_launch, config, arrays);
      if (first.code != DSPARK_OK) return first;
    }
    config.programmatic = c.early;
    return prim::launch(name, right != 0 ? c.right : c.wrong, config, arrays);
  }
  return failed_status(DSPARK_INVALID_ARGUMENT, __FILE__, __LINE__, "no case %s", name);
}

/// The names of the cases, then NULL.
DSPARK_API const char* dspark_simt_case_name(int i) {
  const int count = static_cast<int>(sizeof dspark::simt::kCases / sizeof dspark::simt::kCases[0]);
  return i < count ? dspark::simt::kCases[i].name : nullptr;
}

}  // extern "C"
