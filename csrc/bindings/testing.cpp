// SPDX-License-Identifier: Apache-2.0
//
// `_C._testing`: the arithmetic of core/ on arrays, for the tests alone. Not part of the API.
#include <vector>

#include "bindings/bindings.h"
#include "core/dtype.h"
#include "core/math.h"
#include "core/philox.h"
#include "core/sampler.h"

namespace dspark::bindings {
namespace {

// Apply f to the n elements at an address, result behind another.
template <class In, class Out, class F>
void map(py::module_& m, const char* name, F f) {
  m.def(
      name,
      [f](uintptr_t in, uintptr_t out, int64_t n) {
        const In* x = reinterpret_cast<const In*>(in);
        Out* y = reinterpret_cast<Out*>(out);
        for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
      },
      py::arg("input"), py::arg("output"), py::arg("count"));
}

py::tuple words(const Philox4& r) { return py::make_tuple(r.w[0], r.w[1], r.w[2], r.w[3]); }

}  // namespace

void register_testing(py::module_& parent) {
  py::module_ m = parent.def_submodule("_testing", "Arithmetic of core/, exposed for tests.");
  map<float, float>(m, "exp_f32", [](float x) { return exp_f32(x); });
  map<float, float>(m, "exp2_weight", [](float x) { return exp2_weight(x); });
  map<float, float>(m, "expm1_f32", [](float x) { return expm1_f32(x); });
  map<double, double>(m, "exp_f64", [](double x) { return exp_f64(x); });
  map<double, double>(m, "exp_f64_nonpositive", [](double x) { return exp_f64_nonpositive(x); });
  map<double, double>(m, "expm1_f64", [](double x) { return expm1_f64(x); });
  map<double, double>(m, "log_f64", [](double x) { return log_f64(x); });
  map<double, double>(m, "sin_f64", [](double x) {
    double sine, cosine;
    sin_cos_f64(x, &sine, &cosine);
    return sine;
  });
  map<double, double>(m, "cos_f64", [](double x) {
    double sine, cosine;
    sin_cos_f64(x, &sine, &cosine);
    return cosine;
  });
  map<uint32_t, double>(m, "gumbel", [](uint32_t word) { return gumbel(word); });
  map<float, uint16_t>(m, "f32_to_bf16", [](float x) { return f32_to_bf16(x); });
  map<float, uint16_t>(m, "f32_to_f16", [](float x) { return f32_to_f16(x); });
  map<uint16_t, float>(m, "bf16_to_f32", [](uint16_t x) { return bf16_to_f32(x); });
  map<uint16_t, float>(m, "f16_to_f32", [](uint16_t x) { return f16_to_f32(x); });
  map<float, uint8_t>(m, "f32_to_f8", [](float x) { return f32_to_f8(x); });
  map<uint8_t, float>(m, "f8_to_f32", [](uint8_t x) { return f8_to_f32(x); });
  map<float, uint32_t>(m, "ordered_f32", [](float x) { return ordered_f32(x); });
  map<double, uint64_t>(m, "ordered_f64", [](double x) { return ordered_f64(x); });
  m.def("philox", [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return words(philox4x32_10(Philox4{{c0, c1, c2, c3}}, k0, k1));
  });
  m.def("draw",
        [](uint64_t seed, int64_t position, uint32_t distance, uint32_t kind, uint32_t index) {
          return words(draw({seed, position, distance, kind}, index));
        });
  m.def("draw_u53", [](uint64_t seed, int64_t position, uint32_t distance, uint32_t kind) {
    return draw_u53({seed, position, distance, kind});
  });
  m.def("segment_gumbel",
        [](uint64_t seed, int64_t position, uint32_t distance, uint32_t kind, uint32_t segment) {
          return segment_gumbel({seed, position, distance, kind}, segment);
        });
  m.def("pack_key", [](double key, uint32_t segment) { return pack_key(key, segment); });
  m.def("packed_segment", [](uint64_t packed) { return packed_segment(packed); });
  m.def("log_add", [](double a, double b) { return log_add(a, b); });
  m.def("halving_sum", [](uintptr_t w) { return halving_sum(reinterpret_cast<const float*>(w)); });
  m.def("inner_pick", [](uintptr_t w, uint64_t u53) {
    return inner_pick(reinterpret_cast<const float*>(w), u53);
  });
}

}  // namespace dspark::bindings
