// SPDX-License-Identifier: Apache-2.0
//
// Keys and values on their way to two warpgroups: a ring of slots in shared memory, each with 64
// keys or 64 values in columns of 128 bytes, [column][row], swizzled as wgmma reads them. Keys of a
// block of 64, then its values, and so on, are copied by the tensor memory accelerator in boxes of
// 16 rows of a page, one an active lane of the first warp: at most sixteen instructions a slot.
//
// The first warp is a consumer too. It asks for more while its wgmma are under way, and for the
// slots of the block before the last one only, which the other warpgroup has left by then. A
// producer warp of its own would take a third of the registers away (the warps of an SM's four
// partitions share them in equal parts), and has to wait for the same warps.
//
// Rows outside of the range come along as they are, boxes without any row inside, and those of a
// bad page, are zeros: the accelerator finds no such page. Everybody masks what he does not see.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_WGMMA_RING_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_WGMMA_RING_CUH_

#include "cuda/prim/bulk.h"
#include "cuda/prim/mbarrier.h"
#include "cuda/verify_attention/plan.cuh"
#include "cuda/verify_attention/wgmma_sizes.h"

namespace dspark::cuda::attention {

/// A place in the ring, and how often it has been passed: the parity of its mbarriers.
struct RingPlace {
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void move(int32_t by, int32_t slots) {
    slot += by;
    if (slot < slots) return;
    slot -= slots;
    parity ^= 1;
  }
};

/// Keys of the tile at hand, in shared memory: registers are scarce.
struct RingKeys {
  int32_t from, to;

  /// Blocks of 64 keys, and the first key of block b.
  __device__ int32_t blocks() const {
    return from < to ? (to - 1) / kWgmmaKeys - from / kWgmmaKeys + 1 : 0;
  }
  __device__ int32_t first(int32_t b) const { return (from / kWgmmaKeys + b) * kWgmmaKeys; }
};

template <int kDim>
class WgmmaRing {
  using Sizes = WgmmaSizes<kDim>;
  static constexpr int kBoxes = Sizes::kColumns * kWgmmaKeys / kBoxRows;  // of a slot, a lane each
  static constexpr int kPieces = kWgmmaKeys / kBoxRows;                   // of a column
  static_assert(kBoxes <= 32, "");

 public:
  /// `barriers`: two a slot, for the most slots. Thread 0 makes them; others use them behind a
  /// barrier.
  __device__ WgmmaRing(const Args& args, unsigned char* slots, uint64_t* barriers, RingKeys& range)
      : args_(args),
        p_(args.p),
        slots_(slots),
        full_(barriers),
        empty_(barriers + kWgmmaMaxStages),
        range_(range) {
    value_.move(1, args.config.stages);
    if (threadIdx.x != 0) return;
    prim::prefetch_tensor_map(args.keys);
    prim::prefetch_tensor_map(args.values);
#pragma unroll 1
    for (int32_t slot = 0; slot < args.config.stages; ++slot) {
      prim::mbarrier_init(full_ + slot, 1);
      prim::mbarrier_init(empty_ + slot, kWgmmaThreads / 32);
    }
    prim::mbarrier_init_fence();
  }

  /// Start on the keys of the tile. Whole CTA, behind fence_proxy_async() of those who have stored
  /// to the slots, and a barrier.
  __device__ void open(const Tile& t) {
    tile_ = &t;
    asked_ = 0;
    bad_ = false;
    if (threadIdx.x >= 32) return;
    ahead_ = page_of(0);
    fill(args_.config.stages);
  }

  __device__ int32_t blocks() const { return range_.blocks(); }
  __device__ int32_t key(int32_t b) const { return range_.first(b); }
  /// Of this thread's boxes.
  __device__ bool bad() const { return bad_; }

  /// While block b is being worked on: ask for what goes into the slots of the block before the
  /// last. Whole first warp.
  __device__ void more(int32_t b) {
    const int32_t lead = args_.config.stages >= kWgmmaLazyStages ? 4 : 2;
    fill(args_.config.stages + 2 * b - lead + 1);
  }

  /// The slot of the next block's keys or values, when they have landed.
  __device__ __forceinline__ const unsigned char* keys() const { return landed(key_); }
  __device__ __forceinline__ unsigned char* values() const { return landed(value_); }

  /// This warp has read them: go on to the next block's. Behind wgmma_wait().
  __device__ __forceinline__ void free_keys() { free(key_); }
  __device__ __forceinline__ void free_values() { free(value_); }

 private:
  __device__ __forceinline__ unsigned char* landed(const RingPlace& at) const {
    prim::mbarrier_wait(full_ + at.slot, at.parity);
    return slots_ + at.slot * Sizes::kSlotBytes;
  }
  __device__ __forceinline__ void free(RingPlace& at) const {
    if (threadIdx.x % 32 == 0) prim::mbarrier_arrive(empty_ + at.slot);
    at.move(2, args_.config.stages);
  }

  // Of this lane's rows of block b: the page, -1 when there is no such row.
  __device__ int32_t page_of(int32_t b) {
    if (threadIdx.x >= kBoxes || b >= blocks()) return -1;
    const int32_t row = key(b) + static_cast<int32_t>(threadIdx.x) % kPieces * kBoxRows;
    if (row >= range_.to || row <= range_.from - kBoxRows) return -1;
    const int32_t page = p_.page_table[tile_->request * p_.page_table_stride + row / p_.page_size];
    const bool good = static_cast<uint32_t>(page) < static_cast<uint32_t>(p_.num_pages);
    bad_ |= !good;
    return good ? page : -1;
  }

  // Ask for slots until `count` have been asked for in this tile.
  __device__ void fill(int32_t count) {
    count = min(count, 2 * blocks());
#pragma unroll 1
    for (; asked_ < count; ++asked_) {
      const bool keys = asked_ % 2 == 0;
      if (keys) {
        page_ = ahead_;
        ahead_ = page_of(asked_ / 2 + 1);
      }
      prim::mbarrier_wait(empty_ + write_.slot, write_.parity ^ 1);
      // The slot is not full before this arrival, whoever is the first to ask.
      if (threadIdx.x == 0) prim::mbarrier_expect(full_ + write_.slot, Sizes::kSlotBytes);
      if (threadIdx.x < kBoxes) copy(keys ? args_.keys : args_.values);
      write_.move(1, args_.config.stages);
    }
  }

  // This lane's box.
  __device__ void copy(const prim::TensorMap& map) const {
    const int32_t piece = static_cast<int32_t>(threadIdx.x) % kPieces;
    const int32_t column = static_cast<int32_t>(threadIdx.x) / kPieces;
    unsigned char* to = slots_ + write_.slot * Sizes::kSlotBytes + column * kWgmmaColumnBytes +
                        piece * kBoxRows * prim::kBoxRowBytes;
    const int32_t row = (key(asked_ / 2) + piece * kBoxRows) % p_.page_size;
    prim::tensor_load_4d(to, map, full_ + write_.slot, column * kWgmmaColumns, row, tile_->head,
                         page_, prim::CacheHint::kNormal);
  }

  const Args& args_;
  const Params& p_;
  unsigned char* slots_;
  uint64_t* full_;   // [slots] copies have landed
  uint64_t* empty_;  // [slots] all warps have read it
  const RingKeys& range_;
  const Tile* tile_ = nullptr;
  int32_t asked_ = 0;  // slots of this tile, keys and values in turn
  int32_t page_ = -1,
          ahead_ = -1;  // of this lane's box: of the block being asked for, and the next
  RingPlace key_, value_, write_;
  bool bad_ = false;
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_WGMMA_RING_CUH_
