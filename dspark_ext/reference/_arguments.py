# SPDX-License-Identifier: Apache-2.0
"""Per-request arguments of the reference: broadcasting, and what an illegal value counts as."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.status import Status

__all__ = ["active_mask", "legal", "legal_temperature", "per_request"]

#: Smallest temperature above 0 (contract, section 3).
SMALLEST_TEMPERATURE = 1e-3


def per_request(value: ArrayLike | None, requests: int, default: Any, dtype: Any) -> NDArray[Any]:
    """Broadcast a scalar, a list or None (= ``default``) to shape (R,)."""
    given = default if value is None else value
    values: NDArray[Any] = np.broadcast_to(np.asarray(given, dtype=dtype), (requests,)).copy()
    return values


def active_mask(active: ArrayLike | None, requests: int) -> NDArray[np.bool_]:
    """Return bool (R,): which requests take part."""
    on: NDArray[np.bool_] = per_request(active, requests, 1, np.int64) != 0
    return on


def legal(
    values: NDArray[Any], good: NDArray[np.bool_], instead: Any, status: NDArray[np.int32]
) -> NDArray[Any]:
    """Replace illegal per-request values and set BAD_PARAM in ``status``, in place."""
    status[~good] |= int(Status.BAD_PARAM)
    return np.where(good, values, instead)


def legal_temperature(
    temperature: ArrayLike | None, status: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Temperatures as float64 (R,); None means greedy.

    An illegal one (negative, in (0, 1e-3), NaN, infinite) sets BAD_PARAM and counts as 0: greedy
    needs no division, so no token depends on a broken number.
    """
    t = per_request(temperature, len(status), 0.0, np.float32).astype(np.float64)
    smallest = np.float64(np.float32(SMALLEST_TEMPERATURE))
    good = (t == 0) | (np.isfinite(t) & (t >= smallest))
    return legal(t, good, 0.0, status)
