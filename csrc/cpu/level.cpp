// SPDX-License-Identifier: Apache-2.0
#include "cpu/level.h"

#include <cstdlib>
#include <cstring>

namespace dspark::cpu {
namespace {

Level detect() noexcept {
  Level best = Level::kBaseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2")) {
    best = Level::kV3;
  }
  if (best == Level::kV3 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    best = Level::kV4;
  }
#endif
  const char* wanted = std::getenv("DSPARK_CPU_LEVEL");
  if (wanted == nullptr) return best;
  constexpr Level kLower[] = {Level::kBaseline, Level::kV3};
  for (Level l : kLower) {
    if (l < best && std::strcmp(wanted, level_name(l)) == 0) return l;
  }
  return best;
}

}  // namespace

const char* level_name(Level level) noexcept {
  return level == Level::kV4 ? "x86-64-v4" : level == Level::kV3 ? "x86-64-v3" : "baseline";
}

Level level() noexcept {
  static const Level found = detect();
  return found;
}

}  // namespace dspark::cpu
