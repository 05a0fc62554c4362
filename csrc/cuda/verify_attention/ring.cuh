// SPDX-License-Identifier: Apache-2.0
//
// Keys and values of the cache on their way to a warp: a ring of slots in shared memory. A step is
// 16 keys (32 of one byte), its keys in one slot, its values in the next. A slot is columns of 128
// bytes (64 where a row has no more), [column][row], their 16-byte pieces swizzled: eight rows fall
// into different banks under ldmatrix.
//
// Two ways to fill it, which leave the same bytes in every row that counts:
// * bulk (sm_90 on, pages of a multiple of 16 rows): one lane asks the copy engine for boxes of 16
//   rows of a column, one to four a slot, and an mbarrier counts their bytes. Rows outside of the
//   range come along as they are; the box of a bad page is taken from page 0. Waiting, looking up
//   and asking are 149 instructions of a warp a slot (sm_90a, 128 elements of two bytes; the mean
//   of keys, with the look-up, and values; row by row it is 432).
// * rows (everything else): all lanes copy 16 bytes at a time with cp.async, row by row, so that
//   any page size will do. Rows that are not there become zeros.
// Nobody looks at a row that is not there but through masks, which keep out whatever it holds
// (tile_mma.cuh). Which way it is, is a branch and not another kernel: all warps take it alike.
//
// The page of a row or box is read one step ahead, so the page table is never waited for. Warps of
// a pair (Config::row_groups = 2) share a ring: the first one asks for boxes, or each loads half of
// the rows' pieces.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_RING_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_RING_CUH_

#include "cuda/prim/async.h"
#include "cuda/prim/barrier.h"
#include "cuda/prim/bulk.h"
#include "cuda/prim/mbarrier.h"
#include "cuda/prim/thread.h"
#include "cuda/verify_attention/plan.cuh"

namespace dspark::cuda::attention {

constexpr int kKeyGroups = 4;  // warps that take turns along the keys
constexpr int kMaxStages = 8;  // of a ring

/// kBytes: of an element of the cache.
template <int kBytes, int kDim>
class Ring {
 public:
  static constexpr int kKeys = 32 / kBytes;  // of a step
  static constexpr int kRowBytes = kDim * kBytes;
  static constexpr int kPitch = kRowBytes < prim::kBoxRowBytes ? kRowBytes : prim::kBoxRowBytes;
  static constexpr int kColumns = kRowBytes / kPitch;
  static constexpr int kColumnBytes = kKeys * kPitch;
  static constexpr int kSlotBytes = kKeys * kRowBytes;
  static constexpr int kPieces = kRowBytes / 16;        // of a row
  static constexpr int kColumnPieces = kPitch / 16;     // of them in a column
  static constexpr int kCopies = kKeys * kPieces / 32;  // of a lane and slot, row by row
  static constexpr int kBoxes = kKeys / kBoxRows;       // of a column
  static constexpr int kBoxBytes = kBoxRows * kPitch;
  static_assert(kBoxBytes % prim::kBoxAlignment == 0, "");

  /// `full`: an mbarrier a slot.
  __device__ Ring(const Args& args, unsigned char* slots, uint64_t* full, int32_t key_group,
                  int32_t row_group)
      : args_(args),
        p_(args.p),
        config_(args.config),
        slots_(slots),
        full_(full),
        key_group_(key_group),
        row_group_(row_group) {
    if (!bulk() || !asks()) return;
#pragma unroll 1
    for (int32_t slot = 0; slot < config_.stages; ++slot) prim::mbarrier_init(full_ + slot, 1);
    prim::mbarrier_init_fence();
  }

  /// Where piece `piece` of the first column's row `row` lies in a slot.
  static __device__ __forceinline__ int32_t place(int32_t row, int32_t piece) {
    const int32_t turned = kPitch == prim::kBoxRowBytes ? row & 7 : row >> 1 & 3;
    return row * kPitch + (piece ^ turned) * 16;
  }
  /// Where piece `first` + `piece` of a row lies, from the place of `first`; no bit in common.
  static __device__ __forceinline__ int32_t shifted(int32_t place, int32_t piece) {
    return (place ^ piece % kColumnPieces * 16) + piece / kColumnPieces * kColumnBytes;
  }

