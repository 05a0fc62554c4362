// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels on the CPU: the library that `make simt` builds is opened at run time, so
// nothing of it is in the package. Several may be open (the fast and the checked one); one is in
// use.
#include <dlfcn.h>

#include <map>

#include "bindings/bindings.h"

namespace dspark::bindings {
namespace {

void* current = nullptr;

/// Open the library at `path`, or find it open, and use it from now on.
void load(const std::string& path) {
  static std::map<std::string, void*> opened;
  void*& library = opened[path];
  // Local: its C functions have the names of those linked into this module.
  if (library == nullptr) library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  current = library;
}

template <class Function>
Function* find(const char* name) {
  return reinterpret_cast<Function*>(simt_function(name));
}

}  // namespace

void* simt_function(const std::string& name) {
  if (current == nullptr) throw std::runtime_error("no SIMT library is loaded: call simt_load()");
  void* function = dlsym(current, name.c_str());
  if (function == nullptr) throw std::runtime_error("the SIMT library has no function " + name);
  return function;
}

void register_simt(py::module_& m) {
  m.attr("SIMT") = kSimt;
  m.def("simt_load", &load, py::arg("path"),
        "Use the library at `path` for calls with the device SIMT.");
  m.def(
      "simt_checks", [] { return find<int()>("dspark_simt_checks")() != 0; },
      "Whether the library in use checks memory accesses.");
  m.def(
      "simt_register",
      [](uintptr_t data, size_t bytes, const std::string& name) {
        find<void(const void*, size_t, const char*)>("dspark_simt_register")(
            reinterpret_cast<const void*>(data), bytes, name.c_str());
      },
      py::arg("data"), py::arg("bytes"), py::arg("name"),
      "Let the kernels launched from now on use this memory.");
  m.def(
      "simt_forget", [] { find<void()>("dspark_simt_forget")(); }, "Take back all registrations.");
}

}  // namespace dspark::bindings
