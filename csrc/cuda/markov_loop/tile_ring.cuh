// SPDX-License-Identifier: Apache-2.0
//
// W2 on its way into shared memory, for the sources that multiply on a warp's tensor cores.
//
// Warp w of eight has ids 16 w .. 16 w + 15 of a segment. A slot of shared memory holds 128 bytes
// of each of a segment's 128 rows, 16 KB, and a warp reads nothing of it but its own 2 KB: so each
// warp runs its own ring of cp.async copies, and W2 needs no barrier of the CTA at all.
//
//   slots    | ring: streams, in the order of visit, on into the next step | resident segments |
//
// What is resident is read once a launch. The rest streams forwards and backwards in turn, so that
// the rows read last, which are what a cache still has, are read first in the next step. The ring
// is filled again while the CTA is in the epilogue and in the exchange: W2 depends on no token.
//
// Rows of a slot are 128 bytes with 16-byte piece c at c ^ (row & 7): no bank conflicts under
// ldmatrix. What lies behind a row's end in its last 32 bytes is zero.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_RING_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_RING_CUH_

#include "cuda/markov_loop/tile_source.h"
#include "cuda/prim/async.h"

namespace dspark::cuda::markov {

/// Wait until at most `pending` of this thread's youngest copies are unfinished.
__device__ __forceinline__ void wait_pending(int32_t pending) {
  switch (pending) {
    case 0:
      return prim::cp_async_wait<0>();
    case 1:
      return prim::cp_async_wait<1>();
    case 2:
      return prim::cp_async_wait<2>();
    case 3:
      return prim::cp_async_wait<3>();
    case 4:
      return prim::cp_async_wait<4>();
    case 5:
      return prim::cp_async_wait<5>();
    default:
      return prim::cp_async_wait<6>();
  }
}

/// kElement: bytes of an element of W2.
template <int kElement>
class W2Ring {
 public:
  __device__ W2Ring(const Args& args, const Shared& shared)
      : args_(args),
        s_(shared),
        first_(first_segment(args.config, blockIdx.x)),
        chunks_((args.p.rank * kElement + 127) / 128),
        ring_(args.config.ring),
        step_(args.first_step) {
    const int32_t owned = first_segment(args.config, blockIdx.x + 1) - first_;
    const int32_t room = (args.config.slots - ring_) / chunks_;
    resident_ = owned < room ? owned : room;
    streamed_ = owned - resident_;
    next_step_ = args.first_step;
  }

  __device__ void begin_step(int32_t step) {
    if (step != step_) base_ += streamed_ * chunks_;
    step_ = step;
  }

  /// Resident segments first in the first step, where they arrive first, and last in all others,
  /// where the ring is full when the step begins.
  __device__ int32_t segment(int32_t position) const {
    const int32_t ahead = residents_ahead();
    if (position < ahead) return first_ + position;
    const int32_t index = position - ahead;
    return index < streamed_ ? streamed_segment(step_, index) : first_ + index - streamed_;
  }

  __device__ void end_pass(int32_t, int32_t) {}
  __device__ void close() { prim::cp_async_wait<0>(); }

 protected:
  /// Where a segment's chunks are: `slot` has the first.
  struct Place {
    int32_t index;  // in the stream of this step; below 0 or from streamed_ on: resident
    int32_t home;   // number of a resident segment
    int32_t slot;
    bool streams;
  };

  /// Start loading: resident segments, then the ring.
  __device__ void open_ring() {
    for (int32_t i = 0; i < resident_; ++i) {
      for (int32_t c = 0; c < chunks_; ++c) load_chunk(first_ + i, c, ring_ + i * chunks_ + c);
      prim::cp_async_commit();
    }
    for (int32_t i = 0; i < ring_; ++i) issue_next();
  }

  __device__ Place place_of(int32_t position) const {
    Place at;
    const int32_t ahead = residents_ahead();
    at.index = position - ahead;
    at.streams = at.index >= 0 && at.index < streamed_;
    at.home = at.index < 0 ? position : at.index - streamed_;
    at.slot = at.streams ? (base_ + at.index * chunks_) % ring_ : ring_ + at.home * chunks_;
    return at;
  }

  /// This warp's part of the segment's chunk `c` is in place.
  __device__ void wait_chunk(const Place& at, int32_t c) const {
    if (at.streams) {
      wait_pending(issued_ - (base_ + at.index * chunks_ + c) - 1);
    } else if (at.index < 0 || residents_ahead() != 0) {
      wait_pending(issued_ + resident_ - 1 - at.home);
    }
    __syncwarp();
  }

  /// Behind the reading of a chunk. `last`: nobody will read it again in this step.
  __device__ void chunk_done(Place& at, bool last) {
    ++at.slot;
    if (!at.streams) return;
    if (at.slot == ring_) at.slot = 0;
    if (!last) return;
    __syncwarp();  // all lanes have read the slot
    issue_next();
  }

  const Args& args_;
  const Shared& s_;
  int32_t first_, chunks_, ring_;

 private:
  __device__ int32_t residents_ahead() const { return step_ == args_.first_step ? resident_ : 0; }
  __device__ int32_t streamed_segment(int32_t step, int32_t index) const {
    return first_ + resident_ + (step % 2 == 0 ? index : streamed_ - 1 - index);
  }

  // This warp's 16 rows of one chunk to a slot. Rows from V_d on become zeros.
  __device__ void load_chunk(int32_t segment, int32_t chunk, int32_t slot) {
    const Params& p = args_.p;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* tile = s_.source + slot * kSlotBytes + warp * 2048;
    const int32_t piece = lane % 8;  // of 16 bytes
    const int32_t byte = chunk * 128 + piece * 16;
    if (byte >= (p.rank * kElement + 31) / 32 * 32) return;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int32_t row = lane / 8 + 4 * t;
      const int64_t id = segment * kSegment + warp * 16 + row;
      const bool there = id < p.draft_vocab_size && byte < p.rank * kElement;
      const unsigned char* from = static_cast<const unsigned char*>(p.w2) +
                                  (there ? id * p.w2_stride * kElement + byte : 0);
      prim::cp_async_16(tile + row * 128 + (piece ^ (row & 7)) * 16, from, there ? 16 : 0);
    }
  }

  // The next chunk of the stream into the slot that it has in the ring, one group of copies.
  __device__ void issue_next() {
    if (streamed_ == 0 || next_step_ >= args_.last_step) return;
    load_chunk(streamed_segment(next_step_, next_index_), next_chunk_, next_slot_);
    prim::cp_async_commit();
    ++issued_;
    if (++next_slot_ == ring_) next_slot_ = 0;
    if (++next_chunk_ < chunks_) return;
    next_chunk_ = 0;
    if (++next_index_ < streamed_) return;
    next_index_ = 0;
    ++next_step_;
  }

  int32_t resident_, streamed_;  // segments
  int32_t step_;                 // that is being computed
  int32_t base_ = 0;             // place in the stream where it begins, in chunks
  int32_t issued_ = 0;           // chunks of the stream that were asked for
  int32_t next_step_, next_index_ = 0, next_chunk_ = 0, next_slot_ = 0;
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_RING_CUH_
