// SPDX-License-Identifier: Apache-2.0
//
// paged_kv: append the keys and values of new tokens to a paged cache, and commit a round.
//
// A request has `slices` blocks; block s moves its tokens s, s + slices, ... one after the other:
// all heads of k, rotated on the way, then all heads of v. The page of a token is one read of the
// page table; lengths and tables stay on the device. Angles are float64 and have the bits of the
// CPU backend (core/math.h), one evaluation a token and frequency, shared by all heads; pairs lie
// apart or side by side. A cache in FP8 takes x / scale, rounded once, also as on the CPU.
//
// Traffic and floor: k and v read once and written once; R = 128 requests of 8 tokens, 8 heads of
// 128 in bf16: 8.4 MB, 2 us of an H200's memory, about the time of a launch. Rows move in pieces of
// 16 bytes where pointers and strides allow, else element by element. Not measured.
#ifndef DSPARK_CUDA_PAGED_KV_KERNEL_CUH_
#define DSPARK_CUDA_PAGED_KV_KERNEL_CUH_

#include "core/dtype.h"
#include "core/math.h"
#include "cuda/prim/platform.h"
#include "dspark/paged_kv.h"

namespace dspark::cuda::paged {

using Params = dspark_paged_kv_params;

constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 8;  // 64 registers a thread
constexpr int kMaxFrequencies = 256;         // of a rotation that is given by its base

struct Args {
  Params p;
  int32_t slices;                    // blocks of a request
  int32_t piece;                     // elements moved at once: 1, or as many as fill 16 bytes
  int32_t turning;                   // elements of a head that the rotation turns
  double amplitude;                  // of its cosine and sine
  double inv_freq[kMaxFrequencies];  // [turning / 2], unless p.rope_inv_freq is given
};

/// Some elements of a row as floats, and as they lie in memory.
template <int kElements>
struct Piece {
  float x[kElements];
};

template <int kElements>
__device__ __forceinline__ Piece<kElements> load_piece(const void* data, int32_t dtype,
                                                       int64_t at) {
  Piece<kElements> piece;
  if constexpr (kElements == 1) {
    piece.x[0] = load_f32(data, dtype, at);
  } else {
    const uint4 words = *static_cast<const uint4*>(advance(data, dtype, at));
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (kElements == 4) {
        piece.x[i] = float_from_bits(w[i]);
      } else {
        const uint16_t half = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
        piece.x[i] = dtype == DSPARK_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
      }
    }
  }
  return piece;
}

template <int kElements>
__device__ __forceinline__ void store_piece(void* data, int32_t dtype, int64_t at,
                                            const Piece<kElements>& piece, float scale) {
  if constexpr (kElements == 1) {
    store_kv(data, dtype, at, dtype == DSPARK_F8_E4M3 ? piece.x[0] / scale : piece.x[0]);
  } else if (dtype == DSPARK_F8_E4M3) {
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      w[i / 4] |= static_cast<uint32_t>(f32_to_f8(piece.x[i] / scale)) << (i % 4 * 8);
    }
    if constexpr (kElements == 4) {
      *static_cast<uint32_t*>(const_cast<void*>(advance(data, dtype, at))) = w[0];
    } else {
      *static_cast<uint2*>(const_cast<void*>(advance(data, dtype, at))) = make_uint2(w[0], w[1]);
    }
  } else {
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (kElements == 4) {
        w[i] = bits_f32(piece.x[i]);
      } else {
        const uint16_t half =
            dtype == DSPARK_BF16 ? f32_to_bf16(piece.x[i]) : f32_to_f16(piece.x[i]);
        w[i / 2] |= static_cast<uint32_t>(half) << (i % 2 * 16);
      }
    }
    *static_cast<uint4*>(const_cast<void*>(advance(data, dtype, at))) =
        make_uint4(w[0], w[1], w[2], w[3]);
  }
}

/// The rows of a request that are appended and its length, as the device has them.
struct Span {
  int64_t begin, end, length;
};

__device__ __forceinline__ bool read_span(const Params& p, int64_t r, Span* span) {
  *span = Span{p.cu_seqlens[r], p.cu_seqlens[r + 1], p.kv_len[r]};
  if (span->begin < 0 || span->end < span->begin || span->end > p.num_tokens || span->length < 0) {
    return false;
  }
  if (p.num_new == nullptr) return true;
  const int32_t rows = p.num_new[r];
  if (rows < 0 || rows > span->end - span->begin) return false;
  span->end = span->begin + rows;
  return true;
}

