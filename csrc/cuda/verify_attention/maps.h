// SPDX-License-Identifier: Apache-2.0
//
// The caches as the copy engine sees them: four dimensions (elements of a row, rows of a page,
// heads, pages), each with a stride of its own, so that heads may lie before or behind rows. A box
// is 16 rows of one page and head by 128 bytes, or 64 where a row has no more; boxes side by side
// and one behind the other make tiles of any size.
#ifndef DSPARK_CUDA_VERIFY_ATTENTION_MAPS_H_
#define DSPARK_CUDA_VERIFY_ATTENTION_MAPS_H_

#include <cstdlib>

#include "core/dtype.h"
#include "cuda/prim/launch.h"
#include "cuda/verify_attention/args.h"

namespace dspark::cuda::attention {

/// For tests, DSPARK_VERIFY_ATTENTION_BULK=0 in the environment leaves the copy engine out
/// (docs/testing.md).
inline bool bulk_allowed() {
  const char* text = std::getenv("DSPARK_VERIFY_ATTENTION_BULK");
  return text == nullptr || *text != '0';
}

inline dspark_status describe_one(prim::TensorMap* map, const Params& p, const void* cache) {
  using prim::TensorType;
  const uint64_t bytes = static_cast<uint64_t>(dtype_bytes(p.cache_dtype));
  const auto type = p.cache_dtype == DSPARK_F8_E4M3 ? TensorType::kI8
                    : p.cache_dtype == DSPARK_F16   ? TensorType::kF16
                                                    : TensorType::kBf16;
  // The stride of a single head or page means nothing, and the driver looks at it all the same.
  const auto stride = [&](int32_t count, int64_t elements) {
    return count > 1 ? static_cast<uint64_t>(elements) * bytes : 16;
  };
  return prim::make_tensor_map_4d(
      map, type, cache,
      {static_cast<uint64_t>(p.head_dim), static_cast<uint64_t>(p.page_size),
       static_cast<uint64_t>(p.num_kv_heads), static_cast<uint64_t>(p.num_pages)},
      {stride(p.page_size, p.row_stride), stride(p.num_kv_heads, p.head_stride),
       stride(p.num_pages, p.page_stride)},
      kBoxRows);
}

/// Whether the copy engine can read the caches, which args.keys and args.values then describe.
inline bool describe_caches(Args& args, const prim::DeviceLimits& device) {
  const Params& p = args.p;
  const int64_t row_bytes = int64_t{p.head_dim} * dtype_bytes(p.cache_dtype);
  if (device.major < 9 || !bulk_allowed() || p.page_size % kBoxRows != 0 || p.num_pages == 0 ||
      (row_bytes != prim::kNarrowBoxRowBytes && row_bytes % prim::kBoxRowBytes != 0)) {
    return false;
  }
  return describe_one(&args.keys, p, p.k_cache).code == DSPARK_OK &&
         describe_one(&args.values, p, p.v_cache).code == DSPARK_OK;
}

}  // namespace dspark::cuda::attention

#endif  // DSPARK_CUDA_VERIFY_ATTENTION_MAPS_H_
