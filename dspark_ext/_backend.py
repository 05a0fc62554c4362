# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a call, its scratch memory and its threads."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dspark_ext import _C, _simt
from dspark_ext._arrays import Checker, View, device_name, is_torch, on_device, to_numpy
from dspark_ext.status import TROUBLE, Status

__all__ = [
    "StatusError",
    "copy_into",
    "device_code",
    "launch",
    "num_threads",
    "ptr",
    "raise_on_trouble",
    "reference",
    "resolve",
    "run",
    "scratch",
]

BACKENDS = ("cpu", "cuda", "reference", "simt")
_scratch = threading.local()


class StatusError(RuntimeError):
    """``strict=True`` found trouble in the data; ``status`` holds the bits of every request."""

    def __init__(self, function: str, status: np.ndarray[Any, Any]) -> None:
        rows = np.flatnonzero(status & int(TROUBLE))
        text = "\n".join(f"request {r}: {Status.describe(int(status[r]))}" for r in rows[:8])
        super().__init__(f"{function}: trouble in {len(rows)} of {len(status)} requests\n{text}")
        self.status = status


def resolve(check: Checker, backend: str | None) -> str:
    """Return the backend that serves this call: forced, or by the device of the arrays."""
    device = "cpu" if check.like is None else device_name(check.like)
    if backend is None:
        backend = "cuda" if device.startswith("cuda") else "cpu"
    if not isinstance(backend, str) or backend not in BACKENDS:
        check.fail("backend", repr(backend)[:80], "None, 'cpu', 'cuda', 'reference' or 'simt'")
    elif backend in ("cpu", "reference", "simt") and device != "cpu":
        check.fail("backend", f"{backend!r} with arrays on {device}", "arrays on the CPU")
    elif backend == "cuda" and not device.startswith("cuda"):
        check.fail("backend", f"'cuda' with arrays on {device}", "torch tensors on a CUDA device")
    elif backend == "simt" and not _simt.load():
        built = "a source tree in which `make simt` has run, or its library named by DSPARK_SIMT"
        check.fail("backend", "'simt'", built)
    return str(backend)


def device_code(backend: str) -> int:
    """Return the device argument of the C API for a backend that is not the reference."""
    return {"cpu": _C.CPU, "cuda": _C.CUDA, "simt": _C.SIMT}[backend]


def num_threads() -> int:
    """Return torch's thread count when torch is loaded, else 0 (all that OpenMP has)."""
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else 0


def run(family: str, params: Any, backend: str = "cpu", like: Any = None) -> None:
    """Call ``_C.<family>`` with scratch memory: this thread's own, grown when needed.

    With ``backend="cuda"``, ``like`` is one of the tensors: it names the device.
    """
    if backend == "cuda":
        _run_cuda(family, params, like.device)
        return
    if backend == "simt":
        _simt.run(family, params)
        return
    needed = getattr(_C, family + "_workspace")(_C.CPU, params)
    getattr(_C, family)(_C.CPU, params, scratch(needed), needed, 0)


def scratch(needed: int) -> int:
    """Return the address of this thread's scratch memory, at least ``needed`` bytes of it."""
    if getattr(_scratch, "bytes", -1) < needed:
        _scratch.bytes = max(needed, 4096)
        _scratch.buffer = np.empty(_scratch.bytes + 256, dtype=np.uint8)
        _scratch.address = (_scratch.buffer.ctypes.data + 255) // 256 * 256
    return int(_scratch.address)


def launch(function: str, params: Any, backend: str, like: Any) -> None:
    """Call ``_C.<function>(device, params, stream)``, an operator without scratch memory."""
    if backend == "simt":
        _C.simt_forget()  # no array of an earlier call bounds this one
    if backend != "cuda":
        getattr(_C, function)(device_code(backend), params, 0)
        return
    torch = sys.modules["torch"]
    with torch.cuda.device(like.device):
        stream = torch.cuda.current_stream(like.device).cuda_stream
        getattr(_C, function)(_C.CUDA, params, stream)


def _run_cuda(family: str, params: Any, device: Any) -> None:
    """Queue the operator on the current stream of ``device``; nothing is waited for.

    The scratch memory is torch's: when this function returns it goes back to torch's allocator,
    which reuses it in the order of the same stream, or of the graph that is being captured.
    """
    torch = sys.modules["torch"]
    with torch.cuda.device(device):  # a launch needs its stream's device to be the current one
        needed = getattr(_C, family + "_workspace")(_C.CUDA, params)
        memory = torch.empty(max(needed, 1), dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
        getattr(_C, family)(_C.CUDA, params, memory.data_ptr(), needed, stream)


def reference(family: str, function: str) -> Callable[..., Any]:
    """Return ``dspark_ext.reference.<family>.<function>``."""
    module = importlib.import_module(f"dspark_ext.reference.{family}")
    return getattr(module, function)  # type: ignore[no-any-return]


def raise_on_trouble(function: str, status: Any, strict: bool) -> None:
    """With ``strict``, raise :class:`StatusError` when any request has a trouble bit."""
    if not strict:
        return
    if on_device(status) and sys.modules["torch"].cuda.is_current_stream_capturing():
        raise RuntimeError(f"{function}: a graph cannot hold strict=True, which waits")
    bits = to_numpy(status)
    if np.any(bits & int(TROUBLE)):
        raise StatusError(function, bits)


def ptr(v: View | None) -> int:
    """Return the address of a view, 0 when absent."""
    return 0 if v is None else v.ptr


def copy_into(
    target: View, values: np.ndarray[Any, Any], keep: np.ndarray[Any, Any] | None = None
) -> None:
    """Write a NumPy result of the reference into an output array of the caller's kind.

    ``keep`` [R] selects the requests to write; the rows of inactive ones stay untouched.
    """
    rows = slice(None) if keep is None or target.array.ndim == 0 else np.flatnonzero(keep)
    values = np.ascontiguousarray(values)[rows]
    if is_torch(target.array):
        torch = sys.modules["torch"]
        source = torch.from_numpy(np.ascontiguousarray(values)).to(target.array.dtype)
        target.array[rows if isinstance(rows, slice) else torch.from_numpy(rows)] = source
    else:
        target.array[rows] = values
