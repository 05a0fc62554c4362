// SPDX-License-Identifier: Apache-2.0
//
// From checked arguments to the backend of the device that was asked for: the second half of every
// C function of a family that runs on both.
#ifndef DSPARK_CORE_DISPATCH_H_
#define DSPARK_CORE_DISPATCH_H_

#include "core/checks.h"

namespace dspark {

/// The functions of families.h that belong to one family; the CUDA ones are NULL in a build
/// without CUDA, whose check_device() lets no such call through.
template <class Params>
struct Backends {
  size_t (*cpu_workspace)(const Params&);
  void (*cpu)(const Params&, void* scratch);
  dspark_status (*cuda_workspace)(const Params&, size_t* bytes);
  dspark_status (*cuda)(const Params&, void* scratch, void* stream);
};

#ifdef DSPARK_WITH_CUDA
#define DSPARK_BACKENDS(family)                                                            \
  {dspark::cpu::family##_workspace, dspark::cpu::family, dspark::cuda::family##_workspace, \
   dspark::cuda::family}
#else
#define DSPARK_BACKENDS(family) \
  {dspark::cpu::family##_workspace, dspark::cpu::family, nullptr, nullptr}
#endif

/// Scratch bytes of a call.
template <class Params>
dspark_status workspace_bytes(const Backends<Params>& backends, dspark_device device,
                              const Params& p, size_t* bytes) {
  if (device == DSPARK_CUDA) return backends.cuda_workspace(p, bytes);
  *bytes = backends.cpu_workspace(p);
  return ok_status();
}

/// The workspace function behind its checks.
template <class Params>
dspark_status finish_workspace(Problems& problems, const Backends<Params>& backends,
                               dspark_device device, const Params& p, size_t* bytes) {
  check_device(problems, device);
  check_pointer(problems, "bytes", bytes);
  if (!problems.none()) return problems.status();
  return workspace_bytes(backends, device, p, bytes);
}

/// The family's function behind its checks: the workspace is looked at last, then the call runs.
template <class Params>
dspark_status finish_call(Problems& problems, const Backends<Params>& backends,
                          dspark_device device, const Params& p, const dspark_workspace& workspace,
                          void* stream) {
  check_device(problems, device);
  if (!problems.none()) return problems.status();
  size_t needed = 0;
  const dspark_status sized = workspace_bytes(backends, device, p, &needed);
  if (sized.code != DSPARK_OK) return sized;
  check_workspace(problems, workspace, needed);
  if (!problems.none()) return problems.status();
  if (device == DSPARK_CUDA) return backends.cuda(p, workspace.data, stream);
  backends.cpu(p, workspace.data);
  return ok_status();
}

}  // namespace dspark

#endif  // DSPARK_CORE_DISPATCH_H_
