// SPDX-License-Identifier: Apache-2.0
#include "dspark/prefix_scheduler.h"

#include "core/dispatch.h"
#include "core/families.h"
#include "core/work_plan.h"

namespace {

using Params = dspark_prefix_scheduler_params;

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Whether the table decides how much is admitted, rather than only pricing the result.
bool table_decides(const Params& p) {
  return p.mode == DSPARK_SCHEDULE_CAUSAL || (p.mode == DSPARK_SCHEDULE_TWO_PHASE && p.budget < 0);
}

bool finite_and_not_negative(double x) { return x >= 0.0 && x - x == 0.0; }

void check_sizes(dspark::Problems& problems, const Params& p) {
  dspark::check_gamma(problems, p.gamma);
  const int64_t candidates = static_cast<int64_t>(p.num_requests) * (p.gamma + INT64_C(1));
  DSPARK_REQUIRE(problems, candidates <= DSPARK_MAX_CANDIDATES,
                 "num_requests: got %d, expected R * (gamma + 1) <= %d", p.num_requests,
                 DSPARK_MAX_CANDIDATES);
  DSPARK_REQUIRE(problems, p.mode >= DSPARK_SCHEDULE_CAUSAL && p.mode <= DSPARK_SCHEDULE_OFF,
                 "mode: got %d, expected a dspark_schedule_mode", p.mode);
}

void check_cost(dspark::Problems& problems, const Params& p) {
  DSPARK_REQUIRE(
      problems, !table_decides(p) || p.cost_ms != nullptr,
      "cost_ms: got NULL, expected a cost table (causal, and two_phase without a budget, "
      "need one; fixed and off are the policies without)");
  DSPARK_REQUIRE(problems, p.cost_ms != nullptr ? p.cost_size >= 1 : p.cost_size == 0,
                 "cost_size: got %d, expected %s", p.cost_size,
                 p.cost_ms != nullptr ? ">= 1" : "0 without cost_ms");
  DSPARK_REQUIRE(problems, finite_and_not_negative(p.draft_ms),
                 "draft_ms: got %g, expected a finite value >= 0", p.draft_ms);
  DSPARK_REQUIRE(problems, finite_and_not_negative(p.ms_per_kv_token),
                 "ms_per_kv_token: got %g, expected a finite value >= 0", p.ms_per_kv_token);
  DSPARK_REQUIRE(problems,
                 p.num_requests == 0 || p.cost_ms == nullptr || !(p.ms_per_kv_token > 0.0) ||
                     p.kv_len != nullptr,
                 "kv_len: got NULL, expected lengths (ms_per_kv_token is %g)", p.ms_per_kv_token);
}

void check_mode(dspark::Problems& problems, const Params& p) {
  const bool two_phase = p.mode == DSPARK_SCHEDULE_TWO_PHASE;
  const bool searches = two_phase && p.budget < 0;
  if (p.num_requests > 0) {
    if (two_phase || p.mode == DSPARK_SCHEDULE_CAUSAL) {
      dspark::check_pointer(problems, "survival", p.survival);
    }
    if (p.mode == DSPARK_SCHEDULE_THRESHOLD) {
      dspark::check_pointer(problems, "conditional", p.conditional);
    }
    DSPARK_REQUIRE(problems, !searches || p.lagged != nullptr,
                   "lagged, budget: got neither, expected one of them in two_phase");
  }
  DSPARK_REQUIRE(problems, searches || p.lagged == nullptr,
                 "lagged: got an array, expected NULL (only two_phase without a budget reads it)");
  DSPARK_REQUIRE(
      problems, p.mode != DSPARK_SCHEDULE_THRESHOLD || (p.threshold >= 0.0f && p.threshold <= 1.0f),
      "threshold: got %g, expected 0..1", static_cast<double>(p.threshold));
  DSPARK_REQUIRE(problems,
                 p.mode != DSPARK_SCHEDULE_FIXED || (p.fixed_len >= 0 && p.fixed_len <= p.gamma),
                 "fixed_len: got %d, expected 0..gamma = %d", p.fixed_len, p.gamma);
  DSPARK_REQUIRE(problems, p.capacity < 0 || p.active != nullptr || p.capacity >= p.num_requests,
                 "capacity: got %d, expected at least one token for each of %d requests, or < 0 "
                 "for none",
                 p.capacity, p.num_requests);
}

void check_outputs(dspark::Problems& problems, const Params& p) {
  const int64_t rows = dspark_prefix_scheduler_max_tokens(&p);
  DSPARK_REQUIRE(problems, p.padded_tokens >= rows,
                 "padded_tokens: got %d, expected at least %lld, the largest batch possible",
                 p.padded_tokens, static_cast<long long>(rows));
  if (p.num_requests > 0) {
    dspark::check_pointer(problems, "length", p.length);
    dspark::check_pointer(problems, "status", p.status);
  }
  dspark::check_pointer(problems, "cu_seqlens", p.cu_seqlens);
  dspark::check_pointer(problems, "total_tokens", p.total_tokens);
  dspark::check_pointer(problems, "theta", p.theta);
  if (p.padded_tokens > 0) {
    dspark::check_pointer(problems, "row_to_request", p.row_to_request);
    dspark::check_pointer(problems, "row_offset", p.row_offset);
  }
  const int given = (p.anchor != nullptr) + (p.draft_tokens != nullptr) + (p.position != nullptr);
  DSPARK_REQUIRE(problems, given == 0 || given == 3,
                 "anchor, draft_tokens, position: got %d of the three, expected all or none",
                 given);
  const bool wanted = p.token_ids != nullptr || p.positions != nullptr;
  DSPARK_REQUIRE(problems, p.num_requests == 0 || given == 3 || !wanted,
                 "token_ids, positions: got an array without anchor, draft_tokens and position");
  const int64_t needed = dspark::work_plan_size(p.num_requests);
  DSPARK_REQUIRE(problems, p.work == nullptr || p.work_size >= needed,
                 "work_size: got %d, expected at least %lld", p.work_size,
                 static_cast<long long>(needed));
}

constexpr dspark::Backends<Params> kBackends = DSPARK_BACKENDS(prefix_scheduler);

}  // namespace