  /// Ordinary stores to the slots come before what is loaded behind the next barrier. All threads.
  __device__ void release() const {
    if (bulk()) prim::fence_proxy_async();
  }

  /// Start on keys [from, to) of the tile. Whole warp, behind a barrier that follows release() and
  /// the last use of the slots.
  __device__ void open(const Tile& t, int32_t from, int32_t to) {
    tile_ = &t;
    from_ = from;
    to_ = to;
    const int32_t first = from / kKeys, last = from < to ? (to - 1) / kKeys : first - 1;
    step_ = first + (key_group_ - first % kKeyGroups + kKeyGroups) % kKeyGroups;
    steps_ = last < step_ ? 0 : (last - step_) / kKeyGroups + 1;
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

  /// One turn: half-step h has landed, unless it is below 0; then the one `lead()` ahead is asked
  /// for, in the slot that was read last. Returns h's slot. Whole warp, or pair of warps.
  __device__ const unsigned char* turn(int32_t h) {
    if (h >= 0) {
      wait();
      if (config_.row_groups == 1) {
        __syncwarp();
      } else {
        prim::barrier_sync(1 + key_group_, 64);
      }
    }
    load(h);
    if (h < 0) return nullptr;
    const unsigned char* slot = slots_ + read_ * kSlotBytes;
    if (++read_ == config_.stages) {
      read_ = 0;
      phase_ ^= 1;
    }
    return slot;
  }

 private:
  __device__ __forceinline__ bool bulk() const { return DSPARK_HAS_BULK != 0 && config_.bulk; }
  // The lane that asks the copy engine.
  __device__ __forceinline__ bool asks() const { return threadIdx.x % 32 == 0 && row_group_ == 0; }

  // Bulk: the half-step to be read. Rows: all but the youngest stages - 2 half-steps.
  __device__ void wait() const {
    if (bulk()) {
      prim::mbarrier_wait(full_ + read_, phase_);
    } else if (config_.stages >= 8) {
      prim::cp_async_wait<6>();
    } else if (config_.stages >= 6) {
      prim::cp_async_wait<4>();
    } else if (config_.stages >= 4) {
      prim::cp_async_wait<2>();
    } else {
      prim::cp_async_wait<0>();
    }
  }

  // Keys that this lane looks up in a step: one, or in bulk the box that it would be in.
  __device__ __forceinline__ int32_t keys_of_lane() const { return bulk() ? kBoxRows : 1; }
  __device__ __forceinline__ int32_t position_of(int32_t step) const {
    const int32_t lane = static_cast<int32_t>(prim::thread_index() % kKeys);
    return step * kKeys + (bulk() ? lane / kBoxRows * kBoxRows : lane);
  }
  __device__ __forceinline__ bool there(int32_t position) const {
    return position + keys_of_lane() > from_ && position < to_;
  }

  // The page of this lane's keys of a step; 0 when it has none.
  __device__ int32_t page_of(int32_t step) const {
    const int32_t position = position_of(step);
    if (!there(position)) return 0;
    return p_.page_table[tile_->request * p_.page_table_stride + page_column(position)];
  }
  // position / page_size. The product is it or one less.
  __device__ __forceinline__ int32_t page_column(int32_t position) const {
    const uint32_t at = static_cast<uint32_t>(position);
    const uint32_t size = static_cast<uint32_t>(p_.page_size);
    const uint32_t column = __umulhi(at, config_.page_inverse);
    return static_cast<int32_t>(column + (at - column * size >= size ? 1 : 0));
  }

  // What half-step h makes room for. Row by row it is always one group of copies, if only an empty
  // one.
  __device__ void load(int32_t h) {
    const int32_t asked = h + lead();
    if (asked < half_steps()) {
      const int32_t behind = read_ + min(h, 0) + lead();
      const int32_t slot = behind < config_.stages ? behind : behind - config_.stages;
      const bool keys = asked % 2 == 0;
      if (keys) locate(asked / 2);
      if (bulk()) {
        copy_boxes(keys ? args_.keys : args_.values, slot);
      } else {
        const void* cache = keys ? p_.k_cache : p_.v_cache;
        copy_rows(static_cast<const unsigned char*>(cache) + tile_->head * p_.head_stride * kBytes,
                  slots_ + slot * kSlotBytes);
      }
    }
    if (!bulk()) prim::cp_async_commit();
  }

  // This lane's row, or box, of this warp's n-th step.
  __device__ void locate(int32_t n) {
    const int32_t step = step_ + n * kKeyGroups, position = position_of(step);
    const bool mine = there(position);
    const bool good = static_cast<uint32_t>(ahead_) < static_cast<uint32_t>(p_.num_pages);
    bad_ |= mine && !good;
    page_ = mine && good ? ahead_ : -1;
    row_ = position - page_column(position) * p_.page_size;
    if (n + 1 < steps_) ahead_ = page_of(step + kKeyGroups);
  }

  // One lane asks for the boxes of a slot. A hint for each branch: as a variable it would be held
  // in registers by all lanes.
  __device__ void copy_boxes(const prim::TensorMap& map, int32_t slot) const {
    int32_t page[kBoxes], row[kBoxes];
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      page[b] = max(0, b == 0 ? page_ : __shfl_sync(0xffffffffu, page_, b * kBoxRows));
      row[b] = b == 0 ? row_ : __shfl_sync(0xffffffffu, row_, b * kBoxRows);
    }
    if (!asks()) return;
    prim::mbarrier_expect(full_ + slot, kSlotBytes);
    if (config_.once) {
      ask(map, slot, page, row, prim::CacheHint::kEvictFirst);
    } else {
      ask(map, slot, page, row, prim::CacheHint::kNormal);
    }
  }
  __device__ __forceinline__ void ask(const prim::TensorMap& map, int32_t slot,
                                      const int32_t (&page)[kBoxes], const int32_t (&row)[kBoxes],
                                      prim::CacheHint hint) const {
    const int32_t head = tile_->head;
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        prim::tensor_load_4d(slots_ + slot * kSlotBytes + column * kColumnBytes + b * kBoxBytes,
                             map, full_ + slot, column * (kPitch / kBytes), row[b], head, page[b],
                             hint);
      }
    }
  }

  // Every lane copies its pieces of a slot.
  __device__ void copy_rows(const unsigned char* cache, unsigned char* to) const {
    const int64_t offset =
        page_ < 0 ? -1 : (page_ * p_.page_stride + row_ * p_.row_stride) * kBytes;
    const int32_t lane = prim::thread_index() % 32;
#pragma unroll 4
    for (int c = 0; c < kCopies; ++c) {
      if (config_.row_groups > 1 && c % 2 != row_group_) continue;
      const int32_t i = c * 32 + lane, row = i / kPieces, piece = i % kPieces;
      const int64_t from = __shfl_sync(0xffffffffu, offset, row);
      const bool there = from >= 0;
      prim::cp_async_16(
          to + piece / kColumnPieces * kColumnBytes + place(row, piece % kColumnPieces),
          cache + (there ? from : 0) + piece * 16, there ? 16 : 0);
    }
  }

  const Args& args_;
  const Params& p_;
  const Config& config_;
  unsigned char* slots_;
  uint64_t* full_;
  int32_t key_group_, row_group_;
  const Tile* tile_ = nullptr;
  int32_t from_ = 0, to_ = 0;
  int32_t step_ = 0, steps_ = 0;  // the first step of this warp, and how many
  int32_t read_ = 0;              // slot of the next half-step
  uint32_t phase_ = 0;            // and the parity of its mbarrier
  int32_t ahead_ = 0;             // the page of this lane's row or box of the next step
  int32_t page_ = -1, row_ = 0;   // the same of the step being loaded; page -1 for none
  bool bad_ = false;
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_RING_CUH_
