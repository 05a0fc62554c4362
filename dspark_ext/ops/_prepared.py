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
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

__all__ = ["Prepared", "address", "signature"]

T = TypeVar("T")
_LIMIT = 256  # shapes kept per thread and family; a decoder uses a few


def signature(x: Any) -> Any:
    """Return what the checks see of an array, or ``None`` when ``x`` is not a plain array."""
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return None


def address(x: Any) -> int:
    """Return the address of an array's first element."""
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())


class Prepared(threading.local):
    """Filled params objects of one family, per thread (a call writes addresses into its object).

    Examples
    --------
    >>> cache = Prepared()
    >>> cache.get(("f", 1), lambda: "made"), cache.get(("f", 1), lambda: "again")
    ('made', 'made')
    """

    def __init__(self) -> None:
        self._entries: dict[Any, Any] = {}

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Return the entry of ``key``, made by ``make`` (which may raise) at first sight."""
        entry = self._entries.get(key)
        if entry is None:
            entry = make()
            if len(self._entries) >= _LIMIT:
                self._entries.clear()
            self._entries[key] = entry
        return entry  # type: ignore[no-any-return]
