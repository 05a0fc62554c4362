// SPDX-License-Identifier: Apache-2.0
//
// Tile source for Hopper: W2 by tensor copies, products by wgmma (bf16 or f16 W2, r % 64 == 0).
//
// W2 as A: a segment is 128 ids, 64 for each of the two warpgroups. The r-vectors as B: N = 8, 16,
// 32 or 64 of them, stored once a step in the layout that wgmma reads. W2 moves in boxes of 128 ids
// by 64 columns, 16 KB each, one copy instruction a box. A CTA's boxes are numbered segment by
// segment; the first `slots - ring` stay in shared memory over all steps, the others pass through
// the ring:
//
//   * even steps go forwards through the CTA's segments, odd steps backwards. Box b always lies in
//     slot (b - resident) % ring of the ring, so at the turn the last `ring` boxes are already
//     there and no copy is made: the ring too counts as resident. A step reads n - slots of its n
//     boxes.
//   * what the turn leaves is read in the reverse order of the last step, so L2 holds the most
//     recent part of it even where W2 exceeds L2. Copies are marked evict_last, in a launch's last
//     step evict_first.
//   * a box is free when both warpgroups have waited for their wgmma: one arrival a warp on the
//     slot's `empty` mbarrier, awaited by the one thread that makes copies. A producer warp of its
//     own would wait for the same arrivals and bring nothing: the thread waits while the next box's
//     wgmma are under way, and the ring's other boxes keep the copy engine busy.
//
// The order of a sum is: columns by 64, within them the parts of the vector, then columns by 16.
// It depends on r and the number of parts alone, so this source serves every number of requests. A
// second path for few of them would be no faster: with N = 8 a step reads each box from shared
// memory once (128 bytes a clock: 2.6 us at V = 151,936, r = 256 in bf16), as ldmatrix would, and
// waits for L2 anyway.
//
// From 33 requests on arithmetic counts: groups of 64, one segment a pass, and the wgmma of the
// next tile run while the warps are in the epilogue of this one (WgmmaSource<.., true>).
//
// Prediction, no measurement, us a step without the exchange's 1.2 (H200 model: 132 SMs, L2 to SM
// 6 TB/s, 790 TFLOP/s). V = 151,936, r = 256, bf16, vanilla, n = 36 boxes a CTA:
//
//   R          1            8            32           64           128
//   slots      13           12           10           9            7
//   from L2    49.7 MB 8.3  51.9 MB 8.7  56.2 MB 9.4  58.4 MB 9.7  62.7 MB 10.5
//   tensor     0.8          0.8          3.2          6.3          12.6
//
// and the epilogue's arithmetic is added where it does not overlap (kernel.cuh). At V = 49,152 all
// of W2 is resident for R <= 16: reading shared memory takes 0.9 us, the exchange is the rest.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_WGMMA_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_WGMMA_CUH_

#include "cuda/markov_loop/config_wgmma.h"
#include "cuda/markov_loop/parts.cuh"
#include "cuda/markov_loop/tile_source.h"
#include "cuda/prim/bulk.h"
#include "cuda/prim/mbarrier.h"
#include "cuda/prim/wgmma.h"

namespace dspark::cuda::markov {

/// kOverlap: groups of 64, and the next tile's wgmma run during the epilogue of a tile.
template <int32_t kDtype, bool kOverlap>
class WgmmaSource;

template <int32_t kDtype, bool kOverlap>
constexpr bool kCompiled<WgmmaSource<kDtype, kOverlap>> = DSPARK_HAS_WGMMA != 0;
template <int32_t kDtype>
constexpr bool kAhead<WgmmaSource<kDtype, true>> = true;

template <int32_t kDtype, bool kOverlap>
class WgmmaSource {
 public:
  __device__ WgmmaSource(const Args& args, const Shared& shared, int32_t rows)
      : args_(args),
        s_(shared),
        first_(first_segment(args.config, blockIdx.x)),
        owned_(first_segment(args.config, blockIdx.x + 1) - first_),
        chunks_(args.p.rank / kChunkColumns),
        resident_(min(args.config.slots - args.config.ring, owned_ * chunks_)) {
    full_ =
        reinterpret_cast<uint64_t*>(vectors((rows + args.config.group - 1) / args.config.group));
    empty_ = full_ + args.config.slots;
    scales_ = reinterpret_cast<float*>(empty_ + args.config.slots);
  }