extern "C" {

int64_t dspark_prefix_scheduler_max_tokens(const dspark_prefix_scheduler_params* params) {
  if (params == nullptr || params->struct_size != sizeof(Params)) return 0;
  const Params& p = *params;
  const int64_t requests = p.num_requests;
  int64_t drafts = requests * p.gamma;
  if (p.min_len == nullptr) {  // floors may exceed a budget and a fixed length
    if (p.mode == DSPARK_SCHEDULE_FIXED) drafts = requests * p.fixed_len;
    if (p.mode == DSPARK_SCHEDULE_TWO_PHASE && p.budget >= 0) drafts = smaller(drafts, p.budget);
  }
  int64_t tokens = requests + drafts;
  if (table_decides(p)) tokens = smaller(tokens, larger(requests, p.cost_size - INT64_C(1)));
  if (p.capacity >= 0) tokens = smaller(tokens, larger(requests, p.capacity));
  return tokens;
}

dspark_status dspark_prefix_scheduler_workspace(dspark_device device,
                                                const dspark_prefix_scheduler_params* params,
                                                size_t* bytes) {
  dspark::Problems problems("dspark_prefix_scheduler_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, *params);
  return dspark::finish_workspace(problems, kBackends, device, *params, bytes);
}

dspark_status dspark_prefix_scheduler(dspark_device device,
                                      const dspark_prefix_scheduler_params* params,
                                      dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_prefix_scheduler");
  if (!dspark::check_header(problems, params)) return problems.status();
  check_sizes(problems, *params);
  if (problems.none()) {
    check_cost(problems, *params);
    check_mode(problems, *params);
    check_outputs(problems, *params);
  }
  return dspark::finish_call(problems, kBackends, device, *params, workspace, stream);
}

}  // extern "C"
