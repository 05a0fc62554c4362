// SPDX-License-Identifier: Apache-2.0
//
// Who has finished: a counter for each tile that several CTAs share, named after the CTA in which
// the tile begins. A CTA arrives when its part is in the workspace; the parts are merged when as
// many have arrived as have a share.
//
// In a cooperative launch nothing is assumed about the workspace. CTA 0 zeroes the counters; the
// others must not count before that, and cannot know it from memory alone, so CTA j asks: it reads
// echo[j], writes the number behind it to check[j] and waits to see it in echo[j]. Only CTA 0 of
// this very launch writes echo[j] = check[j], and only behind its zeroing; whatever was in echo[j]
// before is not the number asked for. CTA 0 answers when it knows its share, now and then while it
// works, and at its end until all have been admitted. The question is put before the work and the
// answer needed behind it, so nobody waits for it in a launch that has some work; and what has to
// be read before the question is on its way while the plan is made.
//
// Without a cooperative launch the host has zeroed the counters in stream order and nobody waits:
// whoever arrives last merges.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_EXCHANGE_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_EXCHANGE_CUH_

#include "cuda/prim/memory.h"
#include "cuda/verify_attention/args.h"

namespace dspark::cuda::attention {

class Exchange {
 public:
  /// In shared memory.
  struct State {
    uint32_t ticket;    // the number asked for
    uint32_t admitted;  // it has been seen
  };
  __device__ Exchange(const Args& args, State& state)
      : work_(args.work), s_(state), waits_(args.config.cooperative && gridDim.x > 1) {}

  /// Before anything else of the launch that touches the workspace; waits for nothing. Whole CTA.
  __device__ void open() {
    if (!waits_) return;
    if (threadIdx.x == 0) s_.admitted = 0;
    if (blockIdx.x == 0) {
      for (uint32_t i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
        prim::st_relaxed(work_.arrived + i, 0u);
      }
      if (threadIdx.x == 0) prim::st_relaxed(work_.admitted, 0u);
    } else if (threadIdx.x == 0) {
      before_ = prim::ld_relaxed(work_.echo + blockIdx.x);
    }
  }

  /// The question, and the first answers. Whole CTA, with a barrier since open().
  __device__ void ask() {
    if (!waits_) return;
    if (blockIdx.x == 0) {
      prim::fence_gpu();  // whatever this thread answers from now on, the zeros are before it
      answer();
    } else if (threadIdx.x == 0) {
      s_.ticket = before_ + 1;
      prim::st_relaxed(work_.check + blockIdx.x, s_.ticket);
    }
  }

  /// CTA 0 answers who has asked. Any thread, at any time behind ask(); a few reads of L2.
  __device__ void answer() const {
    if (!waits_ || blockIdx.x != 0) return;
    for (uint32_t j = threadIdx.x; j < gridDim.x; j += blockDim.x) {
      if (j != 0) prim::st_relaxed(work_.echo + j, prim::ld_relaxed(work_.check + j));
    }
  }

  /// Behind this the counters are this launch's. Whole CTA, behind ask().
  __device__ void admit() {
    if (!waits_ || s_.admitted != 0) return;
    __syncthreads();
    if (blockIdx.x != 0 && threadIdx.x == 0) {
      while (prim::ld_acquire(work_.echo + blockIdx.x) != s_.ticket) {
      }
      prim::red_release_add(work_.admitted, 1);
    }
    if (threadIdx.x == 0) s_.admitted = 1;
    __syncthreads();
  }

  /// This CTA's part of the tile that begins in CTA `owner` is in the workspace. Whole CTA, behind
  /// admit(). Whether this CTA has a part in merging: all have, or without waiting the last one.
  __device__ bool arrive(int32_t owner, int32_t parts) const {
    __syncthreads();
    if (waits_) {
      if (threadIdx.x == 0) prim::red_release_add(work_.arrived + owner, 1);
      return true;
    }
    bool last = false;
    if (threadIdx.x == 0) {
      prim::fence_gpu();
      last = atomicAdd(work_.arrived + owner, 1u) + 1 == static_cast<uint32_t>(parts);
      prim::fence_gpu();
    }
    return __syncthreads_or(last) != 0;
  }

  /// Until all parts of the tile are there. Whole CTA; ends with a barrier.
  __device__ void wait(int32_t owner, int32_t parts) const {
    wait_for(work_.arrived + owner, static_cast<uint32_t>(parts));
    __syncthreads();
  }

  /// The end of the first `participants` CTAs: CTA 0 stays until each of the others has its answer.
  __device__ void close(int32_t participants) {
    if (!waits_) return;
    admit();
    if (blockIdx.x == 0) wait_for(work_.admitted, static_cast<uint32_t>(participants) - 1);
  }

  __device__ bool waits() const { return waits_; }

 private:
  __device__ void wait_for(const uint32_t* counter, uint32_t count) const {
    if (blockIdx.x == 0) {
      while (prim::ld_acquire(counter) < count) answer();
    } else if (threadIdx.x == 0) {
      while (prim::ld_acquire(counter) < count) {
      }
    }
  }

  const Workspace& work_;
  State& s_;
  bool waits_;
  uint32_t before_ = 0;  // what the answer was before this launch; thread 0 of the others
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_EXCHANGE_CUH_
