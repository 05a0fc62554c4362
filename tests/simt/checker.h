// SPDX-License-Identifier: Apache-2.0
//
// What the runner tells the checker, besides runtime.h's namespace check. race_*.cpp implement it
// in the checked build, no_checker.cpp does nothing in the fast one.
#ifndef DSPARK_TESTS_SIMT_CHECKER_H_
#define DSPARK_TESTS_SIMT_CHECKER_H_

#include <string>
#include <vector>

#include "simt/block.h"

namespace dspark::simt {

class Grid;

namespace check {

void begin_launch(Grid& grid);
/// Append what was found to `report`.
void end_launch(std::string* report);
void begin_block(Block& block);
void end_block(Block& block);

/// These threads have met: each knows what any of them did.
void meet(Block& block, const std::vector<Fiber*>& members);
/// Like release() and acquire(), for another thread than the running one.
void arrive(Block& block, Fiber* fiber, const void* object);
void learn(Block& block, Fiber* fiber, const void* object);

/// An atomic access of the running thread.
enum class Atomic { kLoad, kStore, kUpdate };
void atomic(const void* address, size_t bytes, Atomic kind, Order order, Site site);
void fence();

}  // namespace check
}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_CHECKER_H_
