// SPDX-License-Identifier: Apache-2.0
#include "cuda/markov_loop/kernel.cuh"
#include "cuda/markov_loop/kernel_wgmma.h"
#include "cuda/markov_loop/tile_wgmma.cuh"

namespace dspark::cuda::markov {

Kernel wgmma_kernel(const Config& c, int32_t w2_dtype) {
  const bool bf16 = w2_dtype == DSPARK_BF16;
  if (c.group == 64) {
    return bf16 ? markov_loop_kernel<WgmmaSource<DSPARK_BF16, true>>
                : markov_loop_kernel<WgmmaSource<DSPARK_F16, true>>;
  }
  return bf16 ? markov_loop_kernel<WgmmaSource<DSPARK_BF16, false>>
              : markov_loop_kernel<WgmmaSource<DSPARK_F16, false>>;
}

dspark_status describe_w2(Args& args) {
  const Params& p = args.p;
  const auto type = p.w2_dtype == DSPARK_BF16 ? prim::TensorType::kBf16 : prim::TensorType::kF16;
  return prim::make_tensor_map_2d(
      &args.w2_map, type, p.w2, static_cast<uint64_t>(p.draft_vocab_size),
      static_cast<uint64_t>(p.rank), static_cast<uint64_t>(p.w2_stride) * 2, kSegment);
}

}  // namespace dspark::cuda::markov
