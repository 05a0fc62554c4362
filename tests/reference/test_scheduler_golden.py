# SPDX-License-Identifier: Apache-2.0
"""Scheduler cases with known right answers (paper's Algorithm 1 and tables worked by hand)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_ext.reference.prefix_scheduler import cost_table_ms, prefix_schedule
from dspark_ext.status import Status


def ms(first: int, *steps_per_second: float) -> np.ndarray:
    """Cost array whose SPS at B = first, first + 1, ... is as given."""
    return np.concatenate([np.ones(first), 1000 / np.array(steps_per_second)])


def survive(*conditional: Any) -> np.ndarray:
    return np.cumprod(np.array(conditional, dtype=np.float64), axis=1)


A2 = survive((0.9, 0.5), (0.6, 0.6))
A3 = survive((0.95, 0.85, 0.70), (0.80, 0.55, 0.30), (0.65, 0.25, 0.10))
TABLE_T6 = ms(3, 1, 0.85, 0.70, 0.60, 0.42, 0.30, 0.20, 0.12, 0.07, 0.04)


@pytest.mark.parametrize("second", [0.9, 0.0], ids=["x1=A", "x1=B"])
def test_s1_t2_appendix_a_stops_whatever_comes_behind(second: float) -> None:
    plan = prefix_schedule(survive((0.8, second)), ms(1, 1.0, 0.5, 0.45))
    assert plan.length.tolist() == [0]
    assert float(plan.theta) == pytest.approx(1.0)


def test_s2_t3_one_request() -> None:
    a = survive((0.95, 0.92, 0.85, 0.30))
    plan = prefix_schedule(a, ms(1, 1000, 520, 400, 340, 280))
    assert plan.length.tolist() == [3]
    assert float(plan.theta) == pytest.approx(1212.746, abs=1e-3)
    for length, theta in enumerate((1000, 1014, 1129.6, 1212.746, 1061.1356)):
        fixed = prefix_schedule(a, ms(1, 1000, 520, 400, 340, 280), mode="fixed", fixed_len=length)
        assert float(fixed.theta) == pytest.approx(theta, abs=1e-3)


def test_s3_t4_two_requests() -> None:
    plan = prefix_schedule(A2, ms(2, 1, 0.8, 0.55, 0.5, 0.3))
    assert plan.length.tolist() == [1, 0]
    assert float(plan.theta) == pytest.approx(2.32)
    order = [prefix_schedule(A2, mode="two_phase", budget=k).length.tolist() for k in range(5)]
    assert order == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]


def test_s4_t5_jagged_table() -> None:
    table = ms(2, 1, 0.66, 0.60, 0.55, 0.30)
    causal = prefix_schedule(A2, table)
    assert causal.length.tolist() == [0, 0]
    assert float(causal.theta) == pytest.approx(2.0)
    searched = prefix_schedule(A2, table, mode="two_phase", lagged=A2)
    assert searched.length.tolist() == [2, 1]
    assert float(searched.theta) == pytest.approx(2.1725)


def test_s5_t6_three_requests() -> None:
    plan = prefix_schedule(A3, TABLE_T6)
    assert plan.length.tolist() == [1, 0, 0]
    assert float(plan.theta) == pytest.approx(3.3575)
    worse = prefix_schedule(A3, TABLE_T6, mode="two_phase", budget=2)
    assert worse.length.tolist() == [2, 0, 0]
    assert float(worse.theta) == pytest.approx(3.33025)


def test_s6_budgets() -> None:
    a = survive((0.9, 0.8, 0.7), (0.95, 0.4, 0.3))
    lengths = [prefix_schedule(a, mode="two_phase", budget=k).length.tolist() for k in range(7)]
    assert lengths == [[0, 0], [0, 1], [1, 1], [2, 1], [3, 1], [3, 2], [3, 3]]


def test_s7_caps() -> None:
    a = survive((0.9, 0.8, 0.7), (0.95, 0.4, 0.3))
    plan = prefix_schedule(a, mode="two_phase", budget=2, max_len=[0, 3])
    assert plan.length.tolist() == [0, 2]


def test_s8_zero_survival_never_helps() -> None:
    a = survive((1, 1, 0, 1, 1), (1, 1, 0, 1, 1))
    plan = prefix_schedule(a, np.ones(13), mode="two_phase", lagged=a)
    assert plan.length.tolist() == [2, 2]
    assert prefix_schedule(a, np.ones(13)).length.tolist() == [2, 2]
    assert prefix_schedule(a, mode="two_phase", budget=9).length.tolist() == [2, 2]


def test_s9_a_staircase_stops_the_causal_search() -> None:
    table = np.where(np.arange(17) <= 8, 1.0, 1.5)
    a = np.full((8, 1), 0.95)
    searched = prefix_schedule(a, table, mode="two_phase", lagged=a)
    assert searched.length.sum() == 8
    assert float(searched.theta) == pytest.approx(10.4e3)
    assert prefix_schedule(a, table).length.sum() == 0


def test_s10_no_cost_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="cost"):
        prefix_schedule(A2)
    with pytest.raises(ValueError, match="cost"):
        prefix_schedule(A2, mode="two_phase", lagged=A2)
    with pytest.raises(ValueError, match="lagged"):
        prefix_schedule(A2, np.ones(9), mode="two_phase")


def test_s11_cost_points() -> None:
    table = cost_table_ms([1, 2, 4], [3, 2, 5])
    assert table[1:].tolist() == [3, 3, 4, 5]
    plan = prefix_schedule(np.full((1, 8), 1.0), np.minimum(table, 1e-3))
    assert int(plan.total_tokens) == 4  # nothing is admitted beyond the last point
    stepped = cost_table_ms([1, 8], [1, 8], plateaus=[2, 4, 8])
    assert stepped[1:].tolist() == [2, 2, 4, 4, 8, 8, 8, 8]


def test_s12_padded_requests_get_nothing(rng: np.random.Generator) -> None:
    a = survive(*rng.uniform(0.2, 1, (100, 5)))
    table = np.linspace(1, 9, 700)
    want = prefix_schedule(a, table)
    padded = np.vstack([a, np.full((12, 5), np.nan)])
    got = prefix_schedule(padded, table, active=np.arange(112) < 100)
    assert got.length[:100].tolist() == want.length.tolist()
    assert got.length[100:].tolist() == [0] * 12
    assert got.cu_seqlens[:101].tolist() == want.cu_seqlens.tolist()
    assert set(got.cu_seqlens[100:].tolist()) == {int(want.total_tokens)}
    assert float(got.theta) == float(want.theta)
    assert not got.status.any()


def test_an_equal_theta_stops() -> None:
    # tau 1 -> 2 while SPS halves: Theta stays, so nothing is admitted
    assert prefix_schedule([[1.0]], ms(1, 1.0, 0.5)).length.tolist() == [0]


def test_ties_by_position_then_request() -> None:
    a = np.full((3, 3), 0.5)
    lengths = [prefix_schedule(a, mode="two_phase", budget=k).length.tolist() for k in (1, 3, 4, 8)]
    assert lengths == [[1, 0, 0], [1, 1, 1], [2, 1, 1], [3, 3, 2]]


def test_running_minimum_and_clamp_make_prefixes() -> None:
    a = np.array([[0.3, 0.9, 2.0], [0.6, -1.0, 0.9]])
    order = [prefix_schedule(a, mode="two_phase", budget=k).length.tolist() for k in range(5)]
    # (1, 0) .3 three times, (2, 1) .6, then nothing positive
    assert order == [[0, 0], [0, 1], [1, 1], [2, 1], [3, 1]]


def test_nan_survival_counts_as_zero() -> None:
    plan = prefix_schedule([[0.9, np.nan, 0.9], [0.9, 0.8, 0.7]], np.ones(9))
    assert plan.length.tolist() == [1, 3]
    assert plan.status.tolist() == [int(Status.NAN_CONFIDENCE), 0]


def test_floors_come_first_and_never_continue_past_a_stop() -> None:
    a = survive((0.9, 0.1, 0.1), (0.3, 0.3, 0.3))
    plan = prefix_schedule(a, ms(2, 1, 0.9, 0.85, 0.1, 0.1, 0.1, 0.1), min_len=[0, 1])
    # B = 3 with the floor .3: Theta 2.07; admitting .9 gives 3.2 * .85 = 2.72
    assert plan.length.tolist() == [1, 1]
    assert float(plan.theta) == pytest.approx(2.72)


def test_weights_rank_and_value() -> None:
    a = survive((0.9, 0.9), (0.5, 0.5))
    lengths = prefix_schedule(a, mode="two_phase", budget=2, weight=[1.0, 4.0]).length
    assert lengths.tolist() == [0, 2]
    plan = prefix_schedule(a, np.full(7, 1000.0), mode="fixed", fixed_len=1, weight=[1.0, 4.0])
    assert float(plan.theta) == pytest.approx(1.9 + 4 * 1.5)


def test_threshold_stops_at_the_first_conditional_below() -> None:
    c = [[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.49, 1, 1]]
    plan = prefix_schedule(None, mode="threshold", conditional=c, threshold=0.5)
    assert plan.length.tolist() == [1, 3, 0]
    assert np.isnan(plan.theta)


@pytest.mark.parametrize(
    ("capacity", "lengths"), [(3, [0, 0, 0]), (5, [1, 1, 0]), (8, [2, 2, 1]), (99, [3, 3, 3])]
)
def test_capacity_is_position_major(capacity: int, lengths: list[int]) -> None:
    a = np.full((3, 3), 0.5)
    assert prefix_schedule(a, mode="off", capacity=capacity).length.tolist() == lengths
    fixed = prefix_schedule(a, mode="fixed", fixed_len=3, capacity=capacity)
    assert fixed.length.tolist() == lengths


def test_capacity_below_the_anchors_is_flagged() -> None:
    plan = prefix_schedule(np.full((3, 2), 0.5), mode="off", capacity=2)
    assert plan.length.tolist() == [0, 0, 0]
    assert plan.status.tolist() == [int(Status.BAD_PARAM)] * 3


def test_cost_includes_the_draft_and_the_kv() -> None:
    plan = prefix_schedule([[0.5]], [1.0, 4.0, 4.0], draft_ms=1.0, ms_per_kv_token=0.5, kv_len=[10])
    assert plan.length.tolist() == [1]
    assert float(plan.theta) == pytest.approx(1.5 * 1000 / (4 + 1 + 5))


def test_layout_is_the_marker_tensor() -> None:
    plan = prefix_schedule(
        survive((0.9, 0.9), (0.9, 0.9), (0.9, 0.9)),
        mode="fixed",
        fixed_len=2,
        max_len=[2, 0, 1],
        active=[1, 0, 1],
        anchor=[10, 20, 30],
        draft_tokens=[[11, 12], [21, 22], [31, 32]],
        position=[100, 200, 300],
        padded_tokens=7,
    )
    assert plan.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert plan.row_to_request.tolist() == [0, 0, 0, 2, 2, -1, -1]
    assert plan.row_offset.tolist() == [0, 1, 2, 0, 1, -1, -1]
    assert plan.token_ids is not None
    assert plan.positions is not None
    assert plan.token_ids.tolist() == [10, 11, 12, 30, 31, 0, 0]
    assert plan.positions.tolist() == [100, 101, 102, 300, 301, 0, 0]
    assert int(plan.total_tokens) == 5


def test_empty_batch() -> None:
    plan = prefix_schedule(np.zeros((0, 4)), np.ones(5))
    assert plan.cu_seqlens.tolist() == [0]
    assert float(plan.theta) == 0
    idle = prefix_schedule(np.ones((2, 4)), np.ones(5), active=[0, 0])
    assert int(idle.total_tokens) == 0
    assert float(idle.theta) == 0
