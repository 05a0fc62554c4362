// SPDX-License-Identifier: Apache-2.0
//
// The checked build's memory of accesses: for every four bytes the last ones, by whom, when and
// where in the source.
#ifndef DSPARK_TESTS_SIMT_RACE_SHADOW_H_
#define DSPARK_TESTS_SIMT_RACE_SHADOW_H_

#include <string>

#include "simt/race_clocks.h"

namespace dspark::simt::check {

/// A place in a kernel: the address of an instruction, or a line that a primitive was told.
struct Location {
  const void* instruction = nullptr;
  Site site;
};

enum class Kind { kRead, kWrite, kAtomicRead, kAtomicWrite };

/// Check one access: where it goes, its alignment, then who else was there.
void access(const Member& member, const void* data, size_t bytes, Kind kind,
            const Location& location);
/// Bytes of shared memory whose content is undefined until `member` writes them.
void mark_pending(const void* data, size_t bytes);

/// Another life of some memory: what is recorded under an earlier generation does not count.
uint32_t new_generation();

// ---- race_memory.cpp

enum class Space { kNone, kUnchecked, kShared, kGlobal };
struct Region {
  Space space = Space::kNone;
  uint32_t generation = 0;
};
/// Where the running thread may find these bytes; does not return if nowhere.
Region find_region(const void* data, size_t bytes, bool write, const Location& location);
void set_launch(Grid* grid, uint32_t generation);

// ---- race_report.cpp

/// "csrc/cuda/x.cuh:12".
std::string describe(const Location& location);
/// Note a finding; the launch goes on, and fails in the end.
void note(const std::string& text);
/// End the launch here, like fail().
[[noreturn]] void stop(const Location& location, const std::string& text);

}  // namespace dspark::simt::check

#endif  // DSPARK_TESTS_SIMT_RACE_SHADOW_H_
