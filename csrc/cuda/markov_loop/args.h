// SPDX-License-Identifier: Apache-2.0
//
// What host and kernel of the Markov loop share: sizes that are fixed, the configuration, the
// workspace, and the argument block of a launch.
#ifndef DSPARK_CUDA_MARKOV_LOOP_ARGS_H_
#define DSPARK_CUDA_MARKOV_LOOP_ARGS_H_

#include <stddef.h>
#include <stdint.h>

#include "core/macros.h"
#include "core/sampler.h"
#include "cuda/prim/bulk.h"
#include "dspark/markov_loop.h"

namespace dspark::cuda::markov {

using Params = dspark_markov_loop_params;

constexpr int kThreads = 256;  // of a CTA, in every configuration
constexpr int kWarps = kThreads / 32;
constexpr int kMaxRows = 512;     // requests of one launch
constexpr int kMaxGrid = 256;     // CTAs of one launch
constexpr int kPairsPerWarp = 8;  // (segment, request) pairs of a tile that one warp finishes
// Requests of a tile of tensor cores: one of the two. 64 would need 64 accumulators, and registers
// for U besides.
constexpr int32_t kMinMmaGroup = 8, kMaxMmaGroup = 32;
constexpr int kMaxPairs = kPairsPerWarp * kWarps;
// Floats between two pairs in shared memory: 128 and 4, so that the accumulators of an mma, eight
// ids of four pairs at a time, fall into 32 different banks.
constexpr int kBiasStride = kSegment + 4;
// Mma tiles (tile_mma.cuh).
constexpr int32_t kChunkColumns = 64;           // 16-bit columns of W2 in a slot of shared memory
constexpr int32_t kSlotBytes = kSegment * 128;  // 128 rows of 128 bytes
constexpr int32_t kVectorPadding = 8;           // elements behind an r-vector

/// Bytes between two vectors of a plane of an int8 product (tile_imma.cuh).
DSPARK_HD int32_t int8_vector_stride(int32_t rank) { return (rank + 31) / 32 * 32 + 16; }

// The greedy screen (tile_screen.cuh): survivors that a CTA has room for, and the bits of an id.
constexpr int kScreenRoom = 2048;
constexpr int kScreenOffsetBits = 23;
static_assert(kMaxRows <= 1 << (32 - kScreenOffsetBits), "row and id share a word");

/// Who computes the dot products; tile_<source>.cuh.
enum class Source : int32_t { kScalar, kMma, kWgmma, kInt, kImma, kScreen };

/// How a launch is cut. Filled by config.h, a pure function of the problem and the device.
struct Config {
  Source source;
  int32_t num_segments;  // ceil(V_d / 128)
  int32_t grid;          // CTAs; CTA i owns segments [first_segment(i), first_segment(i + 1))
  int32_t group;         // requests of one tile
  int32_t batch;         // segments of one pass; batch * min(group, R) <= kMaxPairs
  int32_t parts;         // 16-bit parts of an r-vector (mma), byte planes of it (imma)
  int32_t slots;         // W2 slots in shared memory: `ring` that stream, the rest resident
  int32_t ring;
  bool plain;             // the r-vectors are rows of W1 in W2's dtype
  bool direct;            // and so aligned that cp.async can fetch them
  bool cooperative;       // one launch for all steps; else one a phase
  uint32_t screen_at;     // where in the source's memory the screen has its own (screen)
  uint32_t source_bytes;  // shared memory of the source, at offset 0
  uint32_t shared_bytes;  // all of it
};

/// The first segment of CTA `cta`; first_segment(config, grid) is the end.
DSPARK_HD int32_t first_segment(const Config& c, int32_t cta) {
  return static_cast<int32_t>(int64_t{cta} * c.num_segments / c.grid);
}
/// The CTA that owns a segment: the largest i with first_segment(i) <= segment.
DSPARK_HD int32_t owner_of(const Config& c, int32_t segment) {
  return static_cast<int32_t>((int64_t{segment} + 1) * c.grid - 1) / c.num_segments;
}

/// The workspace. Its contents before a launch do not matter (exchange.cuh).
struct Workspace {
  uint32_t* check;     // [kMaxGrid] a CTA's question to CTA 0
  uint32_t* echo;      // [kMaxGrid] and its answer
  uint32_t* arrived;   // [1] arrivals of this launch
  uint64_t* keys;      // [3, R] best packed key of a step
  uint64_t* picks;     // [2, grid, R] a CTA's candidate: token, logit bits << 32
  double* log_mass;    // [3, R, segments] log-mass of every segment of a step
  float* inner;        // [R, r] what W2 multiplies (gated, rnn)
  float* state;        // [2, R, r] state of the rnn head
  float* hidden_part;  // [R, gamma, head rows] hidden part of the head's linear layer
  size_t bytes;
};

/// Rows of the linear layer of the head: none, [r, ...] or [3r, ...].
DSPARK_HD int32_t head_rows(const Params& p) {
  if (p.head == DSPARK_HEAD_VANILLA) return 0;
  return p.head == DSPARK_HEAD_GATED ? p.rank : 3 * p.rank;
}

inline int32_t rows_of(const Params& p) {
  return p.num_requests < kMaxRows ? p.num_requests : kMaxRows;
}

/// Lay the workspace out over `data`; with NULL the sizes alone. Depends on sizes only.
inline Workspace carve(const Params& p, void* data) {
  Workspace w{};
  const auto take = [&](auto& array, int64_t count) {
    using T = decltype(+array);
    if (data != nullptr) array = reinterpret_cast<T>(static_cast<char*>(data) + w.bytes);
    w.bytes += (static_cast<size_t>(count) * sizeof(*array) + 255) / 256 * 256;
  };
  const int64_t rows = rows_of(p);
  const int64_t segments = (int64_t{p.draft_vocab_size} + kSegment - 1) / kSegment;
  const int64_t grid = segments < kMaxGrid ? segments : kMaxGrid;
  take(w.check, kMaxGrid);
  take(w.echo, kMaxGrid);
  take(w.arrived, 1);
  take(w.keys, 3 * rows);
  take(w.picks, 2 * grid * rows);
  take(w.log_mass, 3 * rows * segments);
  take(w.inner, p.head == DSPARK_HEAD_VANILLA ? 0 : rows * p.rank);
  take(w.state, p.head == DSPARK_HEAD_RNN ? 2 * rows * p.rank : 0);
  take(w.hidden_part, rows * p.gamma * head_rows(p));
  return w;
}

/// What a launch does. A cooperative launch does everything; without one, a launch does one phase
/// of one step, and the launches' order in the stream replaces the waiting.
enum Phase : uint32_t {
  kStart = 1,  ///< first status words, hidden part of the head
  kHead = 2,   ///< the head's inner vectors of a step
  kScore = 4,  ///< the pass over W2 and U of a step
  kFinish = 8  ///< tokens and lse of the last step
};

struct Args {
  Params p;
  Config config;
  Workspace work;
  const void* exact_w2;  // [V_d, r] bf16: p.w2 has the bytes (screen)
  int64_t exact_stride;
  uint32_t phases;
  int32_t first_step, last_step;  // steps [first, last) of this launch, from 0
  prim::TensorMap w2_map;         // W2 for copies in boxes (wgmma)
};

/// One of the family's kernels.
using Kernel = void (*)(Args);

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_ARGS_H_
