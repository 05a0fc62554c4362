// SPDX-License-Identifier: Apache-2.0
//
// Three-level dispatch. Hot loops live in cpu/simd/<family>_loops.cpp, which is compiled three
// times (baseline, x86-64-v3, x86-64-v4) with DSPARK_SIMD set to the namespace; each copy fills a
// table of function pointers, and the backend picks one by what the processor has.
#ifndef DSPARK_CPU_LEVEL_H_
#define DSPARK_CPU_LEVEL_H_

namespace dspark::cpu {

enum class Level { kBaseline = 0, kV3 = 1, kV4 = 2 };

/// The best level this processor has, found once. The environment variable DSPARK_CPU_LEVEL
/// (baseline, x86-64-v3, x86-64-v4), read at the first call, can lower it.
Level level() noexcept;
const char* level_name(Level level) noexcept;

/// The entry of three that belongs to the level in use.
template <class Loops>
const Loops& pick(const Loops& baseline, const Loops& v3, const Loops& v4) noexcept {
  const Level l = level();
  return l == Level::kV4 ? v4 : l == Level::kV3 ? v3 : baseline;
}

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_LEVEL_H_
