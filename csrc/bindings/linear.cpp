// SPDX-License-Identifier: Apache-2.0
#include "cpu/linear.h"

#include "bindings/bindings.h"

namespace dspark::bindings {

void register_linear(py::module_& m) {
  m.attr("LINEAR_ROWS") = cpu::kLinearRows;
  m.def(
      "linear",
      [](uintptr_t weight, int32_t dtype, int32_t columns, int32_t length, uintptr_t x,
         int32_t rows, uintptr_t out, int32_t num_threads) {
        const bool sizes = columns >= 0 && length >= 1 && rows >= 0 && rows <= cpu::kLinearRows;
        if (!sizes || dtype < DSPARK_F32 || dtype > DSPARK_F16) {
          throw py::value_error("linear: columns, length, rows or dtype out of range");
        }
        py::gil_scoped_release release;
        cpu::linear({reinterpret_cast<const void*>(weight), dtype, columns, length,
                     reinterpret_cast<const float*>(x), rows, reinterpret_cast<float*>(out),
                     num_threads});
      },
      "out [rows, columns] = x [rows, length] times weight [columns, length] transposed; float32 x "
      "and out, contiguous.");
}

}  // namespace dspark::bindings
