// SPDX-License-Identifier: Apache-2.0
#include "dspark/confidence.h"

#include "core/checks.h"
#include "core/families.h"

namespace {

void check(dspark::Problems& problems, const dspark_confidence_params* p) {
  dspark::check_gamma(problems, p->gamma);
  if (p->num_requests == 0) return;
  DSPARK_REQUIRE(problems, (p->logit != nullptr) != (p->probability != nullptr),
                 "logit, probability: got %s, expected exactly one of them",
                 p->logit != nullptr ? "both" : "neither");
  DSPARK_REQUIRE(problems, p->temperature == nullptr || p->logit != nullptr,
                 "temperature: got STS temperatures with probability, expected them with logit");
  dspark::check_pointer(problems, "conditional", p->conditional);
  dspark::check_pointer(problems, "survival", p->survival);
  dspark::check_pointer(problems, "status", p->status);
}

dspark_status workspace_bytes(dspark_device device, const dspark_confidence_params& p,
                              size_t* bytes) {
#ifdef DSPARK_WITH_CUDA
  if (device == DSPARK_CUDA) return dspark::cuda::confidence_workspace(p, bytes);
#else
  (void)device;
#endif
  *bytes = dspark::cpu::confidence_workspace(p);
  return dspark::ok_status();
}

}  // namespace

extern "C" {

dspark_status dspark_confidence_workspace(dspark_device device,
                                          const dspark_confidence_params* params, size_t* bytes) {
  dspark::Problems problems("dspark_confidence_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  dspark::check_device(problems, device);
  dspark::check_pointer(problems, "bytes", bytes);
  if (!problems.none()) return problems.status();
  return workspace_bytes(device, *params, bytes);
}

dspark_status dspark_confidence(dspark_device device, const dspark_confidence_params* params,
                                dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_confidence");
  if (!dspark::check_header(problems, params)) return problems.status();
  check(problems, params);
  dspark::check_device(problems, device);
  if (!problems.none()) return problems.status();
  size_t needed = 0;
  const dspark_status sized = workspace_bytes(device, *params, &needed);
  if (sized.code != DSPARK_OK) return sized;
  dspark::check_workspace(problems, workspace, needed);
  if (!problems.none()) return problems.status();
#ifdef DSPARK_WITH_CUDA
  if (device == DSPARK_CUDA) return dspark::cuda::confidence(*params, workspace.data, stream);
#else
  (void)stream;
#endif
  dspark::cpu::confidence(*params, workspace.data);
  return problems.status();
}

}  // extern "C"
