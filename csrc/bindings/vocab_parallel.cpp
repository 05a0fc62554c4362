// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {
namespace {

using P = dspark_vocab_parallel_params;
using Run = dspark_status(dspark_device, const P*, dspark_workspace, void*);

void phase(py::module_& m, const char* name, Run* run) {
  const std::string symbol = std::string("dspark_") + name;
  m.def(
      name,
      [run, symbol](int device, const P& params, uintptr_t data, size_t bytes, uintptr_t stream) {
        dspark_status status;
        auto* function = choose(device, run, symbol);
        {
          py::gil_scoped_release release;
          status = function(c_device(device), &params,
                            dspark_workspace{reinterpret_cast<void*>(data), bytes},
                            reinterpret_cast<void*>(stream));
        }
        raise_if_failed(status);
      },
      py::arg("device"), py::arg("params"), py::arg("workspace") = 0,
      py::arg("workspace_bytes") = 0, py::arg("stream") = 0);
}

}  // namespace

void register_vocab_parallel(py::module_& m) {
  auto cls = params_class<P>(m, "VocabParallelParams");
  field(cls, "num_ranks", &P::num_ranks);
  field(cls, "rank", &P::rank);
  field(cls, "shard_sizes", &P::shard_sizes);
  field(cls, "scans", &P::scans);
  field(cls, "draws", &P::draws);
  field(cls, "scan", &P::scan);
  field(cls, "draw", &P::draw);
  field(cls, "call", &P::call);
  phase(m, "vocab_parallel_scan", &dspark_vocab_parallel_scan);
  phase(m, "vocab_parallel_draw", &dspark_vocab_parallel_draw);
  phase(m, "vocab_parallel_finish", &dspark_vocab_parallel_finish);
  m.def(
      "vocab_parallel_workspace",
      [](int device, const P& params) {
        size_t bytes = 0;
        auto* function =
            choose(device, &dspark_vocab_parallel_workspace, "dspark_vocab_parallel_workspace");
        raise_if_failed(function(c_device(device), &params, &bytes));
        return bytes;
      },
      py::arg("device"), py::arg("params"));
}

}  // namespace dspark::bindings
