// SPDX-License-Identifier: Apache-2.0
#include "core/families.h"
#include "cuda/prim/launch.h"
#include "cuda/rejection_sampler/team_size.h"
#include "cuda/vocab_parallel/kernel.cuh"

namespace dspark::cuda {
namespace {

using Params = dspark_vocab_parallel_params;
using shards::Args;

int64_t rows_of(const Params& v) { return int64_t{v.call.num_requests} * (v.call.gamma + 1); }
size_t stats_bytes(const Params& v) {
  const size_t numbers =
      verify::kStats * static_cast<size_t>(segments_of(v.call.vocab_size)) * sizeof(float);
  return (static_cast<size_t>(rows_of(v)) * numbers + 255) / 256 * 256;
}

template <class Kernel>
dspark_status start_teams(const char* name, Kernel* kernel, Args args, int32_t team, int64_t work,
                          void* stream) {
  args.team = team;
  args.slice = (args.segments + team - 1) / team;
  prim::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(work * team));
  config.block = dim3(shards::kThreads);
  config.stream = stream;
  config.cluster = team > 1 ? static_cast<unsigned>(team) : 0;
  return prim::launch(name, kernel, config, args);
}

template <class Kernel>
dspark_status start(const char* name, Kernel* kernel, const Params& v, int64_t work, void* scratch,
                    void* stream) {
  if (work == 0) return ok_status();
  prim::DeviceLimits device;
  const dspark_status limits = prim::device_limits(&device);
  if (limits.code != DSPARK_OK) return limits;
  Args args{v, shard::place_of(v), 1, segments_of(v.call.vocab_size), 0, nullptr, nullptr};
  args.stats = static_cast<float*>(scratch);
  args.ids = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + stats_bytes(v));
  const int32_t team = verify::team_for(work, args.segments, device);
  const dspark_status status = start_teams(name, kernel, args, team, work, stream);
  if (status.code != DSPARK_UNSUPPORTED || team == 1) return status;
  // A part of a device may hold no cluster: the same work for CTAs alone.
  return start_teams(name, kernel, args, 1, work, stream);
}

}  // namespace

dspark_status vocab_parallel_workspace(const Params& v, size_t* bytes) {
  const size_t ids = static_cast<size_t>(v.call.num_requests) * v.call.vocab_size;
  *bytes = stats_bytes(v) + ids * sizeof(int32_t);
  return ok_status();
}

dspark_status vocab_parallel_scan(const Params& v, void* scratch, void* stream) {
  return start("vocab_parallel_scan", shards::scan_kernel, v, rows_of(v), scratch, stream);
}

dspark_status vocab_parallel_draw(const Params& v, void* scratch, void* stream) {
  return start("vocab_parallel_draw", shards::draw_kernel, v, v.call.num_requests, scratch, stream);
}

dspark_status vocab_parallel_finish(const Params& v, void* scratch, void* stream) {
  (void)scratch;
  if (v.call.num_requests == 0) return ok_status();
  const Args args{v, shard::place_of(v), 1, segments_of(v.call.vocab_size), 0, nullptr, nullptr};
  prim::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((v.call.num_requests + shards::kFinishThreads - 1) /
                                           shards::kFinishThreads));
  config.block = dim3(shards::kFinishThreads);
  config.stream = stream;
  return prim::launch("vocab_parallel_finish", shards::finish_kernel, config, args);
}

}  // namespace dspark::cuda
