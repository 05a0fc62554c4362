# SPDX-License-Identifier: Apache-2.0
"""Device code to look at: the installed module's, or of the folder in DSPARK_STATIC_BUILD."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dspark_ext import _C

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "_build"))

import sass


@pytest.fixture(scope="session")
def disassembler() -> None:
    """Skip where nothing can read machine code."""
    missing = [name for name in ("cuobjdump", "nvdisasm") if sass.tool(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found: pip install -r requirements/dev.txt")


@pytest.fixture(scope="session")
def device_code(disassembler: None) -> list[Path]:
    """The files with the kernels of this build."""
    folder = os.environ.get("DSPARK_STATIC_BUILD")
    if folder:
        return sorted(Path(folder, "csrc").rglob("*.cu.o"))
    if not _C.cuda_info()["compiled"]:
        pytest.skip("this build has no device code (DSPARK_CUDA=off); make static has some")
    return [Path(_C.__file__)]


@pytest.fixture(scope="session")
def kernels(device_code: list[Path]) -> list[sass.Kernel]:
    """All kernels, as compiled for each architecture."""
    return sass.read(device_code)
