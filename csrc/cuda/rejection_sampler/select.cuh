// SPDX-License-Identifier: Apache-2.0
//
// min-p, top-k, top-p and the n likeliest ids: one place in the order (logit descending, id
// ascending), found without sorting, and the same one as on the CPU.
//
// A search narrows an interval of ordered logits, 256 bins a level: every CTA counts its slice, the
// team adds up the bins, and a scan over them shows in which one the target is reached. Bins hold
// counts, or masses in whole steps of a grid, hence sums that do not depend on any order. Ties at
// the last key are searched by id in the same way. top-k starts at the k-th largest maximum of a
// segment, and top-p near the largest logit, so that few segments have a say.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_SELECT_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_SELECT_CUH_

#include "cuda/rejection_sampler/row.cuh"

namespace dspark::cuda::verify {

struct SelectShared {
  uint32_t low[kThreads];  // of 64-bit bins
  uint32_t high[kThreads];
  uint32_t bin;
  uint64_t before, at;
};

enum class Count : int32_t {
  kMaxima,  // segments by their largest logit
  kValues,  // ids by their logit
  kTies     // ids with one logit, the lowest first
};

struct Search {
  Count what;
  bool by_mass;         // amounts are masses, not 1
  bool raw;             // the unprocessed row
  const float* maxima;  // of the slice's segments, or null: all segments are looked at
  uint32_t tie;         // kTies: the ordered logit
  uint32_t lowest, highest;
  uint64_t before;  // amount above the interval
  double target;    // the first key at which the amount reaches it is wanted
};

/// `found`: the amounts of keys above `key` and of `key` itself. Else `before` is that of all.
struct Crossing {
  bool found;
  uint32_t key;
  uint64_t before, at;
};

// 64-bit atomics of shared memory are a loop; two of 32 bits are not.
__device__ __forceinline__ void add_to_bin(SelectShared& s, uint32_t bin, uint64_t amount) {
  const uint32_t low = static_cast<uint32_t>(amount);
  const uint32_t old = atomicAdd(&s.low[bin], low);
  const uint32_t high = static_cast<uint32_t>(amount >> 32) + (old + low < old ? 1u : 0u);
  if (high != 0) atomicAdd(&s.high[bin], high);
}

__device__ __forceinline__ void count_maxima(SelectShared& s, const Row& row, const Search& q,
                                             int shift) {
  const int32_t count = row.end - row.first;
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
    const uint32_t key = ordered_f32(q.maxima[i]);
    if (key >= q.lowest && key <= q.highest) add_to_bin(s, (q.highest - key) >> shift, 1);
  }
}

__device__ __forceinline__ void count_ids(SelectShared& s, const Row& row, const Search& q,
                                          int shift) {
  const float scale = weight_scale(row.law.temperature);
  const double grid = mass_grid(row.law.vocab);
  const uint32_t least = q.what == Count::kTies ? q.tie : q.lowest;
#pragma unroll 1
  for (int32_t i = row.first + warp_id(); i < row.end; i += kWarps) {
    if (q.maxima != nullptr && ordered_f32(q.maxima[i - row.first]) < least) continue;
    float z[4];
    segment_logits(row, i, q.raw, z);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t value = ordered_f32(z[e]);
      const uint32_t key = q.what == Count::kTies ? ~static_cast<uint32_t>(id_of(i, e)) : value;
      const bool counts = q.what == Count::kTies ? value == q.tie : true;
      if (!counts || key < q.lowest || key > q.highest) continue;
      const uint64_t amount = q.by_mass ? grid_mass(z[e], row.top, scale, grid) : 1;
      add_to_bin(s, (q.highest - key) >> shift, amount);
    }
  }
}

