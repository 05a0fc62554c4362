// SPDX-License-Identifier: Apache-2.0
//
// What every family shares: element types, devices, the result of a call, the workspace, and the
// per-request status bits. C11 and C++17; no CUDA and no framework header is needed to use it.
//
// Every family has the same two functions:
//
//   dspark_status dspark_<family>_workspace(device, params, &bytes);     // reads sizes only
//   dspark_status dspark_<family>(device, params, workspace, stream);    // runs, allocates nothing
//
// A call that returns a code other than DSPARK_OK has written nothing. Trouble that only the data
// shows (a NaN, an id out of range) is not an error of the call: it sets bits in `status[r]`.
#ifndef DSPARK_TYPES_H_
#define DSPARK_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DSPARK_API
#else
#define DSPARK_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// Vocabulary ids in one segment of the categorical sampler. Part of the random-number contract.
#define DSPARK_SEGMENT 128
/// Largest number of draft tokens per request and round.
#define DSPARK_MAX_GAMMA 16

/// Element type of an array.
typedef enum dspark_dtype {
  DSPARK_F32 = 0,     ///< IEEE binary32
  DSPARK_BF16 = 1,    ///< bfloat16
  DSPARK_F16 = 2,     ///< IEEE binary16
  DSPARK_I8 = 3,      ///< signed 8-bit integer with a scale per row
  DSPARK_F8_E4M3 = 4  ///< OCP FP8 E4M3: no infinities, NaN is 0x7f and 0xff, largest value 448
} dspark_dtype;

/// Where the arrays of a call live and the call runs.
typedef enum dspark_device {
  DSPARK_CPU = 0,  ///< host memory; the stream argument is ignored
  DSPARK_CUDA = 1  ///< device memory; the stream argument is a cudaStream_t
} dspark_device;

/// Outcome of a call.
typedef enum dspark_code {
  DSPARK_OK = 0,                ///< done
  DSPARK_INVALID_ARGUMENT = 1,  ///< an argument breaks the contract; the message lists all of them
  DSPARK_UNSUPPORTED = 2,       ///< a legal request that this build or backend cannot serve
  DSPARK_CUDA_ERROR = 3         ///< the CUDA runtime refused; the message carries its text
} dspark_code;

/// Result of a call, by value. `message` lists every problem found, one a line: the argument, what
/// it got and what was expected; it is empty when `code` is DSPARK_OK.
typedef struct dspark_status {
  int32_t code;        ///< a dspark_code
  int32_t line;        ///< source line of the check that failed
  const char* file;    ///< source file of the check that failed; static storage
  char message[1024];  ///< text for a person; always terminated
} dspark_status;

/// Scratch memory lent to one call. Its size comes from the family's workspace function.
typedef struct dspark_workspace {
  void* data;    ///< 256-byte aligned, on the call's device; may be NULL when bytes is 0
  size_t bytes;  ///< size of `data`
} dspark_workspace;

/// Bits of the per-request `status` word. Zero means nothing happened.
enum {
  DSPARK_NAN_TARGET = 1 << 0,      ///< a target logit that was needed is NaN (counts as -inf)
  DSPARK_NAN_DRAFT = 1 << 1,       ///< a draft logit, logit value or lse that was needed is NaN
  DSPARK_NAN_CONFIDENCE = 1 << 2,  ///< a confidence input is NaN (counts as probability 0)
  DSPARK_EMPTY_SUPPORT = 1 << 3,   ///< no id has positive mass: lowest allowed id emitted, else 0
  DSPARK_BAD_DRAFT_ID = 1 << 4,    ///< a draft or anchor id is out of range or has q = 0
  DSPARK_BAD_PARAM = 1 << 5,       ///< a per-request parameter on the device is out of its range
  DSPARK_ZERO_RESIDUAL = 1 << 6,   ///< the residual has no mass: the token comes from p itself
  DSPARK_FORCED_REJECT = 1 << 7,   ///< a draft was refused without a coin (p = 0 or no valid law)
  DSPARK_STOPPED = 1 << 8,         ///< the round ended at a stop id or at max_new_tokens
  DSPARK_KV_OVERFLOW = 1 << 9,     ///< a position lies beyond the request's page table
  DSPARK_BAD_PAGE = 1 << 10,       ///< a page id in use is negative or >= num_pages
  DSPARK_SYNTHETIC = 1 << 11       ///< acceptance was made up for a benchmark: not the target's law
};

/// Name of a status bit ("NAN_TARGET", ...), or NULL when `bit` is not exactly one known bit.
DSPARK_API const char* dspark_status_name(int32_t bit);
/// One-line description of a status bit, or NULL when `bit` is not exactly one known bit.
DSPARK_API const char* dspark_status_describe(int32_t bit);
/// Version of the library, "major.minor.patch".
DSPARK_API const char* dspark_version(void);
/// SIMD level the CPU backend chose on this machine: "baseline", "x86-64-v3" or "x86-64-v4".
DSPARK_API const char* dspark_cpu_level(void);

#ifdef __cplusplus
}
#endif
#endif  // DSPARK_TYPES_H_
