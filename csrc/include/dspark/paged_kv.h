// SPDX-License-Identifier: Apache-2.0
//
// paged_kv: append the keys and values of new tokens to a paged cache at device-side lengths, and
// commit a round. Logical position p of request r lives in page page_table[r, p / page_size], row
// p % page_size. Entries past kv_len are dead and may be overwritten.
//
// Token i of request r goes to position kv_len[r] + i. With num_new only the first num_new[r] rows
// of a request are appended: a drafter keeps those that the round has committed. A position beyond
// the page table sets DSPARK_KV_OVERFLOW, a page id outside [0, num_pages) sets DSPARK_BAD_PAGE;
// that token is not written, the request's other tokens are. A negative kv_len, a num_new outside
// 0..rows of the request, or bounds that are not
// 0 <= cu_seqlens[r] <= cu_seqlens[r + 1] <= num_tokens, set DSPARK_BAD_PARAM and nothing of the
// request is written; so does a scale that is not a positive finite number, for every request. Two
// requests must not share a page that the append writes to.
//
// Rotation of k: with E = rope_dim, a = pos * inv_freq[i] in float64, and c, s the cosine and sine
// of a times rope_amplitude, rounded to float32 once, the pair (x, y) of elements i and i + E / 2
// (or 2 i and 2 i + 1 with rope_interleaved) becomes (x c - y s, y c + x s). Elements from E on
// stay. k is rounded to the cache dtype once, after the rotation. A cache in FP8 E4M3 takes the
// nearest element to x / scale, saturating at +-448; NaN stays NaN.
#ifndef DSPARK_PAGED_KV_H_
#define DSPARK_PAGED_KV_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Arguments of dspark_paged_kv(): append. R = num_requests, B = cu_seqlens[R].
typedef struct dspark_paged_kv_params {
  uint32_t struct_size;       ///< sizeof(dspark_paged_kv_params)
  int32_t num_requests;       ///< R >= 0
  int32_t num_kv_heads;       ///< Hkv >= 1
  int32_t head_dim;           ///< D >= 1
  int32_t page_size;          ///< tokens in a page, >= 1
  int32_t num_pages;          ///< pages in the caches
  int32_t max_pages;          ///< columns of page_table
  int32_t num_tokens;         ///< rows of k and v; an upper bound on cu_seqlens[R]
  int32_t num_threads;        ///< CPU threads to use; 0 = as many as OpenMP has
  int32_t dtype;              ///< of k and v: f32, bf16 or f16
  int32_t cache_dtype;        ///< of the caches: f32, bf16, f16 or f8_e4m3
  const void* k;              ///< [B, Hkv, D] new keys
  int64_t k_token_stride;     ///< elements between tokens
  int64_t k_head_stride;      ///< elements between heads
  const void* v;              ///< [B, Hkv, D] new values
  int64_t v_token_stride;     ///< elements between tokens
  int64_t v_head_stride;      ///< elements between heads
  void* k_cache;              ///< [num_pages, page_size, Hkv, D]
  void* v_cache;              ///< [num_pages, page_size, Hkv, D]
  int64_t page_stride;        ///< elements between pages (both caches)
  int64_t row_stride;         ///< elements between rows of a page (both caches)
  int64_t head_stride;        ///< elements between heads of a row (both caches)
  const float* k_scale;       ///< [Hkv] or one value, f8_e4m3 only: key = scale * element; NULL = 1
  const float* v_scale;       ///< the same for values
  int32_t k_scale_stride;     ///< elements between heads: 1 for [Hkv], 0 for one value
  int32_t v_scale_stride;     ///< elements between heads: 1 for [Hkv], 0 for one value
  const int32_t* page_table;  ///< [R, max_pages] page ids, -1 = none
  int64_t page_table_stride;  ///< elements between requests
  const int32_t* kv_len;      ///< [R] lengths BEFORE the append
  const int32_t* cu_seqlens;  ///< [R + 1] rows of each request in k and v; device data
  const int32_t* num_new;     ///< [R] rows of each request to append, or NULL for all
  double rope_theta;          ///< 0 = no rotation; else RoPE on k at its position
  const double* rope_inv_freq;  ///< [E / 2] radians per position, or NULL: theta^(-2i / E)
  double rope_amplitude;        ///< factor of cosine and sine (YaRN's attention factor); 0 = 1
  int32_t rope_dim;             ///< E, even: leading elements of a head that turn; 0 = head_dim
  int32_t rope_interleaved;     ///< 1: pairs (2 i, 2 i + 1); 0: pairs (i, i + E / 2)
  int32_t* status;              ///< [R] out: status bits
} dspark_paged_kv_params;

/// Scratch bytes that dspark_paged_kv() needs for these sizes.
DSPARK_API dspark_status dspark_paged_kv_workspace(dspark_device device,
                                                   const dspark_paged_kv_params* params,
                                                   size_t* bytes);
/// Append keys and values of the new tokens.
DSPARK_API dspark_status dspark_paged_kv(dspark_device device, const dspark_paged_kv_params* params,
                                         dspark_workspace workspace, void* stream);

/// Arguments of dspark_paged_kv_commit(). R = num_requests.
typedef struct dspark_paged_kv_commit_params {
  uint32_t struct_size;        ///< sizeof(dspark_paged_kv_commit_params)
  int32_t num_requests;        ///< R >= 0
  int32_t* kv_len;             ///< [R] in place: += num_emitted
  int64_t* position;           ///< [R] in place: += num_emitted
  const int32_t* num_emitted;  ///< [R] tokens emitted by the round
  const uint8_t* active;       ///< [R] 0 = leave alone, or NULL for all active
} dspark_paged_kv_commit_params;

/// After a round: kv_len += num_emitted and position += num_emitted of the active requests.
DSPARK_API dspark_status dspark_paged_kv_commit(dspark_device device,
                                                const dspark_paged_kv_commit_params* params,
                                                void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_PAGED_KV_H_
