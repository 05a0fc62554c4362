// SPDX-License-Identifier: Apache-2.0
#include "simt/race_shadow.h"

#include <stdlib.h>
#include <string.h>

#include <deque>
#include <set>
#include <unordered_map>

#include "simt/grid.h"
#include "simt/hopper.h"

namespace dspark::simt::check {

void order_atomic(const void* address, Atomic kind, Order order);

namespace {

constexpr int kRecords = 5;  // accesses remembered for four bytes
constexpr size_t kPageBytes = 4096;

/// One access.
struct Record {
  uint32_t block;
  uint32_t epoch;  // 0: none
  uint32_t location;
  uint16_t slot;
  uint8_t bytes : 4;  // which of the four
  uint8_t write : 1;
  uint8_t atomic : 1;
};

struct Cell {
  uint32_t generation;
  uint8_t written;  // bytes that hold something, in shared memory
  uint8_t pending;  // bytes that a copy will overwrite
  Record records[kRecords];
};

struct Page {
  Cell cells[kPageBytes / 4];
};

std::unordered_map<uintptr_t, Page*> pages;
uint32_t generation = 0;
uint32_t first_unended = 0;  // generation of the first launch that need not have ended
uint32_t replace_next = 0;

std::deque<Location> locations{Location{}};
std::unordered_map<uint64_t, uint32_t> location_numbers;
std::set<std::pair<uint32_t, uint32_t>> reported;  // pairs of locations

uint32_t number_of(const Location& location) {
  const uint64_t key =
      location.instruction != nullptr
          ? reinterpret_cast<uint64_t>(location.instruction)
          : reinterpret_cast<uint64_t>(location.site.file_name()) * 31 + location.site.line();
  const auto [found, fresh] =
      location_numbers.try_emplace(key, static_cast<uint32_t>(locations.size()));
  if (fresh) locations.push_back(location);
  return found->second;
}

Cell& cell_at(uintptr_t address) {
  static uintptr_t last_key = 0;
  static Page* last_page = nullptr;
  const uintptr_t key = address / kPageBytes;
  if (last_page == nullptr || key != last_key) {
    Page*& page = pages[key];
    if (page == nullptr) page = static_cast<Page*>(calloc(1, sizeof(Page)));
    last_key = key;
    last_page = page;
  }
  return last_page->cells[address % kPageBytes / 4];
}

std::string who(unsigned block, uint32_t slot) {
  if (block == kLaunchBefore) return "a launch before, without grid_dependency_wait()";
  const unsigned threads = static_cast<unsigned>(context.block->threads());
  return "block " + std::to_string(block) +
         (slot < threads ? " thread " + std::to_string(slot) : " (asynchronous)");
}

const char* verb(bool write, bool atomic) {
  if (atomic) return write ? "an atomic write" : "an atomic read";
  return write ? "a write" : "a read";
}

void report_race(const Record& earlier, const Record& now, Space space) {
  if (!reported.insert({earlier.location, now.location}).second) return;
  note(std::string("race on ") + (space == Space::kShared ? "shared" : "global") +
       " memory: " + verb(now.write, now.atomic) + " by " + who(now.block, now.slot) + " at " +
       describe(locations[now.location]) + " is not ordered behind " +
       verb(earlier.write, earlier.atomic) + " by " + who(earlier.block, earlier.slot) + " at " +
       describe(locations[earlier.location]));
}

void report_once(const Record& now, const char* text) {
  if (!reported.insert({now.location, 0}).second) return;
  note(std::string(text) + ": " + who(now.block, now.slot) + " at " +
       describe(locations[now.location]));
}

/// Keep the access, in the place of one that says no more than it does.
void remember(Cell& cell, const Member& member, const Record& now) {
  Record* free = nullptr;
  for (Record& record : cell.records) {
    if (record.epoch == 0) {
      if (free == nullptr) free = &record;
      continue;
    }
    const bool covered = (record.bytes & ~now.bytes) == 0 && (now.write || !record.write) &&
                         record.atomic >= now.atomic &&
                         knows(member, record.block, record.slot, record.epoch);
    if (!covered) continue;
    record.epoch = 0;
    free = &record;
  }
  // All are worth keeping: drop a reader. Many readers of one word stand for each other.
  for (int i = 0; free == nullptr && i < kRecords; ++i) {
    Record& record = cell.records[(replace_next + static_cast<uint32_t>(i)) % kRecords];
    if (!record.write) free = &record;
  }
  replace_next = replace_next * 1664525u + 1013904223u;
  if (free == nullptr) free = &cell.records[replace_next % kRecords];
  *free = now;
}

/// A cell in another life: of its accesses those remain that a launch before may be making still.
void renew(Cell& cell, const Region& region) {
  if (region.space != Space::kGlobal || cell.generation < first_unended) {
    memset(&cell, 0, sizeof cell);
  }
  cell.generation = region.generation;
  for (Record& record : cell.records) {
    if (record.epoch == 0) continue;
    record.block = kLaunchBefore;
    record.slot = 0;
    record.epoch = 1;
  }
}

void visit(Cell& cell, const Member& member, const Record& now, const Region& region) {
  if (cell.generation != region.generation) renew(cell, region);
  const bool shared = region.space == Space::kShared;
  if (shared && !now.write && (cell.pending & now.bytes) != 0) {
    report_once(now, "read of shared memory that an asynchronous copy has yet to fill");
  } else if (shared && !now.write && (now.bytes & ~cell.written) != 0) {
    report_once(now, "read of uninitialised shared memory");
  }
  for (const Record& record : cell.records) {
    const bool conflict = record.epoch != 0 && (record.bytes & now.bytes) != 0 &&
                          (record.write || now.write) && !(record.atomic && now.atomic);
    if (conflict && !knows(member, record.block, record.slot, record.epoch)) {
      report_race(record, now, region.space);
    }
  }
  if (now.write) {
    cell.written |= now.bytes;
    cell.pending &= static_cast<uint8_t>(~now.bytes);
  }
  remember(cell, member, now);
}

}  // namespace

uint32_t new_generation() { return ++generation; }

void access(const Member& member, const void* data, size_t bytes, Kind kind,
            const Location& location) {
  const bool write = kind == Kind::kWrite || kind == Kind::kAtomicWrite;
  const Region region = find_region(data, bytes, write, location);
  if (region.space == Space::kUnchecked) return;
  Record now{};
  now.block = member.block;
  now.epoch = member.epoch;
  now.location = number_of(location);
  now.slot = static_cast<uint16_t>(member.slot);
  now.write = write;
  now.atomic = kind == Kind::kAtomicRead || kind == Kind::kAtomicWrite;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  for (uintptr_t at = begin & ~uintptr_t{3}; at < end; at += 4) {
    unsigned mask = 0;
    for (unsigned i = 0; i < 4; ++i) mask |= at + i >= begin && at + i < end ? 1u << i : 0u;
    now.bytes = mask & 15u;
    visit(cell_at(at), member, now, region);
  }
}

void mark_pending(const void* data, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  for (uintptr_t at = begin & ~uintptr_t{3}; at < end; at += 4) cell_at(at).pending = 15;
}

// ---- the hooks
// ------------------------------------------------------------------------------------

void access(const void* data, size_t bytes, bool write, Site site) {
  if (bytes == 0) return;
  access(running_member(), data, bytes, write ? Kind::kWrite : Kind::kRead, {nullptr, site});
}

void access(const AgentPtr& agent, const void* data, size_t bytes, bool write, Site site) {
  if (bytes == 0) return;
  access(agent->member, data, bytes, write ? Kind::kWrite : Kind::kRead, {nullptr, site});
}

void pending(const AgentPtr& agent, const void* shared, size_t bytes, Site site) {
  // The write itself comes later; that nobody else may be there counts from now on.
  access(agent->member, shared, bytes, Kind::kWrite, {nullptr, site});
  mark_pending(shared, bytes);
}

void atomic(const void* address, size_t bytes, Atomic kind, Order order, Site site) {
  const Kind access_kind = kind == Atomic::kLoad ? Kind::kAtomicRead : Kind::kAtomicWrite;
  // First the order: an acquiring read is itself behind the write that it reads.
  order_atomic(address, kind, order);
  access(running_member(), address, bytes, access_kind, {nullptr, site});
}

void begin_launch(Grid& grid) {
  clear_objects();
  reported.clear();
  const uint32_t launch = new_generation();
  if (!grid.config().programmatic) first_unended = launch;
  set_launch(&grid, launch);
}

}  // namespace dspark::simt::check

