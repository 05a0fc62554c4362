// SPDX-License-Identifier: Apache-2.0
//
// How a launch is cut for tile_screen.cuh.
#ifndef DSPARK_CUDA_MARKOV_LOOP_CONFIG_SCREEN_H_
#define DSPARK_CUDA_MARKOV_LOOP_CONFIG_SCREEN_H_

#include "cuda/markov_loop/config.h"

namespace dspark::cuda::markov {

/// The problem with the bytes in W2's place.
inline Params screened_params(const Params& p) {
  Params bytes = p;
  bytes.w2 = p.w2_screen;
  bytes.w2_dtype = DSPARK_I8;
  bytes.w2_stride = p.w2_screen_stride;
  bytes.w2_scale = p.screen_scale;
  return bytes;
}

/// A configuration for the first `*rows` requests of the problem, or for fewer. False without a
/// screen, or where the screen has no kernel: the call is then served from the bf16 W2 alone.
inline bool choose_screen_config(Config& c, const Params& p, const prim::DeviceLimits& device,
                                 int32_t* rows) {
  if (p.w2_screen == nullptr) return false;
  Params bytes = screened_params(p);
  if (!serves_mma(p, device) || !serves_mma(bytes, device)) return false;
  for (int32_t n = *rows;; n = ceil_div(n, 2)) {
    const int32_t own = kScreenRoom * 8 + (n * 8 + 4 + 15) / 16 * 16;
    prim::DeviceLimits left = device;
    left.shared_bytes_per_block -= own;
    bytes.num_requests = n;
    if (mma_config(c, bytes, left)) {
      const int64_t owned = ceil_div(c.num_segments, c.grid);
      if (owned * kSegment >= int64_t{1} << kScreenOffsetBits) return false;
      c.source = Source::kScreen;
      c.screen_at = (c.source_bytes + 15) / 16 * 16;
      c.shared_bytes += c.screen_at - c.source_bytes + static_cast<uint32_t>(own);
      c.source_bytes = c.screen_at + static_cast<uint32_t>(own);
      *rows = n;
      return true;
    }
    if (n <= 8) return false;
  }
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_CONFIG_SCREEN_H_
