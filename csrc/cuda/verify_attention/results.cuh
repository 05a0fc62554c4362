// SPDX-License-Identifier: Apache-2.0
//
// From the softmax of some keys to rows of `out`. A part of a row is (maximum m, sum l of 2^(score
// - m), values summed with these weights); scores are in units of log 2. Parts are folded in
// ascending order of their keys by one function, whoever does it and wherever they lie, so a row's
// bytes follow from how its keys are cut alone: in the batch-invariant mode into splits, which are
// folded to runs, which are folded to the row.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_RESULTS_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_RESULTS_CUH_

#include "core/dtype.h"
#include "core/math.h"
#include "cuda/prim/convert.h"
#include "cuda/prim/thread.h"
#include "cuda/verify_attention/plan.cuh"

namespace dspark::cuda::attention {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2OfE = 1.44269504f;

/// Four values of a row, with the row's maximum and sum.
struct Running {
  float max, sum;
  float x[4];
};

__device__ __forceinline__ Running no_keys() { return {-kInfinity, 0.0f, {0, 0, 0, 0}}; }

/// The part `b`, whose keys come later, into `a`. A part without a key of the row changes nothing.
__device__ __forceinline__ void fold(Running& a, const Running& b) {
  if (b.max == -kInfinity && b.sum == 0.0f) return;
  const float max = fmaxf(a.max, b.max);
  const float base = max == -kInfinity ? 0.0f : max;  // only with NaN in the sum
  const float fa = prim::exp2_approx(a.max - base), fb = prim::exp2_approx(b.max - base);
  a.max = max;
  a.sum = fma_f32(b.sum, fb, a.sum * fa);
#pragma unroll
  for (int i = 0; i < 4; ++i) a.x[i] = fma_f32(b.x[i], fb, a.x[i] * fa);
}

/// A part as a CTA leaves it in shared memory: `count` buffers [rows][pitch] to add up in order.
struct View {
  const float* values;
  int32_t count, pitch;
  int64_t stride;         // floats between buffers
  const float2* softmax;  // [rows] maximum and sum

  __device__ Running load(int32_t row, int32_t column) const {
    const float2 ms = softmax[row];
    Running r{ms.x, ms.y, {0, 0, 0, 0}};
    const float* at = values + row * pitch + column;
    for (int32_t i = 0; i < count; ++i, at += stride) {
      const float4 v = *reinterpret_cast<const float4*>(at);
      r.x[0] += v.x;
      r.x[1] += v.y;
      r.x[2] += v.z;
      r.x[3] += v.w;
    }
    return r;
  }
};

/// What has been computed of a tile: keys [from, to), unit `unit`, with a bad page or without one.
struct Piece {
  int32_t from, to;
  int32_t unit;
  bool bad;
};

class Results {
 public:
  /// `own`: in shared memory, the addresses of this CTA's own slots, for a run and for a tile.
  __device__ Results(const Args& args, unsigned char* const (&own)[2])
      : args_(args), p_(args.p), own_(own), columns_(args.config.width / 4) {}
  static __device__ unsigned char* own_slot(const Args& args) {
    return args.work.slots + (args.config.slots + blockIdx.x) * slot_bytes(args.config);
  }

  /// A piece goes to the run that it is in, a finished run of a tile that is this CTA's alone to
  /// the tile, a finished tile to `out`. A finished unit of a shared tile goes to the slot where
  /// others will read it, as does a piece that is a unit: `alone`. Whole CTA; a barrier lies
  /// between two.
  __device__ void keep(const Tile& t, const View& view, const Piece& piece, bool shared,
                       bool alone) const {
    constexpr int32_t kInRun = (1 << kRunShift) - 1;
    const bool invariant = args_.config.invariant;
    const bool opens = alone || piece.from <= t.low || (piece.from & kInRun) == 0;
    const bool ends = alone || !invariant || piece.to >= t.high || (piece.to & kInRun) == 0;
    const bool first = (piece.from & ~kInRun) <= t.low;  // run of the tile
    const bool last = !shared && piece.to >= t.high;
    const int split = piece.from >> kSplitShift & 1, run = piece.from >> kRunShift & 1;
    unsigned char* slot = shared ? slot_at(shared_slot(t, piece.unit)) : own_[1];
    for (int32_t e = prim::thread_index(); e < t.rows * columns_; e += blockDim.x) {
      const int32_t row = e / columns_, column = e - row * columns_;
      Running part = view.load(row, column * 4);
      if (!opens) fold_behind(part, own_[0], split ^ 1, row, e);
      if (!ends) {
        write_slot(own_[0], split, row, column, e, part);
        continue;
      }
      if (!shared && invariant && !first) fold_behind(part, own_[1], run ^ 1, row, e);
      if (last) {
        finish(t, row, column, part, piece.bad);
      } else {
        write_slot(slot, shared ? 0 : run, row, column, e, part);
      }
    }
    if (shared && ends && prim::thread_index() == 0) *bad_of(slot) = piece.bad;
    if (last) write_status(t, piece.bad);
  }

