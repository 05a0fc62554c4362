// SPDX-License-Identifier: Apache-2.0
#include "cpu/linear.h"

#include "core/dtype.h"
#include "cpu/level.h"
#include "cpu/markov_loop_loops.h"
#include "cpu/parallel.h"

namespace dspark::cpu {
namespace {

constexpr int64_t kColumns = 96;  // of one piece of work: 110 KB of a bf16 matrix 576 wide

int64_t element_bytes(int32_t dtype) { return dtype == DSPARK_F32 ? 4 : 2; }

}  // namespace

void linear(const Linear& job) noexcept {
  if (job.rows == 0) return;
  const float* vectors[kLinearRows];
  for (int32_t i = 0; i < job.rows; ++i) {
    vectors[i] = job.x + static_cast<int64_t>(i) * job.length;
  }
  const auto& loops = pick(baseline::kMarkovLoops, v3::kMarkovLoops, v4::kMarkovLoops);
  const int64_t pieces = (job.columns + kColumns - 1) / kColumns;
  const int64_t row_bytes = job.length * element_bytes(job.dtype);
  parallel_for(job.num_threads, pieces, [&](int64_t piece, int) {
    const int64_t first = piece * kColumns;
    const int64_t count = job.columns - first < kColumns ? job.columns - first : kColumns;
    Dots d{};
    d.matrix = static_cast<const char*>(job.weight) + first * row_bytes;
    d.dtype = job.dtype;
    d.row_stride = job.length;
    d.num_rows = static_cast<int32_t>(count);
    d.length = job.length;
    d.vectors = vectors;
    d.num_vectors = job.rows;
    d.out = job.out + first;
    d.out_stride = job.columns;
    loops.dots(d);
  });
}

}  // namespace dspark::cpu
