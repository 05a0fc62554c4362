# SPDX-License-Identifier: Apache-2.0
"""The libraries of `make simt` for the runner's own tests: C functions by ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for modules that tests here share

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "fast": "libdspark_simt.so",
    "checked": "libdspark_simt_checked.so",
    "undefined": "libdspark_simt_undefined.so",
}


class Status(ctypes.Structure):
    """``dspark_status``."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("line", ctypes.c_int32),
        ("file", ctypes.c_char_p),
        ("message", ctypes.c_char * 1024),
    ]


class Library(ctypes.CDLL):
    """A library of the runner, with the types of the functions that tests call."""

    Status = Status

    def __init__(self, path: str) -> None:
        super().__init__(path)
        if not hasattr(self, "dspark_simt_case"):  # nvcc's library of conformance.cu
            return
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        self.dspark_simt_case.restype = Status
        self.dspark_simt_case.argtypes = [text, ctypes.c_int, pointer, pointer]
        self.dspark_simt_case_name.restype = text
        self.dspark_simt_register.argtypes = [pointer, ctypes.c_size_t, text]
        self.dspark_simt_register.restype = None
        self.dspark_simt_forget.restype = None

    def register(self, **arrays: np.ndarray[Any, Any]) -> None:
        """Let kernels use these arrays."""
        for name, array in arrays.items():
            self.dspark_simt_register(array.ctypes.data, array.nbytes, name.encode())


def folder() -> Path:
    """Where `make simt` has built: the folder of ``DSPARK_SIMT``, else the source tree's."""
    named = os.environ.get("DSPARK_SIMT")
    return Path(named).parent if named else ROOT / "build" / "simt"


@functools.cache
def _open(kind: str) -> Library:
    """A library of `make simt`, or another one by its path; skips what is not built."""
    path = folder() / FILES[kind] if kind in FILES else Path(kind)
    if not path.exists():
        pytest.skip(f"{path.name} is not built: run `make simt`")
    return Library(str(path))


@pytest.fixture(scope="session")
def open_library() -> Callable[[str], Library]:
    """``open_library("fast" or "checked")``."""
    return _open


@pytest.fixture(scope="session")
def fast() -> Library:
    """The fast library."""
    return _open("fast")


@pytest.fixture(scope="session")
def checked() -> Library:
    """The checked library."""
    return _open("checked")
