# SPDX-License-Identifier: Apache-2.0
"""Element types of the reference: one correct rounding from float64, and the NaN and +inf rules.

NumPy has no bfloat16, so the reference names the type with a string and keeps the values in wider
arrays.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LARGEST", "DType", "clean", "round_to"]

DType = Literal["f32", "bf16", "f16", "f8_e4m3"]

# significand bits after the leading one, smallest normal exponent
_FORMAT = {"f32": (23, -126), "bf16": (7, -126), "f16": (10, -14), "f8_e4m3": (3, -6)}

#: Largest finite value of each type.
LARGEST: dict[str, float] = {
    "f32": float(np.finfo(np.float32).max),
    "bf16": (2.0 - 2.0**-7) * 2.0**127,
    "f16": 65504.0,
    "f8_e4m3": 448.0,
}


def round_to(x: ArrayLike, dtype: DType) -> NDArray[np.float64]:
    """Round float64 values to ``dtype``, once, to nearest even; overflow becomes infinity.

    FP8 E4M3 has no infinity: what lies beyond its largest value 448 becomes 448.

    Parameters
    ----------
    x : array_like
    dtype : {"f32", "bf16", "f16", "f8_e4m3"}

    Returns
    -------
    ndarray of float64 that holds values of ``dtype``

    Raises
    ------
    ValueError
        For another dtype name.

    Examples
    --------
    >>> round_to([1.00390625, 1.01171875], "bf16").tolist()
    [1.0, 1.015625]
    >>> round_to([17.0, -1e6], "f8_e4m3").tolist()
    [16.0, -448.0]
    """
    if dtype not in _FORMAT:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {sorted(_FORMAT)}")
    bits, smallest = _FORMAT[dtype]
    x = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(x)
    # frexp: |x| = m 2^e with m in [1/2, 1), so the leading bit is worth 2^(e - 1)
    exponent = np.maximum(np.frexp(np.where(finite, x, 0.0))[1] - 1, smallest) - bits
    quantum = np.ldexp(1.0, exponent)
    rounded = np.where(finite, np.rint(np.where(finite, x, 0.0) / quantum) * quantum, x)
    if dtype == "f8_e4m3":
        return np.clip(rounded, -LARGEST[dtype], LARGEST[dtype])
    too_large = np.abs(rounded) > LARGEST[dtype]
    return np.where(too_large & finite, np.copysign(np.inf, x), rounded)


def clean(x: ArrayLike, dtype: DType) -> tuple[NDArray[np.float64], bool]:
    """Apply the contract's rule for special values (section 3): NaN is -inf, +inf is finite.

    Returns
    -------
    values : ndarray of float64
        NaN replaced by -inf, +inf by the largest finite value of ``dtype``.
    found_nan : bool
        Whether there was a NaN.

    Examples
    --------
    >>> values, found = clean([float("nan"), float("inf"), 1.0], "f16")
    >>> values.tolist(), found
    ([-inf, 65504.0, 1.0], True)
    """
    x = np.asarray(x, dtype=np.float64)
    nan = np.isnan(x)
    x = np.where(nan, -np.inf, x)
    return np.where(x == np.inf, LARGEST[dtype], x), bool(nan.any())
