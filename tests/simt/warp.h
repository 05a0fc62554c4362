// SPDX-License-Identifier: Apache-2.0
//
// CUDA's block barriers, shuffles, votes and reductions.
#ifndef DSPARK_TESTS_SIMT_WARP_H_
#define DSPARK_TESTS_SIMT_WARP_H_

#include <type_traits>

#include "simt/runtime.h"

namespace dspark::simt {

/// A lane's `in` and `out` as values of type T.
template <class T>
T& in(Thread* lane) {
  static_assert(sizeof(T) <= sizeof lane->in);
  return *reinterpret_cast<T*>(lane->in);
}
template <class T>
T& out(Thread* lane) {
  static_assert(sizeof(T) <= sizeof lane->out);
  return *reinterpret_cast<T*>(lane->out);
}

template <class T>
struct Shuffle {
  T value;
  int source;  // lane, -1: its own value
};

template <class T>
T shuffle(unsigned mask, T value, int source, const char* what, Site site) {
  static_assert(std::is_trivially_copyable_v<T>);
  in<Shuffle<T>>(self()) = {value, source};
  warp_collective(
      mask,
      [](Thread* const* lanes, unsigned members) {
        for (unsigned i = 0; i < 32; ++i) {
          if ((members >> i & 1u) == 0) continue;
          const int from = in<Shuffle<T>>(lanes[i]).source;
          if ((members >> from & 1u) == 0) {
            fail(last_site(), "a shuffle of lane %u reads lane %d, which is not in mask 0x%08x", i,
                 from, members);
          }
          out<T>(lanes[i]) = in<Shuffle<T>>(lanes[from]).value;
        }
      },
      what, site);
  return out<T>(self());
}

/// Reduce the values of the lanes with `Op` and give the result to all.
template <class T, class Op>
T reduce(unsigned mask, T value, const char* what, Site site) {
  in<T>(self()) = value;
  warp_collective(
      mask,
      [](Thread* const* lanes, unsigned members) {
        bool first = true;
        T total{};
        for (unsigned i = 0; i < 32; ++i) {
          if ((members >> i & 1u) == 0) continue;
          total = first ? in<T>(lanes[i]) : Op()(total, in<T>(lanes[i]));
          first = false;
        }
        for (unsigned i = 0; i < 32; ++i) {
          if ((members >> i & 1u) != 0) out<T>(lanes[i]) = total;
        }
      },
      what, site);
  return out<T>(self());
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a + b);
  }
};
struct Minimum {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Maximum {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct And {
  unsigned operator()(unsigned a, unsigned b) const { return a & b; }
};
struct Or {
  unsigned operator()(unsigned a, unsigned b) const { return a | b; }
};
struct Xor {
  unsigned operator()(unsigned a, unsigned b) const { return a ^ b; }
};

}  // namespace dspark::simt

using dspark_simt_site = dspark::simt::Site;
#define DSPARK_SIMT_SITE dspark_simt_site site = dspark_simt_site::current()

inline void __syncthreads(DSPARK_SIMT_SITE) {
  if (dspark::simt::left_out("__syncthreads", site)) return;
  dspark::simt::block_barrier(dspark::simt::Vote::kNone, 0, site);
}
inline int __syncthreads_or(int predicate, DSPARK_SIMT_SITE) {
  return dspark::simt::block_barrier(dspark::simt::Vote::kOr, predicate, site);
}
inline int __syncthreads_and(int predicate, DSPARK_SIMT_SITE) {
  return dspark::simt::block_barrier(dspark::simt::Vote::kAnd, predicate, site);
}
inline int __syncthreads_count(int predicate, DSPARK_SIMT_SITE) {
  return dspark::simt::block_barrier(dspark::simt::Vote::kCount, predicate, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, DSPARK_SIMT_SITE) {
  if (dspark::simt::left_out("__syncwarp", site)) return;
  dspark::simt::warp_collective(
      mask, [](dspark::simt::Thread* const*, unsigned) {}, "__syncwarp", site, true);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, DSPARK_SIMT_SITE) {
  const int lane = static_cast<int>(dspark::simt::self()->lane);
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return dspark::simt::shuffle(mask, value, from, "__shfl_sync", site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, DSPARK_SIMT_SITE) {
  const int lane = static_cast<int>(dspark::simt::self()->lane);
  const int from = lane ^ bits;
  const bool outside = (from & ~(width - 1)) > (lane & ~(width - 1));
  return dspark::simt::shuffle(mask, value, outside ? lane : from, "__shfl_xor_sync", site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, DSPARK_SIMT_SITE) {
  const int lane = static_cast<int>(dspark::simt::self()->lane);
  const bool outside = (lane & (width - 1)) < static_cast<int>(delta);
  return dspark::simt::shuffle(mask, value, outside ? lane : lane - static_cast<int>(delta),
                               "__shfl_up_sync", site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, DSPARK_SIMT_SITE) {
  const int lane = static_cast<int>(dspark::simt::self()->lane);
  const bool outside = (lane & (width - 1)) + static_cast<int>(delta) >= width;
  return dspark::simt::shuffle(mask, value, outside ? lane : lane + static_cast<int>(delta),
                               "__shfl_down_sync", site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, DSPARK_SIMT_SITE) {
  const unsigned bit = predicate != 0 ? 1u << dspark::simt::self()->lane : 0u;
  return dspark::simt::reduce<unsigned, dspark::simt::Or>(mask, bit, "__ballot_sync", site);
}
inline int __any_sync(unsigned mask, int predicate, DSPARK_SIMT_SITE) {
  const unsigned bit = predicate != 0;
  return dspark::simt::reduce<unsigned, dspark::simt::Or>(mask, bit, "__any_sync", site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, DSPARK_SIMT_SITE) {
  const unsigned bit = predicate != 0;
  return dspark::simt::reduce<unsigned, dspark::simt::And>(mask, bit, "__all_sync", site) != 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, DSPARK_SIMT_SITE) {
  using namespace dspark::simt;
  in<T>(self()) = value;
  warp_collective(
      mask,
      [](Thread* const* lanes, unsigned members) {
        for (unsigned i = 0; i < 32; ++i) {
          unsigned equal = 0;
          if ((members >> i & 1u) == 0) continue;
          for (unsigned j = 0; j < 32; ++j) {
            const bool counts = (members >> j & 1u) != 0;
            if (counts && memcmp(lanes[i]->in, lanes[j]->in, sizeof(T)) == 0) equal |= 1u << j;
          }
          out<unsigned>(lanes[i]) = equal;
        }
      },
      "__match_any_sync", site);
  return out<unsigned>(self());
}

#define DSPARK_SIMT_REDUCE(name, T, Op)                                         \
  inline T name(unsigned mask, T value, DSPARK_SIMT_SITE) {                     \
    return dspark::simt::reduce<T, dspark::simt::Op>(mask, value, #name, site); \
  }
DSPARK_SIMT_REDUCE(__reduce_add_sync, unsigned, Add)
DSPARK_SIMT_REDUCE(__reduce_add_sync, int, Add)
DSPARK_SIMT_REDUCE(__reduce_min_sync, unsigned, Minimum)
DSPARK_SIMT_REDUCE(__reduce_min_sync, int, Minimum)
DSPARK_SIMT_REDUCE(__reduce_max_sync, unsigned, Maximum)
DSPARK_SIMT_REDUCE(__reduce_max_sync, int, Maximum)
DSPARK_SIMT_REDUCE(__reduce_and_sync, unsigned, And)
DSPARK_SIMT_REDUCE(__reduce_or_sync, unsigned, Or)
DSPARK_SIMT_REDUCE(__reduce_xor_sync, unsigned, Xor)
#undef DSPARK_SIMT_REDUCE

#endif  // DSPARK_TESTS_SIMT_WARP_H_
