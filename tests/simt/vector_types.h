// SPDX-License-Identifier: Apache-2.0
//
// CUDA's vector types, with CUDA's sizes and alignments, and its make_* functions.
#ifndef DSPARK_TESTS_SIMT_VECTOR_TYPES_H_
#define DSPARK_TESTS_SIMT_VECTOR_TYPES_H_

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define DSPARK_SIMT_VECTOR_TYPES(name, T)                    \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };         \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };   \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

DSPARK_SIMT_VECTOR_TYPES(char, signed char)
DSPARK_SIMT_VECTOR_TYPES(uchar, unsigned char)
DSPARK_SIMT_VECTOR_TYPES(short, short)
DSPARK_SIMT_VECTOR_TYPES(ushort, unsigned short)
DSPARK_SIMT_VECTOR_TYPES(int, int)
DSPARK_SIMT_VECTOR_TYPES(uint, unsigned)
DSPARK_SIMT_VECTOR_TYPES(float, float)

#undef DSPARK_SIMT_VECTOR_TYPES

struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

#endif  // DSPARK_TESTS_SIMT_VECTOR_TYPES_H_
