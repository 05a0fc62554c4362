# SPDX-License-Identifier: Apache-2.0
"""``backend="simt"``: the CUDA kernels on the CPU, for tests.

``make simt`` in a source tree builds two libraries that run the kernels on host memory. The fast
one is for results. The checked one finds races and accesses out of bounds, so it is told of every
array of a call: all of them pass through ``_arrays.view``, which keeps a list while it is in use.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np

from dspark_ext import _C, _arrays
from dspark_ext._arrays import View, item_size

__all__ = ["load", "run"]

_TREE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_BUILT = os.path.join(_TREE, "build", "simt", "libdspark_simt.so")
_loaded: str | None = None
_traced = False  # whether the arrays of the call that runs have been seen


def load() -> bool:
    """Use the library named by ``DSPARK_SIMT``, else the source tree's; False without any."""
    global _loaded, _traced
    path = os.environ.get("DSPARK_SIMT") or (_BUILT if os.path.exists(_BUILT) else "")
    if not path or not os.path.exists(path):
        return False
    _traced = path == _loaded and _arrays.traced is not None
    if path != _loaded:
        _C.simt_load(path)
        _loaded = path
        _arrays.traced = [] if _C.simt_checks() else None
    return True


@cache
def _garbage() -> np.random.Generator:
    """Made when a call wants it: importing numpy.random takes longer than all of this package."""
    return np.random.default_rng(0)


def _extent(v: View) -> tuple[int, int]:
    """Address and bytes of what an array spans."""
    itemsize = item_size(v.dtype)
    if 0 in v.shape:
        return v.ptr, 0
    reach = [(n - 1) * s for n, s in zip(v.shape, v.strides, strict=True)]
    low = sum(x for x in reach if x < 0)
    high = sum(x for x in reach if x > 0)
    return v.ptr + low * itemsize, (high - low + 1) * itemsize


def _register(params: Any, workspace: np.ndarray[Any, Any]) -> None:
    """Tell the checked library of the arrays that ``params`` points to.

    The call that loads the library made its views before: nothing is registered, all is allowed.
    """
    if not _traced:
        return
    views = {v.ptr: v for v in _arrays.traced or []}
    _C.simt_register(workspace.ctypes.data, workspace.nbytes, "workspace")
    for name in dir(params):
        value = getattr(params, name)
        if not name.startswith("_") and isinstance(value, int) and value in views:
            _C.simt_register(*_extent(views[value]), name)
    if _arrays.traced:
        _arrays.traced.clear()


def run(function: str, params: Any, family: str = "") -> None:
    """Call the kernels of ``function``. The workspace holds garbage, another at each call.

    ``family`` is named where it has several functions; its arrays are not registered, since some
    lie in a struct of the params.
    """
    needed = getattr(_C, (family or function) + "_workspace")(_C.SIMT, params)
    memory = np.frombuffer(_garbage().bytes(needed + 256), np.uint8).copy()
    start = -memory.ctypes.data % 256
    workspace = memory[start : start + needed]
    if _C.simt_checks():
        _C.simt_forget()  # what somebody else told the library
        if not family:
            _register(params, workspace)
    try:
        getattr(_C, function)(_C.SIMT, params, workspace.ctypes.data, needed, 0)
    finally:
        _C.simt_forget()  # the arrays may be gone before the next call
