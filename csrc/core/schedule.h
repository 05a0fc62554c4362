// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of the prefix scheduler, shared by all backends so that every rank and every
// device chooses the same lengths bit for bit: survivals are ordered by the bits of a float32,
// expected tokens are summed on a grid of 2^-40 in 64-bit integers (any order of addition gives the
// same sum), and Theta is one fixed sequence of float64 operations.
#ifndef DSPARK_CORE_SCHEDULE_H_
#define DSPARK_CORE_SCHEDULE_H_

#include <stdint.h>

#include "core/macros.h"
#include "core/math.h"
#include "dspark/prefix_scheduler.h"

namespace dspark {

/// c or a as the scheduler reads it: clamped to [0, 1], NaN counts as 0 and is reported.
DSPARK_HD float clean_probability(float x, int32_t* status) {
  if (x != x) *status |= DSPARK_NAN_CONFIDENCE;
  return x >= 1.0f ? 1.0f : x > 0.0f ? x : 0.0f;
}

/// Nearest value on the grid of 2^-40. Below 2^48 for x in [0, DSPARK_MAX_WEIGHT], so the float64
/// on the way is exact.
DSPARK_HD uint64_t to_grid(float x) {
  return static_cast<uint64_t>(
      static_cast<int64_t>(static_cast<double>(x) * 1099511627776.0 + 0.5));
}

DSPARK_HD double from_grid(uint64_t sum) {
  return static_cast<double>(sum) * (1.0 / 1099511627776.0);
}

/// What a step costs besides the table: the same for every B of a call.
struct StepCost {
  const double* ms;  // [size] by B
  int64_t size;
  double draft_ms;
  double kv_ms;  // ms_per_kv_token * total KV length
};

/// Whether the table prices a step of `batch` tokens. A price that is not positive and finite
/// counts as the end of the table.
DSPARK_HD bool has_price(const StepCost& cost, int64_t batch) {
  if (batch >= cost.size) return false;
  const double ms = cost.ms[batch];
  return ms > 0.0 && ms - ms == 0.0;
}

/// Theta in tokens per second. The order of these operations is part of the contract.
DSPARK_HD double theta_of(const StepCost& cost, uint64_t tau, int64_t batch) {
  const double sps = 1000.0 / ((cost.ms[batch] + cost.draft_ms) + cost.kv_ms);
  return from_grid(tau) * sps;
}

/// The floor, cap and weight of one request, repaired and reported where they are out of range:
/// a negative cap or floor counts as 0, a weight that is not in [0, DSPARK_MAX_WEIGHT] as 0. Not
/// reported, because engines mean it: a cap above gamma is gamma, a floor above the cap is the cap.
struct RequestLimits {
  int32_t floor;
  int32_t cap;
  float weight;
};

DSPARK_HD RequestLimits request_limits(const dspark_prefix_scheduler_params& p, int64_t r,
                                       int32_t* status) {
  RequestLimits limits = {0, p.gamma, 1.0f};
  bool bad = false;
  if (p.max_len != nullptr) {
    const int32_t cap = p.max_len[r];
    bad |= cap < 0;
    limits.cap = cap < 0 ? 0 : cap > p.gamma ? p.gamma : cap;
  }
  if (p.min_len != nullptr) {
    const int32_t floor = p.min_len[r];
    bad |= floor < 0;
    limits.floor = floor < 0 ? 0 : floor > limits.cap ? limits.cap : floor;
  }
  if (p.weight != nullptr) {
    const float weight = p.weight[r];
    const bool good = weight >= 0.0f && weight <= DSPARK_MAX_WEIGHT;
    bad |= !good;
    limits.weight = good ? weight + 0.0f : 0.0f;  // + 0: -0 must not order above everything
  }
  if (bad) *status |= DSPARK_BAD_PARAM;
  return limits;
}

}  // namespace dspark

#endif  // DSPARK_CORE_SCHEDULE_H_
