// SPDX-License-Identifier: Apache-2.0
//
// Emulation of csrc/cuda/prim/launch.h: a launch runs to its end before the call returns.
#ifndef DSPARK_TESTS_SIMT_PRIM_LAUNCH_H_
#define DSPARK_TESTS_SIMT_PRIM_LAUNCH_H_

#include <tuple>

#include "core/problems.h"
#include "simt/cuda.h"

namespace dspark::simt {

/// A kernel with its arguments: what a launch runs once a thread.
struct Body {
  void (*run)(const void* arguments);
  const void* arguments;
  size_t bytes;
};

dspark_status launch(const char* name, const prim::LaunchConfig& config, const Body& body);

}  // namespace dspark::simt

namespace dspark::prim {

template <class... P, class... A>
dspark_status launch(const char* name, void (*kernel)(P...), const LaunchConfig& config,
                     A... arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "one argument for each parameter");
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> values;
  };
  const Call call{kernel, std::tuple<P...>(static_cast<P>(arguments)...)};
  const auto run = [](const void* data) {
    const Call& c = *static_cast<const Call*>(data);
    std::apply(c.kernel, c.values);
  };
  return simt::launch(name, config, {run, &call, sizeof call});
}

}  // namespace dspark::prim

#endif  // DSPARK_TESTS_SIMT_PRIM_LAUNCH_H_
