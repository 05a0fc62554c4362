# SPDX-License-Identifier: Apache-2.0
"""The compiled scheduler against the float64 reference (bit for bit) and against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dspark_ext as dx

MODES = ("causal", "two_phase", "budget", "threshold", "fixed", "off")
# Values where ties, zeros, NaN, clamping and the smallest floats meet.
SURVIVAL = st.sampled_from(
    [0.0, 1e-45, 1e-13, 7e-13, 0.25, 0.5, 0.5000001, 0.75, 1.0, 1.5, -1.0, np.nan]
)


def assert_same(got: dx.Plan, want: dx.Plan) -> None:
    for field in fields(dx.Plan):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if a is None or b is None:
            assert a is b
            continue
        assert a.dtype == b.dtype and a.shape == b.shape, field.name
        assert np.array_equal(a, b, equal_nan=field.name == "theta"), (field.name, a, b)


def history(survival: np.ndarray) -> dx.LaggedSurvival:
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(survival)
    return lagged


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    """Any legal call, with illegal values in the data."""
    requests, gamma = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    tokens = requests * (gamma + 1)
    matrix = hnp.arrays(np.float32, (requests, gamma), elements=SURVIVAL)
    maybe = lambda s: st.one_of(st.none(), s)  # noqa: E731
    row = lambda dtype, s: maybe(hnp.arrays(dtype, (requests,), elements=s))  # noqa: E731
    prices = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 1e-3, 40.0])
    cost = draw(hnp.arrays(np.float64, st.integers(1, tokens + 2), elements=prices))
    mode = draw(st.sampled_from(MODES))
    k: dict[str, Any] = {
        "mode": "two_phase" if mode == "budget" else mode,
        "min_len": draw(row(np.int32, st.integers(-1, gamma + 1))),
        "max_len": draw(row(np.int32, st.integers(-1, gamma + 1))),
        "weight": draw(
            row(np.float32, st.sampled_from([0.0, -0.0, 0.5, 1.0, 3.0, 128, -1, np.nan]))
        ),
        "active": draw(row(np.uint8, st.integers(0, 1))),
        "kv_len": draw(row(np.int32, st.integers(-1, 50))),
    }
    least = requests if k["active"] is None else 0
    k["capacity"] = draw(maybe(st.integers(least, tokens + 1)))
    if mode == "two_phase":
        k["lagged"] = history(draw(matrix))
    if mode == "budget":
        k["budget"] = draw(st.integers(0, tokens))
    if mode == "threshold":
        k["conditional"], k["threshold"] = draw(matrix), draw(st.sampled_from([0.0, 0.5, 1.0]))
    if mode == "fixed":
        k["fixed_len"] = draw(st.integers(0, gamma))
    if mode in ("causal", "two_phase") or draw(st.booleans()):
        k["cost"] = cost
    if draw(st.booleans()):
        ids = st.integers(0, 9)
        k["anchor"] = draw(hnp.arrays(np.int32, (requests,), elements=ids))
        k["draft_tokens"] = draw(hnp.arrays(np.int64, (requests, gamma), elements=ids))
        k["position"] = draw(hnp.arrays(np.int64, (requests,), elements=st.integers(0, 2**32)))
    return draw(matrix), k


@settings(max_examples=120, deadline=None)
@given(problems())
def test_any_problem_bit_for_bit(problem: tuple[np.ndarray, dict[str, Any]]) -> None:
    survival, k = problem
    want = dx.prefix_schedule(survival, backend="reference", **k)
    assert_same(dx.prefix_schedule(survival, backend="cpu", **k), want)
    caps = survival.shape[1] if k["max_len"] is None else np.clip(k["max_len"], 0, None)
    assert np.all((want.length >= 0) & (want.length <= caps))


@pytest.mark.parametrize("mode", ["causal", "two_phase", "budget", "off"])
@pytest.mark.parametrize(
    ("requests", "gamma"), [(1, 16), (33, 7), (64, 16), (512, 16)], ids=lambda n: str(n)
)
def test_large_batches_bit_for_bit(
    rng: np.random.Generator, requests: int, gamma: int, mode: str
) -> None:
    def draw() -> np.ndarray:
        return np.cumprod(rng.beta(4, 1, (requests, gamma)).astype(np.float32), axis=1)

    check_large(rng, draw, requests, gamma, mode)


@pytest.mark.parametrize("mode", ["causal", "two_phase", "budget"])
@pytest.mark.parametrize("low", [1 - 2**-10, 1 - 2**-18, 1e-6], ids=str)
def test_crowded_and_scattered_keys_bit_for_bit(
    rng: np.random.Generator, low: float, mode: str
) -> None:
    """Hundreds of different keys within a thousandth, hundreds of equal ones, or all sizes of
    them down to the smallest floats: however the CPU sorts, the order is the reference's."""

    def draw() -> np.ndarray:
        return np.cumprod(rng.uniform(low, 1, (90, 9)).astype(np.float32), axis=1)

    check_large(rng, draw, 90, 9, mode, weight=np.ones(90, np.float32))


