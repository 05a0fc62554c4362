// SPDX-License-Identifier: Apache-2.0
//
// Keys and values of the cache on their way to a warp: a ring of slots in shared memory, filled by
// cp.async row by row. A step is 16 keys (32 of one byte), its keys in one slot, its values in the
// next. A row of the slot has 16 bytes behind it: eight rows fall into different banks under
// ldmatrix, without a swizzle.
//
// Lane n of the warp finds row n of a step: its page is read one step ahead, so the page table is
// never waited for. Rows that are not there (outside of the range, on a bad page) become zeros.
// Warps of a pair (Config::row_groups = 2) share a ring and load half of each slot.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_RING_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_RING_CUH_

#include "cuda/prim/async.h"
#include "cuda/prim/barrier.h"
#include "cuda/verify_attention/plan.cuh"

namespace dspark::cuda::attention {

constexpr int kKeyGroups = 4;  // warps that take turns along the keys

/// kBytes: of an element of the cache.
template <int kBytes, int kDim>
class Ring {
 public:
  static constexpr int kKeys = 32 / kBytes;  // of a step
  static constexpr int kRowBytes = kDim * kBytes;
  static constexpr int kPitch = kRowBytes + 16;  // bytes between rows of a slot
  static constexpr int kSlotBytes = kKeys * kPitch;
  static constexpr int kPieces = kRowBytes / 16;        // of a row
  static constexpr int kCopies = kKeys * kPieces / 32;  // of a lane and slot

  __device__ Ring(const Args& args, unsigned char* slots, int32_t key_group, int32_t row_group)
      : p_(args.p),
        config_(args.config),
        slots_(slots),
        key_group_(key_group),
        row_group_(row_group) {}

  /// Start on keys [from, to) of the tile. Whole warp, behind a barrier that follows the last use
  /// of the slots.
  __device__ void open(const Tile& t, int32_t from, int32_t to) {
    tile_ = &t;
    from_ = from;
    to_ = to;
    const int32_t first = from / kKeys, last = from < to ? (to - 1) / kKeys : first - 1;
    step_ = first + (key_group_ - first % kKeyGroups + kKeyGroups) % kKeyGroups;
    steps_ = last < step_ ? 0 : (last - step_) / kKeyGroups + 1;
    asked_ = step_;
    left_ = 2 * steps_;
    write_ = 0;
    read_ = 0;
    bad_ = false;
    ahead_ = steps_ > 0 ? page_of(step_) : 0;
  }

  /// Half-steps (the keys of a step, then its values) of this warp; the reader starts `lead()`
  /// turns behind the loads.
  __device__ int32_t half_steps() const { return 2 * steps_; }
  __device__ int32_t lead() const { return config_.stages - 1; }
  /// The first key of half-step h.
  __device__ int32_t key(int32_t h) const { return (step_ + h / 2 * kKeyGroups) * kKeys; }
  __device__ bool bad() const { return bad_; }

  /// One turn: the next half-step has landed, when `reads`; then a load is started, in the slot
  /// that was read last. Returns the half-step's slot. Whole warp, or pair of warps.
  __device__ const unsigned char* turn(bool reads) {
    if (reads) {
      wait();
      if (config_.row_groups == 1) {
        __syncwarp();
      } else {
        prim::barrier_sync(1 + key_group_, 64);
      }
    }
    load();
    return reads ? next_slot(read_) : nullptr;
  }

  /// Nothing is under way any more.
  static __device__ void drain() { prim::cp_async_wait<0>(); }

 private:
  __device__ unsigned char* next_slot(int32_t& number) {
    unsigned char* slot = slots_ + number * kSlotBytes;
    number = number + 1 == config_.stages ? 0 : number + 1;
    return slot;
  }

  // All but the youngest stages - 2 half-steps.
  __device__ void wait() const {
    if (config_.stages >= 8) {
      prim::cp_async_wait<6>();
    } else if (config_.stages >= 6) {
      prim::cp_async_wait<4>();
    } else if (config_.stages >= 4) {
      prim::cp_async_wait<2>();
    } else {
      prim::cp_async_wait<0>();
    }
  }

  // The page of this lane's key of a step; 0 when it has none.
  __device__ int32_t page_of(int32_t step) const {
    const int32_t position = step * kKeys + static_cast<int32_t>(threadIdx.x % kKeys);
    if (position < from_ || position >= to_) return 0;
    return p_.page_table[tile_->request * p_.page_table_stride + position / p_.page_size];
  }

  // The next half-step: always one group of copies, if only an empty one.
  __device__ void load() {
    unsigned char* slot = next_slot(write_);
    if (left_ > 0) {
      const bool keys = left_ % 2 == 0;
      if (keys) locate();
      const void* cache = keys ? p_.k_cache : p_.v_cache;
      copy(static_cast<const unsigned char*>(cache) + tile_->head * p_.head_stride * kBytes, slot);
      --left_;
    }
    prim::cp_async_commit();
  }

  // This lane's row of the next step.
  __device__ void locate() {
    const int32_t position = asked_ * kKeys + static_cast<int32_t>(threadIdx.x % kKeys);
    const int32_t page = ahead_;
    const bool there = position >= from_ && position < to_;
    const bool good = static_cast<uint32_t>(page) < static_cast<uint32_t>(p_.num_pages);
    bad_ |= there && !good;
    offset_ = -1;
    if (there && good) {
      offset_ = (page * p_.page_stride + position % p_.page_size * p_.row_stride) * kBytes;
    }
    asked_ += kKeyGroups;
    if (left_ > 2) ahead_ = page_of(asked_);
  }

  __device__ void copy(const unsigned char* cache, unsigned char* to) const {
    const int32_t lane = threadIdx.x % 32;
#pragma unroll 4
    for (int c = 0; c < kCopies; ++c) {
      if (config_.row_groups > 1 && c % 2 != row_group_) continue;
      const int32_t i = c * 32 + lane, row = i / kPieces, piece = i % kPieces;
      const int64_t offset = __shfl_sync(0xffffffffu, offset_, row);
      const bool there = offset >= 0;
      prim::cp_async_16(to + row * kPitch + piece * 16, cache + (there ? offset : 0) + piece * 16,
                        there ? 16 : 0);
    }
  }

  const Params& p_;
  const Config& config_;
  unsigned char* slots_;
  int32_t key_group_, row_group_;
  const Tile* tile_ = nullptr;
  int32_t from_ = 0, to_ = 0;
  int32_t step_ = 0, steps_ = 0;  // the first step of this warp, and how many
  int32_t asked_ = 0, left_ = 0;  // the next step to load, and half-steps not yet asked for
  int32_t write_ = 0, read_ = 0;  // slots of the next load and the next half-step
  int32_t ahead_ = 0;             // the page of this lane's row of the next step
  int64_t offset_ = -1;           // bytes to this lane's row of the step being loaded; -1 for none
  bool bad_ = false;
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_RING_CUH_
