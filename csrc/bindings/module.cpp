// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Thin binding of the C API: params objects mirror dspark/<family>.h field by field.";
  m.attr("__version__") = dspark_version();
  m.attr("CPU") = static_cast<int>(DSPARK_CPU);
  m.attr("CUDA") = static_cast<int>(DSPARK_CUDA);
  m.def("cpu_level", [] { return std::string(dspark_cpu_level()); });
  dspark::bindings::register_device(m);
  dspark::bindings::register_simt(m);
  dspark::bindings::register_confidence(m);
  dspark::bindings::register_paged_kv(m);
  dspark::bindings::register_prefix_scheduler(m);
  dspark::bindings::register_markov_loop(m);
  dspark::bindings::register_testing(m);
  dspark::bindings::register_rejection_sampler(m);
  dspark::bindings::register_vocab_parallel(m);
  dspark::bindings::register_verify_attention(m);
  dspark::bindings::register_linear(m);
}
