// SPDX-License-Identifier: Apache-2.0
//
// How a launch is cut: a pure function of the problem and the device.
#ifndef DSPARK_CUDA_MARKOV_LOOP_CONFIG_H_
#define DSPARK_CUDA_MARKOV_LOOP_CONFIG_H_

#include "cuda/markov_loop/args.h"
#include "cuda/markov_loop/shared.cuh"
#include "cuda/prim/launch.h"

namespace dspark::cuda::markov {

constexpr int32_t kChunkColumns = 64;           // columns of W2 in one slot
constexpr int32_t kSlotBytes = kSegment * 128;  // 128 rows of 128 bytes
constexpr int32_t kMinRing = 4;                 // slots that stream: 48 KB in flight
constexpr int32_t kSourceAlignment = 1024;      // of a source's parts
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
  const int64_t bytes = (int64_t{4} * group * p.rank + 15) / 16 * 16;
  if (bytes + record_bytes(c, rows) > limit) return false;
  c.source_bytes = static_cast<uint32_t>(bytes);
  c.shared_bytes = c.source_bytes + record_bytes(c, rows);
  return true;
}

/// The scalar source: false when not even one r-vector fits into shared memory.
inline bool scalar_config(Config& c, const Params& p, const prim::DeviceLimits& device) {
  c = base_config(p, device);
  c.source = Source::kScalar;
  int32_t group = 64;
  while (group > 8 && group / 2 >= rows_of(p)) group /= 2;
  for (; group >= 1; group /= 2) {
    if (fit_scalar(c, p, group, device.shared_bytes_per_block)) return true;
  }
  return false;
}

/// Choose. `problem` describes what cannot be served when it returns false.
inline bool make_config(Config& c, const Params& p, const prim::DeviceLimits& device) {
  return scalar_config(c, p, device);
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_CONFIG_H_
