// SPDX-License-Identifier: Apache-2.0
#include "core/device.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/problems.h"

namespace {

template <class Info>
bool check_info(dspark::Problems& problems, const Info* info) {
  DSPARK_REQUIRE(problems, info != nullptr, "info: got NULL, expected a struct to fill");
  if (info == nullptr) return false;
  DSPARK_REQUIRE(problems, info->struct_size == sizeof(Info),
                 "info->struct_size: got %u, expected %zu (header and library differ)",
                 info->struct_size, sizeof(Info));
  return problems.none();
}

#ifndef DSPARK_WITH_CUDA
constexpr char kWithoutCuda[] =
    "dspark was built without CUDA; build it with DSPARK_CUDA=auto, pip or system";

dspark_status without_cuda(const char* function) {
  return dspark::failed_status(DSPARK_UNSUPPORTED, __FILE__, __LINE__, "%s: %s", function,
                               kWithoutCuda);
}
#endif

/// One entry of an architecture list: "90a-real" is 90, exact, cubin.
struct Arch {
  int number;
  bool exact;
  bool cubin;
  bool ptx;
};

/// Read the entry at `*text` and step behind it; number 0 for what is not understood.
Arch next_arch(const char** text) {
  char* end = nullptr;
  Arch arch{static_cast<int>(std::strtol(*text, &end, 10)), false, true, true};
  if (std::isalpha(static_cast<unsigned char>(*end))) {
    arch.exact = true;
    ++end;
  }
  if (std::strncmp(end, "-real", 5) == 0) arch.ptx = false;
  if (std::strncmp(end, "-virtual", 8) == 0) arch.cubin = false;
  const char* separator = std::strpbrk(end, " ;");
  *text = separator != nullptr ? separator + 1 : end + std::strlen(end);
  return arch;
}

}  // namespace

namespace dspark {

bool archs_serve(const char* archs, int major, int minor) noexcept {
  const int device = 10 * major + minor;
  for (const char* text = archs; *text != '\0';) {
    const Arch arch = next_arch(&text);
    if (arch.number == 0) continue;
    if (arch.exact) {
      if (device == arch.number) return true;
      continue;
    }
    if (arch.cubin && major == arch.number / 10 && device >= arch.number) return true;
    if (arch.ptx && device >= arch.number) return true;
  }
  return false;
}

}  // namespace dspark

extern "C" {

dspark_status dspark_cuda_query(dspark_cuda_info* info) {
  dspark::Problems problems("dspark_cuda_query");
  if (!check_info(problems, info)) return problems.status();
  *info = dspark_cuda_info{};
  info->struct_size = sizeof *info;
#ifdef DSPARK_WITH_CUDA
  info->compiled = 1;
  std::snprintf(info->archs, sizeof info->archs, "%s", DSPARK_CUDA_ARCHS);
  dspark::cuda::query(info);
#else
  std::snprintf(info->reason, sizeof info->reason, "%s", kWithoutCuda);
#endif
  return problems.status();
}

dspark_status dspark_cuda_device(int32_t index, dspark_cuda_device_info* info) {
  dspark::Problems problems("dspark_cuda_device");
  if (!check_info(problems, info)) return problems.status();
#ifdef DSPARK_WITH_CUDA
  return dspark::cuda::describe(index, info);
#else
  (void)index;
  return without_cuda("dspark_cuda_device");
#endif
}

dspark_status dspark_cuda_probe(int32_t index) {
#ifdef DSPARK_WITH_CUDA
  return dspark::cuda::probe(index);
#else
  (void)index;
  return without_cuda("dspark_cuda_probe");
#endif
}

}  // extern "C"
