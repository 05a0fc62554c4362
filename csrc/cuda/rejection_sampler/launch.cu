// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <initializer_list>

#include "core/families.h"
#include "cuda/prim/launch.h"
#include "cuda/rejection_sampler/kernel.cuh"
#include "cuda/rejection_sampler/team_size.h"

namespace dspark::cuda {
namespace {

using verify::Args;
using verify::Keep;
using verify::kResident;
using verify::Phase;
using verify::Plan;
using Params = dspark_rejection_sampler_params;

constexpr int64_t kReserved = 20 * 1024;  // of a CTA: static shared memory, and the system's share

// A number from the environment, for tests: docs/testing.md lists the names.
int64_t asked_for(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == 0 ? otherwise : std::strtol(text, nullptr, 10);
}

int32_t team_of(int64_t work, int32_t segments, const prim::DeviceLimits& device) {
  const int32_t team = verify::team_for(work, segments, device);
  const int64_t asked = asked_for("DSPARK_REJECTION_SAMPLER_TEAM", team);
  const bool can = asked == 1 || (device.major >= 9 && asked > 1 && asked <= verify::kMaxTeam &&
                                  (asked & (asked - 1)) == 0);
  return can ? static_cast<int32_t>(asked) : team;
}

int64_t element_bytes(const Params& p) { return p.target_dtype == DSPARK_F32 ? 4 : 2; }

bool processes(const Params& p) {
  return p.token_mask != nullptr || p.logit_bias != nullptr || p.min_tokens_left != nullptr ||
         p.repetition_penalty != nullptr || p.presence_penalty != nullptr ||
         p.frequency_penalty != nullptr || p.top_k != nullptr || p.top_p != nullptr ||
         p.min_p != nullptr;
}

// What of a slice fits into shared memory beside a second CTA of the multiprocessor.
void choose_memory(const Params& p, const prim::DeviceLimits& device, Plan* plan) {
  const int64_t room = (device.shared_bytes_per_block - 2 * 1024) / kResident - kReserved;
  const int64_t stats = int64_t{verify::kStats} * plan->slice * int64_t{sizeof(float)};
  const int64_t ids = int64_t{plan->slice} * kSegment;
  int64_t used = 0;
  plan->shared_stats = plan->rows_at_once == 0 && stats <= room ? 1 : 0;
  used += plan->shared_stats != 0 ? stats : 0;
  plan->keep = Keep::kNothing;
  if (plan->shared_stats != 0 && !processes(p) && used + ids * element_bytes(p) <= room) {
    plan->keep = Keep::kRaw;
    used += ids * element_bytes(p);
  } else if (plan->shared_stats != 0 && processes(p) &&
             used + ids * int64_t{sizeof(float)} <= room) {
    plan->keep = Keep::kFloat;
    used += ids * int64_t{sizeof(float)};
  }
  plan->shared_bytes = static_cast<int32_t>(used);
}

// A division into teams of this size.
Plan divide(const Params& p, const prim::DeviceLimits& device, bool rows_at_once, int32_t team) {
  Plan plan{};
  plan.segments = segments_of(p.vocab_size);
  plan.rows_at_once = rows_at_once ? 1 : 0;
  plan.team = team;
  plan.slice = (plan.segments + team - 1) / team;
  plan.prefetch = !rows_at_once && team >= 4 ? 1 : 0;
  choose_memory(p, device, &plan);
  return plan;
}

// Of a call whose rows have to be read, or are mostly known to the engine.
Plan plan_for(const Params& p, const prim::DeviceLimits& device, bool told) {
  const int64_t rows = int64_t{p.num_requests} * (p.gamma + 1);
  // Teams of four for every row at once: worth it as long as they run together.
  const bool few = 4 * rows <= int64_t{kResident} * device.multiprocessors;
  const bool at_once = !told && asked_for("DSPARK_REJECTION_SAMPLER_ROWS", few ? 1 : 0) != 0;
  const int64_t work = at_once ? rows : p.num_requests;
  return divide(p, device, at_once, team_of(work, segments_of(p.vocab_size), device));
}

size_t carve(const Params& p, const Plan& plan, char* base, verify::Work* work) {
  const size_t rows = static_cast<size_t>(p.num_requests) * static_cast<size_t>(p.gamma + 1);
  const bool at_once = plan.rows_at_once != 0;
  const size_t records = at_once ? rows * sizeof(verify::RowRecord) : 0;
  const size_t first = (records + 255) / 256 * 256;
  const size_t owners = at_once ? rows : plan.shared_stats != 0 ? 0 : p.num_requests;
  work->records = at_once ? reinterpret_cast<verify::RowRecord*>(base) : nullptr;
  work->stats = owners != 0 ? reinterpret_cast<float*>(base + first) : nullptr;
  return first + owners * verify::kStats * static_cast<size_t>(plan.segments) * sizeof(float);
}

dspark_status start(const Args& args, Phase phase, int64_t teams, void* stream) {
  Args call = args;
  call.phase = phase;
  prim::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(teams * call.plan.team));
  config.block = dim3(verify::kThreads);
  config.shared_bytes = phase == Phase::kDecide
                            ? static_cast<size_t>(call.p.gamma + 1) * sizeof(verify::RowRecord)
                            : static_cast<size_t>(call.plan.shared_bytes);
  config.stream = stream;
  config.programmatic = phase == Phase::kDecide;
  config.cluster = call.plan.team > 1 ? static_cast<unsigned>(call.plan.team) : 0;
  return prim::launch("rejection_sampler", verify::rejection_sampler_kernel, config, call);
}

dspark_status run(const Params& p, const Plan& plan, void* scratch, void* stream) {
  Args args{p, plan, {}, Phase::kWhole};
  carve(p, plan, static_cast<char*>(scratch), &args.work);
  if (plan.rows_at_once == 0) return start(args, Phase::kWhole, p.num_requests, stream);
  const int64_t rows = int64_t{p.num_requests} * (p.gamma + 1);
  const dspark_status status = start(args, Phase::kRows, rows, stream);
  return status.code == DSPARK_OK ? start(args, Phase::kDecide, p.num_requests, stream) : status;
}

}  // namespace

dspark_status rejection_sampler_workspace(const Params& p, size_t* bytes) {
  prim::DeviceLimits device;
  const dspark_status limits = prim::device_limits(&device);
  if (limits.code != DSPARK_OK) return limits;
  *bytes = 0;
  for (const bool told : {false, true}) {
    const Plan plan = plan_for(p, device, told);
    for (const int32_t team : {plan.team, 1}) {
      verify::Work unused;
      const Plan other = divide(p, device, plan.rows_at_once != 0, team);
      const size_t needed = carve(p, other, nullptr, &unused);
      *bytes = needed > *bytes ? needed : *bytes;
    }
  }
  return limits;
}

dspark_status rejection_sampler(const Params& p, void* scratch, void* stream) {
  if (p.num_requests == 0) return ok_status();
  prim::DeviceLimits device;
  const dspark_status limits = prim::device_limits(&device);
  if (limits.code != DSPARK_OK) return limits;
  const Plan plan = plan_for(p, device, p.target_lse != nullptr);
  const dspark_status status = run(p, plan, scratch, stream);
  if (status.code != DSPARK_UNSUPPORTED || plan.team == 1) return status;
  // A part of a device may hold no cluster: the same work for CTAs alone.
  return run(p, divide(p, device, plan.rows_at_once != 0, 1), scratch, stream);
}

}  // namespace dspark::cuda
