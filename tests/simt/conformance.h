// SPDX-License-Identifier: Apache-2.0
//
// Small kernels that show what a primitive does. test_conformance.py runs them in the emulation
// and, compiled by nvcc, on a GPU, with one expected answer for both: what the emulation claims
// about the hardware is true there. A file conformance_*.cu adds cases by defining global Case
// objects.
#ifndef DSPARK_TESTS_SIMT_CONFORMANCE_H_
#define DSPARK_TESTS_SIMT_CONFORMANCE_H_

#include "cuda/prim/launch.h"

namespace dspark::conformance {

/// A kernel reads `in` and writes `out`; both are 256-byte aligned, `out` is zeroed.
using Kernel = void (*)(const uint32_t* in, uint32_t* out);
/// For a case that needs more of the host than a launch.
using Run = dspark_status (*)(const uint32_t* in, uint32_t* out, void* stream);

struct Case {
  const char* name;
  size_t in_bytes, out_bytes;
  int capability;  ///< the least compute capability, 80 or 90
  Kernel kernel;
  Run run;
  unsigned blocks, threads;
  bool cooperative;
  const Case* next;

  static const Case*& first() {
    static const Case* list = nullptr;
    return list;
  }
  Case(const char* name_, size_t in, size_t out, Kernel kernel_, unsigned threads_ = 32,
       unsigned blocks_ = 1, bool cooperative_ = false)
      : name(name_),
        in_bytes(in),
        out_bytes(out),
        capability(80),
        kernel(kernel_),
        run(nullptr),
        blocks(blocks_),
        threads(threads_),
        cooperative(cooperative_),
        next(first()) {
    first() = this;
  }
  Case(const char* name_, int capability_, size_t in, size_t out, Run run_)
      : name(name_),
        in_bytes(in),
        out_bytes(out),
        capability(capability_),
        kernel(nullptr),
        run(run_),
        blocks(0),
        threads(0),
        cooperative(false),
        next(first()) {
    first() = this;
  }
};

}  // namespace dspark::conformance

#endif  // DSPARK_TESTS_SIMT_CONFORMANCE_H_
