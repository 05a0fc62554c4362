// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"

namespace dspark::bindings {

void register_vocab_parallel(py::module_& m) {
  using P = dspark_vocab_parallel_params;
  auto cls = params_class<P>(m, "VocabParallelParams");
  field(cls, "num_ranks", &P::num_ranks);
  field(cls, "rank", &P::rank);
  field(cls, "shard_sizes", &P::shard_sizes);
  field(cls, "scans", &P::scans);
  field(cls, "draws", &P::draws);
  field(cls, "scan", &P::scan);
  field(cls, "draw", &P::draw);
  field(cls, "call", &P::call);
  runs(m, "vocab_parallel_scan", &dspark_vocab_parallel_scan);
  runs(m, "vocab_parallel_draw", &dspark_vocab_parallel_draw);
  runs(m, "vocab_parallel_finish", &dspark_vocab_parallel_finish);
  sizes(m, "vocab_parallel", &dspark_vocab_parallel_workspace);
}

}  // namespace dspark::bindings
