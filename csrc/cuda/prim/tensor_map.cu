// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps are encoded by the driver. Its entry point is looked up at run time: the library
// never links libcuda, so that it loads on machines without a driver.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "core/problems.h"
#include "cuda/prim/bulk.h"

namespace dspark::prim {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
static_assert(alignof(TensorMap) >= 64);

CUtensorMapDataType driver_type(TensorType type) {
  switch (type) {
    case TensorType::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case TensorType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case TensorType::kI8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;  // the engine moves bits: there is no signed byte
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

}  // namespace

dspark_status make_tensor_map_2d(TensorMap* map, TensorType type, const void* data, uint64_t rows,
                                 uint64_t columns, uint64_t row_bytes, uint32_t box_rows) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return failed_status(DSPARK_CUDA_ERROR, __FILE__, __LINE__,
                         "the driver has no cuTensorMapEncodeTiled (%s)",
                         cudaGetErrorString(error));
  }
  const cuuint64_t sizes[2] = {columns, rows};
  const cuuint64_t strides[1] = {row_bytes};
  const cuuint32_t element_bytes = type == TensorType::kI8 ? 1 : 2;
  const cuuint32_t box[2] = {kBoxRowBytes / element_bytes, box_rows};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap encoded;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  const CUresult result =
      encode(&encoded, driver_type(type), 2, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                         "no tensor map for %llu x %llu elements, rows %llu bytes apart",
                         static_cast<unsigned long long>(rows),
                         static_cast<unsigned long long>(columns),
                         static_cast<unsigned long long>(row_bytes));
  }
  std::memcpy(map, &encoded, sizeof encoded);
  return ok_status();
}

}  // namespace dspark::prim