// ---- what g++ -fsanitize=thread calls before each access of a kernel
// ------------------------------

namespace {

using namespace dspark::simt;

inline void observe(const void* data, size_t bytes, bool write, bool aligned, const void* caller) {
  const Fiber* fiber = context.fiber;
  if (fiber == nullptr) return;  // host code
  Block& block = *context.block;
  const char* p = static_cast<const char*>(data);
  const int thread = static_cast<int>(fiber->linear);
  if (p >= block.stacks().low(thread) && p < block.stacks().high(thread)) return;
  if (block.owns_fiber(data)) return;
  const check::Location location{caller, Site()};
  if (aligned && reinterpret_cast<uintptr_t>(data) % bytes != 0) {
    check::stop(location, "misaligned access of " + std::to_string(bytes) + " bytes");
  }
  check::access(check::running_member(), data, bytes,
                write ? check::Kind::kWrite : check::Kind::kRead, location);
  const bool shared = (p >= block.dynamic_low() && p < block.dynamic_high()) ||
                      (p >= block.static_low() && p < block.static_high());
  if (write && shared) proxy_ordinary_store(data, bytes);
}

}  // namespace

extern "C" {

#define DSPARK_TSAN(bytes)                                        \
  void __tsan_read##bytes(void* p) {                              \
    observe(p, bytes, false, true, __builtin_return_address(0));  \
  }                                                               \
  void __tsan_write##bytes(void* p) {                             \
    observe(p, bytes, true, true, __builtin_return_address(0));   \
  }                                                               \
  void __tsan_unaligned_read##bytes(void* p) {                    \
    observe(p, bytes, false, false, __builtin_return_address(0)); \
  }                                                               \
  void __tsan_unaligned_write##bytes(void* p) {                   \
    observe(p, bytes, true, false, __builtin_return_address(0));  \
  }                                                               \
  void __tsan_volatile_read##bytes(void* p) {                     \
    observe(p, bytes, false, true, __builtin_return_address(0));  \
  }                                                               \
  void __tsan_volatile_write##bytes(void* p) {                    \
    observe(p, bytes, true, true, __builtin_return_address(0));   \
  }
DSPARK_TSAN(1)
DSPARK_TSAN(2)
DSPARK_TSAN(4)
DSPARK_TSAN(8)
DSPARK_TSAN(16)

void __tsan_read_range(void* p, size_t bytes) {
  observe(p, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  observe(p, bytes, true, false, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
