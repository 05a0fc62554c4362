// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_KERNEL_MMA_CUH_
#define DSPARK_CUDA_VERIFY_ATTENTION_KERNEL_MMA_CUH_

#include "cuda/verify_attention/kernel.cuh"
#include "cuda/verify_attention/kernels.h"
#include "cuda/verify_attention/tile_mma.cuh"

namespace dspark::cuda::attention {

template <class Element, int kDim>
MmaKernel mma_kernel_of() {
  using Sizes = MmaSizes<Element::kBytes, kDim>;
  return {attention_kernel<MmaTile<Element, kDim>>, Sizes::kGroupRows, mma_ring_bytes<Sizes>,
          mma_bytes<Sizes>};
}

template <int kDim>
MmaKernel mma_kernel_by_type(int32_t cache_dtype) {
  if (cache_dtype == DSPARK_F8_E4M3) return mma_kernel_of<OneByte, kDim>();
  if (cache_dtype == DSPARK_F32) return {nullptr, 0, nullptr, nullptr};
  return mma_kernel_of<TwoBytes, kDim>();
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_KERNEL_MMA_CUH_
