// SPDX-License-Identifier: Apache-2.0
//
// markov_loop: the sequential stage of DSpark. For k = 1..gamma:
//
//   z_k = U_k + B_k(x_0, x_<k)     x_k ~ softmax(z_k / T)     (eq. 4; heads: eq. 5 and eq. 6)
//
// z is formed in fp32 and rounded once to the dtype of U; argmax, sampling, logit, lse and the
// stored logits all use that value. T = 0 is the exact argmax (lowest id on ties).
//
// An int8 W2 with row scales has an exact definition (core/int8.h, docs/contract.md): the r-vector
// x is rounded to integers q = rint(x / s), s the smallest power of two >= 2^-100 with max|x| <=
// 32512 s, and B[v] = float(sum of q_j W2[v, j]) * (s * scale[v]). The sum is an integer (below
// 2^31 for r
// <= 512, in 64 bits beyond), so the bits of z depend on no backend, batch or order. A NaN or an
// infinity in x makes every B NaN.
//
// topk_support = M > 0 restricts the law of slot k to the M largest U_k (NaN as -inf, lowest id on
// ties; all columns when V_d < M): x_k ~ softmax(z_k / T) over those, greedy rows take their
// argmax, and only their rows of W2 are read. The law is exactly known, so it is as lossless as the
// full one; only the acceptance changes. A NaN anywhere in U_k sets DSPARK_NAN_DRAFT. top_k and
// top_p then work among the M.
//
// w2_screen is an exact shortcut for greedy calls (temperature NULL, bf16 W2): its bytes, times
// their scales, are within (1/2 + 2^-16) screen_scale[v] of W2[v, j] for all j. A backend may then
// bound every z from W2 in eight bits, and compute from the bf16 W2 only those that can be the
// argmax: the tokens and logits are those of the bf16 W2, at the traffic of the bytes. There is no
// lse and no stored row then.
//
// Glossary: U base logits, B transition bias, W1/W2 the low-rank Markov embedding and projection,
// gamma draft length, x_0 the anchor (last committed token, at absolute position `position`),
// d2t the map from the reduced draft vocabulary [V_d] to target ids.
#ifndef DSPARK_MARKOV_LOOP_H_
#define DSPARK_MARKOV_LOOP_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Which transition bias B is used.
typedef enum dspark_head {
  DSPARK_HEAD_VANILLA = 0,  ///< B = W2 W1[x_{k-1}]                                       (eq. 5)
  DSPARK_HEAD_GATED = 1,    ///< B = W2 (sigmoid(G [h_k; e] + g) * e),  e = W1[x_{k-1}]
  DSPARK_HEAD_RNN = 2       ///< B = W2 tanh(o), gate, candidate, o from [s; e; h_k]      (eq. 6)
} dspark_head;

/// The largest topk_support.
#define DSPARK_MAX_SUPPORT 1024

