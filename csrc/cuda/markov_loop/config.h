// SPDX-License-Identifier: Apache-2.0
//
// How a launch is cut: a pure function of the problem and the device.
#ifndef DSPARK_CUDA_MARKOV_LOOP_CONFIG_H_
#define DSPARK_CUDA_MARKOV_LOOP_CONFIG_H_

#include <cstdlib>
#include <cstring>

#include "cuda/markov_loop/args.h"
#include "cuda/markov_loop/shared.cuh"
#include "cuda/prim/launch.h"

namespace dspark::cuda::markov {

constexpr int32_t kMinRing = 4;  // slots that stream: 48 KB in flight while one is in use
constexpr int32_t kMaxMmaRank = 512;

inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

/// Segments of one pass: as many as the epilogue can hold, in passes of equal length.
inline int32_t choose_batch(int32_t owned, int32_t rows, int32_t group) {
  const int32_t count = rows < group ? rows : group;
  const int32_t most = rows <= kWarps ? kMaxPairs / count : kPairsPerWarp / ceil_div(count, kWarps);
  return ceil_div(owned, ceil_div(owned, most));
}

inline uint32_t record_bytes(const Config& c, int32_t rows) {
  return shared_record_bytes(rows, c.batch * (rows < c.group ? rows : c.group));
}

// The grid and what follows from it.
inline Config base_config(const Params& p, const prim::DeviceLimits& device) {
  Config c{};
  c.num_segments = ceil_div(p.draft_vocab_size, kSegment);
  c.grid = device.multiprocessors < kMaxGrid ? device.multiprocessors : kMaxGrid;
  if (c.num_segments < c.grid) c.grid = c.num_segments;
  c.cooperative = device.cooperative;
  c.parts = 1;
  return c;
}

/// Set group, batch and memory for `group` rows a tile; false when it does not fit.
inline bool fit_scalar(Config& c, const Params& p, int32_t group, int32_t limit) {
  const int32_t rows = rows_of(p);
  c.group = group;
  c.batch = choose_batch(ceil_div(c.num_segments, c.grid), rows, group);
  const int64_t bytes = (int64_t{4} * group * (p.rank + 1) + 15) / 16 * 16;
  if (bytes + record_bytes(c, rows) > limit) return false;
  c.source_bytes = static_cast<uint32_t>(bytes);
  c.shared_bytes = c.source_bytes + record_bytes(c, rows);
  return true;
}

/// The sources for every shape: false when not even one r-vector fits into shared memory.
inline bool scalar_config(Config& c, const Params& p, const prim::DeviceLimits& device) {
  c = base_config(p, device);
  c.source = p.w2_dtype == DSPARK_I8 ? Source::kInt : Source::kScalar;
  int32_t group = 64;
  while (group > 8 && group / 2 >= rows_of(p)) group /= 2;
  for (; group >= 1; group /= 2) {
    if (fit_scalar(c, p, group, device.shared_bytes_per_block)) return true;
  }
  return false;
}

inline bool aligned_16(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

/// Whether a source may be chosen. For benches and tests, DSPARK_MARKOV_LOOP_SOURCE in the
/// environment holds back what is faster: "mma" leaves out wgmma, "scalar" both.
inline bool allowed(Source source) {
  const char* most = std::getenv("DSPARK_MARKOV_LOOP_SOURCE");
  if (most == nullptr) return true;
  if (std::strcmp(most, "mma") == 0) return source != Source::kWgmma;
  return std::strcmp(most, "scalar") != 0;
}

/// Whether tile_mma.cuh or, with int8, tile_imma.cuh can read this W2.
inline bool serves_mma(const Params& p, const prim::DeviceLimits& device) {
  return allowed(Source::kMma) && device.major >= 8 && p.w2_dtype != DSPARK_F32 &&
         p.rank % 16 == 0 && p.rank <= kMaxMmaRank &&
         aligned_16(p.w2, p.w2_stride * dtype_bytes(p.w2_dtype));
}

/// Slots, ring and batch with `group` rows a tile; false when the tiles of a pass do not fit.
inline bool fit_mma(Config& c, const Params& p, int32_t group, int32_t limit) {
  const int32_t rows = rows_of(p);
  const bool int8 = p.w2_dtype == DSPARK_I8;
  const int32_t chunks = ceil_div(p.rank, int8 ? 2 * kChunkColumns : kChunkColumns);
  const int32_t owned = ceil_div(c.num_segments, c.grid);
  const int32_t stride = int8 ? int8_vector_stride(p.rank) : (p.rank + kVectorPadding) * 2;
  const int32_t vectors = c.parts * group * stride + group * 4;
  c.group = group;
  for (c.batch = choose_batch(owned, rows, group); c.batch >= 1; --c.batch) {
    const uint32_t fixed = record_bytes(c, rows) + static_cast<uint32_t>(vectors + 15) / 16 * 16;
    if (fixed >= static_cast<uint32_t>(limit)) continue;
    c.slots = static_cast<int32_t>((static_cast<uint32_t>(limit) - fixed) / kSlotBytes);
    // With several groups the tiles of a pass stay until the last one has used them.
    const int32_t held = rows > group ? chunks * c.batch : 1;
    c.ring = held + kMinRing - 1;
    if (c.slots >= owned * chunks) {
      c.slots = owned * chunks;
      c.ring = 0;
    } else if (c.slots > c.ring) {
      c.ring = c.slots - (c.slots - c.ring) / chunks * chunks;
    } else {
      c.ring = c.slots;
    }
    // The pass that follows loads meanwhile: a longer pass is not worth a ring without that room.
    if (c.ring != 0 && c.ring < held + (c.batch > 1 ? kMinRing : 1)) continue;
    c.source_bytes = static_cast<uint32_t>(c.slots * kSlotBytes + (vectors + 15) / 16 * 16);
    c.shared_bytes = c.source_bytes + record_bytes(c, rows);
    return true;
  }
  return false;
}

/// Tensor cores; false when the problem or the device is not made for it, or when the requests are
/// too many for one launch (fewer may fit).
inline bool mma_config(Config& c, const Params& p, const prim::DeviceLimits& device) {
  if (!serves_mma(p, device)) return false;
  c = base_config(p, device);
  const bool int8 = p.w2_dtype == DSPARK_I8;
  c.source = int8 ? Source::kImma : Source::kMma;
  const bool vanilla = p.head == DSPARK_HEAD_VANILLA;
  c.plain = vanilla && p.w1_dtype == p.w2_dtype;
  c.direct = c.plain && aligned_16(p.w1, p.w1_stride * 2);
  // bfloat16 has fewer bits than one part of either type.
  c.parts = c.plain || (vanilla && p.w1_dtype == DSPARK_BF16) ? 1 : 3;
  if (int8) c.parts = 2;
  // Two sizes of tile: between them the padding is products, and W2's bytes decide the time.
  for (const int32_t group : {kMaxMmaGroup, kMinMmaGroup}) {
    if (group > kMinMmaGroup && rows_of(p) <= kMinMmaGroup) continue;
    if (fit_mma(c, p, group, device.shared_bytes_per_block)) return true;
  }
  return false;
}

/// The best configuration for the first `*rows` requests of the problem, or for fewer of them:
/// halves `*rows` while no tensor-core configuration has room. False when nothing fits.
inline bool choose_config(Config& c, Params p, const prim::DeviceLimits& device, int32_t* rows) {
  for (int32_t n = *rows;; n = ceil_div(n, 2)) {
    p.num_requests = n;
    if (mma_config(c, p, device)) {
      *rows = n;
      return true;
    }
    if (n <= 8 || !serves_mma(p, device)) break;
  }
  p.num_requests = *rows;
  return scalar_config(c, p, device);
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_CONFIG_H_
