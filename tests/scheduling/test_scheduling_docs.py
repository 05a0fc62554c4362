# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/scheduling.md are those of the files beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspark.scheduling.simulate import Point
from dspark.scheduling.simulate_report import compare, read_csv

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "scheduling.md").read_text(encoding="utf-8")


def points(name: str) -> dict[tuple[str, int], Point]:
    return {(p.policy, p.load): p for p in read_csv(DOCS / "scheduling" / f"{name}.csv")}


def table(head: str) -> list[list[str]]:
    """Cells of the table whose first line begins like this."""
    lines = TEXT[TEXT.index(f"| requests | {head}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_scheduler_over_the_best_fixed_length() -> None:
    found = points("smooth")
    rows = {r["load"]: r for r in compare(list(found.values()))}
    for load, best, rate, *ratios, sent in table("best fixed"):
        row = rows[int(load)]
        assert (best, rate) == (row["best_static"], f"{row['static_throughput']:,.0f}")
        names = ("causal", "two_phase", "two_phase+gate", "oracle")
        assert ratios == [f"{row[name]:.2f}" for name in names]
        assert sent == f"{found['two_phase', int(load)].budget:.1f}"


def test_distance_to_the_oracle() -> None:
    files = points("smooth"), points("staircase")
    names = ("causal", "two_phase", "two_phase:unsafe_lag0", "two_phase:lag4")
    for load, *cells in table("smooth: causal"):
        at = int(load)
        want = [f[n, at].throughput / f["oracle", at].throughput for f in files for n in names]
        assert cells == [f"{x:.2f}" for x in want]


@pytest.mark.parametrize("name", ["two_phase", "causal"])
def test_miscalibration(name: str) -> None:
    good, bold, shy = (points(n) for n in ("ece-1", "ece-8", "ece-8-under"))
    for load, two_phase, causal, under, *rows in table("two_phase, ECE 8 %"):
        key = name, int(load)
        cell = f"{bold[key].throughput / good[key].throughput:.3f}"
        assert cell == (two_phase if name == "two_phase" else causal)
        if name == "two_phase":
            assert under == f"{shy[key].throughput / good[key].throughput:.3f}"
            assert rows == [f"{f[key].budget:.2f}" for f in (good, bold, shy)]
        # Outcomes do not hear of the head: what no head decides is the same in all files.
        assert good["static3", int(load)] == bold["static3", int(load)] == shy["static3", int(load)]


def test_fairness_and_a_wrong_table() -> None:
    fair = points("fairness")
    for load, *cells, drought in table("min1"):
        plain = fair["two_phase", int(load)]
        for extra, cell in zip(("min1", "weight2", "age4", "age16"), cells, strict=True):
            p = fair[f"two_phase+{extra}", int(load)]
            rates = p.throughput / plain.throughput, p.user_p1 / plain.user_p1
            assert cell == f"{rates[0]:.2f} ({rates[1]:.2f})"
        assert drought == str(plain.drought)
    true, believed = points("staircase"), points("believed-smooth")
    for load, *cells in table("two_phase, believes"):
        base = true["two_phase", int(load)].throughput
        found = [believed["two_phase", int(load)], believed["causal", int(load)],
                 true["causal", int(load)]]  # fmt: skip
        assert cells == [f"{p.throughput / base:.2f}" for p in found]


def test_everything_that_is_shown_is_there() -> None:
    for name in re.findall(r"\]\((scheduling/[^)]+)\)", TEXT):
        assert (DOCS / name).exists(), name