/// Amounts of the team in bins up to this thread's, this thread's bin in *own.
__device__ __forceinline__ uint64_t through_bins(Team& team, SelectShared& s, uint64_t* own) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  __syncthreads();
  uint64_t total = static_cast<uint64_t>(s.high[thread]) << 32 | s.low[thread];
  if (team.size > 1) {
    uint64_t* bins = team.shared->bins[team.turn];
    bins[thread] = total;
    team.barrier();
    total = 0;
    for (int32_t c = 0; c < team.size; ++c) {
      total += prim::map_shared(bins, static_cast<uint32_t>(c))[thread];
    }
    team.turn ^= 1;
  }
  *own = total;
  uint64_t through = total;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t below = __shfl_up_sync(~0u, through, d);
    if (lane_id() >= d) through += below;
  }
  uint64_t* warps = &team.shared->warp[0][0];
  if (lane_id() == 31) warps[warp_id()] = through;
  __syncthreads();
  for (int32_t w = 0; w < warp_id(); ++w) through += warps[w];
  return through;
}

/// The first key, from the highest down, at which the amount reaches the target. Whole team.
__device__ __forceinline__ Crossing descend(Team& team, SelectShared& s, const Row& row, Search q) {
  for (;;) {
    const uint32_t span = q.highest - q.lowest;
    const int shift = span < kThreads ? 0 : 24 - __clz(static_cast<int>(span));
    // A thread alone has read its bin, and what was found is written behind three more barriers.
    s.low[threadIdx.x] = s.high[threadIdx.x] = 0;
    __syncthreads();
    if (q.what == Count::kMaxima) {
      count_maxima(s, row, q, shift);
    } else {
      count_ids(s, row, q, shift);
    }
    uint64_t own;
    const uint64_t through = q.before + through_bins(team, s, &own);
    const bool last = static_cast<double>(through - own) < q.target;
    if (!(static_cast<double>(through) < q.target) && last) {
      s.bin = threadIdx.x;
      s.before = through - own;
      s.at = own;
    }
    if (threadIdx.x == kThreads - 1 && static_cast<double>(through) < q.target) {
      s.bin = kThreads;  // none
      s.before = through;
    }
    __syncthreads();
    const uint32_t bin = s.bin;
    if (bin == kThreads) return Crossing{false, 0, s.before, 0};
    q.before = s.before;
    q.highest -= bin << shift;
    if (shift == 0) return Crossing{true, q.highest, s.before, s.at};
    const uint32_t width = (1u << shift) - 1;
    if (q.highest - q.lowest > width) q.lowest = q.highest - width;
  }
}

/// How many equal amounts behind `before` reach the target: at least one.
__device__ __forceinline__ uint64_t needed(double target, uint64_t before, uint64_t each) {
  const double about = (target - static_cast<double>(before)) / static_cast<double>(each);
  uint64_t n = about > 1.0 ? static_cast<uint64_t>(about) : 1;
  while (n > 1 && !(static_cast<double>(before + (n - 1) * each) < target)) --n;
  while (static_cast<double>(before + n * each) < target) ++n;
  return n;
}

/// What is selected: of the ids from `low` on the `k` best, of those the share `top_p` of the mass.
struct Wanted {
  bool raw;
  const float* maxima;
  float low, top;  // no id is above `top`
  int64_t k;       // 0: all
  float top_p;     // 1: all
};

enum class Stage : int32_t { kBound, kBest, kMass, kTop, kRest, kTies, kDone };

/// A selection on its way; the same in all threads.
struct Selection {
  Stage stage;
  bool by_mass;
  double target;
  Cut cut;
  Search search;
};

__device__ __forceinline__ Selection start_selection(const Wanted& w, int32_t segments) {
  const bool bound = w.maxima != nullptr && w.k <= segments;
  const Stage stage = w.k <= 0 ? Stage::kDone : bound ? Stage::kBound : Stage::kBest;
  const uint32_t low = ordered_f32(w.low);
  const Search search{Count::kValues, false, w.raw, w.maxima, 0, low, ordered_f32(w.top), 0, 0.0};
  return Selection{stage, false, static_cast<double>(w.k), Cut{w.low, INT32_MAX}, search};
}

