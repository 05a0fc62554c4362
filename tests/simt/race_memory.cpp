// SPDX-License-Identifier: Apache-2.0
//
// Which memory a thread may touch: its block's shared memory, its cluster's, what was registered,
// the kernel's arguments and the constants of this library.
#include <link.h>
#include <stdint.h>

#include <algorithm>
#include <string>
#include <vector>

#include "simt/grid.h"
#include "simt/memory_map.h"
#include "simt/race_shadow.h"

namespace dspark::simt::check {
namespace {

struct Range {
  const char* low;
  const char* high;
  std::string name;
};

std::vector<Range> registered;
std::vector<Range> constants;  // of the running launch
uint32_t launch_generation = 0;
constexpr ptrdiff_t kNear = 4096;

bool inside(const char* low, const char* high, const char* p, size_t bytes) {
  return p >= low && p < high && bytes <= static_cast<size_t>(high - p);
}

bool in_shared(const Block& block, const char* p, size_t bytes) {
  return inside(block.dynamic_low(), block.dynamic_high(), p, bytes) ||
         inside(block.static_low(), block.static_high(), p, bytes);
}

void add_segments_of_this_library() {
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void*) {
        const auto address = [&](int i) {
          return reinterpret_cast<const char*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        };
        bool ours = false;
        std::vector<Range> found;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
          const char* low = address(i);
          found.push_back({low, low + info->dlpi_phdr[i].p_memsz, "constants"});
          ours = ours ||
                 inside(low, found.back().high, reinterpret_cast<const char*>(&find_region), 1);
        }
        if (ours) constants.insert(constants.end(), found.begin(), found.end());
        return ours ? 1 : 0;
      },
      nullptr);
}

/// ", 4 bytes past the end of tokens", if something is near.
std::string neighbour(const char* p, size_t bytes) {
  ptrdiff_t nearest = kNear;
  std::string text;
  for (const Range& range : registered) {
    const ptrdiff_t behind = p + bytes - range.high, before = range.low - p;
    const bool past = p >= range.low && behind > 0;
    const ptrdiff_t distance = past ? behind : before;
    if ((!past && p >= range.low) || distance >= nearest) continue;
    nearest = distance;
    text = ", " + std::to_string(distance) + " bytes " +
           (past ? "past the end of " : "before the start of ") + range.name;
  }
  return text;
}

}  // namespace

void set_launch(Grid* grid, uint32_t generation) {
  launch_generation = generation;
  constants.clear();
  const char* arguments = static_cast<const char*>(grid->body().arguments);
  constants.push_back({arguments, arguments + grid->body().bytes, "arguments"});
  add_segments_of_this_library();
}

Region find_region(const void* data, size_t bytes, bool write, const Location& location) {
  const char* p = static_cast<const char*>(data);
  Block& me = *context.block;
  if (in_shared(me, p, bytes)) return {Space::kShared, me.clocks->generation};
  if (registered.empty()) {
    for (const Range& range : constants) {
      if (inside(range.low, range.high, p, bytes)) return {Space::kUnchecked, 0};
    }
  }
  for (const Range& range : registered) {
    if (inside(range.low, range.high, p, bytes)) return {Space::kGlobal, launch_generation};
  }
  for (const Range& range : constants) {
    if (!write && inside(range.low, range.high, p, bytes)) return {Space::kUnchecked, 0};
  }
  if (me.owns_stack(p)) stop(location, "access to another thread's local memory");
  const unsigned cluster = std::max(1u, me.grid().config().cluster);
  for (Block* other : me.grid().running_blocks()) {
    if (other == nullptr || !in_shared(*other, p, bytes)) continue;
    if (other->number() / cluster == me.number() / cluster) {
      return {Space::kShared, other->clocks->generation};
    }
    stop(location, "access to the shared memory of a block outside of the cluster");
  }
  if (registered.empty()) return {Space::kGlobal, launch_generation};
  const bool dynamic = p >= me.dynamic_low() && p < me.dynamic_high() + kNear;
  const std::string near =
      dynamic ? ", past the end of the block's dynamic shared memory" : neighbour(p, bytes);
  stop(location, std::string(write ? "write" : "read") + " of " + std::to_string(bytes) +
                     " bytes out of bounds" + near);
}

}  // namespace dspark::simt::check

extern "C" {

DSPARK_API int dspark_simt_checks(void) { return 1; }

DSPARK_API void dspark_simt_register(const void* data, size_t bytes, const char* name) {
  const char* low = static_cast<const char*>(data);
  dspark::simt::check::registered.push_back({low, low + bytes, name});
}

DSPARK_API void dspark_simt_forget(void) { dspark::simt::check::registered.clear(); }

}  // extern "C"
