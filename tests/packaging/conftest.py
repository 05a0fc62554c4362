# SPDX-License-Identifier: Apache-2.0
"""The build scripts as a module: they are not part of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def toolchain() -> ModuleType:
    """A fresh copy of _build/toolchain.py, free to be patched."""
    spec = importlib.util.spec_from_file_location("toolchain", ROOT / "_build" / "toolchain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
