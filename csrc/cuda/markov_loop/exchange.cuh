// SPDX-License-Identifier: Apache-2.0
//
// The one thing that CTAs say to each other in a step: the best key of every row, and the
// candidate behind it.
//
//   publish   red.max of the CTA's key of every row, its candidate beside it in a cell of its own
//   arrive    barrier, then one red.release.add on a counter that only grows inside a launch
//   wait      ld.acquire of the counter until all CTAs have arrived at this exchange
//   collect   read the winning keys; who owns the winning segment is arithmetic, so its candidate
//             is one more read
//
// Nothing is assumed about the workspace: garbage, the remains of a launch that was killed, another
// problem's data. CTA 0 zeroes the counter and the keys of the launch. The others must not publish
// before that, and cannot know it from memory alone, so CTA j asks: it reads echo[j], writes the
// number behind it to check[j] and waits to see it in echo[j]. Only CTA 0 of this very launch
// writes echo[j] = check[j], and only behind its zeroing; whatever was in echo[j] before is not the
// number asked for. CTA 0 answers at its start and again in every turn of its first wait.
//
// The keys of step k are in set k % 3. Set (k + 1) % 3 is zeroed by CTA 0 at the start of step k:
// it held step k - 2, whose keys every CTA has read before it arrived at step k - 1; and nobody
// writes step k + 1 before CTA 0 has arrived at step k. Candidates of step k are in set k % 2:
// written again in step k + 2, behind everybody's arrival at step k + 1.
#ifndef DSPARK_CUDA_MARKOV_LOOP_EXCHANGE_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_EXCHANGE_CUH_

#include "cuda/markov_loop/args.h"
#include "cuda/prim/memory.h"
#include "cuda/prim/platform.h"

namespace dspark::cuda::markov {

static_assert(kMaxGrid <= kThreads, "a thread of CTA 0 for every CTA");

/// A packed candidate.
DSPARK_HD uint64_t pack_pick(int32_t token, float logit) {
  return static_cast<uint64_t>(bits_f32(logit)) << 32 | static_cast<uint32_t>(token);
}
DSPARK_HD int32_t pick_token(uint64_t pick) { return static_cast<int32_t>(pick); }
DSPARK_HD float pick_logit(uint64_t pick) {
  return float_from_bits(static_cast<uint32_t>(pick >> 32));
}

class Exchange {
 public:
  __device__ Exchange(const Workspace& work, const Config& config, int32_t capacity)
      : work_(work), capacity_(capacity), waiting_(config.cooperative && config.grid > 1) {}

  /// Before anything else of the launch that touches the workspace's exchange. Whole CTA.
  __device__ void open(bool start) {
    if (blockIdx.x == 0 && (waiting_ || start)) {
      for (int32_t i = threadIdx.x; i < 3 * capacity_; i += kThreads) work_.keys[i] = 0;
      if (threadIdx.x == 0) prim::st_relaxed(work_.arrived, 0u);
      __syncthreads();
      answer();
    } else if (waiting_ && threadIdx.x == 0) {
      ticket_ = prim::ld_relaxed(work_.echo + blockIdx.x) + 1;
      prim::st_relaxed(work_.check + blockIdx.x, ticket_);
    }
  }

  /// CTA 0 takes away the keys of step k - 2, where step k + 1 will put its own.
  __device__ void recycle(int32_t step) {
    if (blockIdx.x != 0) return;
    uint64_t* keys = work_.keys + (step + 1) % 3 * capacity_;
    for (int32_t n = threadIdx.x; n < capacity_; n += kThreads) keys[n] = 0;
  }

  /// Behind this the CTA may publish. Whole CTA; a barrier the first time.
  __device__ void admit() {
    if (admitted_ || !waiting_) return;
    if (blockIdx.x == 0) {
      answer();
    } else {
      if (threadIdx.x == 0) {
        while (prim::ld_acquire(work_.echo + blockIdx.x) != ticket_) {
        }
      }
      __syncthreads();
    }
    admitted_ = true;
  }

  __device__ void publish(int32_t step, int32_t row, uint64_t key, uint64_t pick) {
    work_.picks[(step % 2 * static_cast<int64_t>(gridDim.x) + blockIdx.x) * capacity_ + row] = pick;
    prim::red_max(work_.keys + step % 3 * capacity_ + row, key);
  }

  /// Everything that this CTA wrote is for the others to read. Whole CTA.
  __device__ void arrive() {
    if (!waiting_) return;
    __syncthreads();
    if (threadIdx.x == 0) prim::red_release_add(work_.arrived, 1);
    target_ += gridDim.x;
  }

  /// Until all CTAs have arrived as often as this one. Whole CTA; ends with a barrier.
  __device__ void wait() {
    if (waiting_) {
      if (blockIdx.x == 0 && target_ == gridDim.x) {
        while (prim::ld_acquire(work_.arrived) < target_) answer();
      } else if (threadIdx.x == 0) {
        while (prim::ld_acquire(work_.arrived) < target_) {
        }
      }
    }
    __syncthreads();
  }

  __device__ uint64_t key(int32_t step, int32_t row) const {
    return prim::ld_relaxed(work_.keys + step % 3 * capacity_ + row);
  }
  __device__ uint64_t pick(int32_t step, int32_t row, int32_t cta) const {
    return prim::ld_relaxed(work_.picks +
                            (step % 2 * static_cast<int64_t>(gridDim.x) + cta) * capacity_ + row);
  }

 private:
  // CTA 0: thread j answers CTA j.
  __device__ void answer() {
    const uint32_t j = threadIdx.x;
    if (!waiting_ || j == 0 || j >= gridDim.x) return;
    prim::st_release(work_.echo + j, prim::ld_relaxed(work_.check + j));
  }

  const Workspace& work_;
  int32_t capacity_;  // rows that the arrays have room for
  bool waiting_;      // CTAs of this launch wait for each other
  bool admitted_ = false;
  uint32_t ticket_ = 0;
  uint32_t target_ = 0;
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_EXCHANGE_CUH_
