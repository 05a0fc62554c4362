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

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                             12000, cudaEnableDefault, &found);
  if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) {
    return reinterpret_cast<Encode>(entry);
  }
  cudaGetLastError();
  return nullptr;
}

/// `sizes` (elements, innermost first) and `strides` (bytes, of the second dimension on) of `rank`
/// dimensions; a box is `box_rows` of the second by one each of the others.
dspark_status encode_map(TensorMap* map, TensorType type, const void* data, uint32_t rank,
                         const uint64_t* sizes, const uint64_t* strides, uint32_t box_rows) {
  static const Encode encode = find_encode();  // the driver stays the same one
  if (encode == nullptr) {
    return failed_status(DSPARK_CUDA_ERROR, __FILE__, __LINE__,
                         "the driver has no cuTensorMapEncodeTiled");
  }
  const cuuint32_t element_bytes = tensor_element_bytes(type);
  const uint64_t row_bytes = sizes[0] * element_bytes;
  const bool narrow = rank > 2 && row_bytes == kNarrowBoxRowBytes;
  const cuuint32_t box_row_bytes = narrow ? kNarrowBoxRowBytes : kBoxRowBytes;
  const cuuint32_t box[4] = {box_row_bytes / element_bytes, box_rows, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  // What is asked for ahead in L2 belongs to the same row.
  const auto promotion = rank > 2 && row_bytes % 256 != 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                          : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  CUtensorMap encoded;
  const CUresult result = encode(&encoded, driver_type(type), rank, const_cast<void*>(data), sizes,
                                 strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                                 promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                         "no tensor map of %u dimensions for %llu x %llu elements, rows %llu bytes "
                         "apart",
                         rank, static_cast<unsigned long long>(sizes[1]),
                         static_cast<unsigned long long>(sizes[0]),
                         static_cast<unsigned long long>(strides[0]));
  }
  std::memcpy(map, &encoded, sizeof encoded);
  return ok_status();
}

}  // namespace

dspark_status make_tensor_map_2d(TensorMap* map, TensorType type, const void* data, uint64_t rows,
                                 uint64_t columns, uint64_t row_bytes, uint32_t box_rows) {
  const uint64_t sizes[2] = {columns, rows};
  return encode_map(map, type, data, 2, sizes, &row_bytes, box_rows);
}

dspark_status make_tensor_map_4d(TensorMap* map, TensorType type, const void* data,
                                 const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                                 uint32_t box_rows) {
  return encode_map(map, type, data, 4, sizes, strides, box_rows);
}

}  // namespace dspark::prim
