// SPDX-License-Identifier: Apache-2.0
//
// Scheduler on the CPU: one thread. The whole problem is at most 8192 candidates in practice, and
// waking a second thread costs more than the early stop leaves to do.
//
// Only `causal` lets live survivals decide how much is admitted; it may, because it stops at the
// first Theta that does not rise, so whether (r, j) is admitted depends on nothing after (r, j) in
// the order. The full search below is handed lagged survivals and nothing else.
#include "core/families.h"
#include "core/schedule.h"
#include "core/work_plan.h"
#include "cpu/candidates.h"

namespace dspark::cpu {
namespace {

using Params = dspark_prefix_scheduler_params;

// Per-request state in the workspace.
struct State {
  uint64_t* room;  // [2, R, gamma] candidates and their sort
  float* live;     // [R, gamma] keys of the live survivals
  float* lagged;   // [R, gamma] keys of the lagged ones
  float* weight;   // [R]
  int32_t* floor;  // [R] floors, cut to what fits
  int32_t* cap;    // [R] largest length
  int32_t* reach;  // [R] candidates end here: a > 0 and below the cap
  int64_t active;  // active requests
};

State state_in(const Params& p, void* scratch) {
  const int64_t n = p.num_requests;
  State s = {};
  s.room = static_cast<uint64_t*>(scratch);
  s.live = reinterpret_cast<float*>(s.room + 2 * n * p.gamma);
  s.lagged = s.live + n * p.gamma;
  s.weight = s.lagged + n * p.gamma;
  s.floor = reinterpret_cast<int32_t*>(s.weight + n);
  s.cap = s.floor + n;
  s.reach = s.cap + n;
  return s;
}

bool is_active(const Params& p, int64_t r) { return p.active == nullptr || p.active[r] != 0; }

void flag_active(const Params& p, int32_t bit) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if (is_active(p, r)) p.status[r] |= bit;
  }
}

void read_limits(const Params& p, State* s) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    p.status[r] = 0;
    p.length[r] = 0;
    s->floor[r] = s->cap[r] = s->reach[r] = 0;
    s->weight[r] = 0.0f;
    if (!is_active(p, r)) continue;
    const RequestLimits limits = request_limits(p, r, &p.status[r]);
    s->floor[r] = limits.floor;
    s->cap[r] = limits.cap;
    s->weight[r] = limits.weight;
    ++s->active;
  }
}

// Keys of all candidates, and in `reach` where each request's candidates with a > 0 end.
void read_keys(const Params& p, const float* survival, int64_t stride, const State& s, float* key) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    s.reach[r] = 0;
    if (!is_active(p, r)) continue;
    float least = 1.0f;
    for (int j = 0; j < p.gamma; ++j) {
      const float a = clean_probability(survival[r * stride + j], &p.status[r]);
      least = a < least ? a : least;
      key[r * p.gamma + j] = s.weight[r] * least;
      if (least > 0.0f && j < s.cap[r]) s.reach[r] = j + 1;
    }
  }
}

StepCost read_cost(const Params& p) {
  StepCost cost = {p.cost_ms, p.cost_size, p.draft_ms, 0.0};
  if (p.kv_len == nullptr) return cost;
  int64_t total = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if (!is_active(p, r)) continue;
    if (p.kv_len[r] < 0) {
      p.status[r] |= DSPARK_BAD_PARAM;
    } else {
      total += p.kv_len[r];
    }
  }
  cost.kv_ms = p.ms_per_kv_token * static_cast<double>(total);
  return cost;
}

// Whether `batch` is priced; a bad price inside the table is everybody's trouble.
bool priced(const Params& p, const StepCost& cost, int64_t batch) {
  if (has_price(cost, batch)) return true;
  if (batch > 0 && batch < cost.size) flag_active(p, DSPARK_BAD_PARAM);
  return false;
}

