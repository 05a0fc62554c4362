// SPDX-License-Identifier: Apache-2.0
//
// Host side of the Markov loop on CUDA: what is not served, blocks of up to 512 requests, and one
// cooperative launch for each (or one launch a phase where that cannot be had).
#include "core/families.h"
#include "core/problems.h"
#include "cuda/markov_loop/config.h"
#include "cuda/markov_loop/config_screen.h"
#include "cuda/markov_loop/config_wgmma.h"
#include "cuda/markov_loop/kernel.cuh"
#include "cuda/markov_loop/kernel_int8.h"
#include "cuda/markov_loop/kernel_screen.h"
#include "cuda/markov_loop/kernel_wgmma.h"
#include "cuda/markov_loop/tile_mma.cuh"
#include "cuda/markov_loop/tile_scalar.cuh"
#include "cuda/markov_loop/topk.h"
#include "cuda/prim/launch.h"

namespace dspark::cuda {
namespace {

using markov::Args;
using markov::Config;
using Params = dspark_markov_loop_params;

// The arguments of requests [first, first + count).
Params slice(const Params& all, int64_t first, int32_t count) {
  Params p = all;
  const auto shift = [](auto& pointer, int64_t elements) {
    if (pointer != nullptr) pointer += elements;
  };
  p.num_requests = count;
  p.base_logits = advance(all.base_logits, all.base_dtype, first * all.base_request_stride);
  shift(p.hidden, first * all.hidden_request_stride);
  shift(p.anchor, first);
  shift(p.seed, first);
  shift(p.position, first);
  shift(p.temperature, first);
  shift(p.active, first);
  shift(p.debug_uniform, first * all.gamma);
  shift(p.tokens, first * all.gamma);
  shift(p.logit, first * all.gamma);
  shift(p.lse, first * all.gamma);
  shift(p.confidence_logit, first * all.gamma);
  shift(p.status, first);
  if (p.logits != nullptr) {
    p.logits =
        const_cast<void*>(advance(all.logits, all.base_dtype, first * all.logits_request_stride));
  }
  return p;
}

// Every kernel of the family.
markov::Kernel kernel_of(const Args& args) {
  using namespace markov;
  const Config& c = args.config;
  if (c.source == Source::kScalar) return markov_loop_kernel<ScalarSource>;
  if (c.source == Source::kWgmma) return wgmma_kernel(c, args.p.w2_dtype);
  if (c.source == Source::kScreen) return screen_kernel(c);
  if (c.source == Source::kInt || c.source == Source::kImma) return int8_kernel(c);
  return c.group == kMinMmaGroup ? markov_loop_kernel<MmaSource<kMinMmaGroup>>
                                 : markov_loop_kernel<MmaSource<kMaxMmaGroup>>;
}

dspark_status launch_phase(Args args, uint32_t phases, int32_t first, int32_t last, void* stream) {
  args.phases = phases;
  args.first_step = first;
  args.last_step = last;
  prim::LaunchConfig launch;
  launch.grid = dim3(static_cast<unsigned>(args.config.grid));
  launch.block = dim3(markov::kThreads);
  launch.shared_bytes = args.config.shared_bytes;
  launch.stream = stream;
  launch.cooperative = args.config.cooperative;
  return prim::launch("markov_loop", kernel_of(args), launch, args);
}

// One block of requests.
dspark_status run(Args args, void* stream) {
  using namespace markov;
  const int32_t gamma = args.p.gamma;
  if (args.config.cooperative) {
    const dspark_status all =
        launch_phase(args, kStart | kHead | kScore | kFinish, 0, gamma, stream);
    if (all.code != DSPARK_UNSUPPORTED) return all;
    args.config.cooperative = false;  // no room for all CTAs at once: nothing has started
  }
  // The order of launches in the stream takes the place of waiting inside of one.
  dspark_status status = launch_phase(args, kStart, 0, 0, stream);
  for (int32_t k = 0; k < gamma && status.code == DSPARK_OK; ++k) {
    if (args.p.head != DSPARK_HEAD_VANILLA) status = launch_phase(args, kHead, k, k + 1, stream);
    if (status.code == DSPARK_OK) status = launch_phase(args, kScore, k, k + 1, stream);
  }
  if (status.code == DSPARK_OK) status = launch_phase(args, kFinish, 0, 0, stream);
  return status;
}

void check_served(Problems& problems, const Params& p) {
  DSPARK_SUPPORTED(problems, p.top_k == nullptr,
                   "top_k: got an array; the CUDA backend draws from the full law, use NULL or "
                   "DSPARK_CPU");
  DSPARK_SUPPORTED(problems, p.top_p == nullptr,
                   "top_p: got an array; the CUDA backend draws from the full law, use NULL or "
                   "DSPARK_CPU");
}

}  // namespace

dspark_status markov_loop_workspace(const Params& p, size_t* bytes) {
  *bytes = p.topk_support > 0 ? topk::workspace(p) : markov::carve(p, nullptr).bytes;
  return ok_status();
}

dspark_status markov_loop(const Params& p, void* scratch, void* stream) {
  Problems problems("dspark_markov_loop");
  check_served(problems, p);
  if (!problems.none() || p.num_requests == 0) return problems.status();
  if (p.topk_support > 0) return topk::run(p, scratch, stream);
  prim::DeviceLimits device;
  dspark_status status = prim::device_limits(&device);
  int32_t count = 0;
  for (int64_t first = 0; first < p.num_requests && status.code == DSPARK_OK; first += count) {
    const int64_t left = p.num_requests - first;
    count = static_cast<int32_t>(left < markov::kMaxRows ? left : markov::kMaxRows);
    Args args{};
    const Params rest = slice(p, first, count);
    if (!markov::choose_screen_config(args.config, rest, device, &count) &&
        !markov::choose_wgmma_config(args.config, rest, device, &count) &&
        !markov::choose_config(args.config, rest, device, &count)) {
      DSPARK_SUPPORTED(problems, false,
                       "rank: got %d; %d bytes of shared memory hold no vector of that length",
                       p.rank, device.shared_bytes_per_block);
      return problems.status();
    }
    args.p = slice(p, first, count);
    if (args.config.source == markov::Source::kScreen) {
      args.exact_w2 = p.w2;
      args.exact_stride = p.w2_stride;
      args.p = markov::screened_params(args.p);
    }
    args.work = markov::carve(p, scratch);
    if (args.config.source == markov::Source::kWgmma) status = markov::describe_w2(args);
    if (status.code == DSPARK_OK) status = run(args, stream);
  }
  return status;
}

}  // namespace dspark::cuda
