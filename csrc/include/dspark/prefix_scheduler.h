// SPDX-License-Identifier: Apache-2.0
//
// prefix_scheduler: how many of its draft tokens each request may send to the target
// (paper section 3.2.2, Algorithm 1, and the two-phase form of section 5.2).
//
//   B = sum over active r of (1 + l_r)     tau = sum w_r (1 + sum_{j <= l_r} a_{r,j})
//   Theta = tau * SPS(B)                   SPS = 1000 / (ms(B) + draft_ms + ms_per_kv_token * kv)
//
// Glossary: a survival, c conditional acceptance, l scheduled length, B tokens in the target
// forward, SPS steps per second, Theta expected tokens per second.
//
// The causal mode may read live survivals because it stops at the first Theta that does not rise;
// a full search over live survivals would leak the drafted tokens into their own admission, so it
// exists only on survivals that are at least two rounds old (`lagged`).
//
// The rules, in the order they apply:
//  1. Survivals are clamped to [0, 1] (NaN counts as 0, DSPARK_NAN_CONFIDENCE) and replaced by
//  their
//     running minimum. A candidate is a draft with a > 0 and j <= max_len; its key is the float32
//     w a; candidates are taken by key descending, position ascending, request ascending.
//  2. Floors (min_len) come first, in every mode. What does not fit into `capacity`, or into the
//     cost table where one decides, is cut position-major: one more position for every request in
//     order before the next. The anchor of an active request is always sent.
//  3. causal: admit while Theta rises strictly. two_phase: K drafts in all, floors included, with
//     K = min(budget or searched K, sum max_len, capacity - R) but never below the floors; the
//     search takes the best Theta over `lagged`, the lowest B on ties. threshold, fixed, off: the
//     rule's length, raised to the floor, cut by max_len, then by capacity as in 2.
//  4. The reported Theta belongs to the lengths chosen and the live survivals. It is NaN when there
//     is no cost table or it ends before B, or `survival` is NULL; 0 when no request is active.
//
// Trouble in device data never fails the call; it sets DSPARK_BAD_PARAM on the request: a floor or
// cap below 0 counts as 0, a weight that is not in [0, 128] as 0, a negative kv_len as 0. (A cap
// above gamma means gamma and a floor above the cap means the cap: that is no trouble.) More active
// requests than `capacity`: nothing is admitted and every active request reports it. A price that
// is not positive and finite ends the table there, and every active request reports it when it was
// met.
#ifndef DSPARK_PREFIX_SCHEDULER_H_
#define DSPARK_PREFIX_SCHEDULER_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Largest objective weight. Together with DSPARK_MAX_CANDIDATES it keeps the sums in 64 bits.
#define DSPARK_MAX_WEIGHT 128.0f
/// Largest R * (gamma + 1).
#define DSPARK_MAX_CANDIDATES 131072

/// How the lengths are chosen.
typedef enum dspark_schedule_mode {
  DSPARK_SCHEDULE_CAUSAL = 0,     ///< Algorithm 1 on live survivals
  DSPARK_SCHEDULE_TWO_PHASE = 1,  ///< budget from lagged survivals (or given), live ones rank
  DSPARK_SCHEDULE_THRESHOLD = 2,  ///< stop at the first conditional c_k < threshold
  DSPARK_SCHEDULE_FIXED = 3,      ///< l = fixed_len
  DSPARK_SCHEDULE_OFF = 4         ///< l = max_len
} dspark_schedule_mode;

/// Arguments of dspark_prefix_scheduler(). R = num_requests.
typedef struct dspark_prefix_scheduler_params {
  uint32_t struct_size;        ///< sizeof(dspark_prefix_scheduler_params)
  int32_t num_requests;        ///< R >= 0
  int32_t gamma;               ///< 1..16
  int32_t mode;                ///< a dspark_schedule_mode
  int32_t num_threads;         ///< CPU threads to use; 0 = as many as OpenMP has
  const float* survival;       ///< [R, gamma] live a; NULL allowed for threshold, fixed and off
  int64_t survival_stride;     ///< elements between requests
  const float* conditional;    ///< [R, gamma] live c, for threshold
  int64_t conditional_stride;  ///< elements between requests
  const float* lagged;         ///< [R, gamma] survivals at least two rounds old, for two_phase
  int64_t lagged_stride;       ///< elements between requests
  const double* cost_ms;   ///< [cost_size] milliseconds of a step of B tokens, or NULL; [0] unread
  int32_t cost_size;       ///< entries of cost_ms; nothing is admitted beyond B = cost_size - 1
  double draft_ms;         ///< fixed cost of a round beside the target step
  double ms_per_kv_token;  ///< slope in the total KV length of the active requests
  const int32_t* kv_len;   ///< [R] KV length of each request, or NULL
  int32_t budget;          ///< two_phase: draft tokens to admit; < 0 = search `lagged`
  float threshold;         ///< threshold mode: t in [0, 1]
  int32_t fixed_len;       ///< fixed mode: 0..gamma
  int32_t capacity;        ///< upper bound on B, anchors included; < 0 = none
  int32_t padded_tokens;   ///< flattened arrays; >= dspark_prefix_scheduler_max_tokens()
  const int32_t* min_len;  ///< [R] floors, or NULL for 0
  const int32_t* max_len;  ///< [R] caps, or NULL for gamma
  const float* weight;     ///< [R] objective weights in [0, 128], or NULL for 1
  const uint8_t* active;   ///< [R] 0 = padded row, or NULL for all active
  const int32_t* anchor;   ///< [R] anchor ids; with draft_tokens and position, or all NULL
  const int32_t* draft_tokens;  ///< [R, gamma] draft ids, or NULL
  int64_t draft_tokens_stride;  ///< elements between requests
  const int64_t* position;      ///< [R] absolute position of the anchor, or NULL
  int32_t* length;              ///< [R] out: l_r
  int32_t* cu_seqlens;          ///< [R + 1] out: prefix sums of active * (1 + l)
  int32_t* total_tokens;        ///< [1] out: B
  double* theta;                ///< [1] out: tokens per second; NaN without a cost table
  int32_t* row_to_request;      ///< [padded_tokens] out: request of each row, -1 on padding
  int32_t* row_offset;          ///< [padded_tokens] out: 0 = anchor, j = draft j; -1 on padding
  int32_t* token_ids;           ///< [padded_tokens] out: ids, 0 on padding; NULL without anchor
  int64_t* positions;           ///< [padded_tokens] out: positions, 0 on padding; or NULL
  int32_t* work;                ///< [work_size] out: opaque plan for verify_attention, or NULL
  int32_t work_size;            ///< entries of `work`, at least 4 + 3 R
  int32_t* status;              ///< [R] out: status bits
} dspark_prefix_scheduler_params;

/// Scratch bytes that dspark_prefix_scheduler() needs for these sizes.
DSPARK_API dspark_status dspark_prefix_scheduler_workspace(
    dspark_device device, const dspark_prefix_scheduler_params* params, size_t* bytes);
/// Largest B that any data can lead to, from the sizes and scalars of `params` alone: the capacity
/// (or R when that is larger), the end of the table where it decides, the budget, the fixed length.
DSPARK_API int64_t dspark_prefix_scheduler_max_tokens(const dspark_prefix_scheduler_params* params);
/// Choose the lengths and lay out the target's batch.
DSPARK_API dspark_status dspark_prefix_scheduler(dspark_device device,
                                                 const dspark_prefix_scheduler_params* params,
                                                 dspark_workspace workspace, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_PREFIX_SCHEDULER_H_