def check_large(
    rng: np.random.Generator,
    draw: Callable[[], np.ndarray],
    requests: int,
    gamma: int,
    mode: str,
    **options: Any,
) -> None:
    tokens = requests * (gamma + 1)
    k: dict[str, Any] = {
        "mode": "two_phase" if mode == "budget" else mode,
        "cost": np.maximum.accumulate(10 + 0.01 * np.arange(tokens + 1.0)),
        "weight": rng.uniform(0.5, 2, requests).astype(np.float32),
        "min_len": rng.integers(0, 2, requests).astype(np.int32),
        "capacity": int(tokens * 0.9),
        **options,
    }
    if mode == "two_phase":
        k["lagged"] = history(draw())
    if mode == "budget":
        k["budget"] = tokens // 3
    survival = draw()
    got = dx.prefix_schedule(survival, backend="cpu", **k)
    assert_same(got, dx.prefix_schedule(survival, backend="reference", **k))
    assert int(got.total_tokens) > requests


def algorithm_1(a: np.ndarray, sps: np.ndarray) -> list[int]:
    """Transcribed from the paper, on plain floats."""
    requests, gamma = a.shape
    candidates = [(r, j) for r in range(requests) for j in range(gamma) if a[r, j] > 0]
    candidates.sort(key=lambda c: (-a[c], c[1], c[0]))
    batch, tau = requests, float(requests)
    best, length = tau * sps[batch], [0] * requests
    for r, j in candidates:
        batch, tau = batch + 1, tau + float(a[r, j])
        if not tau * sps[batch] > best:
            break
        best, length[r] = tau * sps[batch], j + 1
    return length


@pytest.mark.parametrize("requests", [1, 2, 3, 7])
def test_causal_is_algorithm_1(backend: str, rng: np.random.Generator, requests: int) -> None:
    stops = set()
    for _ in range(40):
        gamma = int(rng.integers(1, 6))
        a = np.cumprod(rng.uniform(0.2, 1, (requests, gamma)).astype(np.float32), axis=1)
        ms = 1 + rng.uniform(0.01, 0.4) * np.arange(requests * (gamma + 1) + 1)
        plan = dx.prefix_schedule(a, ms, backend=backend)
        assert plan.length.tolist() == algorithm_1(a, 1000 / ms)
        stops.add(int(plan.length.sum()) / (requests * gamma))
    assert {0.0, 1.0} != stops and len(stops) > 3


def test_budget_is_optimal_at_its_batch(backend: str, rng: np.random.Generator) -> None:
    """For a fixed B nothing beats the top of the pool: every length vector is tried."""
    for _ in range(10):
        a = np.cumprod(rng.uniform(0.2, 1, (3, 3)).astype(np.float32), axis=1).astype(np.float64)
        gain = np.concatenate([np.zeros((3, 1)), np.cumsum(a, axis=1)], axis=1)
        vectors = list(itertools.product(range(4), repeat=3))
        for budget in range(10):
            plan = dx.prefix_schedule(
                a.astype(np.float32), mode="two_phase", budget=budget, backend=backend
            )
            best = max(
                sum(gain[r, n] for r, n in enumerate(v)) for v in vectors if sum(v) == budget
            )
            got = sum(gain[r, n] for r, n in enumerate(plan.length))
            assert int(plan.length.sum()) == budget
            assert got == pytest.approx(best, rel=1e-12)


def test_full_search_is_the_global_maximum(backend: str, rng: np.random.Generator) -> None:
    for _ in range(20):
        a = np.cumprod(rng.uniform(0.2, 1, (3, 2)).astype(np.float32), axis=1)
        ms = np.maximum.accumulate(rng.uniform(1, 3, 10))
        plan = dx.prefix_schedule(a, ms, mode="two_phase", lagged=history(a), backend=backend)
        thetas = {}
        for v in itertools.product(range(3), repeat=3):
            tau = 3 + sum(float(a[r, j]) for r, n in enumerate(v) for j in range(n))
            thetas[v] = tau * 1000 / ms[3 + sum(v)]
        assert float(plan.theta) == pytest.approx(max(thetas.values()), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), requests=st.integers(2, 6), gamma=st.integers(1, 4))
def test_permuting_the_batch_permutes_the_lengths(
    data: st.DataObject, requests: int, gamma: int
) -> None:
    """Without ties the order of the batch does not matter; with ties the total does not."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    a = np.cumprod(rng.uniform(0.2, 1, (requests, gamma)).astype(np.float32), axis=1)
    ms = 1 + rng.uniform(0.01, 0.4) * np.arange(requests * (gamma + 1) + 1)
    order = rng.permutation(requests)
    straight, permuted = dx.prefix_schedule(a, ms), dx.prefix_schedule(a[order], ms)
    assert permuted.length.tolist() == straight.length[order].tolist()
    assert float(permuted.theta) == float(straight.theta)  # exact sums: no order of addition
    tied = np.full((requests, gamma), 0.5, np.float32)
    assert int(dx.prefix_schedule(tied, ms).total_tokens) == int(
        dx.prefix_schedule(tied[order], ms).total_tokens
    )
