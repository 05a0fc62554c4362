// SPDX-License-Identifier: Apache-2.0
//
// rejection_sampler when the ranks of a tensor-parallel group hold the vocabulary in pieces: no
// rank sees another one's logits. Three calls with an exchange behind each of the first two; an
// exchange is an all-gather of plain bytes, 72 a row and 40 a request, that the engine does with
// whatever it has:
//
//   dspark_vocab_parallel_scan     every row: the shard's largest logit and mass, z of the draft
//     all-gather  scan [num_rows] -> scans [num_ranks, num_rows]
//   dspark_vocab_parallel_draw     every rank knows p(x) and throws the same coins; it draws a
//                                  candidate of its own ids for the row where the round ends
//     all-gather  draw [R] -> draws [num_ranks, R]
//   dspark_vocab_parallel_finish   the candidate with the largest key wins
//
// Keys are log-masses plus Gumbel noise, so the largest one is an exact draw whoever holds what; to
// normalise and draw on each rank alone would be another law. All ranks write the same results, bit
// for bit. The law is the target's for any split. Segments never cross a shard; where every shard
// but the last is a multiple of 128 ids they are those of the unsplit row, and so are the tokens.
//
// Rules greedy, token and match (another one is greedy and sets BAD_PARAM). Token mask, bias and
// temperature; a truncation would need a third exchange. All status bits, stops and caps as in
// dspark/rejection_sampler.h.
#ifndef DSPARK_VOCAB_PARALLEL_H_
#define DSPARK_VOCAB_PARALLEL_H_

#include "dspark/rejection_sampler.h"
#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// What a rank tells of one row in the first exchange. Without mass: -inf, id -1, key 0.
typedef struct dspark_shard_scan {
  double mass;        ///< sum of exp((z - top) / T) over the shard (greedy rows: T = 1)
  double raw_mass;    ///< the same of the unprocessed row at T = 1
  uint64_t key;       ///< rule match: key of the shard's candidate
  float top;          ///< largest processed logit
  float raw_top;      ///< largest unprocessed logit
  float draft;        ///< processed logit of the draft that the row verifies; -inf: not held here
  float draft_raw;    ///< its unprocessed logit
  int32_t token;      ///< rule match: the candidate's id
  float token_logit;  ///< its processed logit
  float token_raw;    ///< its unprocessed logit
  int32_t best;       ///< lowest id with z = top
  float best_raw;     ///< its unprocessed logit
  int32_t lowest;     ///< lowest allowed id
  float lowest_raw;   ///< its unprocessed logit; without one that of the shard's first id
  int32_t nan;        ///< 1 = a target logit is NaN, 2 = a stored logit of the draft's law is, 3
} dspark_shard_scan;

/// What a rank tells of one request in the second exchange: [0] its candidate from the residual,
/// [1] from p. Without mass, or where nothing is drawn: key 0, id -1.
typedef struct dspark_shard_draw {
  uint64_t key[2];   ///< key of the winning segment
  int32_t token[2];  ///< the id
  float logit[2];    ///< its processed logit
  float raw[2];      ///< its unprocessed logit
} dspark_shard_draw;

/// Arguments of the three calls, set once and passed to each. R = call.num_requests, num_rows =
/// call.num_rows.
typedef struct dspark_vocab_parallel_params {
  uint32_t struct_size;            ///< sizeof(dspark_vocab_parallel_params)
  int32_t num_ranks;               ///< ranks of the group, >= 1
  int32_t rank;                    ///< this one
  const int32_t* shard_sizes;      ///< [num_ranks] ids of each rank in order, >= 1; HOST memory
  const dspark_shard_scan* scans;  ///< [num_ranks, num_rows] in: everybody's `scan`, by rank
  const dspark_shard_draw* draws;  ///< [num_ranks, R] in: everybody's `draw`, by rank
  dspark_shard_scan* scan;  ///< [num_rows] out of the first call; rows of no request: not written
  dspark_shard_draw* draw;  ///< [R] out of the second call; inactive requests: not written
  /// The call of dspark_rejection_sampler() on this rank's columns: vocab_size is this shard's, and
  /// target_logits, logit_bias, token_mask and (without draft_to_target) draft_logits hold its
  /// columns. All else is equal on all ranks; ids are ids of the whole vocabulary. draft_logits
  /// with draft_to_target, and support_ids with support_logits, are whole on every rank.
  /// Truncations, penalties, min_tokens_left, target_lse and top_logprobs are not served. The
  /// results are complete behind the third call.
  dspark_rejection_sampler_params call;
} dspark_vocab_parallel_params;

/// Scratch bytes that each of the three calls needs.
DSPARK_API dspark_status dspark_vocab_parallel_workspace(dspark_device device,
                                                         const dspark_vocab_parallel_params* params,
                                                         size_t* bytes);
/// First call: fill `scan`.
DSPARK_API dspark_status dspark_vocab_parallel_scan(dspark_device device,
                                                    const dspark_vocab_parallel_params* params,
                                                    dspark_workspace workspace, void* stream);
/// Second call: read `scans`, fill `draw`.
DSPARK_API dspark_status dspark_vocab_parallel_draw(dspark_device device,
                                                    const dspark_vocab_parallel_params* params,
                                                    dspark_workspace workspace, void* stream);
/// Third call: read `scans` and `draws`, write the results of `call`.
DSPARK_API dspark_status dspark_vocab_parallel_finish(dspark_device device,
                                                      const dspark_vocab_parallel_params* params,
                                                      dspark_workspace workspace, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_VOCAB_PARALLEL_H_