  __device__ void open() {
    forward_ = args_.first_step % 2 == 0;
    // Columns without a request are multiplied too; nobody reads their sums.
    uint4* operand = reinterpret_cast<uint4*>(vectors(0));
    for (int32_t i = threadIdx.x; operand + i < reinterpret_cast<uint4*>(full_); i += kThreads) {
      operand[i] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x != 0) return;
    prim::prefetch_tensor_map(args_.w2_map);
    for (int32_t slot = 0; slot < args_.config.slots; ++slot) {
      prim::mbarrier_init(full_ + slot, 1);
      prim::mbarrier_init(empty_ + slot, kWarps);
    }
    prim::mbarrier_init_fence();
    for (int32_t i = 0; i < args_.config.ring && resident_ + i < boxes(); ++i) {
      copy(forward_ ? resident_ + i : boxes() - 1 - i);
    }
    for (int32_t box = 0; box < resident_; ++box) copy(box);
  }

  __device__ void begin_step(int32_t step) {
    forward_ = step % 2 == 0;
    last_step_ = step + 1 == args_.last_step;
    stored_ = false;
    group_ = 0;
  }

  __device__ int32_t segment(int32_t position) const {
    const int32_t stay = resident_ / chunks_;
    const int32_t streamed = owned_ - stay;
    if (position >= streamed) return first_ + position - streamed;
    return first_ + (forward_ ? stay + position : owned_ - 1 - position);
  }

  // A step stores the vectors of all rows at once.
  __device__ void load_vectors(int32_t, int32_t) {
    if (stored_) return;
    stored_ = true;
    if (args_.config.direct) {
      copy_rows();
    } else {
      split_rows();
    }
  }

  // wgmma reads the vectors through the async proxy.
  __device__ void vectors_ready() { prim::fence_proxy_async(); }

  __device__ void dots(int32_t position, int32_t segments, int32_t count, bool last) {
    scored_group_ = group_;
    group_ = last ? 0 : group_ + 1;
    if constexpr (kOverlap) {
      dots_ahead(position, count, last);
    } else {
      for (int32_t k = 0; k < segments; ++k) {
        const int32_t local = segment(position + k) - first_;
        float* out = s_.bias + k * count * kBiasStride;
        if (args_.config.group == 8) multiply<8>(local, count, last, out);
        if (args_.config.group == 16) multiply<16>(local, count, last, out);
        if (args_.config.group == 32) multiply<32>(local, count, last, out);
      }
    }
  }

  __device__ __forceinline__ void start_first() { start(segment(0) - first_, 0, chunks_); }
  __device__ __forceinline__ void finish_last() {
    prim::wgmma_wait<0>();
    prim::wgmma_hold(sums_);
  }

  __device__ void end_pass(int32_t, int32_t) {}

  __device__ float bias(float word, int32_t i, int32_t) const {
    if (kDtype == DSPARK_BF16 || args_.config.direct) return word;
    return word * scales_[scored_group_ * args_.config.group + i];
  }

  // Every copy has been waited for if the steps were done; a launch may have had none.
  __device__ void close() {
    for (int32_t slot = 0; slot < args_.config.slots && slot < boxes(); ++slot) {
      prim::mbarrier_wait(full_ + slot, loads_ >> slot & 1u);
    }
  }

 private:
  __device__ int32_t boxes() const { return owned_ * chunks_; }
  __device__ int32_t slot_of(int32_t box) const {
    return box < resident_ ? box : resident_ + (box - resident_) % args_.config.ring;
  }
  __device__ unsigned char* vectors(int32_t group) const {
    return s_.source + args_.config.slots * kSlotBytes +
           group * wgmma_group_bytes(args_.config, args_.p);
  }

  // Thread 0: the box's columns and ids to its slot.
  __device__ void copy(int32_t box) {
    const int32_t slot = slot_of(box);
    const int32_t local = box / chunks_;
    prim::mbarrier_expect(full_ + slot, kSlotBytes);
    prim::tensor_load_2d(s_.source + slot * kSlotBytes, args_.w2_map, full_ + slot,
                         (box - local * chunks_) * kChunkColumns, (first_ + local) * kSegment,
                         last_step_ ? prim::CacheHint::kEvictFirst : prim::CacheHint::kEvictLast);
  }

