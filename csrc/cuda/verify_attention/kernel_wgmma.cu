// SPDX-License-Identifier: Apache-2.0
#include "cuda/verify_attention/kernel.cuh"
#include "cuda/verify_attention/tile_wgmma.cuh"

namespace dspark::cuda::attention {

template <int kDim>
constexpr bool kCompiled<WgmmaTile<kDim>> = DSPARK_HAS_WGMMA != 0;

namespace {

template <int kDim>
WgmmaKernel kernel_by_type(int32_t cache_dtype) {
  using Sizes = WgmmaSizes<kDim>;
  WgmmaKernel k{nullptr, kDim == 256 ? 32 : 64, Sizes::kSlotBytes, Sizes::kPartBytes,
                Sizes::kRingAt};
  const bool serves = cache_dtype == DSPARK_BF16 || cache_dtype == DSPARK_F16;
  if (serves) k.kernel = attention_kernel<WgmmaTile<kDim>>;
  return k;
}

}  // namespace

WgmmaKernel wgmma_kernel(int32_t head_dim, int32_t cache_dtype) {
  if (head_dim == 64) return kernel_by_type<64>(cache_dtype);
  if (head_dim == 128) return kernel_by_type<128>(cache_dtype);
  if (head_dim == 256) return kernel_by_type<256>(cache_dtype);
  return {nullptr, 0, 0, 0, 0};
}

}  // namespace dspark::cuda::attention