  /// Slice `slice` of `slices` of a shared tile, from the slots of all its parts. Whole CTA.
  /// `splits`: the parts are splits, of which those of a run come first.
  __device__ void merge(const Tile& t, int32_t slice, int32_t slices, bool splits) const {
    constexpr int32_t kOfRun = 1 << (kRunShift - kSplitShift);
    const int32_t parts = args_.config.invariant ? t.units : t.sharers;
    const int32_t each = (t.rows * columns_ - 1) / slices + 1;
    const int32_t end = min(t.rows * columns_, each * (slice + 1));
    for (int32_t e = each * slice + prim::thread_index(); e < end; e += blockDim.x) {
      const int32_t row = e / columns_;
      Running total = no_keys(), run = no_keys();
      int32_t bad = 0;
#pragma unroll 4
      for (int32_t i = 0; i < parts; ++i) {
        unsigned char* slot = slot_at(part_slot(t, i));
        bad |= *bad_of(slot);  // of the whole part: each thread looks for itself
        fold(run, read_slot(slot, 0, row, e));
        if (splits && (t.first_unit + i + 1) % kOfRun != 0 && i + 1 < parts) continue;
        fold(total, run);
        run = no_keys();
      }
      finish(t, row, e - row * columns_, total, bad != 0);
      if (e == 0) write_status(t, bad != 0);  // thread 0, which writes it
    }
  }

  /// Four values of `out`; the first four of a row also its lse.
  __device__ void finish(const Tile& t, int32_t tile_row, int32_t column, const Running& r,
                         bool bad) const {
    const int32_t group = p_.num_q_heads / p_.num_kv_heads;
    const int32_t m = t.row + tile_row, token = m / group;
    const int64_t row = static_cast<int64_t>(t.q.first + token) * p_.num_q_heads + t.head * group +
                        (m - token * group);
    const int32_t d = column * 4;
    const float nan = kInfinity - kInfinity;
    const float inverse = bad ? nan : kv_scale(p_.v_scale, p_.v_scale_stride, t.head) / r.sum;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = r.sum == 0.0f && !bad ? 0.0f : r.x[i] * inverse + 0.0f;  // -0 becomes 0
    }
    store_row(row * p_.head_dim + d, p_.head_dim - d, x);
    if (d != 0 || p_.lse == nullptr) return;
    float lse = bad ? nan : r.max + r.sum;  // -infinity without keys; NaN stays
    if (!bad && r.sum > 0.0f) {
      lse = static_cast<float>(fma_f64(r.max, 0.69314718055994531, log_f64(r.sum)));
    }
    p_.lse[row] = lse;
  }

  /// The request's status, by the CTA that finishes the last rows of its first KV head.
  __device__ void write_status(const Tile& t, bool bad) const {
    const int32_t group = p_.num_q_heads / p_.num_kv_heads;
    if (threadIdx.x == 0 && t.head == 0 && t.last_rows(group)) {
      p_.status[t.request] = bad ? DSPARK_BAD_PAGE : 0;
    }
  }

  /// Groups of four values in a row.
  __device__ int32_t columns() const { return columns_; }

 private:
  // The slot of this CTA's part of a shared tile that starts with unit `from` of it.
  __device__ int64_t shared_slot(const Tile& t, int32_t from) const {
    if (args_.config.invariant) return t.begin + from;
    return 2 * static_cast<int64_t>(blockIdx.x) + (from == 0);
  }
  // The slot of part `part`, in the order of keys.
  __device__ int64_t part_slot(const Tile& t, int32_t part) const {
    if (args_.config.invariant) return t.begin + part;
    return 2 * static_cast<int64_t>(t.owner + part) + (part == 0);
  }

  __device__ unsigned char* slot_at(int64_t slot) const {
    return args_.work.slots + slot * slot_bytes(args_.config);
  }
  __device__ int32_t* bad_of(unsigned char* slot) const {
    return reinterpret_cast<int32_t*>(slot + slot_head(args_.config) - 16);
  }
  __device__ float2* softmax_of(unsigned char* slot, int set, int32_t row) const {
    return reinterpret_cast<float2*>(slot) + set * args_.config.rows + row;
  }
  __device__ float4* values_of(unsigned char* slot, int32_t e) const {
    return reinterpret_cast<float4*>(slot + slot_head(args_.config)) + e;
  }

