// SPDX-License-Identifier: Apache-2.0
//
// CUDA's atomic functions. They are relaxed: an order comes from __threadfence() alone.
#ifndef DSPARK_TESTS_SIMT_ATOMICS_H_
#define DSPARK_TESTS_SIMT_ATOMICS_H_

#include <type_traits>

#include "simt/runtime.h"
#include "simt/warp.h"

namespace dspark::simt {

template <class T, class Op>
T atomic(T* address, T operand, Order order, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  T old;
  atomic_update(
      address, &old, sizeof(T),
      [](void* value, const void* with) {
        T& v = *static_cast<T*>(value);
        v = Op()(v, *static_cast<const T*>(with));
      },
      &operand, order, site);
  return old;
}

struct Replace {
  template <class T>
  T operator()(T, T b) const {
    return b;
  }
};
template <class T>
struct Comparison {
  T expected, desired;
};

}  // namespace dspark::simt

#define DSPARK_SIMT_ATOMIC(name, Op)                                                       \
  template <class T>                                                                       \
  T name(T* address, std::type_identity_t<T> value, DSPARK_SIMT_SITE) {                    \
    return dspark::simt::atomic<T, dspark::simt::Op>(address, value,                       \
                                                     dspark::simt::Order::kRelaxed, site); \
  }
DSPARK_SIMT_ATOMIC(atomicAdd, Add)
DSPARK_SIMT_ATOMIC(atomicMin, Minimum)
DSPARK_SIMT_ATOMIC(atomicMax, Maximum)
DSPARK_SIMT_ATOMIC(atomicExch, Replace)
DSPARK_SIMT_ATOMIC(atomicAnd, And)
DSPARK_SIMT_ATOMIC(atomicOr, Or)
#undef DSPARK_SIMT_ATOMIC

template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> desired,
            DSPARK_SIMT_SITE) {
  const dspark::simt::Comparison<T> operand{expected, desired};
  T old;
  dspark::simt::atomic_update(
      address, &old, sizeof(T),
      [](void* value, const void* with) {
        const auto& want = *static_cast<const dspark::simt::Comparison<T>*>(with);
        T& v = *static_cast<T*>(value);
        if (v == want.expected) v = want.desired;
      },
      &operand, dspark::simt::Order::kRelaxed, site);
  return old;
}

inline void __threadfence(DSPARK_SIMT_SITE) { dspark::simt::fence(site); }

#endif  // DSPARK_TESTS_SIMT_ATOMICS_H_
