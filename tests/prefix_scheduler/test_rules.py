# SPDX-License-Identifier: Apache-2.0
"""Floors, caps, weights, capacity, KV cost, and what trouble in the data does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx

BAD = int(dx.Status.BAD_PARAM)


def flat(tokens: int) -> np.ndarray:
    return np.ones(tokens + 1)


def test_threshold_stops_at_the_first_low_conditional(backend: str) -> None:
    c = np.array([[0.9, 0.5, 0.9], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9], [0.9, np.nan, 0.9]], "f4")
    plan = dx.prefix_schedule(None, mode="threshold", conditional=c, threshold=0.5, backend=backend)
    assert plan.length.tolist() == [3, 0, 3, 1]  # 0.5 is not below 0.5
    assert plan.status.tolist() == [0, 0, 0, int(dx.Status.NAN_CONFIDENCE)]
    everything = dx.prefix_schedule(
        None, mode="threshold", conditional=c, threshold=0.0, backend=backend
    )
    assert everything.length.tolist() == [3] * 4


def test_off_and_fixed_are_clipped_by_caps_and_floors(backend: str) -> None:
    a = np.full((3, 4), 0.5, np.float32)
    off = dx.prefix_schedule(a, mode="off", max_len=[9, 2, 0], backend=backend)
    assert off.length.tolist() == [4, 2, 0]
    fixed = dx.prefix_schedule(
        a, mode="fixed", fixed_len=2, min_len=[3, 0, 0], max_len=[4, 1, 4], backend=backend
    )
    assert fixed.length.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(3, [0, 0, 0]), (5, [1, 1, 0]), (6, [1, 1, 1]), (8, [2, 1, 2]), (99, [3, 1, 3])],
)
def test_capacity_cuts_position_major(backend: str, capacity: int, expected: list[int]) -> None:
    a = np.full((3, 3), 0.5, np.float32)
    plan = dx.prefix_schedule(a, mode="off", max_len=[3, 1, 3], capacity=capacity, backend=backend)
    assert plan.length.tolist() == expected


def test_capacity_serves_floors_first(backend: str) -> None:
    a = np.full((2, 4), 0.5, np.float32)
    plan = dx.prefix_schedule(a, mode="off", min_len=[0, 3], capacity=6, backend=backend)
    assert plan.length.tolist() == [1, 3]
    tight = dx.prefix_schedule(a, flat(20), min_len=[2, 3], capacity=5, backend=backend)
    assert tight.length.tolist() == [2, 1]


def test_floors_come_before_the_search_and_do_not_need_survival(backend: str) -> None:
    a = np.array([[0.9, 0.8], [0.0, 0.0]], np.float32)
    steep = np.array([1.0, 1, 1, 100, 100, 100])
    plan = dx.prefix_schedule(a, steep, min_len=[0, 1], backend=backend)
    assert plan.length.tolist() == [2, 1]  # beyond the floor the steps are flat: Theta rises
    assert float(plan.theta) == pytest.approx(1000 * (2 + 0.9 + 0.8) / 100, rel=1e-6)


def test_floors_end_with_the_table_that_decides(backend: str) -> None:
    a = np.full((2, 2), 0.5, np.float32)
    causal = dx.prefix_schedule(a, flat(5), min_len=2, backend=backend)
    assert causal.length.tolist() == [2, 1]  # B = 5 is the last one known
    priced = dx.prefix_schedule(a, flat(5), mode="off", backend=backend)
    assert priced.length.tolist() == [2, 2]
    assert np.isnan(priced.theta)


def test_budget_counts_the_floors(backend: str) -> None:
    a = np.array([[0.9, 0.8], [0.1, 0.05]], np.float32)
    for budget, expected in ((0, [0, 2]), (2, [0, 2]), (3, [1, 2]), (4, [2, 2])):
        plan = dx.prefix_schedule(
            a, mode="two_phase", budget=budget, min_len=[0, 2], backend=backend
        )
        assert plan.length.tolist() == expected


@pytest.mark.parametrize(("survival", "units"), [(7e-13, 1), (4e-13, 0), (0.5, 2**39)])
def test_sums_go_to_the_nearest_point_of_the_grid(
    backend: str, survival: float, units: int
) -> None:
    a = np.array([[survival]], np.float32)
    plan = dx.prefix_schedule(a, flat(2), mode="off", backend=backend)
    assert float(plan.theta) == (2**40 + units) / 2**40 * 1000.0


def test_weights_scale_the_objective_and_the_order(backend: str) -> None:
    a = np.array([[0.9], [0.5]], np.float32)
    plain = dx.prefix_schedule(a, mode="two_phase", budget=1, backend=backend)
    heavy = dx.prefix_schedule(a, mode="two_phase", budget=1, weight=[1, 2], backend=backend)
    nought = dx.prefix_schedule(a, flat(4), weight=[1, 0], backend=backend)
    assert (plain.length.tolist(), heavy.length.tolist()) == ([1, 0], [0, 1])
    assert nought.length.tolist() == [1, 0]
    assert float(nought.theta) == pytest.approx(1900, rel=1e-6)


def test_ties_go_to_the_position_then_the_request(backend: str) -> None:
    a = np.ones((3, 3), np.float32)
    got = [
        dx.prefix_schedule(a, mode="two_phase", budget=k, backend=backend).length.tolist()
        for k in range(10)
    ]
    assert got[1:5] == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]]
    assert got[9] == [3, 3, 3]


def test_an_equal_theta_stops(backend: str) -> None:
    # tau 1 -> 2 while ms 1 -> 2: Theta stays 1000, and Algorithm 1 asks for a strict rise.
    plan = dx.prefix_schedule(np.ones((1, 2), "f4"), np.array([0, 1, 2, 1.0]), backend=backend)
    assert plan.length.tolist() == [0]
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(np.ones((1, 2), "f4"))
    level = np.array([0, 1, 2, 3.0])
    full = dx.prefix_schedule(
        np.ones((1, 2), "f4"), level, mode="two_phase", lagged=lagged, backend=backend
    )
    assert full.length.tolist() == [0]  # lowest B on ties


def test_kv_term_and_draft_time_enter_the_step(backend: str) -> None:
    table = dx.CostTable.from_points([1, 9], [2.0, 2.0], draft_ms=1.0, ms_per_kv_token=0.01)
    a = np.full((2, 2), 0.5, np.float32)
    plan = dx.prefix_schedule(
        a, table, mode="fixed", fixed_len=0, kv_len=[100, 200], backend=backend
    )
    assert float(plan.theta) == 2 * (1000 / (2.0 + 1.0 + 3.0))
    with pytest.raises(dx.ArgumentError, match="kv_len: got None"):
        dx.prefix_schedule(a, table, backend=backend)


def test_long_contexts_make_drafts_worth_it(backend: str) -> None:
    """The same table admits more when the KV part of a step dwarfs the price of a token."""
    table = dx.CostTable.from_points([1, 6], [1.0, 6.0], ms_per_kv_token=0.01)
    a = np.array([[0.9, 0.8, 0.7, 0.6, 0.5]], np.float32)
    short = dx.prefix_schedule(a, table, kv_len=[10], backend=backend)
    long = dx.prefix_schedule(a, table, kv_len=[10_000], backend=backend)
    assert short.length.tolist() == [0]
    assert long.length.tolist() == [5]


@pytest.mark.parametrize("requests", [1, 3])
def test_table_shorter_than_the_batch(backend: str, requests: int) -> None:
    plan = dx.prefix_schedule(np.ones((requests, 2), "f4"), np.ones(1), min_len=1, backend=backend)
    assert plan.length.tolist() == [0] * requests
    assert np.isnan(plan.theta)
    assert int(plan.total_tokens) == requests


def test_no_request(backend: str) -> None:
    for kwargs in ({"cost": np.ones(4)}, {"mode": "off"}, {"mode": "two_phase", "budget": 3}):
        plan = dx.prefix_schedule(np.zeros((0, 7), "f4"), backend=backend, **kwargs)
        assert plan.cu_seqlens.tolist() == [0]
        assert int(plan.total_tokens) == 0
        assert plan.length.shape == (0,)
    priced = dx.prefix_schedule(np.zeros((2, 7), "f4"), np.ones(4), active=[0, 0], backend=backend)
    assert float(priced.theta) == 0.0
    assert priced.cu_seqlens.tolist() == [0, 0, 0]
    assert np.all(priced.row_to_request == -1)


@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        ({"max_len": [-1, 2]}, [0, 2]),
        ({"min_len": [-1, 0]}, [2, 2]),
        ({"weight": [-1.0, 1.0]}, [0, 2]),
        ({"weight": [np.nan, 1.0]}, [0, 2]),
        ({"weight": [np.inf, 1.0]}, [0, 2]),
        ({"weight": [129.0, 1.0]}, [0, 2]),
        ({"kv_len": [-5, 1]}, [2, 2]),
    ],
    ids=["cap", "floor", "negative", "nan", "inf", "heavy", "kv"],
)
def test_bad_values_are_reported_on_their_request(
    backend: str, arguments: dict[str, Any], lengths: list[int]
) -> None:
    a = np.full((2, 2), 0.5, np.float32)
    plan = dx.prefix_schedule(a, flat(8), backend=backend, **arguments)
    assert plan.length.tolist() == lengths
    assert plan.status.tolist() == [BAD, 0]
    assert np.isfinite(plan.theta)


def test_a_floor_above_the_cap_is_the_cap(backend: str) -> None:
    a = np.full((2, 3), 0.1, np.float32)
    steep = np.array([0, 1, 1] + [1e9] * 8)
    plan = dx.prefix_schedule(a, steep, min_len=[3, 3], max_len=[1, 9], backend=backend)
    assert plan.length.tolist() == [1, 3]
    assert plan.status.tolist() == [0, 0]


def test_more_active_requests_than_capacity(backend: str) -> None:
    a = np.full((3, 2), 0.5, np.float32)
    plan = dx.prefix_schedule(a, flat(9), capacity=1, active=[1, 0, 1], backend=backend)
    assert plan.length.tolist() == [0, 0, 0]
    assert plan.status.tolist() == [BAD, 0, BAD]
    assert int(plan.total_tokens) == 2  # the anchors are always sent


def test_nan_and_out_of_range_survivals(backend: str) -> None:
    a = np.array([[np.nan, 1.0], [2.0, -1.0], [np.inf, 0.5]], np.float32)
    plan = dx.prefix_schedule(a, flat(9), backend=backend)
    assert plan.length.tolist() == [0, 1, 2]
    assert plan.status.tolist() == [int(dx.Status.NAN_CONFIDENCE), 0, 0]
    with pytest.raises(dx.StatusError, match="request 0: NAN_CONFIDENCE"):
        dx.prefix_schedule(a, flat(9), strict=True, backend=backend)


def test_nan_in_the_history(backend: str) -> None:
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(np.array([[np.nan, 1.0], [1.0, 1.0]], np.float32))
    live = np.full((2, 2), 0.9, np.float32)
    plan = dx.prefix_schedule(live, flat(9), mode="two_phase", lagged=lagged, backend=backend)
    assert plan.length.tolist() == [1, 1]  # the healthy request's two set K = 2
    assert plan.status.tolist() == [int(dx.Status.NAN_CONFIDENCE), 0]


def test_budget_ignores_live_values(backend: str, rng: np.random.Generator) -> None:
    """K comes from the history alone: every live array of positive survivals admits K drafts."""
    old = np.cumprod(rng.uniform(0.4, 1, (6, 5)).astype(np.float32), axis=1)
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(old)
    cost = 3 + 0.4 * np.arange(37.0)
    totals = set()
    for _ in range(20):
        live = np.cumprod(rng.uniform(0.01, 1, (6, 5)).astype(np.float32), axis=1)
        plan = dx.prefix_schedule(live, cost, mode="two_phase", lagged=lagged, backend=backend)
        totals.add(int(plan.total_tokens))
    assert len(totals) == 1
    assert 6 < totals.pop() < 36
