# SPDX-License-Identifier: Apache-2.0
"""Arrays as the operators see them, and the checker that lists everything wrong at once.

Torch tensors (CPU or CUDA) and NumPy arrays are accepted alike; results are of the same kind as the
first array given. Torch is never imported here: a tensor is recognised through ``sys.modules``.

Values of a tensor on a device are never read: that would wait for everything queued before. Rules
about values are checked here for memory of the host only; kernels report them in the status word.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ArgumentError",
    "Checker",
    "View",
    "empty",
    "is_torch",
    "item_size",
    "on_device",
    "to_numpy",
]

#: dtype name -> code of ``dspark_dtype``.
DTYPE_CODE = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "float8_e4m3fn": 4}
FLOATS = ("float32", "bfloat16", "float16")
#: Element types of a paged cache.
KV_FLOATS = (*FLOATS, "float8_e4m3fn")
#: Bytes of the types that NumPy does not know by name.
_SIZES = {"bfloat16": 2, "float8_e4m3fn": 1}
INTS = ("int32", "int64")
BOOLS = ("uint8", "bool", "int8")


class ArgumentError(ValueError):
    """Arguments break the contract. The text lists every problem: argument, got, expected."""


def is_torch(x: Any) -> bool:
    """Return whether ``x`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def dtype_name(x: Any) -> str:
    """Return the dtype of an array as NumPy spells it (``"bfloat16"`` included)."""
    return _dtype_text(x.dtype)


@functools.cache  # NumPy composes the text anew each time: a third of a small call
def _dtype_text(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(x: Any) -> str:
    """Return ``"cpu"``, ``"cuda:0"``, ... of an array."""
    return _device_text(x.device) if is_torch(x) else "cpu"


@functools.cache  # composed anew each time otherwise, as a dtype's is
def _device_text(device: Any) -> str:
    return str(device)


def on_device(x: Any) -> bool:
    """Return whether the values of ``x`` are out of the host's reach without waiting."""
    return device_name(x) != "cpu"


def item_size(dtype: str) -> int:
    """Return the bytes of an element of a named dtype."""
    return _SIZES.get(dtype) or np.dtype(dtype).itemsize


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy array of the same values; bfloat16 and float8 become float32 (exact)."""
    if is_torch(x):
        x = x.detach().cpu().resolve_neg()
        x = x.float().numpy() if dtype_name(x) in _SIZES else x.numpy()
    array: np.ndarray[Any, Any] = np.asarray(x)
    return array.astype(np.float32) if dtype_name(array) in _SIZES else array


class View(NamedTuple):
    """An array the C API may read or write: address, shape, element strides. Keeps it alive."""

    array: Any
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def code(self) -> int:
        """The ``dspark_dtype`` of the elements."""
        return DTYPE_CODE[self.dtype]


#: The views made since this list was last emptied; None while nobody wants to know (``_simt``).
traced: list[View] | None = None


def view(x: Any) -> View:
    """Wrap a torch tensor or NumPy array without copying."""
    if is_torch(x):
        v = View(x, x.data_ptr(), tuple(x.shape), x.stride(), _dtype_text(x.dtype))
    else:
        strides = tuple(s // x.itemsize for s in x.strides)
        v = View(x, x.ctypes.data, tuple(x.shape), strides, dtype_name(x))
    if traced is not None:
        traced.append(v)
    return v


def _unusable(x: Any) -> str | None:
    """Say why the memory behind an array is not what it shows, or ``None`` when it is."""
    if is_torch(x):
        if x.layout is not sys.modules["torch"].strided:
            return f"a tensor of layout {x.layout}"
        return "a lazily negated view (call resolve_neg())" if x.is_neg() else None
    size = x.itemsize
    if any(n > 1 and s % size for n, s in zip(x.shape, x.strides, strict=True)):
        return f"byte strides {list(x.strides)}, not multiples of the {size}-byte elements"
    return None


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """Allocate an uninitialised array of ``like``'s kind and device."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if dtype == "bfloat16":
        return np.empty(shape, dtype=like.dtype)  # an ml_dtypes array: reuse its dtype object
    return np.empty(shape, dtype=dtype)


def full(shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
    """Allocate an array of ``like``'s kind filled with ``value``."""
    out = empty(shape, dtype, like)
    out[...] = value
    return out


def _describe(x: Any) -> str:
    if x is None:
        return "None"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{dtype_name(x)} {list(x.shape)} on {device_name(x)}"
    return f"{type(x).__name__} {x!r}"[:80]


def is_integer(x: Any) -> bool:
    """Whether a scalar argument is a whole number; a truth value is none."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether a scalar argument is a number, NaN and infinities included; a truth value is none."""
    return is_integer(x) or isinstance(x, (float, np.floating))


def shape_of(x: Any) -> tuple[int, ...] | None:
    """Shape of an array or of nested sequences; ``None`` where NumPy finds none (ragged lists)."""
    if hasattr(x, "shape"):
        return tuple(x.shape)
    try:
        shape: tuple[int, ...] = np.shape(x)
        return shape
    except (TypeError, ValueError):
        return None


def _format_shape(shape: Sequence[int | str | None]) -> str:
    return "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"


class Checker:
    """Collects every problem of one call; :meth:`done` raises one :class:`ArgumentError`.

    The first array seen decides the kind (torch or NumPy) and the device of the results; arrays of
    another device or kind are reported.

    Examples
    --------
    >>> check = Checker("demo")
    >>> a = check.array("logit", np.zeros((2, 3)), ("R", "gamma"), dtypes=("float32",))
    >>> check.done()
    Traceback (most recent call last):
        ...
    dspark_ext._arrays.ArgumentError: demo: 1 problem
      logit: got float64 [2, 3] on cpu, expected float32
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self.problems: list[str] = []
        self.like: Any = None
        self.sizes: dict[str, int] = {}

    def fail(self, name: str, got: str, expected: str) -> None:
        """Record one problem."""
        self.problems.append(f"{name}: got {got}, expected {expected}")

    def require(self, condition: bool, name: str, got: Any, expected: str) -> bool:
        """Record a problem unless ``condition`` holds; return the condition."""
        if not condition:
            self.fail(name, got if isinstance(got, str) else _describe(got), expected)
        return condition

    def choice(self, name: str, x: Any, options: Sequence[str]) -> bool:
        """Record a problem unless ``x`` is one of the words; return whether it is."""
        known = isinstance(x, str) and x in options
        return self.require(known, name, repr(x)[:80], " | ".join(options))

    def whole(self, name: str, x: Any, low: int, high: int | None = None) -> bool:
        """Record a problem unless ``x`` is an integer from ``low`` to ``high``; return whether."""
        good = is_integer(x) and x >= low and (high is None or x <= high)
        reach = f">= {low}" if high is None else f"in {low}..{high}"
        return self.require(good, name, str(x) if is_number(x) else x, f"an integer {reach}")

    def number(self, name: str, x: Any, holds: Callable[[Any], bool], expected: str) -> bool:
        """Record a problem unless ``x`` is a number for which ``holds``; return whether it is."""
        good = is_number(x) and abs(x) <= sys.float_info.max and bool(holds(float(x)))
        return self.require(good, name, str(x) if is_number(x) else x, f"a number {expected}")

    def done(self) -> None:
        """Raise one error that lists everything recorded."""
        if self.problems:
            count = len(self.problems)
            head = f"{self.function}: {count} problem{'s' if count > 1 else ''}"
            raise ArgumentError("\n  ".join([head, *self.problems]))

    def _size_problem(self, shape: Sequence[int | str | None], got: tuple[int, ...]) -> bool:
        if len(got) != len(shape):
            return True
        bad = False
        for want, n in zip(shape, got, strict=True):
            if isinstance(want, str):
                if self.sizes.setdefault(want, n) != n:
                    bad = True
            elif want is not None and want != n:
                bad = True
        return bad

    def array(
        self,
        name: str,
        x: Any,
        shape: Sequence[int | str | None],
        dtypes: Sequence[str] = FLOATS,
        *,
        optional: bool = False,
        contiguous: bool = False,
    ) -> View | None:
        """Check one array and return its view; ``None`` when absent or wrong.

        ``shape`` entries: a number, ``None`` (any) or a name, which is bound to the size at first
        sight and must agree afterwards. The last dimension must be contiguous; with
        ``contiguous=True`` the whole array must be.
        """
        if x is None:
            if not optional:
                self.fail(name, "None", f"an array {_format_shape(shape)}")
            return None
        torch_kind = is_torch(x)
        if not (torch_kind or isinstance(x, np.ndarray)):
            self.fail(name, _describe(x), "a torch tensor or NumPy array")
            return None
        ok = True
        if self.like is None:
            self.like = x
        elif torch_kind != is_torch(self.like) or (torch_kind and x.device != self.like.device):
            kind = "torch" if is_torch(self.like) else "NumPy"
            got = f"{'torch' if is_torch(x) else 'NumPy'} on {device_name(x)}"
            self.fail(name, got, f"{kind} on {device_name(self.like)} like the other arrays")
            ok = False
        if dtype_name(x) not in dtypes:
            self.fail(name, _describe(x), " or ".join(dtypes))
            ok = False
        if self._size_problem(shape, tuple(x.shape)):
            bound = [self.sizes.get(n, n) if isinstance(n, str) else n for n in shape]
            self.fail(name, f"shape {list(x.shape)}", f"{_format_shape(bound)}")
            return None
        reason = _unusable(x)
        if reason is not None:
            self.fail(name, reason, "a plain strided array")
            return None
        v = view(x)
        if v.shape and v.shape[-1] > 1 and v.strides[-1] != 1 and 0 not in v.shape:
            self.fail(name, f"strides {list(v.strides)}", "a contiguous last dimension")
            ok = False
        elif contiguous and not _is_contiguous(v):
            self.fail(name, f"strides {list(v.strides)}", "a contiguous array")
            ok = False
        return v if ok else None

    def per_request(
        self, name: str, x: Any, n: int, dtype: str, *, optional: bool = True
    ) -> View | None:
        """Check a small per-request argument ``[n]``; scalars and lists become arrays.

        Integer arrays of another width and float64 are converted to ``dtype``, with their range
        checked where the host can read them.
        """
        if x is None:
            if not optional:
                self.fail(name, "None", f"[{n}] or a scalar")
            return None
        if is_torch(x) or isinstance(x, np.ndarray):
            if self.like is not None and device_name(x) != device_name(self.like):
                self.fail(name, _describe(x), f"an array on {device_name(self.like)}")
                return None
            reason = _unusable(x)
            if reason is not None:
                self.fail(name, reason, "a plain strided array")
                return None
            v = view(x)
            if v.shape == (n,) and _is_contiguous(v):
                if v.dtype == dtype:
                    return v
                if dtype == "uint64" and v.dtype == "int64":  # the same bits
                    return View(x, v.ptr, v.shape, v.strides, dtype)
            if on_device(x):
                return self._device_request(name, x, n, dtype)
            values = to_numpy(x)
        else:
            try:
                values = _as_numpy(x, dtype)
            except (TypeError, ValueError, OverflowError):
                self.fail(name, _describe(x), f"[{n}] {dtype} or a scalar")
                return None
        if values.shape not in ((), (n,)):
            self.fail(name, f"shape {list(values.shape)}", f"[{n}] or a scalar")
            return None
        converted = _convert(values, dtype)
        if converted is None:
            self.fail(name, f"{values.dtype} {values.tolist()!r}"[:80], f"values of {dtype}")
            return None
        return view(self._spread(converted, n))

    def _device_request(self, name: str, x: Any, n: int, dtype: str) -> View | None:
        """Convert a tensor of another dtype, or one value for all requests, on its device."""
        kinds = (*FLOATS, "float64") if dtype == "float32" else ()
        if dtype_name(x) not in (*kinds, *INTS, *BOOLS, "int16", "uint64"):
            self.fail(name, _describe(x), f"[{n}] {dtype} or a scalar")
            return None
        if tuple(x.shape) not in ((), (n,)):
            self.fail(name, f"shape {list(x.shape)}", f"[{n}] or a scalar")
            return None
        torch = sys.modules["torch"]
        if dtype == "uint64":  # conversions between 64-bit integers keep the bits, as on the host
            x = x if dtype_name(x) == "uint64" else x.to(torch.int64).view(torch.uint64)
        else:
            x = x.to(getattr(torch, dtype))
        return view(x.expand(n).contiguous())

    def like_kind(self, x: np.ndarray[Any, Any]) -> Any:
        """``x`` as an array of the kind and on the device of the other arrays."""
        if self.like is not None and is_torch(self.like):
            return sys.modules["torch"].from_numpy(x).to(self.like.device)
        return x

    def _spread(self, x: np.ndarray[Any, Any], n: int) -> Any:
        """``n`` values, from one or ``n``, of the kind and on the device of the other arrays."""
        if x.ndim == 1 or self.like is None or not on_device(self.like):
            return self.like_kind(np.array(np.broadcast_to(x, (n,))))
        torch = sys.modules["torch"]  # a fill can be captured into a graph, a copy cannot
        signed = x.view(np.int64) if x.dtype == np.uint64 else x
        dtype, device = getattr(torch, str(signed.dtype)), self.like.device
        filled = torch.full((n,), signed.item(), dtype=dtype, device=device)
        return filled.view(torch.uint64) if x.dtype == np.uint64 else filled

    def values(self, v: View | None) -> np.ndarray[Any, Any]:
        """Return host values of a small argument for range checks.

        Empty when it is absent, or on a device: nothing is known about those.
        """
        return np.zeros(0) if v is None or on_device(v.array) else to_numpy(v.array)

    def results(self, out: Any, kind: type) -> Any:
        """Check that preallocated results are of the function's own class; else ``None``."""
        ok = out is None or isinstance(out, kind)
        return out if self.require(ok, "out", out, f"a {kind.__name__} or None") else None

    def output(self, name: str, out: Any, shape: tuple[int, ...], dtype: str) -> View | None:
        """Check a preallocated result, or allocate one of the right kind."""
        if out is None:
            like = self.like if self.like is not None else np.zeros(0)
            return view(empty(shape, dtype, like))
        torch = sys.modules.get("torch")
        if torch is not None and type(out) is torch.Tensor and type(self.like) is torch.Tensor:
            plain = out.shape == shape and out.dtype is getattr(torch, dtype)
            plain = plain and out.device == self.like.device and out.layout is torch.strided
            if plain and out.is_contiguous() and not out.is_neg():
                return view(out)
        elif isinstance(out, np.ndarray):
            flags = out.flags
            plain = type(out) is np.ndarray and not (self.like is not None and is_torch(self.like))
            plain = plain and out.shape == shape and _dtype_text(out.dtype) == dtype
            if plain and flags.c_contiguous and flags.writeable:
                return view(out)  # the usual case of a loop, without the questions
            self.require(flags.writeable, name, "a read-only array", "one that can be written")
        return self.array(name, out, shape, (dtype,), contiguous=True)


def _is_contiguous(v: View) -> bool:
    if 0 in v.shape:
        return True
    expected = 1
    for n, s in zip(reversed(v.shape), reversed(v.strides), strict=True):
        if n > 1 and s != expected:
            return False
        expected *= n
    return True


def _as_numpy(x: Any, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "uint64":  # Python integers above 2^63 survive only as objects
        return np.asarray(x, dtype=object)
    values = np.asarray(x)
    return values if values.size else values.astype(dtype)  # an empty list has no dtype of its own


def _convert(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any] | None:
    kind = np.dtype(dtype).kind
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if kind in "iu":
        if values.dtype.kind not in "iuO" or (
            values.dtype.kind == "O"
            and not all(isinstance(v, (int, np.integer)) for v in values.reshape(-1))
        ):
            return None
        info = np.iinfo(dtype)
        if values.dtype.kind == "i" and dtype == "uint64":
            return (
                values.astype(np.int64).view(np.uint64)
                if values.ndim
                else np.uint64(int(values) & 0xFFFFFFFFFFFFFFFF).reshape(())
            )
        if values.size and (int(values.min()) < info.min or int(values.max()) > info.max):
            return None
    elif values.dtype.kind not in "iuf":
        return None
    return values.astype(dtype)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Silence NumPy's floating-point warnings where NaN and infinities are legal data."""
    with np.errstate(all="ignore"):
        yield
