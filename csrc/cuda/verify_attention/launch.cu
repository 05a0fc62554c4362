// SPDX-License-Identifier: Apache-2.0
//
// Host side of verify_attention on CUDA: the kernel for the call, and one launch (where a
// cooperative launch cannot be had: the counters zeroed, and one launch).
#include <cstdlib>

#include "core/families.h"
#include "core/problems.h"
#include "cuda/prim/launch.h"
#include "cuda/verify_attention/config.h"
#include "cuda/verify_attention/kernel.cuh"
#include "cuda/verify_attention/maps.h"
#include "cuda/verify_attention/tile_plain.cuh"

namespace dspark::cuda {
namespace attention {

Kernel plain_kernel() { return attention_kernel<PlainTile>; }
int64_t plain_shared_bytes(int64_t rows, int64_t width) { return plain_bytes(rows, width); }

}  // namespace attention

namespace {

using attention::Args;
using attention::Choice;
using attention::kHeaderBytes;
using Params = dspark_verify_attention_params;

bool multiple(int64_t value, int64_t of) { return value % of == 0; }
bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

dspark_status too_large(const Params& p, const prim::DeviceLimits& device) {
  return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                       "dspark_verify_attention:\n  head_dim: got %d; %d bytes of shared memory "
                       "hold no row of that length, use DSPARK_CPU",
                       p.head_dim, device.shared_bytes_per_block);
}

// What a test wants of the clusters' mode: docs/testing.md lists the name.
int64_t asked_for_clusters() {
  const char* text = std::getenv("DSPARK_VERIFY_ATTENTION_CLUSTER");
  return text == nullptr || *text == 0 ? -1 : std::strtol(text, nullptr, 10);
}

dspark_status start(const Choice& choice, const Args& args, void* stream) {
  prim::LaunchConfig launch;
  launch.grid = dim3(static_cast<unsigned>(args.config.grid));
  launch.block = dim3(static_cast<unsigned>(args.config.threads));
  launch.shared_bytes = args.config.shared_bytes;
  launch.stream = stream;
  launch.cooperative = args.config.cooperative;
  launch.cluster = static_cast<unsigned>(args.config.cluster);
  launch.programmatic = args.config.cluster > 0;
  return prim::launch("verify_attention", choice.kernel, launch, args);
}

// The same launch in clusters of `size`.
dspark_status start_clusters(const Choice& choice, const Args& args, int32_t size, void* stream) {
  Args call = args;
  call.config.cluster = size;
  call.config.row_blocks = static_cast<int32_t>(attention::row_blocks(call.config, args.p));
  call.config.grid = size * call.config.row_blocks * args.p.num_requests * args.p.num_kv_heads;
  call.config.cooperative = false;
  return start(choice, call, stream);
}

}  // namespace

dspark_status verify_attention_workspace(const Params& p, size_t* bytes) {
  prim::DeviceLimits device;
  dspark_status status = prim::device_limits(&device);
  if (status.code != DSPARK_OK) return status;
  // Which kernel runs depends on the alignment of arrays as well: room for each.
  *bytes = 0;
  Choice choice;
  const auto make_room = [&] {
    const size_t room = carve(choice.config, nullptr).bytes;
    if (room > *bytes) *bytes = room;
  };
  if (choose_wgmma(choice, p, device, kHeaderBytes, &status)) make_room();
  if (status.code != DSPARK_OK) return status;
  if (choose_mma(choice, p, device, kHeaderBytes, &status)) make_room();
  if (status.code != DSPARK_OK) return status;
  if (!choose_plain(choice, p, device, kHeaderBytes, &status)) return too_large(p, device);
  make_room();
  return status;
}

dspark_status verify_attention(const Params& p, void* scratch, void* stream) {
  if (p.num_requests == 0) return ok_status();
  const int64_t rows = static_cast<int64_t>(p.num_tokens) * (p.num_q_heads / p.num_kv_heads);
  if (rows > INT32_MAX) {
    return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                         "dspark_verify_attention:\n  num_tokens: got %d with %d query heads of a "
                         "KV head; the CUDA backend counts up to 2^31 - 1 rows",
                         p.num_tokens, p.num_q_heads / p.num_kv_heads);
  }
  prim::DeviceLimits device;
  dspark_status status = prim::device_limits(&device);
  if (status.code != DSPARK_OK) return status;
  Choice choice;
  Args args{p, {}, {}, {}, {}};
  const bool pieces = aligned(p.k_cache) && aligned(p.v_cache);
  const bool bulk = pieces && describe_caches(args, device);
  const bool wgmma = bulk && choose_wgmma(choice, p, device, kHeaderBytes, &status);
  if (status.code != DSPARK_OK) return status;
  const bool mma = wgmma || (pieces && choose_mma(choice, p, device, kHeaderBytes, &status));
  if (status.code != DSPARK_OK) return status;
  if (!mma && !choose_plain(choice, p, device, kHeaderBytes, &status)) return too_large(p, device);
  if (status.code != DSPARK_OK) return status;
  args.config = choice.config;
  args.config.bulk = mma && bulk;
  args.work = carve(choice.config, scratch);
  args.config.vectors =
      aligned(p.out) && multiple(p.head_dim, 4) &&
      (!mma || (aligned(p.q) && multiple(p.q_token_stride, 8) && multiple(p.q_head_stride, 8)));
  const int32_t cluster = cluster_size(choice, p, device, asked_for_clusters());
  if (cluster > 0) {
    status = start_clusters(choice, args, cluster, stream);
    if (status.code != DSPARK_UNSUPPORTED) return status;  // a part of a device may hold no cluster
  }
  if (args.config.cooperative) {
    status = start(choice, args, stream);
    if (status.code != DSPARK_UNSUPPORTED) return status;
    args.config.cooperative = false;  // no room for all CTAs at once: nothing has started
  }
  status = prim::fill_zero_async(args.work.arrived, sizeof(uint32_t) * args.config.grid, stream);
  return status.code == DSPARK_OK ? start(choice, args, stream) : status;
}

}  // namespace dspark::cuda
