# SPDX-License-Identifier: Apache-2.0
"""Calls of the emulated kernels with the CPU's beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

import dspark_ext as dx
from dspark_ext.results import Verification


def sample(rows: Any, tokens: Any, backend: str, **call: Any) -> Verification:
    """``rejection_sample``; on the emulation with the bits of the CPU in every result.

    The few draws that it has time for say little about a law: the CPU's is tested with many.
    """
    got = dx.rejection_sample(rows, tokens, backend=backend, **call)
    if backend == "simt":
        for field, want in vars(dx.rejection_sample(rows, tokens, backend="cpu", **call)).items():
            if want is not None:
                np.testing.assert_array_equal(getattr(got, field), want, field)
    return got
