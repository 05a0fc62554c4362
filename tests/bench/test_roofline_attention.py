# SPDX-License-Identifier: Apache-2.0
"""The model of verify_attention on a GPU: the documented table, and when clusters may be chosen."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from lib.roofline_attention import CLUSTER_BYTES, Shape, cluster_size, floor, predicted  # noqa: E402

TABLE = re.findall(
    r"^\| (\d+) \| (\d+) \| (\w+) \| ([\d.]+) µs \| ([\d.]+) µs \| (\d+) % \| ([\d.]+) µs \|$",
    (ROOT / "docs" / "verify_attention.md").read_text("utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(row[:3]))
def test_the_documented_table(row: tuple[str, ...]) -> None:
    shape = Shape(int(row[0]), int(row[1]), width={"bf16": 2, "FP8": 1}[row[2]])
    got = floor(shape), predicted(shape), predicted(shape, invariant=True)
    for seconds, written in zip(got, (row[3], row[4], row[6]), strict=True):
        assert f"{1e6 * seconds:.1f}" == written
    assert f"{100 * got[0] / got[1]:.0f}" == row[5]


def test_the_goals() -> None:
    assert len(TABLE) > 4
    assert predicted(Shape(1, 4096)) <= 8e-6
    for requests, length in ((32, 4096), (128, 2048), (8, 32768)):
        for width in (1, 2):
            shape = Shape(requests, length, width=width)
            assert floor(shape) >= 0.85 * predicted(shape)


def test_clusters_never_cost_much() -> None:
    """Whatever the lengths turn out to be: all requests at work, or one alone."""
    slower, faster = 1.0, 1.0
    for heads, group, d, width, slots, capacity in itertools.product(
        (1, 2, 4, 8, 32), (1, 8), (64, 128, 256), (1, 2), (1, 2, 4, 5, 16, 64),
        (128, 512, 1024, 4096, 16384, 1 << 20),
    ):  # fmt: skip
        shape = Shape(slots, capacity, 8, heads * group, heads, d, width)
        size = cluster_size(shape)
        for active, length in itertools.product({1, slots}, (32, 256, 1024, 4096, 16384, 1 << 20)):
            if not size or length > capacity:
                continue
            met = Shape(active, length, 8, heads * group, heads, d, width)
            clusters, shares = (predicted(met, cluster=c) for c in (size, 0))
            slower, faster = max(slower, clusters / shares), min(faster, clusters / shares)
    assert slower <= 1.08
    assert faster <= 0.6


def test_the_rule_is_that_of_the_host() -> None:
    text = (ROOT / "csrc/cuda/verify_attention/config.h").read_text("utf-8")
    shift = re.search(r"kClusterBytes = INT64_C\(1\) << (\d+);", text)
    assert shift is not None
    assert 1 << int(shift[1]) == CLUSTER_BYTES
    # One or two requests of any length; four of a short page table; never without enough keys.
    shape = Shape(1, 4096)
    assert cluster_size(shape, 1, 1 << 20) == cluster_size(shape, 2, 1 << 20) == 16
    assert cluster_size(shape, 4, 2896) == 8
    assert cluster_size(shape, 4, 2897) == 0
    assert cluster_size(shape, 1, 512) == 8
    assert cluster_size(shape, 40, 1 << 20) == 0