/// Status bit of a position, 0 with `offset` set to its row when it can be written.
__device__ __forceinline__ int32_t locate(const Params& p, int64_t r, int64_t position,
                                          int64_t* offset) {
  const int64_t column = position / p.page_size;
  if (column >= p.max_pages) return DSPARK_KV_OVERFLOW;
  const int32_t page = p.page_table[r * p.page_table_stride + column];
  if (page < 0 || page >= p.num_pages) return DSPARK_BAD_PAGE;
  *offset = page * p.page_stride + position % p.page_size * p.row_stride;
  return 0;
}

/// The scales of one of the caches.
struct Scale {
  const float* values;
  int32_t stride;
};

/// Whether all scales of the caches are positive finite numbers. One block; ends with a barrier.
__device__ __forceinline__ bool scales_are_usable(const Params& p) {
  if (p.k_scale == nullptr && p.v_scale == nullptr) return true;
  int bad = 0;
  for (int32_t h = static_cast<int32_t>(threadIdx.x); h < p.num_kv_heads; h += kThreads) {
    bad |= !is_kv_scale(kv_scale(p.k_scale, p.k_scale_stride, h));
    bad |= !is_kv_scale(kv_scale(p.v_scale, p.v_scale_stride, h));
  }
  return __syncthreads_or(bad) == 0;
}

// Status of a request: one look at every page that its append touches. One block.
__device__ __forceinline__ void write_status(const Params& p, int64_t r, bool legal,
                                             const Span& span) {
  int32_t status = legal ? 0 : DSPARK_BAD_PARAM;
  if (legal && span.end > span.begin) {
    const int64_t first = span.length / p.page_size;
    const int64_t last = (span.length + (span.end - span.begin) - 1) / p.page_size;
    int64_t unused;
    for (int64_t c = first + threadIdx.x; c <= last; c += kThreads) {
      status |= locate(p, r, c * p.page_size, &unused);
    }
  }
  const int overflow = __syncthreads_or(status & DSPARK_KV_OVERFLOW);
  const int bad_page = __syncthreads_or(status & DSPARK_BAD_PAGE);
  if (threadIdx.x != 0) return;
  p.status[r] = (status & DSPARK_BAD_PARAM) | (overflow != 0 ? DSPARK_KV_OVERFLOW : 0) |
                (bad_page != 0 ? DSPARK_BAD_PAGE : 0);
}

// cos and sin of a position's angles, [turning / 2] each. Ends with a barrier.
__device__ __forceinline__ void set_angles(const Args& args, int64_t position, float* cosine,
                                           float* sine) {
  const int32_t half = args.turning / 2;
  __syncthreads();  // the angles of the token before have been used
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < half; i += kThreads) {
    const double frequency =
        args.p.rope_inv_freq != nullptr ? args.p.rope_inv_freq[i] : args.inv_freq[i];
    double s, c;
    sin_cos_f64(static_cast<double>(position) * frequency, &s, &c);
    cosine[i] = static_cast<float>(c * args.amplitude);
    sine[i] = static_cast<float>(s * args.amplitude);
  }
  __syncthreads();
}

// All heads of one token, unrotated: the same bytes, unless the cache has another dtype.
template <int kElements>
__device__ __forceinline__ void move_heads(const Params& p, const void* from, int64_t from_stride,
                                           void* to, int64_t offset, Scale scale) {
  const int32_t pieces = p.head_dim / kElements;
  for (int32_t q = static_cast<int32_t>(threadIdx.x); q < p.num_kv_heads * pieces; q += kThreads) {
    const int64_t h = q / pieces, i = static_cast<int64_t>(q % pieces) * kElements;
    const int64_t source = h * from_stride + i, target = offset + h * p.head_stride + i;
    if (p.cache_dtype == DSPARK_F8_E4M3) {
      store_piece(to, p.cache_dtype, target, load_piece<kElements>(from, p.dtype, source),
                  kv_scale(scale.values, scale.stride, static_cast<int32_t>(h)));
    } else if (kElements > 1) {
      *static_cast<uint4*>(const_cast<void*>(advance(to, p.cache_dtype, target))) =
          *static_cast<const uint4*>(advance(from, p.dtype, source));
    } else if (p.dtype != p.cache_dtype) {
      store_f32(to, p.cache_dtype, target, load_f32(from, p.dtype, source));
    } else if (p.dtype == DSPARK_F32) {
      static_cast<uint32_t*>(to)[target] = static_cast<const uint32_t*>(from)[source];
    } else {
      static_cast<uint16_t*>(to)[target] = static_cast<const uint16_t*>(from)[source];
    }
  }
}

// Pairs that lie `apart` elements from each other: pieces a and b of a head, turned.
template <int kElements>
__device__ __forceinline__ void turn_apart(const Piece<kElements>& a, const Piece<kElements>& b,
                                           const float* cosine, const float* sine,
                                           Piece<kElements>* low, Piece<kElements>* high) {
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    low->x[e] = a.x[e] * cosine[e] - b.x[e] * sine[e];
    high->x[e] = b.x[e] * cosine[e] + a.x[e] * sine[e];
  }
}

