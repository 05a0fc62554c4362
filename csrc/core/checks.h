// SPDX-License-Identifier: Apache-2.0
//
// Checks that several families share.
#ifndef DSPARK_CORE_CHECKS_H_
#define DSPARK_CORE_CHECKS_H_

#include "core/problems.h"
#include "dspark/types.h"

namespace dspark {

/// The struct is one this library knows, R and gamma are in range. False: nothing else may be read.
template <class Params>
bool check_header(Problems& problems, const Params* params) {
  DSPARK_REQUIRE(problems, params != nullptr, "params: got NULL, expected a struct");
  if (params == nullptr) return false;
  DSPARK_REQUIRE(problems, params->struct_size == sizeof(Params),
                 "struct_size: got %u, expected %zu (header and library differ)",
                 params->struct_size, sizeof(Params));
  if (params->struct_size != sizeof(Params)) return false;
  DSPARK_REQUIRE(problems, params->num_requests >= 0, "num_requests: got %d, expected >= 0",
                 params->num_requests);
  return true;
}

inline void check_positive(Problems& problems, const char* name, int32_t value) {
  DSPARK_REQUIRE(problems, value >= 1, "%s: got %d, expected >= 1", name, value);
}

inline void check_not_negative(Problems& problems, const char* name, int32_t value) {
  DSPARK_REQUIRE(problems, value >= 0, "%s: got %d, expected >= 0", name, value);
}

inline void check_gamma(Problems& problems, int32_t gamma) {
  DSPARK_REQUIRE(problems, gamma >= 1 && gamma <= DSPARK_MAX_GAMMA, "gamma: got %d, expected 1..%d",
                 gamma, DSPARK_MAX_GAMMA);
}

inline void check_float_dtype(Problems& problems, const char* name, int32_t dtype) {
  DSPARK_REQUIRE(problems, dtype == DSPARK_F32 || dtype == DSPARK_BF16 || dtype == DSPARK_F16,
                 "%s: got dtype code %d, expected f32, bf16 or f16", name, dtype);
}

/// The element type of a paged cache.
inline void check_kv_dtype(Problems& problems, const char* name, int32_t dtype) {
  const bool known =
      dtype == DSPARK_F32 || dtype == DSPARK_BF16 || dtype == DSPARK_F16 || dtype == DSPARK_F8_E4M3;
  DSPARK_REQUIRE(problems, known, "%s: got dtype code %d, expected f32, bf16, f16 or f8_e4m3", name,
                 dtype);
}

/// The scale of a paged cache; its values are the device's business.
inline void check_kv_scale(Problems& problems, const char* name, const float* scale, int32_t stride,
                           int32_t cache_dtype) {
  if (scale == nullptr) return;
  DSPARK_REQUIRE(problems, cache_dtype == DSPARK_F8_E4M3,
                 "%s: got an array with dtype code %d, expected NULL unless the cache is f8_e4m3",
                 name, cache_dtype);
  DSPARK_REQUIRE(problems, stride == 0 || stride == 1, "%s_stride: got %d, expected 0 or 1", name,
                 stride);
}

inline void check_device(Problems& problems, dspark_device device) {
  DSPARK_REQUIRE(problems, device == DSPARK_CPU || device == DSPARK_CUDA,
                 "device: got %d, expected DSPARK_CPU or DSPARK_CUDA", static_cast<int>(device));
#ifndef DSPARK_WITH_CUDA
  DSPARK_SUPPORTED(
      problems, device != DSPARK_CUDA,
      "device: got DSPARK_CUDA; dspark was built without CUDA, use DSPARK_CPU or build "
      "it with DSPARK_CUDA=auto, pip or system");
#endif
}

inline void check_pointer(Problems& problems, const char* name, const void* pointer) {
  DSPARK_REQUIRE(problems, pointer != nullptr, "%s: got NULL, expected an array", name);
}

inline void check_workspace(Problems& problems, const dspark_workspace& workspace, size_t needed) {
  DSPARK_REQUIRE(problems, workspace.bytes >= needed && (needed == 0 || workspace.data != nullptr),
                 "workspace: got %zu bytes at %p, expected at least %zu", workspace.bytes,
                 workspace.data, needed);
}

}  // namespace dspark

#endif  // DSPARK_CORE_CHECKS_H_
