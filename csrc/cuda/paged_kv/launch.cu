// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/families.h"
#include "cuda/paged_kv/kernel.cuh"
#include "cuda/prim/launch.h"

namespace dspark::cuda {
namespace {

using paged::Args;
using Params = dspark_paged_kv_params;

// Enough blocks to fill a large device several times.
constexpr int32_t kBlocks = 1024;

bool multiple(int64_t value, int64_t of) { return value % of == 0; }
bool aligned(const void* pointer, int64_t to) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(to) == 0;
}

// Elements that can be moved as 16 bytes of k and v everywhere (a cache in FP8 takes 4 or 8 bytes
// of them), 1 if that cannot be.
int32_t choose_piece(const Params& p, int32_t turning) {
  if (p.dtype != p.cache_dtype && p.cache_dtype != DSPARK_F8_E4M3) return 1;
  const int32_t n = p.dtype == DSPARK_F32 ? 4 : 8;
  const int64_t bytes = n * dtype_bytes(p.cache_dtype);
  const bool rotates = p.rope_theta > 0.0;
  const int32_t whole = p.rope_interleaved != 0 ? n : 2 * n;  // of what turns
  const bool fits = multiple(p.head_dim, n) && (!rotates || multiple(turning, whole)) &&
                    multiple(p.k_token_stride, n) && multiple(p.k_head_stride, n) &&
                    multiple(p.v_token_stride, n) && multiple(p.v_head_stride, n) &&
                    multiple(p.page_stride, n) && multiple(p.row_stride, n) &&
                    multiple(p.head_stride, n) && aligned(p.k, 16) && aligned(p.v, 16) &&
                    aligned(p.k_cache, bytes) && aligned(p.v_cache, bytes);
  return fits ? n : 1;
}

dspark_status start(const Args& args, void* stream) {
  prim::LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(args.p.num_requests) * args.slices);
  config.block = dim3(paged::kThreads);
  config.shared_bytes = args.p.rope_theta > 0.0 ? sizeof(float) * args.turning : 0;
  config.stream = stream;
  const char* name = "paged_kv";
  if (args.piece == 8) return prim::launch(name, paged::append_kernel<8>, config, args);
  if (args.piece == 4) return prim::launch(name, paged::append_kernel<4>, config, args);
  return prim::launch(name, paged::append_kernel<1>, config, args);
}

}  // namespace

dspark_status paged_kv_workspace(const Params&, size_t* bytes) {
  *bytes = 0;
  return ok_status();
}

dspark_status paged_kv(const Params& p, void*, void* stream) {
  if (p.num_requests == 0) return ok_status();
  const int32_t turning = p.rope_dim > 0 ? p.rope_dim : p.head_dim;
  const int32_t half = turning / 2;
  const bool own = p.rope_theta > 0.0 && p.rope_inv_freq == nullptr;
  if (own && half > paged::kMaxFrequencies) {
    return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                         "dspark_paged_kv:\n  rope_inv_freq: got NULL with %d elements that turn, "
                         "expected frequencies on the device beyond %d of them",
                         turning, 2 * paged::kMaxFrequencies);
  }
  Args args{};
  args.p = p;
  args.turning = turning;
  args.amplitude = p.rope_amplitude > 0.0 ? p.rope_amplitude : 1.0;
  args.piece = choose_piece(p, turning);
  const int32_t wanted = (kBlocks + p.num_requests - 1) / p.num_requests;
  args.slices = p.num_tokens < wanted ? (p.num_tokens > 0 ? p.num_tokens : 1) : wanted;
  for (int32_t i = 0; own && i < half; ++i) {
    args.inv_freq[i] = std::pow(p.rope_theta, -2.0 * i / turning);
  }
  return start(args, stream);
}

dspark_status paged_kv_commit(const dspark_paged_kv_commit_params& p, void* stream) {
  if (p.num_requests == 0) return ok_status();
  prim::LaunchConfig config;
  config.grid = dim3((p.num_requests + paged::kThreads - 1) / paged::kThreads);
  config.block = dim3(paged::kThreads);
  config.stream = stream;
  return prim::launch("paged_kv_commit", paged::commit_kernel, config, p);
}

}  // namespace dspark::cuda
