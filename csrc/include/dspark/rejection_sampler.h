// SPDX-License-Identifier: Apache-2.0
//
// rejection_sampler: target logits in, tokens out, the target's law unchanged.
//
// Row i of a request verifies draft i+1; row l is the bonus row. Draft x is accepted iff
// u < p(x) / q(x), strictly; the first rejection emits one token of the residual max(0, p - q);
// when all l drafts are accepted the bonus comes from p_l. Rules: greedy (equal to the argmax),
// token (the above), block (one decision over all drafts: P_i = min(1, P_{i-1} p(x_i) / q(x_i)),
// S_i = sum max(P_i p_i - q_{i+1}, 0), the largest i with u_i < S_i / (S_i + 1 - P_i), u_l < P_l),
// match (y_i ~ p_i, accept while y_i equals the draft). For benchmarks only: synthetic, which
// accepts a wanted number of drafts whatever they are and says so in the status word.
//
// Processors act on every row in this order: token mask, logit bias, min-tokens, penalties; then
// argmax (T = 0), or temperature, min-p, top-k, top-p (crossing token kept). Total order:
// probability descending, id ascending. NaN counts as -inf, +inf as the largest finite value.
//
// Penalties, in float32: an id of the prompt or the output has its logit divided by the repetition
// penalty if positive, else multiplied; then frequency times its count in the output is taken away,
// then presence if it is in the output. The output of row i is output_counts, the anchor if it is
// given, and drafts 1..i of this round.
//
// What the data does wrong sets bits of status[r] and never leads outside an array: an illegal
// sampling parameter counts as off (T and rule: as greedy), draft_len is clamped to 0..gamma and to
// the request's rows, a request without a row emits nothing. A draft id outside [0, V), or with
// q = 0, ends the prefix and the token comes from p; a NaN in the stored law of a draft refuses it,
// and so do support_ids that do not ascend or leave [0, V).
// Rows behind the first rejection are not read; block reads all rows. An engine whose LM head
// returns target_logit and target_lse has a row read only where a token is drawn from it: rule
// token, T > 0, no processor but the temperature, no top_logprobs; other rows are read as ever.
// They are believed: no NaN is looked for in a row that is not read.
#ifndef DSPARK_REJECTION_SAMPLER_H_
#define DSPARK_REJECTION_SAMPLER_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The largest top_logprobs.
#define DSPARK_MAX_TOP_LOGPROBS 128

/// How a draft is accepted. A request with temperature 0 is greedy whatever its rule, but for
/// synthetic, whose own tokens are then the argmax.
typedef enum dspark_rule {
  DSPARK_RULE_GREEDY = 0,    ///< accept while the draft equals the argmax
  DSPARK_RULE_TOKEN = 1,     ///< min(1, p / q) and the residual
  DSPARK_RULE_BLOCK = 2,     ///< all drafts together (Sun et al.): the most that can be accepted
  DSPARK_RULE_MATCH = 3,     ///< sample p, accept the equal prefix
  DSPARK_RULE_SYNTHETIC = 4  ///< made-up acceptance for benchmarks: not the target's law
} dspark_rule;

/// Why a request ended in this round.
enum {
  DSPARK_FINISH_NONE = 0,   ///< it goes on
  DSPARK_FINISH_STOP = 1,   ///< a stop id was emitted
  DSPARK_FINISH_LENGTH = 2  ///< max_new_tokens was reached
};

