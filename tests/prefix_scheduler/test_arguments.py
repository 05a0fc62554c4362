# SPDX-License-Identifier: Apache-2.0
"""Wrong calls: one error that names everything, and nothing written."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import _C

A = np.full((2, 3), 0.5, np.float32)
LAGGED = dx.LaggedSurvival()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "greedy"}, "mode: got 'greedy', expected causal | two_phase"),
        ({"survival": None, "cost": np.ones(9)}, "survival: got None, expected an array"),
        ({"survival": A.astype(np.float64), "cost": np.ones(9)}, "survival: got float64"),
        ({"survival": A[0], "cost": np.ones(9)}, "survival: got shape [3]"),
        ({"survival": np.ones((2, 17), "f4"), "mode": "off"}, "gamma: got 17, expected 1..16"),
        ({"survival": np.ones((2, 0), "f4"), "mode": "off"}, "gamma: got 0, expected 1..16"),
        ({"survival": A.T, "mode": "off"}, "survival: got strides"),
        ({"survival": None, "mode": "off"}, "no array to size the batch"),
        ({"cost": np.array([1, 1, -1.0])}, "cost: got -1.0 at B = 2, expected milliseconds > 0"),
        ({"cost": np.array([1, 0.0])}, "cost: got 0.0 at B = 1"),
        ({"cost": np.array([1, np.inf])}, "cost: got inf at B = 1"),
        ({"cost": np.array([1, np.nan])}, "cost: got nan at B = 1"),
        ({"cost": np.ones((2, 2))}, "cost: got shape [2, 2], expected [B_max + 1]"),
        ({"cost": np.zeros(0)}, "cost: got shape [0]"),
        ({"cost": "table.json"}, "cost: got table.json"),
        ({"mode": "two_phase"}, "lagged, budget: got neither"),
        ({"mode": "two_phase", "lagged": LAGGED}, "cost: got None"),
        ({"mode": "two_phase", "lagged": LAGGED, "budget": 1}, "lagged, budget: got both"),
        ({"mode": "two_phase", "budget": -1}, "budget: got int -1"),
        ({"mode": "two_phase", "budget": 1.5}, "budget: got float 1.5"),
        ({"mode": "off", "budget": 1}, "budget: got a value in mode 'off'"),
        ({"cost": np.ones(9), "lagged": LAGGED}, "lagged: got a value in mode 'causal'"),
        ({"mode": "off", "threshold": 0.5}, "threshold: got a value in mode 'off'"),
        ({"mode": "off", "fixed_len": 1}, "fixed_len: got a value in mode 'off'"),
        ({"mode": "off", "conditional": A}, "conditional: got a value in mode 'off'"),
        ({"mode": "threshold", "threshold": 0.5}, "conditional: got None"),
        ({"mode": "threshold", "conditional": A}, "threshold: got None, expected a number"),
        ({"mode": "threshold", "conditional": A, "threshold": 1.5}, "threshold: got float 1.5"),
        ({"mode": "threshold", "conditional": A, "threshold": np.nan}, "threshold: got float nan"),
        ({"mode": "fixed"}, "fixed_len: got None, expected an integer in 0..3"),
        ({"mode": "fixed", "fixed_len": 4}, "fixed_len: got int 4, expected an integer in 0..3"),
        ({"mode": "fixed", "fixed_len": True}, "fixed_len: got bool True"),
        ({"mode": "off", "capacity": 1}, "capacity: got int 1, expected an integer in 2.."),
        ({"mode": "off", "capacity": -3}, "capacity: got int -3"),
        ({"mode": "off", "min_len": [1, 2, 3]}, "min_len: got shape [3]"),
        ({"mode": "off", "max_len": [1.5, 2]}, "max_len: got float64"),
        ({"mode": "off", "weight": "heavy"}, "weight: got"),
        ({"mode": "off", "anchor": [1, 2]}, "anchor, draft_tokens, position: got 1 of the three"),
        ({"mode": "off", "draft_tokens": np.full((2, 3), 2**40)}, "draft_tokens: got ids beyond"),
        ({"mode": "off", "draft_tokens": np.zeros((2, 2), "i4")}, "draft_tokens: got shape"),
        ({"mode": "off", "padded_tokens": 7}, "padded_tokens: got int 7, expected at least 8"),
        ({"mode": "off", "padded_tokens": 2**31}, "padded_tokens: got int 2147483648"),
        ({"mode": "off", "backend": "tpu"}, "backend: got 'tpu'"),
    ],
    ids=lambda x: x[:40].replace(" ", "_") if isinstance(x, str) else None,
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    k = {"survival": A, **arguments}
    with pytest.raises(dx.ArgumentError) as error:
        dx.prefix_schedule(k.pop("survival"), **k)
    assert text in str(error.value)


def test_everything_wrong_is_listed_at_once_and_nothing_written() -> None:
    out = dx.prefix_schedule(A, mode="off")
    out.length[...] = 9
    with pytest.raises(dx.ArgumentError) as error:
        dx.prefix_schedule(
            A, np.zeros(3), lagged=LAGGED, fixed_len=1, capacity=0, padded_tokens=1, out=out
        )
    for name in ("cost:", "lagged:", "fixed_len:", "capacity:", "padded_tokens:"):
        assert name in str(error.value)
    assert out.length.tolist() == [9, 9]


def test_read_only_results_are_refused() -> None:
    out = dx.prefix_schedule(A, mode="off")
    out.status.flags.writeable = False
    with pytest.raises(dx.ArgumentError, match=r"out\.status: got a read-only array"):
        dx.prefix_schedule(A, mode="off", out=out)


def test_a_slot_twice_is_an_error() -> None:
    with pytest.raises(dx.ArgumentError, match=r"request_slots: got .* distinct"):
        dx.prefix_schedule(A, np.ones(9), mode="two_phase", lagged=LAGGED, request_slots=[1, 1])


def c_params(cost: np.ndarray, survival: np.ndarray = A) -> tuple[Any, dict[str, np.ndarray]]:
    """A causal call straight into the C API, without the checks of the Python function."""
    requests, gamma = survival.shape
    rows = requests * (gamma + 1)
    out = {
        "length": np.full(requests, 9, np.int32),
        "cu_seqlens": np.zeros(requests + 1, np.int32),
        "total_tokens": np.zeros(1, np.int32),
        "theta": np.zeros(1),
        "row_to_request": np.zeros(rows, np.int32),
        "row_offset": np.zeros(rows, np.int32),
        "status": np.zeros(requests, np.int32),
    }
    p = _C.PrefixSchedulerParams()
    p.num_requests, p.gamma, p.padded_tokens = requests, gamma, rows
    p.survival, p.survival_stride = survival.ctypes.data, gamma
    p.cost_ms, p.cost_size, p.budget, p.capacity = cost.ctypes.data, len(cost), -1, -1
    for name, x in out.items():
        setattr(p, name, x.ctypes.data)
    out["cost"] = cost  # the parameters hold an address: the array must outlive the call
    return p, out


def call(p: Any) -> None:
    scratch = np.zeros(4096, np.uint8)
    _C.prefix_scheduler(_C.CPU, p, scratch.ctypes.data, scratch.size)


@pytest.mark.parametrize("price", [0.0, -1.0, np.nan, np.inf])
def test_c_a_bad_price_ends_the_table(price: float) -> None:
    cost = np.ones(9)
    cost[4] = price
    p, out = c_params(cost)
    call(p)
    assert out["length"].tolist() == [1, 0]  # B = 3 is the last batch with a price
    assert out["status"].tolist() == [int(dx.Status.BAD_PARAM)] * 2
    assert out["theta"][0] == 2500.0
    cost[2] = price
    call(p)
    assert out["length"].tolist() == [0, 0]
    assert np.isnan(out["theta"][0])


def test_c_entry_zero_is_not_read() -> None:
    cost = np.ones(9)
    cost[0] = np.nan
    p, out = c_params(cost)
    call(p)
    assert out["length"].tolist() == [3, 3]
    assert out["status"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gamma": 17}, "gamma: got 17"),
        ({"num_requests": -1}, "num_requests: got -1"),
        ({"num_requests": 40_000}, "num_requests: got 40000, expected R * (gamma + 1) <= 131072"),
        ({"mode": 7}, "mode: got 7"),
        ({"survival": 0}, "survival: got NULL"),
        ({"cost_ms": 0, "cost_size": 0}, "cost_ms: got NULL, expected a cost table"),
        ({"cost_size": 0}, "cost_size: got 0"),
        ({"draft_ms": -1.0}, "draft_ms: got -1"),
        ({"ms_per_kv_token": float("nan")}, "ms_per_kv_token: got nan"),
        ({"ms_per_kv_token": 1.0}, "kv_len: got NULL"),
        ({"mode": 1}, "lagged, budget: got neither"),
        ({"lagged": 4096}, "lagged: got an array"),
        ({"mode": 2}, "conditional: got NULL"),
        ({"mode": 2, "threshold": -1.0}, "threshold: got -1"),
        ({"mode": 3, "fixed_len": 9}, "fixed_len: got 9"),
        ({"capacity": 0}, "capacity: got 0"),
        ({"padded_tokens": 7}, "padded_tokens: got 7, expected at least 8"),
        ({"length": 0}, "length: got NULL"),
        ({"cu_seqlens": 0}, "cu_seqlens: got NULL"),
        ({"row_offset": 0}, "row_offset: got NULL"),
        ({"anchor": 4096}, "anchor, draft_tokens, position: got 1"),
        ({"token_ids": 4096}, "token_ids, positions: got an array without"),
        ({"work": 4096, "work_size": 9}, "work_size: got 9, expected at least 10"),
    ],
    ids=lambda x: x[:30].replace(" ", "_") if isinstance(x, str) else None,
)
def test_c_wrong_arguments(change: dict[str, Any], text: str) -> None:
    p, out = c_params(np.ones(9))
    for name, value in change.items():
        setattr(p, name, value)
    with pytest.raises(ValueError, match=re.escape(text)):
        call(p)
    assert out["length"].tolist() == [9, 9]


def test_c_a_thousand_candidates_take_far_less_than_a_millisecond(
    rng: np.random.Generator,
) -> None:
    """The best of many calls, so that a busy machine does not fail it; 0.02 ms when it is idle."""
    a = np.cumprod(rng.beta(5, 1, (64, 16)).astype(np.float32), axis=1)
    p, out = c_params(np.linspace(1, 1.5, 64 * 17 + 1), a)
    scratch = np.zeros(_C.prefix_scheduler_workspace(_C.CPU, p), np.uint8)
    best = np.inf
    for _ in range(100):
        start = time.perf_counter()
        _C.prefix_scheduler(_C.CPU, p, scratch.ctypes.data, scratch.size)
        best = min(best, time.perf_counter() - start)
    assert int(out["length"].sum()) > 512
    assert best < 1e-3


def test_c_workspace_too_small() -> None:
    p, _ = c_params(np.ones(9))
    needed = _C.prefix_scheduler_workspace(_C.CPU, p)
    scratch = np.zeros(needed, np.uint8)
    with pytest.raises(ValueError, match=f"workspace: got {needed - 1} bytes"):
        _C.prefix_scheduler(_C.CPU, p, scratch.ctypes.data, needed - 1)


def test_c_says_why_it_cannot_run_on_a_device() -> None:
    cuda = dx.info()["cuda"]
    if cuda["usable"]:
        pytest.skip("this machine has a device")
    p, _ = c_params(np.ones(9))
    expected, reason = (
        (RuntimeError, "cuda") if cuda["compiled"] else (NotImplementedError, "built without CUDA")
    )
    with pytest.raises(expected, match=reason):
        _C.prefix_scheduler(_C.CUDA, p, 0, 0)
