// SPDX-License-Identifier: Apache-2.0
//
// The kernels, those of tile_mma.cuh compiled one head size a file, and what the host must know of
// them.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_KERNELS_H_
#define DSPARK_CUDA_VERIFY_ATTENTION_KERNELS_H_

#include "cuda/verify_attention/args.h"

namespace dspark::cuda::attention {

using Kernel = void (*)(Args);

/// A kernel, and the sizes of its tiles.
struct MmaKernel {
  Kernel kernel;
  int32_t group_rows;                                       // rows of a row group
  int32_t (*ring_bytes)(int32_t groups, int32_t stages);    // of a key group
  int32_t (*shared_bytes)(int32_t groups, int32_t stages);  // without the header
};

MmaKernel mma_kernel_64(int32_t cache_dtype);
MmaKernel mma_kernel_128(int32_t cache_dtype);
MmaKernel mma_kernel_256(int32_t cache_dtype);

/// The kernel of a head size and cache type; `kernel` is NULL if there is none.
inline MmaKernel mma_kernel(int32_t head_dim, int32_t cache_dtype) {
  if (head_dim == 64) return mma_kernel_64(cache_dtype);
  if (head_dim == 128) return mma_kernel_128(cache_dtype);
  if (head_dim == 256) return mma_kernel_256(cache_dtype);
  return {nullptr, 0, nullptr, nullptr};
}

/// The same for tile_wgmma.cuh.
struct WgmmaKernel {
  Kernel kernel;
  int32_t least_rows;  // of a KV head, which tile_mma.cuh goes over the cache once for
  int32_t slot_bytes;  // of the ring
  int32_t part_bytes;  // that the ring has room for at the end
  int32_t rest_bytes;  // of shared memory besides, without the header
};

/// The kernel of a head size and cache type; `kernel` is NULL if there is none.
WgmmaKernel wgmma_kernel(int32_t head_dim, int32_t cache_dtype);

// tile_plain.cuh, compiled in launch.cu.
constexpr int64_t kMaxPlainRows = 16;
Kernel plain_kernel();
int64_t plain_shared_bytes(int64_t rows, int64_t width);

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_KERNELS_H_
