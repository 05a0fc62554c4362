// SPDX-License-Identifier: Apache-2.0
//
// What the library exports besides the C API, for the Python package and for tests.
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
/// Leave out the synchronisation `name` ("__syncthreads", "ld_acquire", ...) that is written in
/// lines `first`..`last` of `file` ("csrc/cuda/..."); what orders memory and also acts becomes
/// relaxed. `last` = 0: nothing.
DSPARK_API void dspark_simt_leave_out(const char* name, const char* file, unsigned first,
                                      unsigned last);

/// Begin or end to record which synchronisation runs. Returns what was recorded until now, a line
/// each: "__syncthreads csrc/cuda/x.cuh:12".
DSPARK_API const char* dspark_simt_record(int on);

}  // extern "C"

#endif  // DSPARK_TESTS_SIMT_MEMORY_MAP_H_
