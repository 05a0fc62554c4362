// SPDX-License-Identifier: Apache-2.0
//
// verify_attention: attention of a few query rows per request (0..gamma+1 in verification, more in
// prefill) over a paged cache, grouped-query heads. Query row i of a request with q_len rows sits
// at logical position kv_len - q_len + i; causal rows see keys up to their own position, and with
// causal = 0 all rows see all kv_len keys (the drafter's block). A window of w > 0 keeps the keys
// at positions > pos - w. soft_cap s > 0 replaces a score x by s tanh(x / s).
//
// A row without keys, or with scores of -inf only, gives 0 and lse = -inf. Natural logarithm. NaN
// and infinities in K or V follow IEEE arithmetic in the rows that see them and touch no other row.
//
// A request with trouble gets NaN in its rows of out and lse, so that nothing can take them for a
// result: DSPARK_BAD_PAGE (a page id that its rows need is outside [0, num_pages); pages wholly
// behind the window are not looked at), DSPARK_KV_OVERFLOW (kv_len beyond the page table),
// DSPARK_BAD_PARAM (negative kv_len, more than max_q_len rows, or, for every request that has rows,
// a scale of the cache that is not a positive finite number). Bounds that are not
// 0 <= cu_seqlens[r] <= cu_seqlens[r + 1] <= num_tokens are DSPARK_BAD_PARAM too, and nothing is
// written for the request. Rows of out past cu_seqlens[R] are left as they are.
#ifndef DSPARK_VERIFY_ATTENTION_H_
#define DSPARK_VERIFY_ATTENTION_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Arguments of dspark_verify_attention(). R = num_requests, B = cu_seqlens[R].
typedef struct dspark_verify_attention_params {
  uint32_t struct_size;       ///< sizeof(dspark_verify_attention_params)
  int32_t num_requests;       ///< R >= 0
  int32_t num_q_heads;        ///< Hq, a multiple of Hkv
  int32_t num_kv_heads;       ///< Hkv >= 1
  int32_t head_dim;           ///< D >= 1
  int32_t page_size;          ///< tokens in a page, >= 1
  int32_t num_pages;          ///< pages in the caches
  int32_t max_pages;          ///< columns of page_table
  int32_t num_tokens;         ///< rows of q and out; an upper bound on cu_seqlens[R]
  int32_t max_q_len;          ///< upper bound on the query rows of a request
  int32_t causal;             ///< 1 = bottom-right causal, 0 = bidirectional
  int32_t window;             ///< > 0: sliding window that bounds the past; 0 = none
  int32_t batch_invariant;    ///< 1 = the bytes of a row depend on that row's request alone
  int32_t num_threads;        ///< CPU threads to use; 0 = as many as OpenMP has
  float scale;                ///< of the scores; normally 1 / sqrt(D)
  float soft_cap;             ///< 0 = none
  int32_t dtype;              ///< of q and out: f32, bf16 or f16
  int32_t cache_dtype;        ///< of the caches: f32, bf16, f16 or f8_e4m3
  const void* q;              ///< [B, Hq, D]
  int64_t q_token_stride;     ///< elements between tokens
  int64_t q_head_stride;      ///< elements between heads
  const void* k_cache;        ///< [num_pages, page_size, Hkv, D]
  const void* v_cache;        ///< [num_pages, page_size, Hkv, D]
  int64_t page_stride;        ///< elements between pages (both caches)
  int64_t row_stride;         ///< elements between rows of a page (both caches)
  int64_t head_stride;        ///< elements between heads of a row (both caches)
  const float* k_scale;       ///< [Hkv] or one value, f8_e4m3 only: key = scale * element; NULL = 1
  const float* v_scale;       ///< the same for values
  int32_t k_scale_stride;     ///< elements between heads: 1 for [Hkv], 0 for one value
  int32_t v_scale_stride;     ///< elements between heads: 1 for [Hkv], 0 for one value
  const int32_t* page_table;  ///< [R, max_pages] page ids, -1 = none
  int64_t page_table_stride;  ///< elements between requests
  const int32_t* kv_len;      ///< [R] lengths INCLUDING the new tokens; device data
  const int32_t* cu_seqlens;  ///< [R + 1] query rows of each request; device data
  const int32_t* work;        ///< plan written by dspark_prefix_scheduler(), or NULL; no backend
                              ///< reads it: the lengths are needed anyway and say as much
  int32_t work_size;          ///< entries of `work`
  void* out;                  ///< [B, Hq, D] out, contiguous, dtype of q
  float* lse;                 ///< [B, Hq] out, contiguous, or NULL
  int32_t* status;            ///< [R] out: status bits
} dspark_verify_attention_params;

/// Scratch bytes that dspark_verify_attention() needs for these sizes.
DSPARK_API dspark_status dspark_verify_attention_workspace(
    dspark_device device, const dspark_verify_attention_params* params, size_t* bytes);
/// Attention of the query rows over the paged cache.
DSPARK_API dspark_status dspark_verify_attention(dspark_device device,
                                                 const dspark_verify_attention_params* params,
                                                 dspark_workspace workspace, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_VERIFY_ATTENTION_H_
