// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of a tile on the tensor cores (tile_mma.cuh), and the part of it that is written
// once a tile: queries, which keys each row sees.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_QUERIES_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_QUERIES_CUH_

#include "cuda/verify_attention/elements.h"
#include "cuda/verify_attention/ring.cuh"
#include "cuda/verify_attention/tile_rows.cuh"

namespace dspark::cuda::attention {

/// Sizes of a tile that host and kernel share.
template <int kBytes, int kDim>
struct MmaSizes {
  // Of 16 rows, a warp: 128 accumulators, or 64 beside twice as many scores (32 keys a step).
  static constexpr int kTiles = kBytes == 1 && kDim == 64 ? 2 : 256 / kDim;
  static constexpr int kGroupRows = 16 * kTiles;  // of a warp
  static constexpr int kQueryPitch = kDim * 2 + 16;
  static constexpr int kValuePitch = kDim + 8;  // floats: fragments of a merge in different banks
  static constexpr int kMergeBytes = kGroupRows * kValuePitch * 4;  // of a warp
  static constexpr int kSlotBytes = Ring<kBytes, kDim>::kSlotBytes;
};

/// Bytes of the ring of a key group, which later holds its sums.
template <class Sizes>
int32_t mma_ring_bytes(int32_t groups, int32_t stages) {
  const int32_t ring = stages * Sizes::kSlotBytes, merge = groups * Sizes::kMergeBytes;
  const int32_t more = ring > merge ? ring : merge;
  return (more + prim::kBoxAlignment - 1) / prim::kBoxAlignment * prim::kBoxAlignment;
}

/// What all threads know of the tile, and of the slots; it lies before the rings.
struct MmaState {
  TileState tile;
  uint64_t full[kKeyGroups][kMaxStages];
};
static_assert(sizeof(MmaState) <= prim::kBoxAlignment, "");

/// Of all: state, rings, queries, (maximum, sum) of each row by key group and in total, its seen
/// keys, its factor.
template <class Sizes>
int32_t mma_bytes(int32_t groups, int32_t stages) {
  const int32_t rows = groups * Sizes::kGroupRows;
  return prim::kBoxAlignment + kKeyGroups * mma_ring_bytes<Sizes>(groups, stages) +
         rows * Sizes::kQueryPitch + rows * (8 * (kKeyGroups + 2) + 4);
}

template <class Element, int kDim>
class MmaQueries {
 protected:
  using Sizes = MmaSizes<Element::kBytes, kDim>;

  __device__ MmaQueries(const Args& args, unsigned char* memory)
      : args_(args),
        p_(args.p),
        key_group_(threadIdx.x / 32 % kKeyGroups),
        row_group_(threadIdx.x / 32 / kKeyGroups),
        state_(*reinterpret_cast<MmaState*>(memory)),
        rings_(memory + prim::kBoxAlignment),
        queries_(rings_ + kKeyGroups * args.config.ring_bytes) {}

  // Shared memory: the four rings, at a multiple of prim::kBoxAlignment, after a part the sums,
  // [rows][kValuePitch]; queries; (maximum, sum) by key group and in total; keys that a row sees;
  // factors of its scores.
  __device__ int32_t all_rows() const { return args_.config.row_groups * Sizes::kGroupRows; }
  __device__ unsigned char* rings() const { return rings_; }
  __device__ float2* softmax() const {
    return reinterpret_cast<float2*>(queries_ + all_rows() * Sizes::kQueryPitch);
  }
  __device__ int2* ranges() const {
    return reinterpret_cast<int2*>(softmax() + (kKeyGroups + 1) * all_rows());
  }
  __device__ float* factors() const { return reinterpret_cast<float*>(ranges() + all_rows()); }
  __device__ TileState* state() const { return &state_.tile; }

  // Keys that row g + 8 h of tile m sees; none for rows that do not exist.
  __device__ __forceinline__ int2 range_of(int m, int h) const {
    const int32_t row = row_group_ * Sizes::kGroupRows + m * 16 +
                        static_cast<int32_t>(prim::thread_index() % 32 / 4) + 8 * h;
    return row < state()->rows ? ranges()[row] : make_int2(0, 0);
  }

 public:
  /// The rows' queries, zeros for rows that do not exist, and which keys each row sees.
  __device__ void load_queries(const Tile& t) {
    const int32_t group = p_.num_q_heads / p_.num_kv_heads;
    const int32_t rows = args_.config.row_groups * Sizes::kGroupRows;
    // kDim / 8 lanes have a row of it, so whole warps have whole rows.
    for (int32_t i = prim::thread_index(); i < rows * (kDim / 8); i += blockDim.x) {
      const int32_t row = i / (kDim / 8), d = i % (kDim / 8) * 8;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (row < t.rows) {
        const int64_t at = query_offset(p_, t, row, group) + d;
        words = load_eight(static_cast<const uint16_t*>(p_.q) + at, args_.config.vectors);
      }
      unsigned char* to = queries_ + row * Sizes::kQueryPitch;
      if constexpr (Element::kBytes == 1) {
        store_scaled(words, row, d, to);
      } else {
        *reinterpret_cast<uint4*>(to + d * 2) = words;
      }
    }
    describe_rows(p_, t, ranges(), *state());
    const int32_t mine = t.rows - row_group_ * Sizes::kGroupRows;
    tiles_ = mine <= 0 ? 0 : mine >= Sizes::kGroupRows ? Sizes::kTiles : (mine + 15) / 16;
  }

 private:
  // Eight elements of a query as binary16 for one-byte keys. The row is scaled by a power of two so
  // that its largest element is near 2^14: bf16 has a wider range, and what then is too small to be
  // exact is too small to matter. Columns in the order in which keys come out of ldmatrix: 4t, 4t +
  // 1 where the product has 2t, 2t + 1, and 4t + 2, 4t + 3 where it has 2t + 8, 2t + 9.
  __device__ void store_scaled(const uint4& words, int32_t row, int32_t d,
                               unsigned char* to) const {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    float x[8], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint16_t half = static_cast<uint16_t>(w[i / 2] >> i % 2 * 16);
      x[i] = p_.dtype == DSPARK_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
      largest = fmaxf(largest, fabsf(x[i]));
    }
#pragma unroll
    for (int lanes = 1; lanes < kDim / 8; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const uint32_t exponent = bits_f32(largest) >> 23;
    const bool plain = exponent == 0 || exponent == 255;  // 0 and infinity have no scale
    const uint32_t up = plain ? 127u : min(268u - exponent, 253u);
    const float scale = float_from_bits(up << 23);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int32_t e = d % 16 + i, column = d / 16 * 16 + e / 4 * 2 + e % 4 / 2 * 8;
      *reinterpret_cast<uint32_t*>(to + column * 2) =
          prim::pack_f16(x[i] * scale, x[i + 1] * scale);
    }
    if (d == 0) factors()[row] = float_from_bits((254u - up) << 23);
  }

 protected:
  const Args& args_;
  const Params& p_;
  int32_t key_group_, row_group_;
  MmaState& state_;
  unsigned char* rings_;
  unsigned char* queries_;  // [rows][kQueryPitch bytes], then what else lies in shared memory
  int32_t tiles_ = 0;       // of 16 rows that this warp has
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_QUERIES_CUH_
