// SPDX-License-Identifier: Apache-2.0
//
// The copy engine.
#include "cuda/prim/bulk.h"

#include <cstring>

#include "core/problems.h"
#include "simt/hopper.h"

namespace dspark {
namespace {

/// What the words of an emulated TensorMap hold. A matrix has two further dimensions of one
/// element.
struct Tensor {
  uint64_t mark;
  const char* data;
  uint64_t sizes[4];    // in the first dimension bytes
  uint64_t strides[3];  // bytes, from the second dimension on
  uint32_t rank;
  uint32_t box_rows, box_row_bytes;
  uint32_t element_bytes;
};
constexpr uint64_t kMark = 0x74656e736f726d70u;
static_assert(sizeof(Tensor) <= sizeof(prim::TensorMap));

bool multiple(const void* p, uintptr_t of) { return reinterpret_cast<uintptr_t>(p) % of == 0; }

}  // namespace

namespace prim {

namespace {

dspark_status describe(TensorMap* map, TensorType type, const void* data, uint32_t rank,
                       const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                       uint32_t box_rows) {
  bool described = data != nullptr && multiple(data, 16) && box_rows >= 1 && box_rows <= 256;
  for (uint64_t size : sizes) described = described && size >= 1 && size <= 1ull << 32;
  for (uint64_t stride : strides) {
    described = described && stride % 16 == 0 && stride < 1ull << 40;
  }
  Tensor t{kMark, static_cast<const char*>(data), {}, {}, rank, box_rows, kBoxRowBytes, 1};
  t.element_bytes = tensor_element_bytes(type);
  memcpy(t.sizes, sizes, sizeof sizes);
  memcpy(t.strides, strides, sizeof strides);
  t.sizes[0] *= t.element_bytes;
  if (rank == 4 && t.sizes[0] == kNarrowBoxRowBytes) t.box_row_bytes = kNarrowBoxRowBytes;
  if (!described || (rank == 2 && strides[0] < t.sizes[0])) {
    return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                         "no tensor map of %u dimensions for %llu x %llu elements, rows %llu bytes "
                         "apart",
                         rank, static_cast<unsigned long long>(sizes[1]),
                         static_cast<unsigned long long>(sizes[0]),
                         static_cast<unsigned long long>(strides[0]));
  }
  *map = TensorMap{};
  memcpy(map->words, &t, sizeof t);
  return ok_status();
}

}  // namespace

dspark_status make_tensor_map_2d(TensorMap* map, TensorType type, const void* data, uint64_t rows,
                                 uint64_t columns, uint64_t row_bytes, uint32_t box_rows) {
  return describe(map, type, data, 2, {columns, rows, 1, 1}, {row_bytes, 0, 0}, box_rows);
}

dspark_status make_tensor_map_4d(TensorMap* map, TensorType type, const void* data,
                                 const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                                 uint32_t box_rows) {
  return describe(map, type, data, 4, sizes, strides, box_rows);
}

}  // namespace prim