// Raise length[r] towards goal[r], position-major, until `room` drafts more are admitted.
void raise_lengths(const Params& p, const int32_t* goal, int64_t* room) {
  int64_t wanted = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if (goal[r] > p.length[r]) wanted += goal[r] - p.length[r];
  }
  if (wanted <= *room) {
    *room -= wanted;
    for (int64_t r = 0; r < p.num_requests; ++r) {
      if (goal[r] > p.length[r]) p.length[r] = goal[r];
    }
    return;
  }
  for (int j = 0; j < p.gamma; ++j) {
    for (int64_t r = 0; r < p.num_requests && *room > 0; ++r) {
      if (p.length[r] != j || goal[r] <= j) continue;
      ++p.length[r];
      --*room;
    }
  }
}

// sum w_r (1 + sum over the admitted drafts of a), on the grid.
uint64_t expected_tokens(const Params& p, const State& s, const float* key) {
  uint64_t tau = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    tau += to_grid(s.weight[r]);
    for (int j = 0; j < p.length[r]; ++j) tau += to_grid(key[r * p.gamma + j]);
  }
  return tau;
}

int64_t admitted(const Params& p) {
  int64_t total = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) total += p.length[r];
  return total;
}

// Algorithm 1 from the floors up: `room` drafts more at the most.
void admit_causal(const Params& p, const State& s, const StepCost& cost, int64_t room) {
  int64_t batch = s.active + admitted(p);
  if (!priced(p, cost, batch)) return;
  uint64_t tau = expected_tokens(p, s, s.live);
  double best = theta_of(cost, tau, batch);
  Candidates next(s.room, s.live, p.gamma, p.length, s.reach, p.num_requests);
  for (; !next.empty() && room > 0; --room) {
    tau += to_grid(next.key());
    if (!priced(p, cost, ++batch)) return;
    const double theta = theta_of(cost, tau, batch);
    if (!(theta > best)) return;
    best = theta;
    p.length[next.request()] = next.position() + 1;
    next.pop();
  }
}

// Drafts to admit beyond the floors: the best Theta over lagged survivals, the fewest on ties.
int64_t search_budget(const Params& p, const State& s, const StepCost& cost, int64_t room) {
  read_keys(p, p.lagged, p.lagged_stride, s, s.lagged);
  int64_t batch = s.active + admitted(p);
  if (!priced(p, cost, batch)) return 0;
  uint64_t tau = expected_tokens(p, s, s.lagged);
  double best = theta_of(cost, tau, batch);
  int64_t budget = 0;
  Candidates next(s.room, s.lagged, p.gamma, p.length, s.reach, p.num_requests);
  for (int64_t n = 1; !next.empty() && n <= room; ++n) {
    tau += to_grid(next.key());
    if (!priced(p, cost, ++batch)) break;
    const double theta = theta_of(cost, tau, batch);
    if (theta > best) {
      best = theta;
      budget = n;
    }
    next.pop();
  }
  return budget;
}

// The `budget` best live candidates.
void admit_ranked(const Params& p, const State& s, int64_t budget) {
  if (budget <= 0) return;
  Candidates next(s.room, s.live, p.gamma, p.length, s.reach, p.num_requests, budget);
  for (; !next.empty() && budget > 0; --budget) {
    p.length[next.request()] = next.position() + 1;
    next.pop();
  }
}

// `reach` becomes the length that threshold, fixed or off asks for.
void read_rule(const Params& p, const State& s) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    int32_t wanted = p.mode == DSPARK_SCHEDULE_FIXED ? p.fixed_len : p.gamma;
    if (p.mode == DSPARK_SCHEDULE_THRESHOLD && is_active(p, r)) {
      const float* c = p.conditional + r * p.conditional_stride;
      for (int j = p.gamma - 1; j >= 0; --j) {
        if (clean_probability(c[j], &p.status[r]) < p.threshold) wanted = j;
      }
    }
    s.reach[r] = wanted < s.cap[r] ? wanted : s.cap[r];
  }
}