  // `part` behind what the slot has of the row.
  __device__ void fold_behind(Running& part, unsigned char* slot, int set, int32_t row,
                              int32_t e) const {
    Running before = read_slot(slot, set, row, e);
    fold(before, part);
    part = before;
  }
  __device__ void write_slot(unsigned char* slot, int set, int32_t row, int32_t column, int32_t e,
                             const Running& part) const {
    if (column == 0) *softmax_of(slot, set, row) = make_float2(part.max, part.sum);
    *values_of(slot, e) = make_float4(part.x[0], part.x[1], part.x[2], part.x[3]);
  }
  __device__ Running read_slot(unsigned char* slot, int set, int32_t row, int32_t e) const {
    const float2 ms = *softmax_of(slot, set, row);
    const float4 v = *values_of(slot, e);
    return {ms.x, ms.y, {v.x, v.y, v.z, v.w}};
  }

  __device__ void store_row(int64_t at, int32_t left, const float (&x)[4]) const {
    void* out = const_cast<void*>(advance(p_.out, p_.dtype, at));
    if (!args_.config.vectors) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < left) store_f32(out, p_.dtype, i, x[i]);
      }
    } else if (p_.dtype == DSPARK_F32) {
      *static_cast<float4*>(out) = make_float4(x[0], x[1], x[2], x[3]);
    } else if (p_.dtype == DSPARK_BF16) {
      *static_cast<uint2*>(out) =
          make_uint2(prim::pack_bf16(x[0], x[1]), prim::pack_bf16(x[2], x[3]));
    } else {
      *static_cast<uint2*>(out) =
          make_uint2(prim::pack_f16(x[0], x[1]), prim::pack_f16(x[2], x[3]));
    }
  }

  const Args& args_;
  const Params& p_;
  unsigned char* const (&own_)[2];
  int32_t columns_;  // groups of four values in a row
};

/// Whether a page of keys [from, to) of request r is outside of the cache: the threads' own share
/// of the answer.
__device__ __forceinline__ bool bad_pages(const Params& p, int64_t r, int32_t from, int32_t to) {
  bool bad = false;
  if (from >= to) return bad;
  const int32_t* table = p.page_table + r * p.page_table_stride;
  for (int32_t c = from / p.page_size + threadIdx.x; c < (to - 1) / p.page_size + 1;
       c += blockDim.x) {
    bad |= static_cast<uint32_t>(table[c]) >= static_cast<uint32_t>(p.num_pages);
  }
  return bad;
}

/// Whether every scale of the cache is a positive finite number. Whole CTA.
__device__ __forceinline__ bool usable_scales(const Params& p) {
  if (p.k_scale == nullptr && p.v_scale == nullptr) return true;
  bool bad = false;
  for (int32_t h = threadIdx.x; h < p.num_kv_heads; h += blockDim.x) {
    bad |= !is_kv_scale(kv_scale(p.k_scale, p.k_scale_stride, h)) ||
           !is_kv_scale(kv_scale(p.v_scale, p.v_scale_stride, h));
  }
  return __syncthreads_or(bad) == 0;
}

/// A request that needs no attention: its status, and NaN in its rows if it is in trouble. Whole
/// CTA.
__device__ __forceinline__ void settle_request(const Params& p, int64_t r, const Request& q) {
  int32_t status = q.status;
  if (status == DSPARK_KV_OVERFLOW) {
    const int64_t capacity = static_cast<int64_t>(p.max_pages) * p.page_size;
    const int32_t end = static_cast<int32_t>(min64(q.high(p, q.q_len - 1), capacity));
    if (__syncthreads_or(bad_pages(p, r, q.low(p, 0), end))) status |= DSPARK_BAD_PAGE;
  }
  if (threadIdx.x == 0) p.status[r] = status;
  if (status == 0) return;
  const float nan = kInfinity - kInfinity;
  const int64_t heads = p.num_q_heads, count = q.q_len * heads, first = q.first * heads;
  for (int64_t i = threadIdx.x; i < count * p.head_dim; i += blockDim.x) {
    store_f32(p.out, p.dtype, first * p.head_dim + i, nan);
  }
  if (p.lse == nullptr) return;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) p.lse[first + i] = nan;
}

/// All requests that need no attention, shared out among the CTAs.
__device__ __forceinline__ void settle_requests(const Params& p, bool usable) {
  for (int64_t r = blockIdx.x; r < p.num_requests; r += gridDim.x) {
    const Request q = read_request(p, r, usable);
    if (!q.works()) settle_request(p, r, q);
  }
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_RESULTS_CUH_
