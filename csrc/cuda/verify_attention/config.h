// SPDX-License-Identifier: Apache-2.0
//
// How a call is cut, from its sizes and the device.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_CONFIG_H_
#define DSPARK_CUDA_VERIFY_ATTENTION_CONFIG_H_

#include <cstdlib>

#include "core/dtype.h"
#include "cuda/prim/launch.h"
#include "cuda/verify_attention/kernels.h"
#include "cuda/verify_attention/wgmma_sizes.h"

namespace dspark::cuda::attention {

/// A kernel and its configuration.
struct Choice {
  Kernel kernel;
  Config config;
};

constexpr int64_t kSlotMemory = INT64_C(128) << 20;    // bytes for parts of the invariant mode
constexpr int64_t kMinShareBytes = INT64_C(1) << 17;   // of the cache that a CTA reads, at least
constexpr int64_t kClusterBytes = INT64_C(1) << 16;    // that an SM reads while a grid exchanges
constexpr int64_t kMaxClusterGrid = INT64_C(1) << 16;  // CTAs
constexpr int kUnitShift = 6;                          // 64 keys

inline int64_t capped_product(int64_t a, int64_t b, int64_t cap) {
  return a != 0 && b > cap / a ? cap : a * b;
}

/// Query rows of a KV head that a request can have, at least 1.
inline int64_t most_rows(const Params& p) {
  const int64_t tokens = p.max_q_len < p.num_tokens ? p.max_q_len : p.num_tokens;
  return tokens > 0 ? tokens * (p.num_q_heads / p.num_kv_heads) : 1;
}

/// Tiles of a request and KV head, at most.
inline int64_t row_blocks(const Config& c, const Params& p) {
  return (most_rows(p) + c.rows - 1) / c.rows;
}

/// What follows from rows and threads: units of work, slots.
inline void set_units(Config& c, const Params& p, int64_t unit_bytes) {
  c.invariant = p.batch_invariant != 0;
  c.unit_shift = c.invariant ? kRunShift : kUnitShift;
  c.overhead = c.invariant ? 0 : 1;
  const int64_t least = c.invariant || unit_bytes == 0 ? 1 : kMinShareBytes / unit_bytes;
  c.min_share = least > 1 ? least : 1;
  c.width = (p.head_dim + 3) / 4 * 4;
  c.page_inverse =
      p.page_size > 1 ? static_cast<uint32_t>((UINT64_C(1) << 32) / p.page_size) : UINT32_MAX;
}

/// Shared memory of a launch, whose Compute has the first `bytes`. Behind set_units(), for c.rows.
inline int64_t with_run(Config& c, int64_t bytes) {
  c.run_offset = static_cast<uint32_t>((bytes + 15) / 16 * 16);
  return c.invariant ? c.run_offset + slot_bytes(c) : bytes;
}

/// Partial results that the CTAs of a launch can hand to each other.
inline void set_slots(Config& c, const Params& p) {
  c.slots = 2 * static_cast<int64_t>(c.grid);
  if (!c.invariant) return;
  c.slots = 0;
  const int64_t keys = static_cast<int64_t>(p.max_pages) * p.page_size;
  const auto parts = [&](int shift, int64_t most) {
    int64_t tiles = capped_product(p.num_requests, p.num_kv_heads, most);
    tiles = capped_product(tiles, row_blocks(c, p), most);
    return capped_product(tiles, ((keys - 1) >> shift) + 2, most);
  };
  const int64_t cap = kSlotMemory / slot_bytes(c), few = int64_t{kFineUnits} * c.grid;
  const int64_t splits = parts(kSplitShift, few < cap ? few : cap);  // if more: runs (plan.cuh)
  c.slots = parts(kRunShift, cap);
  if (splits > c.slots) c.slots = splits;
}

/// Whether clusters of `size` for the tiles never lose much against equal shares. They win a
/// grid-wide exchange, some 1.4 us, in which an SM reads 64 KB. They lose where a request is alone
/// with its KV heads and all the others have nothing: its CTAs may be too few for all of the
/// memory's speed, which takes three quarters of the SMs. So either these are at work whatever the
/// lengths are, or the longest request is so short that its tiles cost an SM no more than that:
///
///   bytes / size - bytes heads / (3/4 SMs) <= 64 KB, bytes of the longest tile's keys and values
///
/// (bench/lib/roofline_attention.py compares the two over shapes and lengths).
inline bool cluster_pays(const Params& p, int64_t size, const prim::DeviceLimits& device) {
  int64_t keys = static_cast<int64_t>(p.max_pages) * p.page_size;
  const int64_t seen = static_cast<int64_t>(p.window) + p.max_q_len;  // of the tokens of a tile
  if (p.window > 0 && p.causal != 0 && seen < keys) keys = seen;
  if (keys <= ((size / 2) << kUnitShift)) return false;  // half of the CTAs could have no unit
  const int64_t bytes = keys * 2 * p.head_dim * dtype_bytes(p.cache_dtype);
  const int64_t short_of = 3 * int64_t{device.multiprocessors} - 4 * size * p.num_kv_heads;
  return short_of <= 0 || bytes <= kClusterBytes * 3 * device.multiprocessors * size / short_of;
}

/// CTAs that share a tile in the clusters' mode, 0 for equal shares: the largest size of which all
/// tiles' clusters run at once, and that pays. `asked`: -1, or the size that a test wants.
inline int32_t cluster_size(const Choice& choice, const Params& p, const prim::DeviceLimits& device,
                            int64_t asked) {
  const Config& c = choice.config;
  if (c.invariant || device.major < 9 || asked == 0) return 0;
  int64_t tiles = capped_product(p.num_requests, p.num_kv_heads, kMaxClusterGrid);
  tiles = capped_product(tiles, row_blocks(c, p), kMaxClusterGrid);
  for (int32_t size = kMaxCluster; size > 1; size /= 2) {
    if (tiles * size > kMaxClusterGrid) continue;
    if (size == asked) return size;
    if (asked > 0 || !cluster_pays(p, size, device)) continue;
    // Most calls have too many tiles, which the device need not be asked for.
    if (tiles * size > 2 * c.grid) continue;
    const int clusters = prim::max_resident_clusters(choice.kernel, c.threads,
                                                     static_cast<size_t>(c.shared_bytes), size);
    if (tiles <= clusters) return size;
  }
  return 0;
}

/// CTAs: as many as are resident at once.
inline dspark_status set_grid(Choice& choice, const prim::DeviceLimits& device) {
  int blocks = 0;
  Config& c = choice.config;
  const dspark_status status = prim::max_resident_blocks(
      choice.kernel, c.threads, static_cast<size_t>(c.shared_bytes), &blocks);
  const int64_t grid = static_cast<int64_t>(blocks > 0 ? blocks : 1) * device.multiprocessors;
  c.grid = static_cast<int32_t>(grid < kMaxGrid ? grid : kMaxGrid);
  c.grid_inverse = c.grid > 1 ? UINT64_MAX / static_cast<uint64_t>(c.grid) : UINT64_MAX;
  c.cooperative = device.cooperative;
  return status;
}

/// The tensor cores' kernel; false if none serves these types and sizes. Reads no pointer.
inline bool choose_mma(Choice& choice, const Params& p, const prim::DeviceLimits& device,
                       int64_t header, dspark_status* status) {
  const bool f8 = p.cache_dtype == DSPARK_F8_E4M3;
  const int64_t piece = 16 / dtype_bytes(p.cache_dtype);
  if ((f8 ? p.dtype == DSPARK_F32 : p.dtype != p.cache_dtype) || p.page_stride % piece != 0 ||
      p.row_stride % piece != 0 || p.head_stride % piece != 0) {
    return false;
  }
  const MmaKernel mma = mma_kernel(p.head_dim, p.cache_dtype);
  if (mma.kernel == nullptr) return false;
  Config& c = choice.config;
  c = Config{};
  choice.kernel = mma.kernel;
  set_units(c, p, (INT64_C(2) * p.head_dim * dtype_bytes(p.cache_dtype)) << kUnitShift);
  const int64_t whole = device.shared_bytes_per_block, half = whole / 2 - 512;
  const auto fits = [&](int32_t groups, int32_t stages, int64_t room) {
    const int64_t rows = int64_t{groups} * mma.group_rows;
    c.rows = static_cast<int32_t>(most_rows(p) < rows ? most_rows(p) : rows);
    const int64_t bytes = with_run(c, header + mma.shared_bytes(groups, stages));
    if (bytes > room) return false;
    c.row_groups = groups;
    c.stages = stages;
    c.ring_bytes = mma.ring_bytes(groups, stages);
    c.shared_bytes = static_cast<uint32_t>(bytes);
    return true;
  };
  // Two CTAs a multiprocessor, or one with twice the rows, or whatever there is room for.
  const bool wide = most_rows(p) > mma.group_rows;
  const bool found = (wide && (fits(2, 8, whole) || fits(2, 6, whole) || fits(2, 4, whole))) ||
                     fits(1, 8, half) || fits(1, 6, half) || fits(1, 4, half) ||
                     fits(1, 8, whole) || fits(1, 6, whole) || fits(1, 4, whole) ||
                     fits(1, 2, whole);
  if (!found) return false;
  c.threads = 128 * c.row_groups;
  c.once = most_rows(p) <= c.rows;
  *status = set_grid(choice, device);
  set_slots(c, p);
  return true;
}

/// Hopper's kernel for many rows, sm_90a; false if it does not serve these types and sizes, or
/// tile_mma.cuh reads the cache as rarely. Reads no pointer; the caches must be described (maps.h).
/// Never in the invariant mode: the order of its sums is another one, and which kernel it is
/// follows from max_q_len.
inline bool choose_wgmma(Choice& choice, const Params& p, const prim::DeviceLimits& device,
                         int64_t header, dspark_status* status) {
  const char* allowed = std::getenv("DSPARK_VERIFY_ATTENTION_WGMMA");  // for tests, "0": never
  if (p.batch_invariant != 0 || p.dtype != p.cache_dtype || device.major != 9 ||
      device.minor != 0 || p.page_size % kBoxRows != 0 || (allowed != nullptr && *allowed == '0')) {
    return false;
  }
  const WgmmaKernel wgmma = wgmma_kernel(p.head_dim, p.cache_dtype);
  if (wgmma.kernel == nullptr || most_rows(p) <= wgmma.least_rows) return false;
  Config& c = choice.config;
  c = Config{};
  choice.kernel = wgmma.kernel;
  const int64_t room = device.shared_bytes_per_block - header - wgmma.rest_bytes;
  const int64_t stages = room / wgmma.slot_bytes;
  c.stages = static_cast<int32_t>(stages < kWgmmaMaxStages ? stages : kWgmmaMaxStages);
  c.ring_bytes = c.stages * wgmma.slot_bytes;
  if (c.stages < kWgmmaMinStages || c.ring_bytes < wgmma.part_bytes) return false;
  c.shared_bytes = static_cast<uint32_t>(header + wgmma.rest_bytes + c.ring_bytes);
  c.row_groups = 1;
  c.threads = kWgmmaThreads;
  c.rows = static_cast<int32_t>(most_rows(p) < kWgmmaRows ? most_rows(p) : kWgmmaRows);
  set_units(c, p, (INT64_C(4) * p.head_dim) << kUnitShift);
  *status = set_grid(choice, device);
  set_slots(c, p);
  return true;
}

/// The kernel for everything else; false if not one row fits.
inline bool choose_plain(Choice& choice, const Params& p, const prim::DeviceLimits& device,
                         int64_t header, dspark_status* status) {
  Config& c = choice.config;
  c = Config{};
  choice.kernel = plain_kernel();
  set_units(c, p, 0);
  c.rows = static_cast<int32_t>(most_rows(p) < kMaxPlainRows ? most_rows(p) : kMaxPlainRows);
  int64_t bytes = with_run(c, header + plain_shared_bytes(c.rows, c.width));
  for (; c.rows > 0 && bytes > device.shared_bytes_per_block;) {
    --c.rows;
    bytes = with_run(c, header + plain_shared_bytes(c.rows, c.width));
  }
  if (c.rows == 0) return false;
  c.row_groups = 1;
  c.threads = 128;
  c.shared_bytes = static_cast<uint32_t>(bytes);
  *status = set_grid(choice, device);
  set_slots(c, p);
  return true;
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_CONFIG_H_
