# SPDX-License-Identifier: Apache-2.0
"""The programs that measure a GPU's constants keep compiling against the kernels' own parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "constants"))

import measure


@pytest.mark.parametrize("name", measure.PROGRAMS)
def test_program_builds_and_says_when_there_is_no_device(name: str, tmp_path: Path) -> None:
    compiler = measure.nvcc()
    if compiler is None:
        pytest.skip("no CUDA compiler on this machine")
    rows, trouble = measure.run(measure.build(compiler, name, tmp_path), limit=60)
    assert trouble == "no CUDA device" if not rows else trouble == ""


def test_measured_constants_replace_assumed_ones() -> None:
    rows = [
        {"constant": "l2_stream", "megabytes": m, "again_bytes_per_second": rate}
        for m, rate in ((20, 5e12), (20, 4e12), (34, 4.9e12), (44, 4.6e12), (60, 3e12))
    ]
    rows += [
        {"constant": "exchange", "rows": 1, "gather": "w1_prefetched", "step_us": 1.5},
        {"constant": "exchange", "rows": 8, "gather": "w1_prefetched", "step_us": 9.0},
        {"constant": "mma_stream", "mode": "ldmatrix and mma", "bytes_per_second": 2e13},
    ]
    device = measure.measured_device(rows)
    assert (device.l2, device.l2_resident) == (5e12, 44e6)
    assert device.exchange == pytest.approx(1.5e-6)
    assert device.shared == 2e13
    assert device.memory == measure.roofline.H200.memory
    assert measure.predictions(device)[0]["measured"] > measure.predictions(device)[0]["R"]
