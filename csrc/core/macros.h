// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CORE_MACROS_H_
#define DSPARK_CORE_MACROS_H_

// Arithmetic that the CPU backend and the CUDA kernels share. `static` and always inlined: a TU
// compiled for AVX-512 must not lend its copy of a shared inline function to the rest.
#if defined(__CUDACC__)
#define DSPARK_HD static __host__ __device__ __forceinline__
#else
#define DSPARK_HD static inline __attribute__((always_inline))
#endif

#endif  // DSPARK_CORE_MACROS_H_
