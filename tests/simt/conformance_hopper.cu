// SPDX-License-Identifier: Apache-2.0
//
// Hopper's primitives: wgmma of every shape, tensor and bulk copies on mbarriers, clusters.
#include <type_traits>

#include "cuda/prim/bulk.h"
#include "cuda/prim/cluster.h"
#include "cuda/prim/dependency.h"
#include "cuda/prim/mbarrier.h"
#include "cuda/prim/wgmma.h"
#include "simt/conformance.h"

namespace dspark::conformance {
namespace {

constexpr int kWords = 32;  // of a row of 128 bytes

/// Rows of 128 bytes to shared memory, swizzled as wgmma reads them.
__device__ void store_swizzled(const uint32_t* in, unsigned char* tile, int rows) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * kWords; i += blockDim.x) {
    const int row = i / kWords, offset = i % kWords * 4;
    *reinterpret_cast<uint32_t*>(tile + row * 128 + (offset ^ (row & 7) << 4)) = in[i];
  }
}

// ---- wgmma. in: A [64], B [N] rows of 128 bytes; out: 2 A B^T, the first product not added to d

enum Type { kBf16, kF16, kS8 };

template <Type kType, int N>
__global__ void __launch_bounds__(128) product(const uint32_t* in, uint32_t* out) {
  DSPARK_DYNAMIC_SHARED(memory);
  store_swizzled(in, memory, 64);
  store_swizzled(in + 64 * kWords, memory + 64 * 128, N);
  prim::fence_proxy_async();
  __syncthreads();
  using T = std::conditional_t<kType == kS8, int32_t, float>;
  T d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = static_cast<T>(1000);
  const uint64_t a = prim::wgmma_descriptor(memory);
  const uint64_t b = prim::wgmma_descriptor(memory + 64 * 128);
  prim::wgmma_fence();
  for (uint32_t k = 0; k < 8; ++k) {
    const uint64_t ak = prim::wgmma_advance(a, k % 4 * 32), bk = prim::wgmma_advance(b, k % 4 * 32);
    if constexpr (kType == kBf16) prim::wgmma_bf16<N>(d, ak, bk, k > 0);
    if constexpr (kType == kF16) prim::wgmma_f16<N>(d, ak, bk, k > 0);
    if constexpr (kType == kS8) prim::wgmma_s8<N>(d, ak, bk, k > 0);
  }
  prim::wgmma_commit();
  prim::wgmma_wait<0>();
  prim::wgmma_hold(d);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    reinterpret_cast<T*>(out)[row * N + column] = d[i];
  }
}

template <Type kType, int N>
dspark_status run_product(const uint32_t* in, uint32_t* out, void* stream) {
  prim::LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(128);
  config.shared_bytes = (64 + N) * 128;
  config.stream = stream;
  return prim::launch("wgmma", &product<kType, N>, config, in, out);
}

template <Type kType, int N>
struct ProductCase : Case {
  explicit ProductCase(const char* name)
      : Case(name, 90, (64 + N) * 128, 64 * N * 4, &run_product<kType, N>) {}
};
const ProductCase<kBf16, 8> kBf16x8("wgmma_bf16_8");
const ProductCase<kBf16, 16> kBf16x16("wgmma_bf16_16");
const ProductCase<kBf16, 32> kBf16x32("wgmma_bf16_32");
const ProductCase<kBf16, 64> kBf16x64("wgmma_bf16_64");
const ProductCase<kBf16, 128> kBf16x128("wgmma_bf16_128");
const ProductCase<kF16, 8> kF16x8("wgmma_f16_8");
const ProductCase<kF16, 16> kF16x16("wgmma_f16_16");
const ProductCase<kF16, 32> kF16x32("wgmma_f16_32");
const ProductCase<kF16, 64> kF16x64("wgmma_f16_64");
const ProductCase<kF16, 128> kF16x128("wgmma_f16_128");
const ProductCase<kS8, 8> kS8x8("wgmma_s8_8");
const ProductCase<kS8, 16> kS8x16("wgmma_s8_16");
const ProductCase<kS8, 32> kS8x32("wgmma_s8_32");
const ProductCase<kS8, 64> kS8x64("wgmma_s8_64");
const ProductCase<kS8, 128> kS8x128("wgmma_s8_128");

