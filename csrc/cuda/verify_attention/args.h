// SPDX-License-Identifier: Apache-2.0
//
// What host and kernel of verify_attention share: the configuration, the workspace, the argument
// block of a launch.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_ARGS_H_
#define DSPARK_CUDA_VERIFY_ATTENTION_ARGS_H_

#include <stddef.h>
#include <stdint.h>

#include "core/macros.h"
#include "cuda/prim/bulk.h"
#include "dspark/verify_attention.h"

namespace dspark::cuda::attention {

using Params = dspark_verify_attention_params;

constexpr int kMaxGrid = 1024;   // CTAs of one launch
constexpr int kSplitShift = 8;   // 256 keys of a split, when the bytes must not depend on the batch
constexpr int kRunShift = 10;    // and 1024 of a run of splits
constexpr int kFineUnits = 2;    // splits a CTA up to which they are shared out one by one
constexpr int kBoxRows = 16;     // of a page, in a bulk copy
constexpr int kMaxCluster = 16;  // CTAs that share a tile through their shared memory

/// How a launch is cut: a pure function of the sizes and the device (config.h).
struct Config {
  int32_t rows;        // query rows (tokens times heads of a group) of a tile, at most
  int32_t threads;     // of a CTA
  int32_t row_groups;  // warps that share keys, each with rows of its own (tile_mma.cuh)
  int32_t stages;      // slots of a warp's ring, each half a step (tile_mma.cuh)
  int32_t ring_bytes;  // of a key group's ring, or its sums
  int32_t unit_shift;  // a unit of work is 1 << unit_shift keys, at multiples of it
  int64_t overhead;    // units that a tile costs beside its keys
  int64_t min_share;   // units of a CTA's share, at least
  int32_t grid;        // CTAs
  int32_t cluster;     // CTAs that have a tile to themselves and merge it; 0: equal shares of all
  int32_t row_blocks;  // tiles of a request and KV head, at most
  int32_t width;       // head_dim rounded up to 4: floats of a row of results in the workspace
  uint64_t grid_inverse;  // floor(2^64 / grid), 2^64 - 1 for one CTA
  uint32_t page_inverse;  // floor(2^32 / page_size), 2^32 - 1 for one row
  int64_t slots;          // partial results that CTAs can hand to each other
  bool invariant;         // every split has a softmax of its own
  bool cooperative;       // all CTAs run at once and may wait for each other
  bool vectors;           // q can be read, and out written, in vectors
  bool bulk;              // Args::keys and Args::values describe the caches (maps.h)
  bool once;              // one tile has all rows of a request: nobody reads its keys again
  uint32_t run_offset;    // of the slot in shared memory where splits become a run
  uint32_t shared_bytes;
};

/// The workspace. Its contents before a launch do not matter (exchange.cuh).
struct Workspace {
  uint32_t* check;       // [kMaxGrid] a CTA's question to CTA 0
  uint32_t* echo;        // [kMaxGrid] and its answer
  uint32_t* arrived;     // [kMaxGrid] arrivals at the tile that is shared from this CTA on
  uint32_t* admitted;    // [1] CTAs that have seen their answer
  unsigned char* slots;  // [slots + grid]: shared ones, then one that is a CTA's own
  size_t bytes;
};

struct Args {
  Params p;
  Config config;
  Workspace work;
  prim::TensorMap keys, values;
};

/// A slot: two sets of (maximum, sum) [rows], a word that is not 0 for bad pages, values [rows,
/// width]. Bytes from its start to the values, and of all of it.
DSPARK_HD int64_t slot_head(const Config& c) {
  return static_cast<int64_t>(sizeof(float)) * 4 * c.rows + 16;
}
DSPARK_HD int64_t slot_bytes(const Config& c) {
  return slot_head(c) + static_cast<int64_t>(sizeof(float)) * c.rows * c.width;
}

/// Lay the workspace out over `data`; with NULL the sizes alone.
inline Workspace carve(const Config& c, void* data) {
  Workspace w{};
  const auto take = [&](auto& array, int64_t bytes) {
    using T = decltype(+array);
    if (data != nullptr) array = reinterpret_cast<T>(static_cast<char*>(data) + w.bytes);
    w.bytes += (static_cast<size_t>(bytes) + 255) / 256 * 256;
  };
  take(w.check, sizeof(uint32_t) * kMaxGrid);
  take(w.echo, sizeof(uint32_t) * kMaxGrid);
  take(w.arrived, sizeof(uint32_t) * kMaxGrid);
  take(w.admitted, sizeof(uint32_t));
  take(w.slots, (c.slots + c.grid) * slot_bytes(c));
  return w;
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_ARGS_H_
