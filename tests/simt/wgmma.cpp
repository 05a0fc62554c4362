// SPDX-License-Identifier: Apache-2.0
//
// The tensor cores of a warpgroup. A wgmma does nothing until its group is waited for; then the
// warp that waits reads its 16 rows of A and all of B, and adds. The other warps of the warpgroup
// do the same at their own waits: a stage that is freed behind the wait of one warp alone is seen.
// To the checker an agent of the warp reads: it knows what the first lane knew when the group
// began, so operands that are ordered only before the wait are a race.
#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "simt/grid.h"
#include "simt/hopper.h"
#include "simt/prim_wgmma.h"

namespace dspark::simt {
namespace {

constexpr int kWarpRows = 16;
constexpr int kRowBytes = 32;  // of A and B that one instruction reads: 16 or 32 elements
constexpr int kMaximumColumns = 256;
constexpr int kMaximumDepth = 32;

/// Accumulators between the issue of their first wgmma and the wait for their last.
struct Accumulators {
  std::vector<uint32_t> values;
  int pending = 0;
};

struct Queue {  // of one thread
  std::deque<std::vector<Wgmma>> groups;
  std::vector<Wgmma> open;
  std::map<void*, Accumulators> accumulators;
  bool fenced = false;
};

/// What the four warps of a warpgroup have issued: they must agree.
struct Warpgroup {
  std::deque<Wgmma> history;
  uint64_t forgotten = 0;
  uint64_t issued[4] = {};
};

/// Who reads for the groups of one warp.
struct Readers {
  check::AgentPtr open;
  std::deque<check::AgentPtr> groups;
  std::vector<check::AgentPtr> retired;  // by the last wait
};

struct TensorCores {
  Grid& grid = context.block->grid();
  std::vector<Queue> queues = std::vector<Queue>(block_threads());
  std::vector<Warpgroup> warpgroups = std::vector<Warpgroup>((block_threads() + 127) / 128);
  std::vector<Readers> readers = std::vector<Readers>((block_threads() + 31) / 32);
  double a[kWarpRows][kMaximumDepth];  // what a warp multiplies
  double b[kMaximumColumns][kMaximumDepth];

  ~TensorCores() {
    for (const Queue& queue : queues) {
      for (const auto& group : queue.groups) report_left(group);
      report_left(queue.open);
    }
  }

  void report_left(const std::vector<Wgmma>& operations) {
    if (operations.empty()) return;
    const Site site = operations.front().site;
    grid.report("a block ends with a wgmma that nobody waited for, issued at " + place(site));
  }
};

Queue& queue_of(const Thread* thread) { return block_state<TensorCores>().queues[thread->linear]; }

bool same(const Wgmma& a, const Wgmma& b) {
  return a.type == b.type && a.columns == b.columns && a.desc_a == b.desc_a &&
         a.desc_b == b.desc_b && a.accumulate == b.accumulate &&
         (a.a == nullptr) == (b.a == nullptr);
}

/// Compare with what the other warps of the warpgroup issued in this place.
void agree(unsigned warp, const Wgmma& operation) {
  Warpgroup& group = block_state<TensorCores>().warpgroups[warp / 4];
  const uint64_t place = group.issued[warp % 4]++ - group.forgotten;
  if (place == group.history.size()) {
    group.history.push_back(operation);
  } else if (!same(group.history[place], operation)) {
    fail(operation.site, "wgmma: the warps of the warpgroup differ in type, shape or operands");
  }
  while (!group.history.empty() &&
         *std::min_element(group.issued, group.issued + 4) > group.forgotten) {
    group.history.pop_front();
    ++group.forgotten;
  }
}

/// Where an operand's bytes lie, from its descriptor.
struct Operand {
  uint32_t start, leading, stride;

  Operand(uint64_t descriptor, uint32_t most_inside, Site site)
      : start(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 == 1 && (start & 1023) <= most_inside) return;
    fail(site, "wgmma: operand 0x%llx is no 128-byte swizzled tile at a multiple of 1024",
         static_cast<unsigned long long>(descriptor));
  }

