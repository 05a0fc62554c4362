// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {

void register_confidence(py::module_& m) {
  using P = dspark_confidence_params;
  auto cls = params_class<P>(m, "ConfidenceParams");
  field(cls, "num_requests", &P::num_requests);
  field(cls, "gamma", &P::gamma);
  field(cls, "num_threads", &P::num_threads);
  field(cls, "logit", &P::logit);
  field(cls, "logit_stride", &P::logit_stride);
  field(cls, "probability", &P::probability);
  field(cls, "probability_stride", &P::probability_stride);
  field(cls, "temperature", &P::temperature);
  field(cls, "active", &P::active);
  field(cls, "conditional", &P::conditional);
  field(cls, "survival", &P::survival);
  field(cls, "status", &P::status);
  family(m, "confidence", &dspark_confidence, &dspark_confidence_workspace);
}

}  // namespace dspark::bindings
