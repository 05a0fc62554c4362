// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CPU_TRUNCATE_H_
#define DSPARK_CPU_TRUNCATE_H_

namespace dspark::cpu {

/// 64-bit counters that one thread needs for cpu/simd/truncate.h.
constexpr int kTruncateBins = 2048;

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_TRUNCATE_H_