  /// Sixteen bytes of row `row` of 128 bytes.
  void read(uint32_t from, unsigned row, uint32_t byte, const check::AgentPtr& reader, Site site,
            char* bytes) const {
    uint32_t offset = from + row / 8 * stride + row % 8 * 128 + byte;
    offset ^= (offset >> 7 & 7u) << 4;
    const void* source = shared_pointer(offset);
    check::access(reader, source, 16, false, site);
    proxy_async_access(source, 16, "wgmma", site);
    memcpy(bytes, source, 16);
  }
};

double element(MatrixType type, const char* bytes, int i) {
  if (type == MatrixType::kS8) return static_cast<signed char>(bytes[i]);
  uint16_t half;
  memcpy(&half, bytes + 2 * i, sizeof half);
  return type == MatrixType::kBf16 ? bf16_to_f32(half) : f16_to_f32(half);
}

int depth(MatrixType type) { return type == MatrixType::kS8 ? 32 : 16; }

/// sum + old, as float32 bits or as int32. The sum is rounded once: a GPU has an order and a width
/// of its own, and a kernel must not depend on the last bits.
uint32_t add(MatrixType type, double sum, uint32_t old) {
  if (type == MatrixType::kS8) return old + static_cast<uint32_t>(static_cast<int64_t>(sum));
  return std::bit_cast<uint32_t>(static_cast<float>(sum + std::bit_cast<float>(old)));
}

/// Rows from `first` on of a K-major operand: 32 bytes of each.
void read_rows(uint64_t descriptor, const Wgmma& operation, const check::AgentPtr& reader,
               int first, int rows, double (*to)[kMaximumDepth]) {
  const Operand operand(descriptor, 128 - kRowBytes, operation.site);
  char bytes[kRowBytes];
  for (int row = 0; row < rows; ++row) {
    for (uint32_t piece = 0; piece < kRowBytes; piece += 16) {
      operand.read(operand.start, static_cast<unsigned>(first + row), piece, reader, operation.site,
                   bytes + piece);
    }
    for (int i = 0; i < depth(operation.type); ++i) {
      to[row][i] = element(operation.type, bytes, i);
    }
  }
}

/// An MN-major B: 16 rows of K, tiles of 64 columns.
void read_columns(const Wgmma& operation, const check::AgentPtr& reader, TensorCores& cores) {
  const Operand operand(operation.desc_b, 0, operation.site);
  char bytes[16];
  for (int k = 0; k < 16; ++k) {
    for (int column = 0; column < operation.columns; column += 8) {
      const uint32_t tile = static_cast<uint32_t>(column / 64);
      operand.read(operand.start + tile * operand.leading, static_cast<unsigned>(k),
                   static_cast<uint32_t>(column % 64 * 2), reader, operation.site, bytes);
      for (int i = 0; i < 8; ++i) cores.b[column + i][k] = element(operation.type, bytes, i);
    }
  }
}

/// A of the lanes' registers, which nobody may have changed since.
void read_registers(Thread* const* lanes, size_t place, TensorCores& cores) {
  for (int lane = 0; lane < 32; ++lane) {
    const Wgmma& operation = queue_of(lanes[lane]).groups.front()[place];
    if (memcmp(operation.a, operation.a_then, sizeof operation.a_then) != 0) {
      fail(operation.site, "wgmma: registers of A have changed before the wait");
    }
    for (int i = 0; i < 8; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, column = lane % 4 * 2 + i % 2 + i / 4 * 8;
      const char* pair = reinterpret_cast<const char*>(&operation.a_then[i / 2]);
      cores.a[row][column] = element(operation.type, pair, i % 2);
    }
  }
}

/// The part of one warp: `lanes` have the same operation at hand, number `place` of its group.
void multiply(Thread* const* lanes, const Wgmma& operation, size_t place,
              uint32_t* const (&values)[32]) {
  const int k = depth(operation.type);
  TensorCores& cores = block_state<TensorCores>();
  const check::AgentPtr& reader = cores.readers[lanes[0]->warp].groups.front();
  if (operation.a != nullptr) {
    read_registers(lanes, place, cores);
    read_columns(operation, reader, cores);
  } else {
    const int first_row = static_cast<int>(lanes[0]->warp % 4) * kWarpRows;
    read_rows(operation.desc_a, operation, reader, first_row, kWarpRows, cores.a);
    read_rows(operation.desc_b, operation, reader, 0, operation.columns, cores.b);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int d = 0; d < operation.columns / 2; ++d) {
      const int row = lane / 4 + d / 2 % 2 * 8;
      const int column = d / 4 * 8 + lane % 4 * 2 + d % 2;
      double sum = 0;
      for (int i = 0; i < k; ++i) sum += cores.a[row][i] * cores.b[column][i];
      const uint32_t old = operation.accumulate ? values[lane][d] : 0;
      values[lane][d] = add(operation.type, sum, old);
    }
  }
}

