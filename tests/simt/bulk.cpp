// SPDX-License-Identifier: Apache-2.0
//
// The copy engine.
#include "cuda/prim/bulk.h"

#include <cstring>

#include "core/problems.h"
#include "simt/hopper.h"

namespace dspark {
namespace {

/// What the words of an emulated TensorMap hold.
struct Matrix {
  uint64_t mark;
  const char* data;
  uint64_t rows, row_bytes, pitch;  // pitch: bytes between rows
  uint32_t box_rows;
  uint32_t element_bytes;
};
constexpr uint64_t kMark = 0x74656e736f726d70u;
static_assert(sizeof(Matrix) <= sizeof(prim::TensorMap));

bool multiple(const void* p, uintptr_t of) { return reinterpret_cast<uintptr_t>(p) % of == 0; }

}  // namespace

namespace prim {

dspark_status make_tensor_map_2d(TensorMap* map, TensorType type, const void* data, uint64_t rows,
                                 uint64_t columns, uint64_t row_bytes, uint32_t box_rows) {
  const uint32_t element_bytes = type == TensorType::kI8 ? 1 : 2;
  const uint64_t width = columns * element_bytes;
  const bool described = data != nullptr && multiple(data, 16) && row_bytes % 16 == 0 &&
                         row_bytes < 1ull << 40 && row_bytes >= width && rows >= 1 &&
                         rows <= 1ull << 32 && columns >= 1 && columns <= 1ull << 32 &&
                         box_rows >= 1 && box_rows <= 256;
  if (!described) {
    return failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__,
                         "no tensor map for %llu x %llu elements, rows %llu bytes apart",
                         static_cast<unsigned long long>(rows),
                         static_cast<unsigned long long>(columns),
                         static_cast<unsigned long long>(row_bytes));
  }
  const Matrix matrix{
      kMark, static_cast<const char*>(data), rows, width, row_bytes, box_rows, element_bytes};
  *map = TensorMap{};
  memcpy(map->words, &matrix, sizeof matrix);
  return ok_status();
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
void store_box_row(char* box, uint32_t row, const char* bytes) {
  for (uint32_t piece = 0; piece < prim::kBoxRowBytes / 16; ++piece) {
    uint32_t offset = shared_offset(box) + row * prim::kBoxRowBytes + piece * 16;
    offset ^= (offset >> 7 & 7u) << 4;
    memcpy(shared_pointer(offset), bytes + piece * 16, 16);
  }
}

void land_box(char* shared, const Matrix& m, int64_t x, int64_t y, const check::AgentPtr& agent,
              Site site) {
  for (uint32_t row = 0; row < m.box_rows; ++row) {
    char bytes[prim::kBoxRowBytes] = {};  // outside of the matrix: zeros
    const int64_t r = y + row;
    const int64_t low = x < 0 ? -x : 0;
    const int64_t left = static_cast<int64_t>(m.row_bytes) - x;
    const int64_t high = left < prim::kBoxRowBytes ? left : prim::kBoxRowBytes;
    if (r >= 0 && r < static_cast<int64_t>(m.rows) && low < high) {
      const char* source = m.data + static_cast<uint64_t>(r) * m.pitch + x;
      check::access(agent, source + low, static_cast<size_t>(high - low), false, site);
      memcpy(bytes + low, source + low, static_cast<size_t>(high - low));
    }
    store_box_row(shared, row, bytes);
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

void tensor_load_2d(void* shared, const prim::TensorMap& map, uint64_t* barrier, int32_t x,
                    int32_t y, Site site) {
  Matrix matrix;
  memcpy(&matrix, map.words, sizeof matrix);
  if (matrix.mark != kMark) fail(site, "tensor_load_2d: this is no tensor map");
  if (!multiple(shared, prim::kBoxAlignment)) {
    fail(site, "tensor_load_2d: shared offset 0x%x is not a multiple of %d", shared_offset(shared),
         prim::kBoxAlignment);
  }
  const uint32_t bytes = matrix.box_rows * prim::kBoxRowBytes;
  const uint64_t phase = mbarrier_copy_started(barrier, site);
  const check::AgentPtr agent = check::start_agent();
  take(agent, shared, bytes, site);
  const int64_t byte_x = static_cast<int64_t>(x) * matrix.element_bytes;
  const auto land = [=] {
    land_box(static_cast<char*>(shared), matrix, byte_x, y, agent, site);
    check::access(agent, shared, bytes, true, site);
    mbarrier_copy_landed(barrier, phase, bytes, agent, site);
  };
  start_async(land, "tensor_load_2d", site);
}

void bulk_prefetch(const void* global, uint32_t bytes, Site site) {
  if (bytes % 16 != 0 || !multiple(global, 16)) {
    fail(site, "bulk_prefetch_l2: %u bytes, address and size must be multiples of 16", bytes);
  }
}

}  // namespace simt
}  // namespace dspark