// ---- wgmma with A in registers. in: A [64, 64], B [64, N] in tiles of 64 columns, all in rows of
// 128 bytes; out: 2 A B, the first product not added to d

template <Type kType, int N>
__global__ void __launch_bounds__(128) product_registers(const uint32_t* in, uint32_t* out) {
  DSPARK_DYNAMIC_SHARED(memory);
  store_swizzled(in + 64 * kWords, memory, N);
  prim::fence_proxy_async();
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  uint32_t a[4][4];
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + i % 2 * 8;
      a[k][i] = in[row * kWords + k * 8 + i / 2 * 4 + lane % 4];
    }
  }
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = 1000.0f;
  const uint64_t b = prim::wgmma_descriptor_mn(memory, 64 * 128);
  prim::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < 8; ++k) {
    const uint64_t bk = prim::wgmma_advance(b, k % 4 * 2048);
    if constexpr (kType == kBf16) prim::wgmma_bf16<N>(d, a[k % 4], bk, k > 0);
    if constexpr (kType == kF16) prim::wgmma_f16<N>(d, a[k % 4], bk, k > 0);
  }
  prim::wgmma_commit();
  prim::wgmma_wait<0>();
  prim::wgmma_hold(d);
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    reinterpret_cast<float*>(out)[row * N + column] = d[i];
  }
}

template <Type kType, int N>
dspark_status run_product_registers(const uint32_t* in, uint32_t* out, void* stream) {
  prim::LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(128);
  config.shared_bytes = N * 128;
  config.stream = stream;
  return prim::launch("wgmma", &product_registers<kType, N>, config, in, out);
}

template <Type kType, int N>
struct RegistersCase : Case {
  explicit RegistersCase(const char* name)
      : Case(name, 90, (64 + N) * 128, 64 * N * 4, &run_product_registers<kType, N>) {}
};
const RegistersCase<kBf16, 64> kRegistersBf16x64("wgmma_registers_bf16_64");
const RegistersCase<kBf16, 128> kRegistersBf16x128("wgmma_registers_bf16_128");
const RegistersCase<kBf16, 256> kRegistersBf16x256("wgmma_registers_bf16_256");
const RegistersCase<kF16, 64> kRegistersF16x64("wgmma_registers_f16_64");
const RegistersCase<kF16, 128> kRegistersF16x128("wgmma_registers_f16_128");
const RegistersCase<kF16, 256> kRegistersF16x256("wgmma_registers_f16_256");

// ---- tensor copies. in: a matrix of 50 rows, 160 bytes apart, 144 of them described. out: the raw
// shared memory of four boxes of 32 rows, the last of them beyond two edges of the matrix

constexpr int kBoxRows = 32, kBoxes = 4, kMatrixRows = 50, kPitch = 160, kWidth = 144;

__global__ void boxes(const __grid_constant__ prim::TensorMap map, int columns, uint32_t* out) {
  DSPARK_DYNAMIC_SHARED(memory);
  __shared__ uint64_t barrier[2];
  if (threadIdx.x == 0) {
    prim::prefetch_tensor_map(map);
    prim::mbarrier_init(&barrier[0], 1);
    prim::mbarrier_init(&barrier[1], 1);
    prim::mbarrier_init_fence();
    for (int i = 0; i < kBoxes; ++i) {  // two phases of one barrier, a phase of the other for each
      uint64_t* full = &barrier[i % 2];
      if (i >= 2) prim::mbarrier_wait(full, 0);
      prim::mbarrier_expect(full, kBoxRows * 128);
      prim::tensor_load_2d(memory + i * kBoxRows * 128, map, full, i % 2 * columns,
                           i / 2 * kBoxRows, static_cast<prim::CacheHint>(i % 3));
    }
  }
  __syncthreads();
  prim::mbarrier_wait(&barrier[0], 1);
  prim::mbarrier_wait(&barrier[1], 1);
  for (unsigned i = threadIdx.x; i < kBoxes * kBoxRows * kWords; i += blockDim.x) {
    out[i] = reinterpret_cast<const uint32_t*>(memory)[i];
  }
}

