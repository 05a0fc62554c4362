// SPDX-License-Identifier: Apache-2.0
//
// Shared by the binding files: params structs as Python objects whose pointer fields are integers,
// and the translation of a status into a Python exception.
#ifndef DSPARK_BINDINGS_BINDINGS_H_
#define DSPARK_BINDINGS_BINDINGS_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "dspark/dspark.h"

namespace dspark::bindings {

namespace py = pybind11;

/// Raise what a failed status stands for: ValueError, NotImplementedError or RuntimeError.
inline void raise_if_failed(const dspark_status& status) {
  if (status.code == DSPARK_OK) return;
  if (status.code == DSPARK_INVALID_ARGUMENT) throw py::value_error(status.message);
  if (status.code == DSPARK_UNSUPPORTED) {
    py::set_error(PyExc_NotImplementedError, status.message);
    throw py::error_already_set();
  }
  throw std::runtime_error(status.message);
}

/// Expose one field: numbers as they are, pointers as addresses (0 = NULL).
template <class Params, class Member>
void field(py::class_<Params>& cls, const char* name, Member Params::* member) {
  if constexpr (std::is_pointer_v<Member>) {
    cls.def_property(
        name, [member](const Params& p) { return reinterpret_cast<uintptr_t>(p.*member); },
        [member](Params& p, uintptr_t address) { p.*member = reinterpret_cast<Member>(address); });
  } else {
    cls.def_readwrite(name, member);
  }
}

/// Declare a params class, zero-filled with its struct_size set.
template <class Params>
py::class_<Params> params_class(py::module_& m, const char* name) {
  py::class_<Params> cls(m, name);
  cls.def(py::init([] {
    Params p{};
    p.struct_size = sizeof(Params);
    return p;
  }));
  return cls;
}

/// A device code of the binding alone: the CUDA kernels as compiled for the CPU by `make simt`, in
/// the library that simt_load() opened. Their C functions take DSPARK_CUDA.
constexpr int kSimt = 2;

/// The function `name` of that library; a Python exception if there is none.
void* simt_function(const std::string& name);

/// `run`, or the function of the same name in the library of kSimt.
template <class Function>
Function* choose(int device, Function* run, const std::string& name) {
  return device == kSimt ? reinterpret_cast<Function*>(simt_function(name)) : run;
}
inline dspark_device c_device(int device) {
  return device == kSimt ? DSPARK_CUDA : static_cast<dspark_device>(device);
}

/// Declare `name(device, params, workspace, workspace_bytes, stream)`.
template <class Params>
void runs(py::module_& m, const std::string& name,
          dspark_status (*run)(dspark_device, const Params*, dspark_workspace, void*)) {
  const std::string symbol = "dspark_" + name;
  m.def(
      name.c_str(),
      [run, symbol](int device, const Params& params, uintptr_t data, size_t bytes,
                    uintptr_t stream) {
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

/// Declare `name_workspace(device, params)`.
template <class Params>
void sizes(py::module_& m, const std::string& name,
           dspark_status (*workspace)(dspark_device, const Params*, size_t*)) {
  const std::string symbol = "dspark_" + name + "_workspace";
  m.def((name + "_workspace").c_str(),
        [workspace, symbol](int device, const Params& params) {
          size_t bytes = 0;
          auto* function = choose(device, workspace, symbol);
          raise_if_failed(function(c_device(device), &params, &bytes));
          return bytes;
        },
        py::arg("device"), py::arg("params"));
}

/// Declare both functions of a family.
template <class Params>
void family(py::module_& m, const char* name,
            dspark_status (*run)(dspark_device, const Params*, dspark_workspace, void*),
            dspark_status (*workspace)(dspark_device, const Params*, size_t*)) {
  runs(m, name, run);
  sizes(m, name, workspace);
}

void register_device(py::module_& m);
void register_simt(py::module_& m);
void register_confidence(py::module_& m);
void register_paged_kv(py::module_& m);
void register_prefix_scheduler(py::module_& m);
void register_markov_loop(py::module_& m);
void register_testing(py::module_& m);
void register_rejection_sampler(py::module_& m);
void register_vocab_parallel(py::module_& m);
void register_verify_attention(py::module_& m);
void register_linear(py::module_& m);

}  // namespace dspark::bindings

#endif  // DSPARK_BINDINGS_BINDINGS_H_
