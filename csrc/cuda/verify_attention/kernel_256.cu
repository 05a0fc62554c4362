// SPDX-License-Identifier: Apache-2.0
#include "cuda/verify_attention/kernel_mma.cuh"

namespace dspark::cuda::attention {

MmaKernel mma_kernel_256(int32_t cache_dtype) { return mma_kernel_by_type<256>(cache_dtype); }

}  // namespace dspark::cuda::attention
