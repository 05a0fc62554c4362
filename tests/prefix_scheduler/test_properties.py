# SPDX-License-Identifier: Apache-2.0
"""What holds of every schedule, on every backend: prefixes, monotony, permutation, optimality."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dspark_ext as dx

# The fixture only names the backend, so one for all examples is as good as one for each.
examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MODES = ("causal", "two_phase", "budget", "threshold", "fixed", "off")
CONDITIONAL = st.sampled_from([0.0, 0.2, 0.5, 0.75, 0.9, 1.0])


def history(survival: np.ndarray) -> dx.LaggedSurvival:
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(survival)
    return lagged


@st.composite
def limits(draw: st.DrawFn, requests: int, gamma: int) -> dict[str, Any]:
    """Floors, caps, weights and a capacity, each perhaps."""
    row = lambda dtype, s: hnp.arrays(dtype, (requests,), elements=s)  # noqa: E731
    return {
        "min_len": draw(st.none() | row(np.int32, st.integers(0, gamma))),
        "max_len": draw(st.none() | row(np.int32, st.integers(0, gamma))),
        "weight": draw(st.none() | row(np.float32, st.sampled_from([0.5, 1.0, 2.0]))),
        "capacity": draw(st.none() | st.integers(requests, requests * (gamma + 1))),
    }


@st.composite
def batches(draw: st.DrawFn, most: int = 4, gamma: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Survivals [R, gamma] with ties and zeros, and rising milliseconds for every B."""
    shape = draw(st.integers(1, most)), draw(st.integers(1, gamma))
    c = draw(hnp.arrays(np.float32, shape, elements=CONDITIONAL))
    rises = st.sampled_from([0.0, 0.1, 0.5, 2.0])
    ms = 4 + np.cumsum(draw(hnp.arrays(np.float64, shape[0] * (shape[1] + 1) + 1, elements=rises)))
    return np.cumprod(c, axis=1, dtype=np.float32), ms


def call(mode: str, a: np.ndarray, ms: np.ndarray, **k: Any) -> dx.Plan:
    given: dict[str, Any] = {
        "causal": {"cost": ms},
        "two_phase": {"cost": ms, "lagged": history(a)},
        "budget": {"budget": a.size // 2},
        "threshold": {"conditional": a, "threshold": 0.4},
        "fixed": {"fixed_len": (a.shape[1] + 1) // 2},
        "off": {},
    }[mode]
    return dx.prefix_schedule(a, mode="two_phase" if mode == "budget" else mode, **given, **k)


@examples
@given(data=st.data(), problem=batches(), mode=st.sampled_from(MODES))
def test_what_is_sent_is_a_prefix_of_every_request(
    backend: str, data: st.DataObject, problem: tuple[np.ndarray, np.ndarray], mode: str
) -> None:
    a, ms = problem
    k = data.draw(limits(*a.shape))
    plan = call(mode, a, ms, backend=backend, **k)
    cap = np.full(len(a), a.shape[1]) if k["max_len"] is None else k["max_len"]
    assert np.all((plan.length >= 0) & (plan.length <= cap))
    if k["capacity"] is None and mode not in ("causal", "two_phase") and k["min_len"] is not None:
        assert np.all(plan.length >= np.minimum(k["min_len"], cap))
    rows = [(r, j) for r, n in enumerate(plan.length) for j in range(n + 1)]
    total = int(plan.total_tokens)
    assert total == len(rows) <= (k["capacity"] or total)
    assert list(zip(plan.row_to_request[:total], plan.row_offset[:total], strict=True)) == rows
    assert plan.cu_seqlens.tolist() == np.cumsum([0, *(plan.length + 1)]).tolist()
    assert np.all(plan.row_to_request[total:] == -1)


@examples
@given(problem=batches(), part=st.floats(0, 1))
def test_a_larger_budget_only_adds(
    backend: str, problem: tuple[np.ndarray, np.ndarray], part: float
) -> None:
    a, _ = problem
    budget, useful = int(part * a.size), int(np.count_nonzero(a > 0))
    less, more = (
        dx.prefix_schedule(a, mode="two_phase", budget=k, backend=backend).length
        for k in (budget, budget + 1)
    )
    assert np.all(more >= less)
    assert (less.sum(), more.sum()) == (min(budget, useful), min(budget + 1, useful))


@examples
@given(problem=batches(), part=st.floats(0, 1))
def test_room_only_adds_to_algorithm_1(
    backend: str, problem: tuple[np.ndarray, np.ndarray], part: float
) -> None:
    a, ms = problem
    capacity = len(a) + int(part * a.size)
    less, more = (
        dx.prefix_schedule(a, ms, capacity=k, backend=backend).length
        for k in (capacity, capacity + 1)
    )
    assert np.all(more >= less)
    assert more.sum() <= less.sum() + 1


@examples
@given(data=st.data(), problem=batches(), mode=st.sampled_from(("causal", "two_phase", "budget")))
def test_permuted_requests_get_permuted_lengths(
    backend: str, data: st.DataObject, problem: tuple[np.ndarray, np.ndarray], mode: str
) -> None:
    a, ms = problem
    order = np.array(data.draw(st.permutations(range(len(a)))))
    straight = call(mode, a, ms, backend=backend)
    permuted = call(mode, a[order], ms, backend=backend)
    # Ties go to the request with the lower index, so totals and Theta stay, lengths may not ...
    assert int(permuted.total_tokens) == int(straight.total_tokens)
    assert np.array_equal(permuted.theta, straight.theta, equal_nan=True)
    # ... unless nothing is tied across requests.
    rank = 1 - np.arange(len(a), dtype=np.float32)[:, None] / 1024
    apart = a * rank
    ties = [x for r, s in itertools.combinations(apart, 2) for x in np.intersect1d(r, s) if x > 0]
    if not ties:
        straight = call(mode, apart, ms, backend=backend)
        permuted = call(mode, apart[order], ms, backend=backend)
        assert permuted.length.tolist() == straight.length[order].tolist()


@examples
@given(data=st.data(), problem=batches(most=3, gamma=3))
def test_the_full_search_beats_every_length_vector(
    backend: str, data: st.DataObject, problem: tuple[np.ndarray, np.ndarray]
) -> None:
    a, ms = problem
    k = data.draw(limits(*a.shape))
    plan = call("two_phase", a, ms, backend=backend, **k)
    requests, gamma = a.shape
    cap = np.full(requests, gamma) if k["max_len"] is None else k["max_len"]
    floor = np.zeros(requests, int) if k["min_len"] is None else np.minimum(k["min_len"], cap)
    weight = np.ones(requests) if k["weight"] is None else k["weight"].astype(np.float64)
    most = requests * (gamma + 1) if k["capacity"] is None else k["capacity"]
    if requests + floor.sum() > most:
        return  # the floors themselves are cut: another rule, in test_rules.py
    thetas: dict[tuple[int, ...], float] = {}
    for v in itertools.product(
        *(range(low, high + 1) for low, high in zip(floor, cap, strict=True))
    ):
        batch = requests + sum(v)
        if batch <= most:
            gains = [1 + float(a[r, :n].sum(dtype=np.float64)) for r, n in enumerate(v)]
            thetas[v] = float(np.dot(weight, gains)) * 1000 / ms[batch]
    best = max(thetas.values())
    assert float(plan.theta) == pytest.approx(best, rel=1e-9)
    assert thetas[tuple(plan.length.tolist())] == pytest.approx(best, rel=1e-9)
    # Algorithm 1 on the same values may stop early, and never does better.
    causal = call("causal", a, ms, backend=backend, **k)
    assert float(causal.theta) <= best * (1 + 1e-9)