void choose_lengths(const Params& p, State* s, const StepCost& cost) {
  const bool searches = p.mode == DSPARK_SCHEDULE_TWO_PHASE && p.budget < 0;
  int64_t limit = s->active * (p.gamma + INT64_C(1));
  if (p.capacity >= 0 && p.capacity < limit) limit = p.capacity;
  if (limit < s->active) flag_active(p, DSPARK_BAD_PARAM);
  if ((searches || p.mode == DSPARK_SCHEDULE_CAUSAL) && p.cost_size - 1 < limit) {
    limit = p.cost_size - 1;
  }
  int64_t room = limit > s->active ? limit - s->active : 0;
  const int64_t all_room = room;
  raise_lengths(p, s->floor, &room);
  if (p.mode == DSPARK_SCHEDULE_CAUSAL) {
    read_keys(p, p.survival, p.survival_stride, *s, s->live);
    admit_causal(p, *s, cost, room);
  } else if (p.mode == DSPARK_SCHEDULE_TWO_PHASE) {
    int64_t budget = p.budget - (all_room - room);
    if (searches) budget = search_budget(p, *s, cost, room);
    read_keys(p, p.survival, p.survival_stride, *s, s->live);
    admit_ranked(p, *s, budget < room ? budget : room);
  } else {
    if (p.survival != nullptr) read_keys(p, p.survival, p.survival_stride, *s, s->live);
    read_rule(p, *s);
    raise_lengths(p, s->reach, &room);
  }
}

void write_rows(const Params& p, int64_t r, int32_t first) {
  const int64_t anchor = p.position == nullptr ? 0 : p.position[r];
  for (int32_t j = 0; j <= p.length[r]; ++j) {
    const int64_t row = first + j;
    p.row_to_request[row] = static_cast<int32_t>(r);
    p.row_offset[row] = j;
    if (p.token_ids != nullptr) {
      p.token_ids[row] = j == 0 ? p.anchor[r] : p.draft_tokens[r * p.draft_tokens_stride + j - 1];
    }
    if (p.positions != nullptr) p.positions[row] = anchor + j;
  }
}

void write_layout(const Params& p) {
  int32_t row = 0;
  int32_t entry = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    p.cu_seqlens[r] = row;
    if (!is_active(p, r)) continue;
    write_rows(p, r, row);
    const int32_t rows = 1 + p.length[r];
    if (p.work != nullptr) {
      write_work_entry(p.work, entry, WorkEntry{static_cast<int32_t>(r), row, rows});
    }
    row += rows;
    ++entry;
  }
  p.cu_seqlens[p.num_requests] = row;
  *p.total_tokens = row;
  if (p.work != nullptr) {
    write_work_header(p.work, p.num_requests, entry, row);
    for (; entry < p.num_requests; ++entry) write_work_entry(p.work, entry, WorkEntry{0, 0, 0});
  }
  for (int64_t i = row; i < p.padded_tokens; ++i) {
    p.row_to_request[i] = p.row_offset[i] = -1;
    if (p.token_ids != nullptr) p.token_ids[i] = 0;
    if (p.positions != nullptr) p.positions[i] = 0;
  }
}

void write_theta(const Params& p, const State& s, const StepCost& cost) {
  const int64_t batch = s.active + admitted(p);
  const bool known = p.survival != nullptr && priced(p, cost, batch);
  if (s.active == 0) {
    *p.theta = p.cost_ms != nullptr ? 0.0 : double_from_bits(UINT64_C(0x7ff8000000000000));
  } else {
    *p.theta = known ? theta_of(cost, expected_tokens(p, s, s.live), batch)
                     : double_from_bits(UINT64_C(0x7ff8000000000000));
  }
}

}  // namespace

size_t prefix_scheduler_workspace(const dspark_prefix_scheduler_params& p) {
  const size_t n = static_cast<size_t>(p.num_requests);
  const size_t gamma = static_cast<size_t>(p.gamma);
  return n * (2 * gamma * (sizeof(uint64_t) + sizeof(float)) + sizeof(float) + 3 * sizeof(int32_t));
}

void prefix_scheduler(const dspark_prefix_scheduler_params& p, void* scratch) {
  State s = state_in(p, scratch);
  read_limits(p, &s);
  const StepCost cost = read_cost(p);
  choose_lengths(p, &s, cost);
  write_layout(p);
  write_theta(p, s, cost);
}

}  // namespace dspark::cpu
