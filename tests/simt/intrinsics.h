// SPDX-License-Identifier: Apache-2.0
//
// CUDA's integer and bit intrinsics. Approximate floating-point intrinsics are not among them: they
// would give other bits here than on a GPU, and no kernel may let them decide a token.
#ifndef DSPARK_TESTS_SIMT_INTRINSICS_H_
#define DSPARK_TESTS_SIMT_INTRINSICS_H_

#include <bit>
#include <type_traits>

#include "simt/runtime.h"

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<int8_t>(static_cast<unsigned>(a) >> 8 * i) *
         static_cast<int8_t>(static_cast<unsigned>(b) >> 8 * i);
  }
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7u)) & 0xffu;
    const unsigned sign = (selector >> 4 * i & 8u) != 0 ? (byte >> 7) * 0xffu : byte;
    result |= sign << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <class T>
T __ldg(const T* p) {
  return *p;
}

inline void __trap(dspark::simt::Site site = dspark::simt::Site::current()) {
  dspark::simt::fail(site, "__trap()");
}
inline void __nanosleep(unsigned) {}

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

#endif  // DSPARK_TESTS_SIMT_INTRINSICS_H_
