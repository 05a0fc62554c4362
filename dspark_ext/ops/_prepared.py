# SPDX-License-Identifier: Apache-2.0
"""Calls that repeat: the arguments of one shape are checked once, later calls swap addresses.

A decoder calls its attention once a layer, so checking every array in Python each time would cost
more than the operator. Everything that the checks look at (shape, strides, dtype, device, scalar
arguments) is the key of a cache of filled params objects; an array that does not match the key goes
through the checks again. Values are not looked at: they are the status word's business.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

__all__ = ["Prepared", "addresses", "all_as_given", "signature", "zeros_like"]

_LIMIT = 256  # shapes kept per thread and family; a decoder uses a few


def signature(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return what the checks see of arrays (``None`` allowed among them).

    The answer is ``None`` when one is not a plain array: a list must be converted at each call, and
    a mixture of tensors and NumPy arrays is an error that the checks have to report.
    """
    try:  # tensors alone, the common case: no question asked about their type
        return tuple(
            [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in arrays]
        )
    except (AttributeError, RuntimeError, TypeError):
        pass
    if not all(x is None or isinstance(x, np.ndarray) for x in arrays):
        return None
    return tuple(
        [None if x is None else (x.shape, x.strides, x.dtype, x.flags.writeable) for x in arrays]
    )


def all_as_given(pairs: tuple[tuple[Any, Any], ...]) -> bool:
    """Return whether each (view, argument) is the caller's own array, not a converted copy."""
    return all(x is None if v is None else v.array is x for v, x in pairs)


def addresses(arrays: tuple[Any, ...]) -> list[int]:
    """Return the address of each array's first element (0 for ``None``)."""
    try:
        return [0 if x is None else x.data_ptr() for x in arrays]
    except AttributeError:
        return [0 if x is None else x.ctypes.data for x in arrays]


def zeros_like(x: Any) -> Any:
    """Return a contiguous array of zeros of ``x``'s kind, shape, dtype and device."""
    if isinstance(x, np.ndarray):
        return np.zeros(x.shape, x.dtype)
    torch = sys.modules["torch"]
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


class Prepared(threading.local):
    """Filled params objects of one family, per thread (a call writes addresses into its object).

    Examples
    --------
    >>> cache = Prepared()
    >>> cache.find((2, 3)) is None
    True
    >>> cache.keep((2, 3), "params"); cache.find((2, 3))
    'params'
    """

    def __init__(self) -> None:
        self._entries: dict[Any, Any] = {}

    def find(self, key: Any) -> Any:
        """Return the params object of ``key`` or ``None``."""
        return self._entries.get(key)

    def keep(self, key: Any, params: Any) -> None:
        """Remember a filled params object; when there are too many shapes, start again."""
        if len(self._entries) >= _LIMIT:
            self._entries.clear()
        self._entries[key] = params