/// Arguments of dspark_rejection_sampler(). R = num_requests, V = vocab_size, V_d =
/// draft_vocab_size. Per-request arrays may be NULL, which means off (temperature NULL: greedy).
typedef struct dspark_rejection_sampler_params {
  uint32_t struct_size;         ///< sizeof(dspark_rejection_sampler_params)
  int32_t num_requests;         ///< R >= 0
  int32_t gamma;                ///< 1..16
  int32_t vocab_size;           ///< V: columns of target_logits that count
  int32_t draft_vocab_size;     ///< V_d: columns of draft_logits (V without draft_to_target)
  int32_t num_rows;             ///< rows of target_logits; an upper bound on cu_seqlens[R]
  int32_t num_stop_ids;         ///< columns of stop_ids
  int32_t top_logprobs;         ///< n: likeliest ids to list for every emitted token, 0..128
  int32_t num_threads;          ///< CPU threads to use; 0 = as many as OpenMP has
  const void* target_logits;    ///< [num_rows, V_pad] in cu_seqlens order
  int32_t target_dtype;         ///< f32, bf16 or f16
  int64_t target_stride;        ///< elements between rows
  const float* target_logit;    ///< [num_rows] z of the draft that a row verifies, or NULL
  const float* target_lse;      ///< [num_rows] log sum exp(z / T) of the row, with target_logit
  const float* target_lse_raw;  ///< [num_rows] the same at T = 1: for logprob_raw, or NULL
  const int32_t* draft_tokens;  ///< [R, gamma] target ids; id < 0 or >= V ends the prefix
  int64_t draft_tokens_stride;  ///< elements between requests
  const int32_t* draft_len;     ///< [R] l_r, 0..gamma
  const int32_t* cu_seqlens;    ///< [R + 1] first row of each request; 1 + l_r rows if active
  const uint64_t* seed;         ///< [R] seed of each request
  const int64_t* position;      ///< [R] absolute position of the anchor
  const int32_t* rule;          ///< [R] a dspark_rule each
  const float* synthetic_acceptance;  ///< [R] mean tokens of a round, 1..gamma + 1
  const float* temperature;           ///< [R] T; 0 = greedy
  const int32_t* top_k;               ///< [R] keep the k largest; <= 0 off
  const float* top_p;                 ///< [R] keep mass p in (0, 1]; 1 = off
  const float* min_p;                 ///< [R] keep p(x) >= min_p * max p; 0 = off
  const float* logit_bias;            ///< [R, V] added to the logits, or NULL
  int64_t logit_bias_stride;          ///< elements between requests
  const uint32_t* token_mask;   ///< packed bits, 1 = allowed, or NULL: [num_rows, words] ragged,
                                ///< or [R, gamma + 1, words] when mask_request_stride > 0
  int64_t mask_row_stride;      ///< words between rows
  int64_t mask_request_stride;  ///< words between requests of a padded mask; 0 = ragged
  const float* repetition_penalty;  ///< [R] > 0; 1 = off
  const float* presence_penalty;    ///< [R] finite; 0 = off
  const float* frequency_penalty;   ///< [R] finite; 0 = off
  const int32_t* output_counts;     ///< [R, V] how often each id was emitted, or NULL: never
  int64_t output_counts_stride;     ///< elements between requests
  const uint32_t* prompt_mask;      ///< [R, words] packed bits, 1 = in the prompt, or NULL
  int64_t prompt_mask_stride;       ///< words between requests
  const int32_t* anchor;            ///< [R] counted as one more output token; < 0 or NULL: it is
                                    ///< not. Another array than next_anchor
  const int32_t* min_tokens_left;   ///< [R] rows i below this emit no stop id
  const float* draft_logit;         ///< [R, gamma] z(x), or NULL: the draft's law is one-hot
  const float* draft_lse;           ///< [R, gamma] lse of the draft law, or NULL
  const void* draft_logits;         ///< [R, gamma, V_d] stored z, or NULL
  const int32_t* support_ids;      ///< [R, gamma, M] target ids that have mass, ascending, negative
                                   ///< behind the last; in place of draft_logits, or NULL
  const void* support_logits;      ///< [R, gamma, M] their z; with support_ids
  int32_t support_size;            ///< M >= 1 with support_ids
  int32_t draft_dtype;             ///< f32, bf16 or f16: of draft_logits or support_logits
  int64_t draft_request_stride;    ///< elements between requests of draft_logits
  int64_t draft_slot_stride;       ///< elements between slots of draft_logits
  const float* draft_temperature;  ///< [R] T of the draft, NULL = temperature; 0 = one-hot
  const int32_t* draft_to_target;  ///< [V_d] strictly increasing target ids, or NULL
  const int32_t* stop_ids;         ///< [R, num_stop_ids], -1 = none, or NULL
  int64_t stop_ids_stride;         ///< elements between requests; 0 = one list for all
  const int32_t* max_new_tokens;   ///< [R] tokens this round may emit; 0 = inactive. NULL = no cap
  const uint8_t* active;           ///< [R] 0 = padded row, or NULL for all active
  const uint64_t* debug_uniform;   ///< [R, gamma + 1] 53-bit integers that replace the accept and
                                   ///< inner draws and make segment noise equal; tests only
  int32_t* num_accepted;           ///< [R] out: drafts accepted and emitted
  int32_t* num_emitted;            ///< [R] out: tokens emitted
  int32_t* tokens;                 ///< [R, gamma + 1] out: emitted ids, -1 padded
  int32_t* next_anchor;            ///< [R] out: last emitted id
  float* logprob;                  ///< [R, gamma + 1] out: log p of the emitted ids
  float* logprob_raw;              ///< [R, gamma + 1] out: the same under the unprocessed row
  int32_t* top_ids;                ///< [R, gamma + 1, n] out: likeliest ids under p, -1 padded
  float* top_logprob;              ///< [R, gamma + 1, n] out: their log p, -inf padded
  int32_t* top_ids_raw;            ///< [R, gamma + 1, n] out: the same under the unprocessed row
  float* top_logprob_raw;          ///< [R, gamma + 1, n] out; all four or, with n = 0, none
  int8_t* accepted;                ///< [R, gamma] out: 1, 0, -1 unobserved, -2 not scheduled
  int32_t* finish;                 ///< [R] out: 0 none, 1 stop, 2 length
  int32_t* status;                 ///< [R] out: status bits
} dspark_rejection_sampler_params;

/// Scratch bytes that dspark_rejection_sampler() needs for these sizes.
DSPARK_API dspark_status dspark_rejection_sampler_workspace(
    dspark_device device, const dspark_rejection_sampler_params* params, size_t* bytes);
/// Verify the drafts of every request and emit its tokens.
DSPARK_API dspark_status dspark_rejection_sampler(dspark_device device,
                                                  const dspark_rejection_sampler_params* params,
                                                  dspark_workspace workspace, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_REJECTION_SAMPLER_H_