  // This warp has read a box; when all have, the box that takes its place is copied.
  __device__ __forceinline__ void free(int32_t box) {
    const int32_t next = forward_ ? box + args_.config.ring : box - args_.config.ring;
    if (box < resident_ || next < resident_ || next >= boxes()) return;
    const int32_t slot = slot_of(box);
    if (threadIdx.x % 32 == 0) prim::mbarrier_arrive(empty_ + slot);
    if (threadIdx.x == 0) {
      prim::mbarrier_wait(empty_ + slot, loads_ >> slot & 1u);
      copy(next);
    }
    __syncwarp();
    loads_ ^= 1u << slot;
  }

  template <int N>
  static __device__ __forceinline__ void multiply_add(float (&d)[N / 2], uint64_t a, uint64_t b,
                                                      bool add) {
    if constexpr (kDtype == DSPARK_BF16) {
      prim::wgmma_bf16<N>(d, a, b, add);
    } else {
      prim::wgmma_f16<N>(d, a, b, add);
    }
  }

  // One chunk of a segment against the vectors of a group, as soon as its box is there. The first
  // product of a tile replaces the accumulators where tiles overlap, and is added to zeros where
  // they do not: either way is the one in which the compiler lets wgmma run on (ptxas C7514,
  // C7515).
  template <int N>
  __device__ __forceinline__ void issue(float (&d)[N / 2], int32_t local, int32_t chunk,
                                        int32_t group) {
    const int32_t slot = slot_of(local * chunks_ + chunk);
    prim::mbarrier_wait(full_ + slot, loads_ >> slot & 1u);
    prim::wgmma_fence();
    const uint64_t a = prim::wgmma_descriptor(s_.source + slot * kSlotBytes +
                                              threadIdx.x / 128 * (kSlotBytes / 2));
    for (int32_t part = 0; part < args_.config.parts; ++part) {
      const uint64_t b = prim::wgmma_descriptor(vectors(group) +
                                                (part * chunks_ + chunk) * N * prim::kBoxRowBytes);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        multiply_add<N>(d, prim::wgmma_advance(a, 32 * k), prim::wgmma_advance(b, 32 * k),
                        !kOverlap || chunk > 0 || part > 0 || k > 0);
      }
    }
    prim::wgmma_commit();
  }