// From the k best to the mass: what is left of the row is its support now. Nobody reads the cut
// before the first barrier of the search that follows.
__device__ __forceinline__ void start_mass(Row& row, const Wanted& w, Selection& now) {
  if (threadIdx.x == 0) {
    row.cut = now.cut;
    row.cuts = true;
  }
  now.by_mass = true;
  now.search = Search{Count::kValues,       true, false, w.maxima, 0, ordered_f32(w.low),
                      ordered_f32(row.top), 0,    0.0};
  now.stage = Stage::kMass;
  now.target = __builtin_inf();  // never reached: the search ends with all of it
}

// How much of the mass is wanted; it is looked for near the largest logit first.
__device__ __forceinline__ void start_nucleus(const Row& row, const Wanted& w, double whole,
                                              Selection& now) {
  now.target = static_cast<double>(w.top_p) * whole;
  now.stage = Stage::kTop;
  const float near = row.top - 16.0f * row.law.temperature;
  now.search.lowest = ordered_f32(near > w.low ? near : w.low);
}

// What a search has found decides the next one.
__device__ __forceinline__ void step_selection(const Row& row, const Wanted& w, const Crossing& c,
                                               Selection& now) {
  if (now.stage == Stage::kBound) {
    if (c.found) now.search.lowest = c.key;
    now.stage = Stage::kBest;
  } else if (now.stage == Stage::kMass) {
    start_nucleus(row, w, static_cast<double>(c.before), now);
  } else if (now.stage == Stage::kTies) {
    now.cut.id = static_cast<int32_t>(~c.key);
    now.stage = Stage::kDone;
  } else if (c.found) {
    now.cut = Cut{from_ordered_f32(c.key), INT32_MAX};
    const uint64_t each = !now.by_mass
                              ? 1
                              : grid_mass(now.cut.z, row.top, weight_scale(row.law.temperature),
                                          mass_grid(row.law.vocab));
    const uint64_t n = needed(now.target, c.before, each);
    now.stage = n * each == c.at ? Stage::kDone : Stage::kTies;
    now.target = static_cast<double>(n);
    now.search.tie = c.key;
    now.search.lowest = ~static_cast<uint32_t>(row.law.vocab - 1);
    now.search.highest = ~0u;
    now.search.before = 0;
  } else if (now.stage == Stage::kTop && now.search.lowest > ordered_f32(w.low)) {
    now.search.highest = now.search.lowest - 1;
    now.search.lowest = ordered_f32(w.low);
    now.search.before = c.before;
    now.stage = Stage::kRest;
  } else {
    now.stage = Stage::kDone;
  }
}

/// The last id that is wanted. Whole team. With a share of the mass the cut of the row is the
/// scratch of it.
__device__ __forceinline__ Cut select_ids(Team& team, SelectShared& s, Row& row, const Wanted& w,
                                          int32_t segments) {
  if (!(w.top >= w.low)) return Cut{w.low, INT32_MAX};
  Selection now = start_selection(w, segments);
#pragma unroll 1
  for (;;) {
    if (now.stage == Stage::kDone) {
      if (now.by_mass || !(w.top_p < 1.0f)) return now.cut;
      start_mass(row, w, now);
      if (w.k <= 0 && !(row.law.min_p > 0.0f)) {
        start_nucleus(row, w, row.mass * mass_grid(row.law.vocab), now);
      }
    }
    now.search.what = now.stage == Stage::kBound  ? Count::kMaxima
                      : now.stage == Stage::kTies ? Count::kTies
                                                  : Count::kValues;
    now.search.by_mass = now.by_mass && now.stage != Stage::kTies;
    now.search.target = now.target;
    step_selection(row, w, descend(team, s, row, now.search), now);
  }
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_SELECT_CUH_
