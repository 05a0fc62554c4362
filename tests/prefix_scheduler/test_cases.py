# SPDX-License-Identifier: Apache-2.0
"""Scheduler cases with known right answers, from the paper, its appendix and bug reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx


def ms(first: int, *steps_per_second: float) -> np.ndarray:
    """Milliseconds by B whose SPS at B = first, first + 1, ... is as given."""
    return np.concatenate([np.ones(first), 1000 / np.array(steps_per_second)])


def survive(*conditional: Any) -> np.ndarray:
    return np.cumprod(np.array(conditional, dtype=np.float32), axis=1)


def history(survival: np.ndarray, rounds: int = 2) -> dx.LaggedSurvival:
    """A lagged survival whose released round is ``survival``."""
    lagged = dx.LaggedSurvival(rounds=rounds)
    for _ in range(rounds):
        lagged.push(survival)
    return lagged


A2 = survive((0.9, 0.5), (0.6, 0.6))


@pytest.mark.parametrize("second", [0.9, 0.0], ids=["x1=A", "x1=B"])
def test_s1_causal_stops_before_what_it_may_not_know(backend: str, second: float) -> None:
    plan = dx.prefix_schedule(survive((0.8, second)), ms(1, 1, 0.5, 0.45), backend=backend)
    assert plan.length.tolist() == [0]
    assert float(plan.theta) == 1.0


def test_s2_theta_of_every_prefix(backend: str) -> None:
    a, cost = survive((0.95, 0.92, 0.85, 0.30)), ms(1, 1000, 520, 400, 340, 280)
    assert dx.prefix_schedule(a, cost, backend=backend).length.tolist() == [3]
    for length, theta in enumerate((1000, 1014, 1129.6, 1212.746, 1061.1356)):
        plan = dx.prefix_schedule(a, cost, mode="fixed", fixed_len=length, backend=backend)
        assert float(plan.theta) == pytest.approx(theta, abs=1e-3)


def test_s3_order_and_stop(backend: str) -> None:
    plan = dx.prefix_schedule(A2, ms(2, 1, 0.8, 0.55, 0.5, 0.3), backend=backend)
    assert plan.length.tolist() == [1, 0]
    assert float(plan.theta) == pytest.approx(2.32, rel=1e-6)


def test_s4_staircase_needs_the_full_search(backend: str) -> None:
    cost = ms(2, 1, 0.66, 0.60, 0.55, 0.30)
    causal = dx.prefix_schedule(A2, cost, backend=backend)
    full = dx.prefix_schedule(A2, cost, mode="two_phase", lagged=history(A2), backend=backend)
    assert (causal.length.tolist(), full.length.tolist()) == ([0, 0], [2, 1])
    assert float(causal.theta) == 2.0
    assert float(full.theta) == pytest.approx(2.1725, rel=1e-6)


def test_s5_three_requests(backend: str) -> None:
    a = survive((0.95, 0.85, 0.70), (0.80, 0.55, 0.30), (0.65, 0.25, 0.10))
    cost = ms(3, 1, 0.85, 0.70, 0.60, 0.42, 0.30, 0.20, 0.12, 0.07, 0.04)
    plan = dx.prefix_schedule(a, cost, backend=backend)
    assert plan.length.tolist() == [1, 0, 0]
    assert float(plan.theta) == pytest.approx(3.3575, rel=1e-6)
    # The stop that follows: the next candidate would have been (1, 2).
    longer = dx.prefix_schedule(a, cost, mode="two_phase", budget=2, backend=backend)
    assert longer.length.tolist() == [2, 0, 0]
    assert float(longer.theta) == pytest.approx(3.33025, rel=1e-6)


def test_s6_budget_sweep(backend: str) -> None:
    a = survive((0.9, 0.8, 0.7), (0.95, 0.4, 0.3))
    got = [
        dx.prefix_schedule(a, mode="two_phase", budget=k, backend=backend).length.tolist()
        for k in range(8)
    ]
    assert got == [[0, 0], [0, 1], [1, 1], [2, 1], [3, 1], [3, 2], [3, 3], [3, 3]]


def test_s7_caps(backend: str) -> None:
    a = survive((0.9, 0.8, 0.7), (0.5, 0.4, 0.3))
    plan = dx.prefix_schedule(a, mode="two_phase", budget=2, max_len=[0, 3], backend=backend)
    assert plan.length.tolist() == [0, 2]


def test_s8_zero_survival_never_helps(backend: str) -> None:
    a = survive((1, 1, 0, 1, 1), (1, 1, 0, 1, 1))
    flat = np.ones(13)
    full = dx.prefix_schedule(a, flat, mode="two_phase", lagged=history(a), backend=backend)
    assert full.length.tolist() == [2, 2]
    assert dx.prefix_schedule(a, flat, backend=backend).length.tolist() == [2, 2]
    # Nor does a budget reach behind it.
    given = dx.prefix_schedule(a, mode="two_phase", budget=9, backend=backend)
    assert given.length.tolist() == [2, 2]


def test_s9_staircase_of_graph_sizes(backend: str) -> None:
    a = np.full((8, 1), 0.95, np.float32)
    table = dx.CostTable.from_points([1, 8, 9, 16], [1, 1, 1.5, 1.5], plateaus=[8, 16])
    full = dx.prefix_schedule(a, table, mode="two_phase", lagged=history(a), backend=backend)
    causal = dx.prefix_schedule(a, table, backend=backend)
    assert full.length.sum() == 8
    assert float(full.theta) == pytest.approx(10400, rel=1e-6)  # per second; the case counts per ms
    assert causal.length.sum() == 0


def test_flat_cost_admits_everything_that_helps(backend: str) -> None:
    a = np.full((4, 7), 0.25, np.float32)
    plan = dx.prefix_schedule(a, np.ones(64), backend=backend)
    assert plan.length.tolist() == [7] * 4


@pytest.mark.parametrize("mode", ["causal", "two_phase"])
def test_s10_a_missing_table_is_an_error(backend: str, mode: Any) -> None:
    lagged = history(A2) if mode == "two_phase" else None
    with pytest.raises(dx.ArgumentError, match="cost: got None, expected a CostTable"):
        dx.prefix_schedule(A2, mode=mode, lagged=lagged, backend=backend)


@pytest.mark.parametrize("mode", ["fixed", "off"])
def test_s10_the_policies_without_a_table_say_so(backend: str, mode: Any) -> None:
    fixed = 1 if mode == "fixed" else None
    plan = dx.prefix_schedule(A2, mode=mode, fixed_len=fixed, backend=backend)
    assert plan.length.tolist() == ([1, 1] if mode == "fixed" else [2, 2])
    assert np.isnan(plan.theta)


def test_s11_nothing_beyond_the_last_point(backend: str) -> None:
    table = dx.CostTable.from_points([1, 2, 4], [3, 2, 5])
    assert [table.ms(b) for b in (1, 2, 3, 4)] == [3, 3, 4, 5]
    sure = np.ones((2, 4), np.float32)
    for mode, lagged in (("causal", None), ("two_phase", history(sure))):
        plan = dx.prefix_schedule(sure, table, mode=mode, lagged=lagged, backend=backend)
        assert int(plan.total_tokens) <= 4
    assert int(plan.total_tokens) == 4  # 4 tokens / 5 ms beats 2 / 3


def test_s12_padding_changes_nothing(backend: str, rng: np.random.Generator) -> None:
    real, padded, gamma = 100, 112, 7
    a = np.cumprod(rng.uniform(0.3, 1, (real, gamma)).astype(np.float32), axis=1)
    cost = 5 + 0.05 * np.arange(real * (gamma + 1) + 1)
    garbage = np.full((padded - real, gamma), np.nan, np.float32)
    alone = dx.prefix_schedule(a, cost, backend=backend)
    both = dx.prefix_schedule(
        np.concatenate([a, garbage]), cost, active=np.arange(padded) < real, backend=backend
    )
    assert both.length[:real].tolist() == alone.length.tolist()
    assert both.length[real:].tolist() == [0] * 12
    assert both.status.tolist() == [0] * padded
    assert float(both.theta) == float(alone.theta)
    assert int(both.total_tokens) == int(alone.total_tokens) == both.cu_seqlens[real]
    assert both.row_to_request.max() < real