  // The accumulators to the bias buffer.
  template <int N>
  __device__ __forceinline__ void store(const float (&d)[N / 2], int32_t count, float* out) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t id = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int32_t e = 0; e < N / 2; ++e) {
      const int32_t column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      if (column < count) out[column * kBiasStride + id + e / 2 % 2 * 8] = d[e];
    }
  }

  // One segment against the group's vectors.
  template <int N>
  __device__ __forceinline__ void multiply(int32_t local, int32_t count, bool last, float* out) {
    float d[N / 2] = {};
    for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
      issue<N>(d, local, chunk, scored_group_);
      if (last && chunk > 0) {
        prim::wgmma_wait<1>();  // the box before has been read
        free(local * chunks_ + chunk - 1);
      }
    }
    prim::wgmma_wait<0>();
    prim::wgmma_hold(d);
    if (last) free(local * chunks_ + chunks_ - 1);
    store<N>(d, count, out);
  }

  // The same for one segment a pass, with the next tile under way when it returns. Behind the last
  // tile of a step the same one is multiplied again, for nobody: a branch here would make the
  // compiler wait for each wgmma.
  __device__ __forceinline__ void dots_ahead(int32_t position, int32_t count, bool last) {
    const int32_t local = segment(position) - first_;
    for (int32_t chunk = begun_; chunk < chunks_; ++chunk) {
      issue<64>(sums_, local, chunk, scored_group_);
    }
    prim::wgmma_wait<0>();
    prim::wgmma_hold(sums_);
    for (int32_t chunk = 0; last && chunk < chunks_; ++chunk) free(local * chunks_ + chunk);
    store<64>(sums_, count, s_.bias);
    const int32_t next = last && position + 1 < owned_ ? segment(position + 1) - first_ : local;
    start(next, group_, next == local ? chunks_ : boxes_ahead(next));
  }

  // Begin a tile with its first chunks. What may have been asked for only now is left to dots():
  // waiting for it here would keep the epilogue waiting.
  __device__ __forceinline__ void start(int32_t local, int32_t group, int32_t chunks) {
    begun_ = chunks;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) issue<64>(sums_, local, chunk, group);
  }
  __device__ int32_t boxes_ahead(int32_t local) const {
    const int32_t ahead = args_.config.ring - chunks_;
    return local * chunks_ < resident_ || ahead > chunks_ ? chunks_ : ahead;
  }

  // Where 16-byte piece `piece` of a row's vector lies: [group, part, chunk, row of the group].
  __device__ __forceinline__ unsigned char* place(int32_t part, int32_t row, int32_t piece) const {
    const int32_t group = row / args_.config.group, i = row - group * args_.config.group;
    const int32_t chunk = part * chunks_ + piece / 8;
    return vectors(group) + (chunk * args_.config.group + i) * prim::kBoxRowBytes +
           ((piece ^ i) % 8) * 16;
  }

  // Rows of W1 as they are: same dtype as W2, 16-byte aligned.
  __device__ void copy_rows() {
    const Params& p = args_.p;
    const int32_t pieces = p.rank / 8, all = *s_.count * pieces;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < all; i += kThreads) {
      const int32_t row = i / pieces, piece = i - row * pieces;
      const int32_t id = s_.previous[row];
      uint4 value = make_uint4(0, 0, 0, 0);
      if (known(p, id)) {
        const uint16_t* from = static_cast<const uint16_t*>(p.w1) + id * p.w1_stride;
        value = reinterpret_cast<const uint4*>(from)[piece];
      }
      *reinterpret_cast<uint4*>(place(0, row, piece)) = value;
    }
  }

  // Other vectors, a warp a row: two elements of each 64 a lane.
  __device__ void split_rows() {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t row = threadIdx.x / 32; row < *s_.count; row += kWarps) {
      float scale = 1.0f;
      if constexpr (kDtype == DSPARK_F16) scale = row_scale(row);
      for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
        const int32_t j = chunk * kChunkColumns + 2 * lane;
        float x = scale * vector_element(args_, s_, row, j);
        float y = scale * vector_element(args_, s_, row, j + 1);
        for (int32_t part = 0; part < args_.config.parts; ++part) {
          const uint32_t low = take_part<kDtype>(x);
          const uint32_t pair = static_cast<uint32_t>(take_part<kDtype>(y)) << 16 | low;
          unsigned char* piece = place(part, row, chunk * 8 + lane / 4);
          *reinterpret_cast<uint32_t*>(piece + lane % 4 * 4) = pair;
        }
      }
    }
  }

  // The factor of a row's vector; its inverse is for bias(). One warp.
  __device__ float row_scale(int32_t row) const {
    uint32_t largest = 0;
    for (int32_t j = threadIdx.x % 32; j < args_.p.rank; j += 32) {
      const uint32_t bits = bits_f32(vector_element(args_, s_, row, j)) & 0x7fffffffu;
      if (bits < 0x7f800000u && bits > largest) largest = bits;
    }
    const float scale = f16_scale(__reduce_max_sync(~0u, largest));
    if (threadIdx.x % 32 == 0) scales_[row] = 1.0f / scale;
    return scale;
  }

  const Args& args_;
  const Shared& s_;
  const int32_t first_, owned_;  // segments of this CTA
  const int32_t chunks_;         // boxes of a segment
  const int32_t resident_;       // boxes that stay
  uint64_t* full_;               // [slots] a box has landed
  uint64_t* empty_;              // [slots] all warps have read it
  float* scales_;                // [rows] f16: what a dot product is multiplied by
  uint32_t loads_ = 0;           // bit s: parity of the copies that slot s has had
  bool stored_ = false;          // this step's vectors are stored
  int32_t group_ = 0;            // of the next dots()
  int32_t scored_group_ = 0;     // of the last
  bool forward_ = true;
  bool last_step_ = false;
  int32_t begun_ = 0;              // kOverlap: chunks of the tile under way that are issued
  float sums_[kOverlap ? 32 : 1];  // their accumulators
};

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_WGMMA_CUH_
