// SPDX-License-Identifier: Apache-2.0
//
// Sizes of a tile of tile_wgmma.cuh, which host and kernel share.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_WGMMA_SIZES_H_
#define DSPARK_CUDA_VERIFY_ATTENTION_WGMMA_SIZES_H_

#include "cuda/prim/bulk.h"
#include "cuda/verify_attention/kernels.h"

namespace dspark::cuda::attention {

constexpr int kWgmmaThreads = 256;             // two warpgroups
constexpr int kWgmmaRows = kWgmmaThreads / 2;  // 64 of a warpgroup
constexpr int kWgmmaKeys = 64;                 // of a block
constexpr int kWgmmaColumns = 64;              // elements of a swizzled row
constexpr int kWgmmaColumnBytes = 64 * prim::kBoxRowBytes;
constexpr int kWgmmaMinStages = 4;
constexpr int kWgmmaMaxStages = 12;
constexpr int kWgmmaLazyStages = 8;  // from here on slots wait a block longer to be filled again

template <int kDim>
struct WgmmaSizes {
  static constexpr int kColumns = kDim / kWgmmaColumns;
  static constexpr int kSlotBytes = kColumns * kWgmmaColumnBytes;
  static constexpr int kQueryBytes = 2 * kSlotBytes;  // [warpgroup][column][row]
  static constexpr int kValuePitch = kDim + 8;        // floats of a row of the part
  // Behind the queries: keys that each row sees, what all know of the tile, mbarriers. Then the
  // ring: nothing lies at a place that only the host knows.
  static constexpr int kBarriersAt = kQueryBytes + kWgmmaRows * 8 + 32;
  static constexpr int kRingAt = (kBarriersAt + 2 * 8 * kWgmmaMaxStages + prim::kBoxAlignment - 1) /
                                 prim::kBoxAlignment * prim::kBoxAlignment;
  // The part takes the ring's place: values, then (maximum, sum).
  static constexpr int kPartBytes = kWgmmaRows * (kValuePitch * 4 + 8);
};

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_WGMMA_SIZES_H_
