// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "core/dtype.h"
#include "simt/prim_mma.h"
#include "simt/warp.h"

namespace dspark::simt {
namespace {

constexpr unsigned kAll = 0xffffffffu;

template <class T>
struct Fragments {
  T d[4];
  uint32_t a[4], b[2];
};

/// D [16][8] += A [16][K] B [K][8]; four fragments of D a lane, as csrc/cuda/prim/mma.h has them.
template <class T, class Sum, int K>
void multiply(Thread* const* lanes, const Sum (&a)[16][K], const Sum (&b)[K][8]) {
  Sum sums[16][8] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const T* start = in<Fragments<T>>(lanes[lane]).d;
    for (int e = 0; e < 4; ++e) {
      const Sum sum = sums[g + e / 2 * 8][2 * t + e % 2];
      reinterpret_cast<T*>(lanes[lane]->out)[e] = static_cast<T>(static_cast<Sum>(start[e]) + sum);
    }
  }
}

template <float (*kConvert)(uint16_t)>
void finish_16(Thread* const* lanes, unsigned) {
  double a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& x = in<Fragments<float>>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int h = 0; h < 2; ++h) {
      const auto half = [&](uint32_t word) {
        return static_cast<double>(kConvert(static_cast<uint16_t>(word >> 16 * h)));
      };
      a[g][2 * t + h] = half(x.a[0]);
      a[g + 8][2 * t + h] = half(x.a[1]);
      a[g][2 * t + 8 + h] = half(x.a[2]);
      a[g + 8][2 * t + 8 + h] = half(x.a[3]);
      b[2 * t + h][g] = half(x.b[0]);
      b[2 * t + 8 + h][g] = half(x.b[1]);
    }
  }
  multiply<float>(lanes, a, b);
}

void finish_8(Thread* const* lanes, unsigned) {
  int32_t a[16][32], b[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& x = in<Fragments<int32_t>>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int h = 0; h < 4; ++h) {
      const auto byte = [&](uint32_t word) { return static_cast<int8_t>(word >> 8 * h); };
      a[g][4 * t + h] = byte(x.a[0]);
      a[g + 8][4 * t + h] = byte(x.a[1]);
      a[g][4 * t + 16 + h] = byte(x.a[2]);
      a[g + 8][4 * t + 16 + h] = byte(x.a[3]);
      b[4 * t + h][g] = byte(x.b[0]);
      b[4 * t + 16 + h][g] = byte(x.b[1]);
    }
  }
  multiply<int32_t>(lanes, a, b);
}

template <class T>
void run(T* d, const uint32_t* a, const uint32_t* b, Finish finish, const char* what, Site site) {
  Fragments<T>& mine = in<Fragments<T>>(self());
  memcpy(mine.d, d, sizeof mine.d);
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  warp_collective(kAll, finish, what, site);
  memcpy(d, self()->out, sizeof mine.d);
}

float from_bf16(uint16_t h) { return bf16_to_f32(h); }
float from_f16(uint16_t h) { return f16_to_f32(h); }

}  // namespace

void multiply_bf16(float* d, const uint32_t* a, const uint32_t* b, Site site) {
  run(d, a, b, &finish_16<from_bf16>, "mma_bf16", site);
}

void multiply_f16(float* d, const uint32_t* a, const uint32_t* b, Site site) {
  run(d, a, b, &finish_16<from_f16>, "mma_f16", site);
}

void multiply_s8(int32_t* d, const uint32_t* a, const uint32_t* b, Site site) {
  run(d, a, b, &finish_8, "mma_s8", site);
}

void load_matrices(uint32_t* r, int count, const void* row, Site site) {
  if (static_cast<int>(self()->lane) < 8 * count) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail(site, "ldmatrix: misaligned row %p", row);
    shared_offset(row);
    check::access(row, 16, false, site);
  }
  in<const void*>(self()) = row;
  const auto finish = [](Thread* const* lanes, int matrices) {
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t* words = reinterpret_cast<uint32_t*>(lanes[lane]->out);
      for (int m = 0; m < matrices; ++m) {
        const void* from = in<const void*>(lanes[8 * m + lane / 4]);
        memcpy(&words[m], static_cast<const char*>(from) + lane % 4 * 4, 4);
      }
    }
  };
  static constexpr auto run = finish;
  if (count == 4) {
    warp_collective(
        kAll, [](Thread* const* lanes, unsigned) { run(lanes, 4); }, "ldmatrix_x4", site);
  } else {
    warp_collective(
        kAll, [](Thread* const* lanes, unsigned) { run(lanes, 2); }, "ldmatrix_x2", site);
  }
  memcpy(r, self()->out, 4 * static_cast<size_t>(count));
}

void load_transposed(uint32_t* r, const void* row, Site site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail(site, "ldmatrix: misaligned row %p", row);
  shared_offset(row);
  check::access(row, 16, false, site);
  in<const void*>(self()) = row;
  const auto finish = [](Thread* const* lanes, unsigned) {
    for (int lane = 0; lane < 32; ++lane) {
      uint16_t* halves = reinterpret_cast<uint16_t*>(lanes[lane]->out);
      for (int e = 0; e < 8; ++e) {  // half e of the lane: matrix e / 2, row 2 t + e % 2, column g
        const void* from = in<const void*>(lanes[e / 2 * 8 + lane % 4 * 2 + e % 2]);
        memcpy(&halves[e], static_cast<const char*>(from) + lane / 4 * 2, 2);
      }
    }
  };
  warp_collective(kAll, finish, "ldmatrix_x4_trans", site);
  memcpy(r, self()->out, 16);
}

}  // namespace dspark::simt
