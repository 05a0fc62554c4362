// SPDX-License-Identifier: Apache-2.0
//
// Memory operations with an order or a caching behaviour that C++ cannot spell.
//
// The scope is the whole GPU. What a thread wrote, and what it knew of through barriers, is seen by
// another thread whose ld_acquire reads the value of its st_release (or of a red_release_add, also
// through further additions). A relaxed access orders nothing, except together with fence_gpu():
// before a relaxed store it publishes, behind a relaxed load it acquires.
#ifndef DSPARK_CUDA_PRIM_MEMORY_H_
#define DSPARK_CUDA_PRIM_MEMORY_H_

#include "cuda/prim/platform.h"

#ifdef DSPARK_SIMT
#include "simt/prim_memory.h"
#else

namespace dspark::prim {

/// Read with acquire order. PTX ISA 9.7.9.8 (ld).
__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

/// Write with release order. PTX ISA 9.7.9.11 (st).
__device__ __forceinline__ void st_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// Read a word that other threads may be writing, without an order. PTX ISA 9.7.9.8 (ld).
__device__ __forceinline__ uint32_t ld_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

/// Write a word that other threads may be reading, without an order. PTX ISA 9.7.9.11 (st).
__device__ __forceinline__ void st_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// *p += v with release order, no result. PTX ISA 9.7.13.8 (red).
__device__ __forceinline__ void red_release_add(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// *p = max(*p, v) without an order, no result. PTX ISA 9.7.13.8 (red).
__device__ __forceinline__ void red_max(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.gpu.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// Order this thread's accesses before and behind, for the whole GPU. PTX ISA 9.7.13.4 (fence).
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// Ask for the 128-byte line of a global address in L2. PTX ISA 9.7.9.15 (prefetch).
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

namespace detail {

// One instruction a kernel: without `volatile` the compiler keeps one copy. PTX ISA 9.7.9.18.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <int kBytes>
struct StreamLoad;

template <>
struct StreamLoad<2> {
  using Word = uint16_t;
  static __device__ __forceinline__ Word load(const void* p) {
    Word v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.u16 %0, [%1], %2;"
                 : "=h"(v)
                 : "l"(__cvta_generic_to_global(p)), "l"(evict_first_policy()));
    return v;
  }
};

template <>
struct StreamLoad<4> {
  using Word = uint32_t;
  static __device__ __forceinline__ Word load(const void* p) {
    Word v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(v)
                 : "l"(__cvta_generic_to_global(p)), "l"(evict_first_policy()));
    return v;
  }
};

template <>
struct StreamLoad<8> {
  using Word = uint2;
  static __device__ __forceinline__ Word load(const void* p) {
    Word v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(__cvta_generic_to_global(p)), "l"(evict_first_policy()));
    return v;
  }
};

template <>
struct StreamLoad<16> {
  using Word = uint4;
  static __device__ __forceinline__ Word load(const void* p) {
    Word v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(p)), "l"(evict_first_policy()));
    return v;
  }
};

}  // namespace detail

/// Read 2, 4, 8 or 16 bytes of global memory that nobody writes during the kernel and that is read
/// once: no place in L1, first to leave L2. PTX ISA 9.7.9.9 (ld.global.nc).
template <class T>
__device__ __forceinline__ T ld_stream(const T* p) {
  static_assert(alignof(T) == sizeof(T), "one aligned word");
  const auto word = detail::StreamLoad<sizeof(T)>::load(p);
  T value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace dspark::prim

#endif  // DSPARK_SIMT
#endif  // DSPARK_CUDA_PRIM_MEMORY_H_
