// SPDX-License-Identifier: Apache-2.0
//
// confidence: from raw confidence logits (or conditional probabilities) to the conditional
// acceptance c_k and the survival a_j = prod_{i <= j} c_i of every draft position (eq. 7, with
// sequential temperature scaling).
//
//   c_k = sigmoid(logit_k / tau_k)        a_k = a_{k-1} * c_k,   a_0 = 1
//
// c is clamped to [0, 1]. A NaN input counts as probability 0 and sets DSPARK_NAN_CONFIDENCE.
// Inactive requests are neither read nor written.
#ifndef DSPARK_CONFIDENCE_H_
#define DSPARK_CONFIDENCE_H_

#include "dspark/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Arguments of dspark_confidence(). R = num_requests.
typedef struct dspark_confidence_params {
  uint32_t struct_size;        ///< sizeof(dspark_confidence_params)
  int32_t num_requests;        ///< R >= 0
  int32_t gamma;               ///< 1..16
  int32_t num_threads;         ///< CPU threads to use; 0 = as many as OpenMP has
  const float* logit;          ///< [R, gamma] raw logits, or NULL when `probability` is given
  int64_t logit_stride;        ///< elements between requests
  const float* probability;    ///< [R, gamma] conditional probabilities, or NULL
  int64_t probability_stride;  ///< elements between requests
  const float* temperature;    ///< [gamma] tau_k > 0 (STS), or NULL for 1; only with `logit`
  const uint8_t* active;       ///< [R] 0 = padded row, or NULL for all active
  float* conditional;          ///< [R, gamma] out: c_k
  float* survival;             ///< [R, gamma] out: a_k
  int32_t* status;             ///< [R] out: status bits
} dspark_confidence_params;

/// Scratch bytes that dspark_confidence() needs for these sizes.
DSPARK_API dspark_status dspark_confidence_workspace(dspark_device device,
                                                     const dspark_confidence_params* params,
                                                     size_t* bytes);
/// Conditional acceptance and survival of every draft position.
DSPARK_API dspark_status dspark_confidence(dspark_device device,
                                           const dspark_confidence_params* params,
                                           dspark_workspace workspace, void* stream);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_CONFIDENCE_H_
