// SPDX-License-Identifier: Apache-2.0
//
// The `work` array: written by prefix_scheduler, read by verify_attention, opaque to callers.
//
//   work[0]  kWorkTag       tells the layout; anything else is not a plan of this version
//   work[1]  R              requests of the call that wrote it
//   work[2]  n              active requests = entries that follow, n <= R
//   work[3]  B              rows of the flattened batch = cu_seqlens[R]
//   work[4 + 3 i]           request of entry i, ascending in i
//   work[4 + 3 i + 1]       its first row = cu_seqlens[request]
//   work[4 + 3 i + 2]       its rows = 1 + l, at least 1
//   zeros behind the n entries, 4 + 3 R words in all
//
// The rows of the entries are disjoint and cover [0, B) in order, so a backend may hand out entries
// to workers without reading cu_seqlens. A reader that walks the plan must still bound what it
// finds: the array lives in the caller's memory.
#ifndef DSPARK_CORE_WORK_PLAN_H_
#define DSPARK_CORE_WORK_PLAN_H_

#include <stdint.h>

#include "core/macros.h"

namespace dspark {

constexpr int32_t kWorkTag = 0x44535031;  // "DSP1"
constexpr int32_t kWorkHeader = 4;
constexpr int32_t kWorkEntry = 3;

struct WorkEntry {
  int32_t request;
  int32_t first_row;
  int32_t rows;
};

/// Entries of `work` that a batch of R requests needs.
DSPARK_HD int64_t work_plan_size(int64_t num_requests) {
  return kWorkHeader + kWorkEntry * num_requests;
}

DSPARK_HD void write_work_header(int32_t* work, int32_t requests, int32_t active, int32_t rows) {
  work[0] = kWorkTag;
  work[1] = requests;
  work[2] = active;
  work[3] = rows;
}

DSPARK_HD void write_work_entry(int32_t* work, int32_t i, WorkEntry entry) {
  int32_t* out = work + kWorkHeader + kWorkEntry * static_cast<int64_t>(i);
  out[0] = entry.request;
  out[1] = entry.first_row;
  out[2] = entry.rows;
}

/// Whether `work` holds a plan for these requests that fits in `size` entries and `max_rows` rows.
DSPARK_HD bool work_plan_matches(const int32_t* work, int64_t size, int32_t num_requests,
                                 int32_t max_rows) {
  return size >= work_plan_size(num_requests) && work[0] == kWorkTag && work[1] == num_requests &&
         work[2] >= 0 && work[2] <= num_requests && work[3] >= 0 && work[3] <= max_rows;
}

DSPARK_HD WorkEntry read_work_entry(const int32_t* work, int32_t i) {
  const int32_t* in = work + kWorkHeader + kWorkEntry * static_cast<int64_t>(i);
  return WorkEntry{in[0], in[1], in[2]};
}

}  // namespace dspark

#endif  // DSPARK_CORE_WORK_PLAN_H_
