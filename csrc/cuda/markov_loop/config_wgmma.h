// SPDX-License-Identifier: Apache-2.0
//
// How a launch is cut for tile_wgmma.cuh.
#ifndef DSPARK_CUDA_MARKOV_LOOP_CONFIG_WGMMA_H_
#define DSPARK_CUDA_MARKOV_LOOP_CONFIG_WGMMA_H_

#include "cuda/markov_loop/config.h"

namespace dspark::cuda::markov {

// Boxes on their way beside those of one segment, which several groups in turn may be using: 64 KB,
// while the bandwidth of L2 times its latency is about 50 KB an SM.
constexpr int32_t kBoxesAhead = 4;
// With groups of 64 a segment's boxes are free only together: fewer beside them would not keep the
// copies going, and fewer requests a launch are better.
constexpr int32_t kMinBoxesAhead = 3;
// Slots have a bit each in a word.
constexpr int32_t kMaxSlots = 31;
// More vectors would leave too few boxes. The requests beyond go into a launch of their own, which
// reads W2 again; with this many the arithmetic takes longer than that.
constexpr int32_t kMaxWgmmaRows = 128;

/// Bytes of the vectors of one group (tile_wgmma.cuh).
DSPARK_HD int32_t wgmma_group_bytes(const Config& c, const Params& p) {
  return c.parts * (p.rank / kChunkColumns) * c.group * 128;
}

/// Whether W2 can be read by tensor copies and multiplied by wgmma.
inline bool serves_wgmma(const Params& p, const prim::DeviceLimits& device) {
  const bool half = p.w2_dtype == DSPARK_BF16 || p.w2_dtype == DSPARK_F16;
  return allowed(Source::kWgmma) && device.major == 9 && device.minor == 0 && half &&
         p.rank % kChunkColumns == 0 && aligned_16(p.w2, p.w2_stride * 2);
}

// What a vector is made of.
inline void choose_parts(Config& c, const Params& p) {
  const bool vanilla = p.head == DSPARK_HEAD_VANILLA;
  c.plain = vanilla && p.w1_dtype == p.w2_dtype;
  c.direct = c.plain && aligned_16(p.w1, p.w1_stride * 2);
  const bool narrow = vanilla && p.w1_dtype != DSPARK_F32;
  c.parts = c.plain ? 1 : narrow ? 2 : 3;
}

/// False when shared memory is too small for so many requests.
inline bool wgmma_config(Config& c, const Params& p, const prim::DeviceLimits& device) {
  const int32_t rows = p.num_requests;
  if (!serves_wgmma(p, device)) return false;
  c = base_config(p, device);
  c.source = Source::kWgmma;
  choose_parts(c, p);
  c.group = 8;
  while (c.group < 64 && c.group < rows) c.group *= 2;
  const int32_t owned = ceil_div(c.num_segments, c.grid);
  const int32_t boxes = p.rank / kChunkColumns;  // of a segment
  c.batch = choose_batch(owned, rows, c.group);
  // Vectors, scales and mbarriers.
  const int32_t beside =
      ceil_div(rows, c.group) * (wgmma_group_bytes(c, p) + c.group * 4) + kMaxSlots * 16;
  const int32_t left =
      device.shared_bytes_per_block - beside - static_cast<int32_t>(record_bytes(c, rows));
  if (left < 0) return false;
  c.slots = left / kSlotBytes < kMaxSlots ? left / kSlotBytes : kMaxSlots;
  if (c.slots >= owned * boxes) {
    c.slots = owned * boxes;
  } else if (c.slots > boxes + kBoxesAhead) {
    // Whole segments stay; the ring has what is left.
    c.ring = c.slots - (c.slots - boxes - kBoxesAhead) / boxes * boxes;
  } else if (c.slots >= boxes + (c.group == 64 ? kMinBoxesAhead : 1)) {
    c.ring = c.slots;
  } else {
    return false;
  }
  c.source_bytes = static_cast<uint32_t>(c.slots * kSlotBytes + beside);
  c.shared_bytes = c.source_bytes + record_bytes(c, rows);
  return true;
}

/// A configuration for the first `*rows` requests of the problem; halves `*rows` until they fit.
/// False when wgmma does not serve the problem.
inline bool choose_wgmma_config(Config& c, Params p, const prim::DeviceLimits& device,
                                int32_t* rows) {
  for (int32_t n = *rows < kMaxWgmmaRows ? *rows : kMaxWgmmaRows;; n = ceil_div(n, 2)) {
    p.num_requests = n;
    if (wgmma_config(c, p, device)) {
      *rows = n;
      return true;
    }
    if (n <= 8 || !serves_wgmma(p, device)) return false;
  }
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_CONFIG_WGMMA_H_