/// Arguments of dspark_markov_loop(). R = num_requests, V = vocab_size (target ids),
/// V_d = draft_vocab_size (columns of U and rows of W2; V_d = V without draft_to_target).
typedef struct dspark_markov_loop_params {
  uint32_t struct_size;         ///< sizeof(dspark_markov_loop_params)
  int32_t num_requests;         ///< R >= 0
  int32_t gamma;                ///< 1..16
  int32_t vocab_size;           ///< V: rows of W1
  int32_t draft_vocab_size;     ///< V_d: columns of U that count; padded columns behind never win
  int32_t rank;                 ///< r >= 1
  int32_t hidden_size;          ///< d; 0 when `hidden` is NULL
  int32_t head;                 ///< a dspark_head
  int32_t topk_support;         ///< M: the law runs over the M largest U_k; 0 = all columns
  int32_t num_threads;          ///< CPU threads to use; 0 = as many as OpenMP has
  const void* base_logits;      ///< [R, gamma, V_pad] U
  int32_t base_dtype;           ///< f32, bf16 or f16
  int64_t base_request_stride;  ///< elements between requests
  int64_t base_slot_stride;     ///< elements between slots
  const void* w1;               ///< [V, r] Markov embedding
  int32_t w1_dtype;             ///< f32, bf16 or f16
  int64_t w1_stride;            ///< elements between rows
  const void* w2;               ///< [V_d, r] Markov projection
  int32_t w2_dtype;             ///< f32, bf16, f16, or i8 with `w2_scale`
  int64_t w2_stride;            ///< elements between rows
  const float* w2_scale;        ///< [V_d] row scales of an int8 W2, else NULL
  const int8_t* w2_screen;      ///< [V_d, r] W2 in bytes, to choose the rows that can win; or NULL
  int64_t w2_screen_stride;     ///< elements between rows
  const float* screen_scale;    ///< [V_d] row scales of w2_screen; with it
  const float* head_weight;     ///< gated [r, d + r], rnn [3r, 2r + d] contiguous; vanilla NULL
  const float* head_bias;       ///< gated [r], rnn [3r]; vanilla NULL
  const float* hidden;          ///< [R, gamma, d] h_k, or NULL when nothing needs it
  int64_t hidden_request_stride;   ///< elements between requests
  int64_t hidden_slot_stride;      ///< elements between slots
  const float* confidence_weight;  ///< [confidence_size], or NULL: no confidence logit
  int32_t confidence_size;         ///< d + r (input [h_k; W1[x_{k-1}]]) or d (input h_k)
  float confidence_bias;           ///< added to the confidence logit
  const int32_t* anchor;           ///< [R] x_0, target ids
  const uint64_t* seed;            ///< [R] seed of each request
  const int64_t* position;         ///< [R] absolute position of the anchor
  const float* temperature;        ///< [R] T; 0 = greedy. NULL = all greedy
  const int32_t* top_k;            ///< [R] truncate the draft law to k ids; <= 0 off. NULL = off
  const float* top_p;              ///< [R] truncate to mass p in (0, 1]; NULL = off
  const int32_t* draft_to_target;  ///< [V_d] strictly increasing target ids, or NULL
  const uint8_t* active;           ///< [R] 0 = padded row, or NULL for all active
  const uint64_t* debug_uniform;   ///< [R, gamma] 53-bit integers that replace the inner draw, and
                                   ///< force segment noise to be equal; test builds only, else NULL
  int32_t* tokens;                 ///< [R, gamma] out: target ids
  float* logit;                    ///< [R, gamma] out: z_k(x_k)
  float* lse;                      ///< [R, gamma] out: log sum exp(z / T) over the support; NULL
                                   ///< exactly with w2_screen
  float* confidence_logit;         ///< [R, gamma] out, or NULL
  void* logits;                    ///< [R, gamma, V_d] out: z in base_dtype, truncated ids at -inf,
                                   ///< or NULL
  int64_t logits_request_stride;   ///< elements between requests
  int64_t logits_slot_stride;      ///< elements between slots
  int32_t* support_ids;            ///< [R, gamma, M] out: target ids of the support, ascending, -1
                                   ///< behind the last; or NULL. Contiguous
  void* support_logits;            ///< [R, gamma, M] out: their z in base_dtype, truncated ids and
                                   ///< padding at -inf; with support_ids. Contiguous
  int32_t* status;                 ///< [R] out: status bits
} dspark_markov_loop_params;

/// Scratch bytes that dspark_markov_loop() needs for these sizes.
DSPARK_API dspark_status dspark_markov_loop_workspace(dspark_device device,
                                                      const dspark_markov_loop_params* params,
                                                      size_t* bytes);
/// Sample gamma draft tokens per request, with their logit, lse and confidence logit.
DSPARK_API dspark_status dspark_markov_loop(dspark_device device,
                                            const dspark_markov_loop_params* params,
                                            dspark_workspace workspace, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_MARKOV_LOOP_H_
