// SPDX-License-Identifier: Apache-2.0
#include "dspark/confidence.h"

#include "core/dispatch.h"
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

constexpr dspark::Backends<dspark_confidence_params> kBackends = DSPARK_BACKENDS(confidence);

}  // namespace

extern "C" {

dspark_status dspark_confidence_workspace(dspark_device device,
                                          const dspark_confidence_params* params, size_t* bytes) {
  dspark::Problems problems("dspark_confidence_workspace");
  if (!dspark::check_header(problems, params)) return problems.status();
  return dspark::finish_workspace(problems, kBackends, device, *params, bytes);
}

dspark_status dspark_confidence(dspark_device device, const dspark_confidence_params* params,
                                dspark_workspace workspace, void* stream) {
  dspark::Problems problems("dspark_confidence");
  if (!dspark::check_header(problems, params)) return problems.status();
  check(problems, params);
  return dspark::finish_call(problems, kBackends, device, *params, workspace, stream);
}

}  // extern "C"
