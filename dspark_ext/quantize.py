# SPDX-License-Identifier: Apache-2.0
"""Weights in eight bits."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from dspark_ext._arrays import FLOATS, Checker, is_torch

__all__ = ["quantize_rows"]


def quantize_rows(w2: Any) -> tuple[Any, Any]:
    """Round the rows of a matrix to signed bytes with one float32 scale each.

    ``scale = max|row| / 127`` and ``bytes = rint(row / scale)``, ties to even, so an element is off
    by at most half a scale (and the roundings of float32). A row of zeros has the scale 0.

    Parameters
    ----------
    w2 : array, shape (V_d, r), float32, bfloat16 or float16
        A Markov projection. Finite.

    Returns
    -------
    bytes8 : array, shape (V_d, r), int8
        Within [-127, 127]; of the kind and on the device of ``w2``.
    scale : array, shape (V_d,), float32
        The two are the ``w2`` and ``w2_scale`` of :func:`markov_loop`.

    Raises
    ------
    ArgumentError
        Another shape or dtype, or elements that are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> bytes8, scale = quantize_rows(np.float32([[0.5, -1.0, 0.25], [0, 0, 0]]))
    >>> bytes8.tolist(), [round(float(s) * 127, 6) for s in scale]
    ([[64, -127, 32], [0, 0, 0]], [1.0, 0.0])
    """
    check = Checker("quantize_rows")
    check.array("w2", w2, ("V_d", "r"), FLOATS)
    check.done()
    if is_torch(w2):
        torch = sys.modules["torch"]
        wide = w2.detach().to(torch.float32)
        largest = wide.abs().amax(dim=1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
        finite = bool(torch.isfinite(largest).all())
    else:
        wide = np.asarray(w2, dtype=np.float32)
        largest = np.abs(wide).max(axis=1, initial=0)
        finite = bool(np.isfinite(largest).all())
    check.require(finite, "w2", "NaN or infinite elements", "finite ones")
    check.done()
    scale = largest / 127
    divisor = scale + (scale == 0)
    rounded = (wide / divisor[:, None]).round().clip(-127, 127)
    if is_torch(w2):
        return rounded.to(sys.modules["torch"].int8), scale.contiguous()
    return rounded.astype(np.int8), scale.astype(np.float32)
