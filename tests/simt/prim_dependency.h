// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/dependency.h: a launch has ended before the next one starts, but the
// checked build lets a programmatic one know only behind the wait.
#ifndef DSPARK_TESTS_SIMT_PRIM_DEPENDENCY_H_
#define DSPARK_TESTS_SIMT_PRIM_DEPENDENCY_H_

#include "simt/cuda.h"

namespace dspark::prim {

inline void grid_dependency_wait(DSPARK_SIMT_SITE) {
  if (!simt::left_out("grid_dependency_wait", site)) simt::check::await_launches();
}
inline void grid_dependency_launch() {}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_DEPENDENCY_H_