/// Do operation `i` of the oldest group of the warp's lanes.
void retire_one(Thread* const* lanes, size_t i) {
  const Wgmma& first = queue_of(lanes[0]).groups.front()[i];
  uint32_t* values[32];
  for (int lane = 0; lane < 32; ++lane) {
    Queue& queue = queue_of(lanes[lane]);
    const Wgmma& operation = queue.groups.front()[i];
    if (!same(operation, first)) {
      fail(operation.site, "wgmma: the lanes of the warp differ in type, shape or operands");
    }
    values[lane] = queue.accumulators.at(operation.d).values.data();
  }
  agree(lanes[0]->warp, first);
  multiply(lanes, first, i, values);
  for (int lane = 0; lane < 32; ++lane) {
    Queue& queue = queue_of(lanes[lane]);
    void* d = queue.groups.front()[i].d;
    Accumulators& accumulators = queue.accumulators.at(d);
    if (--accumulators.pending != 0) continue;
    memcpy(d, accumulators.values.data(), accumulators.values.size() * sizeof(uint32_t));
    queue.accumulators.erase(d);
  }
}

void retire(Thread* const* lanes, unsigned) {
  const size_t pending = static_cast<size_t>(in<int>(lanes[0]));
  const size_t groups = queue_of(lanes[0]).groups.size();
  for (int lane = 1; lane < 32; ++lane) {
    if (queue_of(lanes[lane]).groups.size() == groups) continue;
    fail(Site::current(), "wgmma_wait: the lanes of the warp have committed different groups");
  }
  Readers& readers = block_state<TensorCores>().readers[lanes[0]->warp];
  readers.retired.clear();
  for (size_t done = pending; done < groups; ++done) {
    const size_t operations = queue_of(lanes[0]).groups.front().size();
    for (int lane = 1; lane < 32; ++lane) {
      if (queue_of(lanes[lane]).groups.front().size() == operations) continue;
      fail(Site::current(), "wgmma_wait: the lanes of the warp have issued different groups");
    }
    for (size_t i = 0; i < operations; ++i) retire_one(lanes, i);
    for (int lane = 0; lane < 32; ++lane) queue_of(lanes[lane]).groups.pop_front();
    readers.retired.push_back(readers.groups.front());
    readers.groups.pop_front();
  }
}

}  // namespace

void wgmma_issue(const Wgmma& operation) {
  const Thread* thread = self();
  if (thread->linear / 128 * 128 + 128 > block_threads()) {
    fail(operation.site, "wgmma: thread %u is in no whole warpgroup", thread->linear);
  }
  Queue& queue = queue_of(thread);
  if (!queue.fenced) fail(operation.site, "wgmma without wgmma_fence() since the last wait");
  const size_t count = static_cast<size_t>(operation.columns) / 2;
  Accumulators& accumulators = queue.accumulators[operation.d];
  if (accumulators.pending++ == 0) {
    accumulators.values.resize(count);
    memcpy(accumulators.values.data(), operation.d, count * sizeof(uint32_t));
    poison(operation.d, count * sizeof(uint32_t));
  } else if (accumulators.values.size() != count) {
    fail(operation.site,
         "wgmma: accumulators of another shape are under way in the same registers");
  }
  queue.open.push_back(operation);
  if (operation.a != nullptr) {
    memcpy(queue.open.back().a_then, operation.a, sizeof operation.a_then);
  }
  Readers& readers = block_state<TensorCores>().readers[thread->warp];
  if (thread->linear % 32 == 0 && queue.open.size() == 1) readers.open = check::start_agent();
}

void wgmma_fence() { queue_of(self()).fenced = true; }

void wgmma_commit() {
  Queue& queue = queue_of(self());
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
  if (self()->linear % 32 != 0) return;
  Readers& readers = block_state<TensorCores>().readers[self()->warp];
  readers.groups.push_back(std::move(readers.open));
  readers.open = nullptr;
}

void wgmma_wait(int pending, Site site) {
  Queue& queue = queue_of(self());
  queue.fenced = false;  // the thread may now change the registers
  in<int>(self()) = pending;
  // The tensor core has read for the whole warp: any lane may now hand the operands on.
  warp_collective(~0u, retire, "wgmma_wait", site, true);
  for (const check::AgentPtr& reader : block_state<TensorCores>().readers[self()->warp].retired) {
    check::join(reader);
  }
}

void wgmma_hold(const void* d, Site site) {
  const Queue& queue = queue_of(self());
  if (queue.accumulators.count(const_cast<void*>(d)) != 0) {
    fail(site, "wgmma_hold: the accumulators are still under way");
  }
  for (const auto& group : queue.groups) {
    for (const Wgmma& operation : group) {
      if (operation.a == d) fail(site, "wgmma_hold: the registers of A are still being read");
    }
  }
}

uint64_t wgmma_descriptor(const void* tile, uint32_t leading_bytes, Site site) {
  const uint32_t offset = shared_offset(tile);
  if (offset % 1024 != 0) fail(site, "wgmma: the tile at 0x%x is no multiple of 1024", offset);
  return (offset & 0x3ffffu) >> 4 | uint64_t{leading_bytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

}  // namespace dspark::simt
