// SPDX-License-Identifier: Apache-2.0
#include "core/device.h"

#include "bindings/bindings.h"

namespace dspark::bindings {
namespace {

py::dict cuda_info() {
  dspark_cuda_info info{};
  info.struct_size = sizeof info;
  raise_if_failed(dspark_cuda_query(&info));
  py::dict out;
  out["compiled"] = info.compiled != 0;
  out["usable"] = info.usable != 0;
  out["num_devices"] = info.num_devices;
  out["driver_version"] = info.driver_version;
  out["runtime_version"] = info.runtime_version;
  out["archs"] = std::string(info.archs);
  out["reason"] = std::string(info.reason);
  return out;
}

py::dict cuda_device(int index) {
  dspark_cuda_device_info info{};
  info.struct_size = sizeof info;
  raise_if_failed(dspark_cuda_device(index, &info));
  py::dict out;
  out["index"] = info.index;
  out["name"] = std::string(info.name);
  out["compute_capability"] = py::make_tuple(info.major, info.minor);
  out["num_multiprocessors"] = info.num_multiprocessors;
  out["shared_bytes_per_block"] = info.shared_bytes_per_block;
  out["l2_bytes"] = info.l2_bytes;
  out["memory_bytes"] = info.memory_bytes;
  return out;
}

}  // namespace

void register_device(py::module_& m) {
  m.def("cuda_info", &cuda_info);
  m.def("cuda_device", &cuda_device, py::arg("index"));
  m.def(
      "cuda_probe",
      [](int index) {
        py::gil_scoped_release release;
        const dspark_status status = dspark_cuda_probe(index);
        py::gil_scoped_acquire acquire;
        raise_if_failed(status);
      },
      py::arg("index"));
  m.def(
      "cuda_archs_serve",
      [](const std::string& archs, int major, int minor) {
        return archs_serve(archs.c_str(), major, minor);
      },
      py::arg("archs"), py::arg("major"), py::arg("minor"));
}

}  // namespace dspark::bindings