namespace simt {
namespace {

/// The destination belongs to the copy engine from now on.
void take(const check::AgentPtr& agent, void* shared, uint32_t bytes, Site site) {
  shared_offset(static_cast<char*>(shared) + bytes - 1);
  proxy_async_access(shared, bytes, "copy over shared memory", site);
  check::pending(agent, shared, bytes, site);
  poison(shared, bytes);
}

/// Row `row` of a box, swizzled by the bits of the address as the engine does it.
void store_box_row(char* box, const Tensor& t, uint32_t row, const char* bytes) {
  const uint32_t mask = t.box_row_bytes / 16 - 1;  // of the 16-byte pieces of a row
  for (uint32_t piece = 0; piece <= mask; ++piece) {
    uint32_t offset = shared_offset(box) + row * t.box_row_bytes + piece * 16;
    offset ^= (offset >> 7 & mask) << 4;
    memcpy(shared_pointer(offset), bytes + piece * 16, 16);
  }
}

/// Whether `index` is one of the dimension.
bool inside(const Tensor& t, int dimension, int64_t index) {
  return index >= 0 && index < static_cast<int64_t>(t.sizes[dimension]);
}

/// The box at `corner`, in the first dimension bytes.
void land_box(char* shared, const Tensor& t, const int64_t (&corner)[4],
              const check::AgentPtr& agent, Site site) {
  const int64_t low = corner[0] < 0 ? -corner[0] : 0;
  const int64_t left = static_cast<int64_t>(t.sizes[0]) - corner[0];
  const int64_t high = left < t.box_row_bytes ? left : t.box_row_bytes;
  const bool there = low < high && inside(t, 2, corner[2]) && inside(t, 3, corner[3]);
  for (uint32_t row = 0; row < t.box_rows; ++row) {
    char bytes[prim::kBoxRowBytes] = {};  // outside of the tensor: zeros
    if (there && inside(t, 1, corner[1] + row)) {
      const char* source = t.data + corner[0] + low;
      source += static_cast<uint64_t>(corner[1] + row) * t.strides[0];
      source += static_cast<uint64_t>(corner[2]) * t.strides[1];
      source += static_cast<uint64_t>(corner[3]) * t.strides[2];
      check::access(agent, source, static_cast<size_t>(high - low), false, site);
      memcpy(bytes + low, source, static_cast<size_t>(high - low));
    }
    store_box_row(shared, t, row, bytes);
  }
}

}  // namespace

void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Site site) {
  if (bytes == 0 || bytes % 16 != 0 || !multiple(shared, 16) || !multiple(global, 16)) {
    fail(site, "bulk_load: %u bytes, both addresses and the size must be multiples of 16", bytes);
  }
  const uint64_t phase = mbarrier_copy_started(barrier, site);
  const check::AgentPtr agent = check::start_agent();
  take(agent, shared, bytes, site);
  const auto land = [=] {
    check::access(agent, global, bytes, false, site);
    memcpy(shared, global, bytes);
    check::access(agent, shared, bytes, true, site);
    mbarrier_copy_landed(barrier, phase, bytes, agent, site);
  };
  start_async(land, "bulk_load", site);
}

void tensor_load(void* shared, const prim::TensorMap& map, uint64_t* barrier, uint32_t rank,
                 const int32_t (&corner)[4], Site site) {
  Tensor t;
  memcpy(&t, map.words, sizeof t);
  if (t.mark != kMark || t.rank != rank) {
    fail(site, "tensor_load_%ud: this is no tensor map of %u dimensions", rank, rank);
  }
  if (!multiple(shared, prim::kBoxAlignment)) {
    fail(site, "tensor_load_%ud: shared offset 0x%x is not a multiple of %d", rank,
         shared_offset(shared), prim::kBoxAlignment);
  }
  const uint32_t bytes = t.box_rows * t.box_row_bytes;
  const uint64_t phase = mbarrier_copy_started(barrier, site);
  const check::AgentPtr agent = check::start_agent();
  take(agent, shared, bytes, site);
  const int64_t x = static_cast<int64_t>(corner[0]) * t.element_bytes;
  const auto land = [=, y = corner[1], z = corner[2], w = corner[3]] {
    land_box(static_cast<char*>(shared), t, {x, y, z, w}, agent, site);
    check::access(agent, shared, bytes, true, site);
    mbarrier_copy_landed(barrier, phase, bytes, agent, site);
  };
  start_async(land, rank == 2 ? "tensor_load_2d" : "tensor_load_4d", site);
}

void bulk_prefetch(const void* global, uint32_t bytes, Site site) {
  if (bytes % 16 != 0 || !multiple(global, 16)) {
    fail(site, "bulk_prefetch_l2: %u bytes, address and size must be multiples of 16", bytes);
  }
}

}  // namespace simt
}  // namespace dspark