template <prim::TensorType kType>
dspark_status run_boxes(const uint32_t* in, uint32_t* out, void* stream) {
  const int element_bytes = kType == prim::TensorType::kI8 ? 1 : 2;
  prim::TensorMap map;
  const dspark_status made =
      prim::make_tensor_map_2d(&map, kType, in, kMatrixRows,
                               static_cast<uint64_t>(kWidth / element_bytes), kPitch, kBoxRows);
  if (made.code != DSPARK_OK) return made;
  prim::LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(64);
  config.shared_bytes = kBoxes * kBoxRows * 128;
  config.stream = stream;
  return prim::launch("boxes", &boxes, config, map, 128 / element_bytes, out);
}
constexpr size_t kBoxesOut = kBoxes * kBoxRows * 128;
const Case kBoxesBf16("boxes_bf16", 90, kMatrixRows* kPitch, kBoxesOut,
                      &run_boxes<prim::TensorType::kBf16>);
const Case kBoxesF16("boxes_f16", 90, kMatrixRows* kPitch, kBoxesOut,
                     &run_boxes<prim::TensorType::kF16>);
const Case kBoxesI8("boxes_i8", 90, kMatrixRows* kPitch, kBoxesOut,
                    &run_boxes<prim::TensorType::kI8>);

// ---- tensor copies of four dimensions. in: 3 pages of 2 heads of 24 rows, rows further apart than
// heads and pages not a multiple of rows apart. out: the raw shared memory of 3 boxes of 16 rows,
// each with all columns: inside, beyond the rows, beyond the heads

constexpr int kPages = 3, kHeads = 2, kPageRows = 24, kCorners = 3;

template <uint32_t kRowBytes>
__global__ void pages(const __grid_constant__ prim::TensorMap map, int columns, uint32_t* out) {
  constexpr int kBox = 16 * (kRowBytes < 128 ? kRowBytes : 128), kAll = 16 * kRowBytes;
  DSPARK_DYNAMIC_SHARED(memory);
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    prim::mbarrier_init(&barrier, 1);
    prim::mbarrier_init_fence();
    prim::mbarrier_expect(&barrier, kCorners * kAll);
    for (int i = 0; i < kCorners; ++i) {
      for (int x = 0; x < kAll / kBox; ++x) {
        prim::tensor_load_4d(memory + i * kAll + x * kBox, map, &barrier, x * columns, i * 12, i,
                             2 - i, prim::CacheHint::kEvictFirst);
      }
    }
  }
  __syncthreads();
  prim::mbarrier_wait(&barrier, 0);
  for (unsigned i = threadIdx.x; i < kCorners * kAll / 4; i += blockDim.x) {
    out[i] = reinterpret_cast<const uint32_t*>(memory)[i];
  }
}

template <prim::TensorType kType, uint32_t kRowBytes>
dspark_status run_pages(const uint32_t* in, uint32_t* out, void* stream) {
  constexpr uint32_t kElement = prim::tensor_element_bytes(kType);
  prim::TensorMap map;
  const dspark_status made = prim::make_tensor_map_4d(
      &map, kType, in, {kRowBytes / kElement, kPageRows, kHeads, kPages},
      {kHeads * kRowBytes, kRowBytes, kPageRows * kHeads * kRowBytes + 16}, 16);
  if (made.code != DSPARK_OK) return made;
  prim::LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(64);
  config.shared_bytes = kCorners * 16 * kRowBytes;
  config.stream = stream;
  return prim::launch("pages", &pages<kRowBytes>, config, map, static_cast<int>(128 / kElement),
                      out);
}

