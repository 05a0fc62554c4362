// SPDX-License-Identifier: Apache-2.0
//
// The one seam to a threading library. OpenMP's runtime is shared with torch when both are loaded
// (same soname), so there is one pool of threads in the process. The body must not throw.
#ifndef DSPARK_CPU_PARALLEL_H_
#define DSPARK_CPU_PARALLEL_H_

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace dspark::cpu {

/// Threads to use for `count` pieces of work when the caller asked for `wanted` (0 = all).
inline int thread_count(int wanted, int64_t count) noexcept {
#if defined(_OPENMP)
  const int available = omp_in_parallel() ? 1 : wanted > 0 ? wanted : omp_get_max_threads();
#else
  const int available = 1;
  (void)wanted;
#endif
  return count < available ? static_cast<int>(count < 1 ? 1 : count) : available;
}

/// Number of threads that thread_count() can ever return: sizes per-thread scratch.
inline int max_threads(int wanted) noexcept { return thread_count(wanted, INT64_C(1) << 30); }

/// body(i, thread) for i in [0, count), pieces handed out dynamically. What a piece computes must
/// not depend on the thread that runs it.
template <class Body>
void parallel_for(int wanted, int64_t count, const Body& body) noexcept {
  const int threads = thread_count(wanted, count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#if defined(_OPENMP)
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
#endif
}

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_PARALLEL_H_
