// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/memory.h.
#ifndef DSPARK_TESTS_SIMT_PRIM_MEMORY_H_
#define DSPARK_TESTS_SIMT_PRIM_MEMORY_H_

#include "simt/cuda.h"

namespace dspark::prim {

namespace detail {

template <class T>
T atomic_load(const T* p, simt::Order order, simt::Site site) {
  T value;
  simt::atomic_load(p, &value, sizeof value, order, site);
  return value;
}

inline simt::Order order(const char* name, simt::Order wanted, simt::Site site) {
  return simt::left_out(name, site) ? simt::Order::kRelaxed : wanted;
}

}  // namespace detail

#define DSPARK_SIMT_WORD(T)                                                                        \
  inline T ld_acquire(const T* p, DSPARK_SIMT_SITE) {                                              \
    return detail::atomic_load(p, detail::order("ld_acquire", simt::Order::kAcquire, site), site); \
  }                                                                                                \
  inline T ld_relaxed(const T* p, DSPARK_SIMT_SITE) {                                              \
    return detail::atomic_load(p, simt::Order::kRelaxed, site);                                    \
  }                                                                                                \
  inline void st_release(T* p, T v, DSPARK_SIMT_SITE) {                                            \
    simt::atomic_store(p, &v, sizeof v, detail::order("st_release", simt::Order::kRelease, site),  \
                       site);                                                                      \
  }                                                                                                \
  inline void st_relaxed(T* p, T v, DSPARK_SIMT_SITE) {                                            \
    simt::atomic_store(p, &v, sizeof v, simt::Order::kRelaxed, site);                              \
  }
DSPARK_SIMT_WORD(uint32_t)
DSPARK_SIMT_WORD(uint64_t)
#undef DSPARK_SIMT_WORD

inline void red_release_add(uint32_t* p, uint32_t v, DSPARK_SIMT_SITE) {
  simt::atomic<uint32_t, simt::Add>(
      p, v, detail::order("red_release_add", simt::Order::kRelease, site), site);
}
inline void red_max(uint64_t* p, uint64_t v, DSPARK_SIMT_SITE) {
  simt::atomic<uint64_t, simt::Maximum>(p, v, simt::Order::kRelaxed, site);
}
inline void fence_gpu(DSPARK_SIMT_SITE) { simt::fence(site); }
inline void prefetch_l2(const void*) {}

template <class T>
T ld_stream(const T* p) {
  static_assert(alignof(T) == sizeof(T) && sizeof(T) >= 2 && sizeof(T) <= 16, "one aligned word");
  return *p;
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_MEMORY_H_