template <prim::TensorType kType, uint32_t kRowBytes>
struct PagesCase : Case {
  explicit PagesCase(const char* name)
      : Case(name, 90, kPages * (kPageRows * kHeads * kRowBytes + 16), kCorners * 16 * kRowBytes,
             &run_pages<kType, kRowBytes>) {}
};
const PagesCase<prim::TensorType::kBf16, 256> kPagesBf16("pages_bf16_256");
const PagesCase<prim::TensorType::kF16, 128> kPagesF16("pages_f16_128");
const PagesCase<prim::TensorType::kI8, 64> kPagesI8("pages_i8_64");

// ---- bulk copies through a ring of two stages, a warp that copies and one that reads

__global__ void bulk_ring(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t stage[2][64];
  __shared__ uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      prim::mbarrier_init(&full[s], 1);
      prim::mbarrier_init(&empty[s], 32);
    }
    prim::mbarrier_init_fence();
  }
  __syncthreads();
  prim::grid_dependency_wait();
  prim::grid_dependency_launch();
  for (int i = 0; i < 8; ++i) {
    const int s = i % 2;
    const uint32_t phase = static_cast<uint32_t>(i / 2) & 1;
    if (threadIdx.x == 32) {
      prim::bulk_prefetch_l2(in + 64 * i, 256);
      prim::mbarrier_wait(&empty[s], phase ^ 1);
      prim::mbarrier_expect(&full[s], 256);
      prim::bulk_load(stage[s], in + 64 * i, 256, &full[s], prim::CacheHint::kEvictFirst);
    } else if (threadIdx.x < 32) {
      prim::mbarrier_wait(&full[s], phase);
      for (unsigned j = threadIdx.x; j < 64; j += 32) out[64 * i + j] = stage[s][63 - j];
      prim::mbarrier_arrive(&empty[s]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) prim::mbarrier_invalidate(&full[0]);
}
const Case kBulkRing(
    "bulk_ring", 90, 2048, 2048, +[](const uint32_t* in, uint32_t* out, void* stream) {
      prim::LaunchConfig config;
      config.grid = dim3(1);
      config.block = dim3(64);
      config.stream = stream;
      return prim::launch("bulk_ring", &bulk_ring, config, in, out);
    });

// ---- clusters of four: each block gives its 64 words to the next rank, adds to the one before

__global__ void neighbours(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t mine[64], total;
  const uint32_t rank = prim::cluster_rank(), size = prim::cluster_size();
  mine[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  if (threadIdx.x == 0) total = 0;
  prim::cluster_arrive();
  prim::cluster_wait();
  const uint32_t word = prim::map_shared(mine, (rank + 1) % size)[63 - threadIdx.x];
  atomicAdd(prim::map_shared(&total, (rank + size - 1) % size), word);
  prim::cluster_arrive();
  prim::cluster_wait();
  uint32_t* o = out + blockIdx.x * 68;
  o[threadIdx.x] = word;
  if (threadIdx.x == 0) o[64] = total;
  if (threadIdx.x == 1) o[65] = rank;
  if (threadIdx.x == 2) o[66] = size;
}
const Case kNeighbours(
    "neighbours", 90, 8 * 64 * 4, 8 * 68 * 4, +[](const uint32_t* in, uint32_t* out, void* stream) {
      prim::LaunchConfig config;
      config.grid = dim3(8);
      config.block = dim3(64);
      config.cluster = 4;
      config.stream = stream;
      return prim::launch("neighbours", &neighbours, config, in, out);
    });

}  // namespace
}  // namespace dspark::conformance
