# SPDX-License-Identifier: Apache-2.0
"""Measured against predicted time of rounds: what counts as drift, and that the engine watches."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.engine import Engine
from dspark.scheduling.drift import CostDrift
from dspark_ext.toy import ToyDrafter, ToyTarget


def fill(drift: CostDrift, ratios: Any, rows: int = 8) -> CostDrift:
    for x in ratios:
        drift.observe(rows, 10.0, 10.0 * x)
    return drift


@pytest.mark.parametrize(
    ("ratio", "drifted"), [(1.0, False), (1.49, False), (1.51, True), (0.68, False), (0.6, True)]
)
def test_factor_holds_on_both_sides(ratio: float, drifted: bool) -> None:
    drift = fill(CostDrift(factor=1.5, min_count=4), [ratio] * 4)
    assert drift.drifted is drifted
    assert ("measure a new one" in drift.text()) is drifted


def test_few_rounds_are_not_judged() -> None:
    assert not fill(CostDrift(min_count=32), [9.0] * 31).drifted
    assert fill(CostDrift(min_count=32), [9.0] * 32).drifted


def test_a_hiccup_is_no_drift() -> None:
    drift = fill(CostDrift(min_count=8), [1.0] * 20 + [400.0] * 9)
    assert drift.ratio == 1.0 and not drift.drifted


def test_one_class_of_sizes_may_drift_alone() -> None:
    drift = CostDrift(min_count=8)
    fill(drift, [1.0] * 100, rows=4)
    fill(drift, [2.0] * 8, rows=33)
    assert drift.ratio == 1.0 and drift.drifted
    assert drift.by_rows() == {"4-7": 1.0, "32-63": 2.0}


def test_old_rounds_fade() -> None:
    """A machine that recovers is believed again."""
    drift = fill(CostDrift(min_count=8), [3.0] * 300)
    assert drift.drifted
    assert not fill(drift, [1.0] * 256).drifted
    assert drift.count == 556


def test_rounds_beyond_the_table_say_nothing() -> None:
    drift = CostDrift(min_count=1)
    for predicted, measured in ((math.nan, 5.0), (0.0, 5.0), (5.0, 0.0), (math.inf, 1.0)):
        drift.observe(4, predicted, measured)
    assert (drift.count, drift.text(), drift.to_dict()["ratio"]) == (0, "", None)
    json.dumps(drift.to_dict(), allow_nan=False)


def test_sums_join() -> None:
    a, b = fill(CostDrift(min_count=4), [1.0] * 3), fill(CostDrift(min_count=4), [2.0] * 5)
    a.merge(b)
    assert (a.count, a.ratio) == (8, 2.0)


@pytest.mark.parametrize("arguments", [{"factor": 1.0}, {"factor": math.nan}, {"min_count": 0}])
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(dx.ArgumentError, match="CostDrift"):
        CostDrift(**arguments)


def test_prediction_is_table_plus_draft_plus_kv() -> None:
    table = dx.CostTable.from_points([1, 9], [2.0, 10.0], draft_ms=3.0, ms_per_kv_token=0.01)
    half = table.with_draft_ms(1.5)
    scheduler = dx.Scheduler("causal", cost={1: half, 2: table})
    state: Any = SimpleNamespace(host=SimpleNamespace(kv_len=np.array([100, 7, 200])))
    result: Any = SimpleNamespace(
        slots=(0, 2),
        plan=object(),
        length=np.array([2, 9, 1]),
        num_emitted=np.array([3, 9, 1]),
        proposed=np.array([4, 4, 4]),
        seconds={"draft": 0.003, "schedule": 0.001, "verify": 0.009, "other": 0.0},
    )
    # 5 rows: 6 ms; 97 + 199 tokens of KV before the round: 2.96 ms; a draft of two: 3 ms.
    drift = CostDrift(min_count=1)
    drift.observe_round(scheduler, state, result)
    assert drift.ratio == pytest.approx(13 / (6 + 2.96 + 3))
    assert list(drift.by_rows()) == ["4-7"]
    result.proposed = np.array([4, 0, 0])  # one of them drafted
    one = CostDrift(min_count=1)
    one.observe_round(scheduler, state, result)
    assert one.ratio == pytest.approx(13 / (6 + 2.96 + 1.5))
    result.plan = None  # a prefill
    one.observe_round(scheduler, state, result)
    assert one.count == 1


@pytest.mark.parametrize(("ms", "drifted"), [(1e-4, True), (1e6, True)], ids=["slower", "faster"])
def test_the_engine_reports_a_table_of_another_machine(ms: float, drifted: bool) -> None:
    target = ToyTarget(6)
    table = dx.CostTable.from_points([1, 16], [ms, ms])
    engine = Engine(
        target,
        ToyDrafter(6, gamma=3, like=target),
        scheduler=dx.Scheduler("two_phase", cost=table, skip=False),
        framework="numpy",
    )
    engine.complete([[1, 2], [3]], dx.SamplingParams(max_new_tokens=120))
    report = engine.metrics.to_dict()["cost_drift"]
    assert report["rounds"] == engine.metrics.steps > 32
    assert report["drifted"] is drifted
    assert (report["ratio"] > 1) == (ms < 1)


def test_without_a_table_there_is_no_report() -> None:
    target = ToyTarget(6)
    engine = Engine(target, ToyDrafter(6, gamma=3, like=target), framework="numpy")
    engine.complete([[1, 2]], dx.SamplingParams(max_new_tokens=8))
    assert engine.metrics.to_dict()["cost_drift"]["rounds"] == 0
