// SPDX-License-Identifier: Apache-2.0
//
// Stacks for CUDA threads and the switch between them.
#ifndef DSPARK_TESTS_SIMT_FIBER_H_
#define DSPARK_TESTS_SIMT_FIBER_H_

#include <stddef.h>

namespace dspark::simt {

/// Store the running stack in `*save` and go on with the stack `load` (x86-64 System V: the six
/// registers that a callee keeps, then a return).
extern "C" void dspark_simt_switch(void** save, void* load);

/// Stacks for `count` threads: DSPARK_SIMT_STACK_KB each (default 128). Memory goes back to a pool.
class Stacks {
 public:
  explicit Stacks(int count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* low(int i) const { return high(i) - bytes_ + kGap; }
  char* high(int i) const { return memory_ + static_cast<size_t>(i + 1) * bytes_; }

  /// Prepare stack i: the first switch to the result calls `entry`, which must not return.
  void* prepare(int i, void (*entry)()) const;
  /// Whether thread i has kept inside its stack so far.
  bool intact(int i) const;

 private:
  // Below each stack: what an overflow destroys before it is noticed.
  static constexpr size_t kGap = 64 * 1024;

  char* memory_;
  size_t bytes_;
  int count_;
};

}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_FIBER_H_
