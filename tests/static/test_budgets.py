# SPDX-License-Identifier: Apache-2.0
"""The machine code of every kernel keeps its budget, and building it stays affordable."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import sass

MAX_PROCESSOR_MINUTES = 12


@pytest.mark.slow
def test_every_kernel_keeps_its_budget(kernels: list[sass.Kernel]) -> None:
    assert kernels
    budgets = sass.read_budgets()
    problems = sass.check(kernels, budgets)
    assert not problems, "\n".join(["", *problems, "", sass.table(kernels, budgets)])


def test_building_all_architectures_is_affordable() -> None:
    folder = os.environ.get("DSPARK_STATIC_BUILD")
    if not folder:
        pytest.skip("the cost of a build is measured by make static, which uses no cache")
    cost = json.loads(Path(folder, "cost.json").read_text("utf-8"))
    assert cost["processor_seconds"] <= 60 * MAX_PROCESSOR_MINUTES, cost