// Pairs side by side in one piece.
template <int kElements>
__device__ __forceinline__ Piece<kElements> turn_pairs(const Piece<kElements>& x,
                                                       const float* cosine, const float* sine) {
  Piece<kElements> y;
#pragma unroll
  for (int e = 0; e + 1 < kElements; e += 2) {
    y.x[e] = x.x[e] * cosine[e / 2] - x.x[e + 1] * sine[e / 2];
    y.x[e + 1] = x.x[e + 1] * cosine[e / 2] + x.x[e] * sine[e / 2];
  }
  return y;
}

// All heads of one token, rotated. A unit is a piece that pairs with another one, a piece of whole
// pairs, or a piece behind the elements that turn.
template <int kElements>
__device__ __forceinline__ void rotate_heads(const Args& args, const void* from, int64_t offset,
                                             const float* cosine, const float* sine) {
  const Params& p = args.p;
  const int32_t half = args.turning / 2;
  const bool together = p.rope_interleaved != 0 && kElements > 1;
  const int32_t turned = (together ? args.turning : half) / kElements;
  const int32_t units = turned + (p.head_dim - args.turning) / kElements;
  const int32_t step = p.rope_interleaved != 0 ? 2 : 1;  // single elements only
  const int32_t apart = p.rope_interleaved != 0 ? 1 : half;
  for (int32_t q = static_cast<int32_t>(threadIdx.x); q < p.num_kv_heads * units; q += kThreads) {
    const int32_t h = q / units, u = q % units;
    const int64_t source = h * p.k_head_stride, target = offset + h * p.head_stride;
    const float scale = kv_scale(p.k_scale, p.k_scale_stride, h);
    if (u >= turned || together) {
      const int32_t i = u >= turned ? args.turning + (u - turned) * kElements : u * kElements;
      auto piece = load_piece<kElements>(from, p.dtype, source + i);
      if constexpr (kElements > 1) {
        if (u < turned) piece = turn_pairs(piece, cosine + i / 2, sine + i / 2);
      }
      store_piece(p.k_cache, p.cache_dtype, target + i, piece, scale);
      continue;
    }
    const int32_t pair = u * kElements;
    const int64_t i = static_cast<int64_t>(pair) * step;
    const auto a = load_piece<kElements>(from, p.dtype, source + i);
    const auto b = load_piece<kElements>(from, p.dtype, source + i + apart);
    Piece<kElements> low, high;
    turn_apart(a, b, cosine + pair, sine + pair, &low, &high);
    store_piece(p.k_cache, p.cache_dtype, target + i, low, scale);
    store_piece(p.k_cache, p.cache_dtype, target + i + apart, high, scale);
  }
}

template <int kElements>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    append_kernel(const __grid_constant__ Args args) {
  DSPARK_DYNAMIC_SHARED(memory);
  const Params& p = args.p;
  float* cosine = reinterpret_cast<float*>(memory);
  float* sine = cosine + args.turning / 2;
  const int64_t r = blockIdx.x / args.slices;
  const int32_t slice = static_cast<int32_t>(blockIdx.x) % args.slices;
  Span span;
  const bool usable = scales_are_usable(p);
  const bool legal = read_span(p, r, &span) && usable;
  if (slice == 0) write_status(p, r, legal, span);
  if (!legal) return;
  for (int64_t t = span.begin + slice; t < span.end; t += args.slices) {
    const int64_t position = span.length + (t - span.begin);
    int64_t offset;
    if (locate(p, r, position, &offset) != 0) continue;
    const void* k = advance(p.k, p.dtype, t * p.k_token_stride);
    if (p.rope_theta > 0.0) {
      set_angles(args, position, cosine, sine);
      rotate_heads<kElements>(args, k, offset, cosine, sine);
    } else {
      move_heads<kElements>(p, k, p.k_head_stride, p.k_cache, offset,
                            Scale{p.k_scale, p.k_scale_stride});
    }
    move_heads<kElements>(p, advance(p.v, p.dtype, t * p.v_token_stride), p.v_head_stride,
                          p.v_cache, offset, Scale{p.v_scale, p.v_scale_stride});
  }
}

__global__ void __launch_bounds__(kThreads)
    commit_kernel(const __grid_constant__ dspark_paged_kv_commit_params p) {
  const int32_t r = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
  if (r >= p.num_requests || (p.active != nullptr && p.active[r] == 0)) return;
  if (p.num_emitted[r] <= 0) return;
  p.kv_len[r] += p.num_emitted[r];
  p.position[r] += p.num_emitted[r];
}

}  // namespace dspark::cuda::paged

#endif  // DSPARK_CUDA_PAGED_KV_KERNEL_CUH_
