# SPDX-License-Identifier: Apache-2.0
"""Calls that look like an earlier one skip the checks: they must not skip anything else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext.ops import prefix_scheduler as module


def history(survival: np.ndarray) -> dx.LaggedSurvival:
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(survival)
    return lagged


def table(rng: np.random.Generator, tokens: int = 24, kv: float = 0.0) -> dx.CostTable:
    ms = 4 + np.cumsum(rng.choice([0.0, 0.3, 1.5], tokens))
    return dx.CostTable.from_points(
        np.arange(1, tokens + 1), ms, draft_ms=float(rng.random()), ms_per_kv_token=kv
    )


def problem(rng: np.random.Generator, requests: int, mode: str) -> dict[str, Any]:
    a = np.cumprod(rng.choice([0.3, 0.9, 1.0], (requests, 3)), axis=1).astype(np.float32)
    k: dict[str, Any] = {"survival": a, "mode": mode, "cost": table(rng)}
    if mode == "two_phase":
        k["lagged"] = history(a[::-1].copy())
    if rng.random() < 0.5:
        k["max_len"] = rng.integers(0, 4, requests).astype(np.int32)
        k["weight"] = rng.choice([0.5, 1.0], requests).astype(np.float32)
    if rng.random() < 0.5:
        k |= {"cost": table(rng, kv=0.01), "kv_len": rng.integers(0, 99, requests).astype(np.int32)}
    if rng.random() < 0.5:
        k["anchor"] = rng.integers(0, 9, requests).astype(np.int32)
        k["draft_tokens"] = rng.integers(0, 9, (requests, 3)).astype(np.int32)
        k["position"] = rng.integers(0, 9, requests)
    return k


def same(got: dx.Plan, want: dx.Plan) -> bool:
    return all(
        np.array_equal(getattr(got, f.name), getattr(want, f.name), equal_nan=f.name == "theta")
        for f in fields(dx.Plan)
        if getattr(want, f.name) is not None
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_prepared", module.Prepared())


def test_any_order_of_calls_gives_what_the_reference_gives(rng: np.random.Generator) -> None:
    """A few shapes and kinds over and over, so that most calls find a predecessor."""
    hits = 0
    for _ in range(150):
        k = problem(rng, int(rng.integers(1, 4)), str(rng.choice(["causal", "two_phase", "off"])))
        known = len(module._prepared._entries)
        got = dx.prefix_schedule(**k)
        hits += len(module._prepared._entries) == known
        assert same(got, dx.prefix_schedule(**k, backend="reference"))
    assert hits > 60


def test_results_do_not_share_memory_unless_they_are_given(rng: np.random.Generator) -> None:
    k = problem(rng, 3, "causal")
    first, second = dx.prefix_schedule(**k), dx.prefix_schedule(**k)
    assert not np.shares_memory(first.length, second.length)
    for _ in range(2):
        assert dx.prefix_schedule(**k, out=first) is not None
    before = first.length.copy()
    k["survival"] = np.zeros_like(k["survival"])
    again = dx.prefix_schedule(**k, out=first)
    assert again.length is first.length and first.length.sum() == 0
    assert before.sum() > 0


def test_torch_in_torch_out_also_with_arrays_of_the_host(rng: np.random.Generator) -> None:
    k = problem(rng, 3, "causal")
    want = dx.prefix_schedule(**k)
    k["survival"] = torch.from_numpy(k["survival"])
    k.update({n: torch.from_numpy(k[n]) for n in ("anchor", "draft_tokens", "position") if n in k})
    for _ in range(3):
        got = dx.prefix_schedule(**k)
        assert isinstance(got.length, torch.Tensor)
        assert got.length.tolist() == want.length.tolist()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"survival": np.zeros((2, 3))}, "survival: got float64"),
        ({"survival": np.zeros((2, 17), np.float32)}, "gamma: got 17"),
        ({"max_len": np.zeros(3, np.int32)}, "max_len: got shape"),
        ({"padded_tokens": 3}, "padded_tokens: got int 3"),
        ({"capacity": 1}, "capacity: got int 1"),
        ({"mode": "twophase"}, "mode: got 'twophase'"),
        ({"budget": 2}, "budget: got a value in mode 'causal'"),
        (
            {"cost": dx.CostTable.from_points([1, 9], [1, 2], ms_per_kv_token=1.0)},
            "kv_len: got None",
        ),
    ],
)
def test_a_wrong_call_behind_a_good_one_is_still_wrong(change: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {
        "survival": np.full((2, 3), 0.5, np.float32),
        "cost": dx.CostTable.from_points([1, 9], [1.0, 2.0]),
    }
    for _ in range(2):
        dx.prefix_schedule(**good)
    with pytest.raises(dx.ArgumentError, match=text):
        dx.prefix_schedule(**(good | change))


def test_a_history_of_another_gamma_is_reported(rng: np.random.Generator) -> None:
    k = problem(rng, 2, "two_phase")
    dx.prefix_schedule(**k)
    k["lagged"] = history(np.zeros((2, 5), np.float32))
    with pytest.raises(dx.ArgumentError, match="gamma: got 3, expected 5"):
        dx.prefix_schedule(**k)


def test_status_is_raised_when_asked_for(rng: np.random.Generator) -> None:
    k = problem(rng, 2, "causal")
    dx.prefix_schedule(**k, strict=True)
    k["survival"] = np.full_like(k["survival"], np.nan)
    with pytest.raises(dx.StatusError):
        dx.prefix_schedule(**k, strict=True)
