// SPDX-License-Identifier: Apache-2.0
//
// The memory that kernels may touch. These functions are exported, for the Python package and for
// tests.
#ifndef DSPARK_TESTS_SIMT_MEMORY_MAP_H_
#define DSPARK_TESTS_SIMT_MEMORY_MAP_H_

#include <stddef.h>

#include "dspark/types.h"

extern "C" {

/// 1 in the checked build, 0 in the fast one.
DSPARK_API int dspark_simt_checks(void);
/// Let the kernels launched from now on use `bytes` bytes at `data`. With nothing registered, all
/// memory may be used.
DSPARK_API void dspark_simt_register(const void* data, size_t bytes, const char* name);
/// Take back all registrations.
DSPARK_API void dspark_simt_forget(void);

}  // extern "C"

#endif  // DSPARK_TESTS_SIMT_MEMORY_MAP_H_
