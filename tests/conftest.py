# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

from __future__ import annotations

import zlib

import numpy as np
import pytest


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every operator test runs on each backend that exists."""
    return str(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name: fresh per test, the same on every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
