# SPDX-License-Identifier: Apache-2.0
"""Losslessness of the schedule, by exact enumeration, with wrong schedulers that must leak.

The law of the first emitted token is a finite sum over the drafts: with l >= 1 draft 1 meets the
acceptance rule, with l = 0 the token comes from p itself. A schedule that looks at draft 1 before
it decides about draft 1 shifts that law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_ext as dx

P = np.array([0.7, 0.3])
Q = np.array([0.5, 0.5])


def ms(first: int, *steps_per_second: float) -> np.ndarray:
    return np.concatenate([np.ones(first), 1000 / np.array(steps_per_second)])


def emitted(draft: int, verified: bool, p: np.ndarray = P, q: np.ndarray = Q) -> np.ndarray:
    """Law of the first token given the first draft and whether it is verified."""
    if not verified:
        return p
    accept = min(1.0, p[draft] / q[draft])
    residual = np.maximum(p - q, 0)
    residual = residual / residual.sum()
    law = (1 - accept) * residual
    law[draft] += accept
    return law


def first_token_law(length_of: Callable[[int], int], q: np.ndarray = Q) -> np.ndarray:
    return sum(q[x] * emitted(x, length_of(x) >= 1, P, q) for x in range(len(q)))


def history(survival: np.ndarray) -> dx.LaggedSurvival:
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(survival)
    return lagged


def appendix_a(x1: int, *others: tuple[float, float]) -> np.ndarray:
    """Survivals of a request whose second confidence gives its first draft away."""
    return np.array([[0.8, 0.72 if x1 == 0 else 0.0], *others], np.float32)


APPENDIX_COST = ms(1, 1, 0.5, 0.45)


def test_causal_on_live_survivals_is_lossless(backend: str) -> None:
    def length(x1: int) -> int:
        plan = dx.prefix_schedule(appendix_a(x1), APPENDIX_COST, backend=backend)
        return int(plan.length[0])

    np.testing.assert_allclose(first_token_law(length), P, atol=1e-15)


def test_full_search_on_live_survivals_leaks(backend: str) -> None:
    """The must-fail control: history = live is what LaggedSurvival exists to prevent."""

    def length(x1: int) -> int:
        a = appendix_a(x1)
        plan = dx.prefix_schedule(
            a, APPENDIX_COST, mode="two_phase", lagged=history(a), backend=backend
        )
        return int(plan.length[0])

    assert [length(0), length(1)] == [2, 0]
    np.testing.assert_allclose(first_token_law(length), [0.85, 0.15], atol=1e-12)


def test_live_arrays_as_history_are_refused(backend: str) -> None:
    a: Any = appendix_a(0)
    with pytest.raises(dx.ArgumentError, match=r"lagged: got float32 .*LaggedSurvival; live surv"):
        dx.prefix_schedule(a, APPENDIX_COST, mode="two_phase", lagged=a, backend=backend)


def test_two_phase_with_an_old_history_is_lossless(backend: str) -> None:
    for old in (np.array([[0.9, 0.8]], np.float32), np.array([[0.1, 0.01]], np.float32)):

        def length(x1: int, old: np.ndarray = old) -> int:
            plan = dx.prefix_schedule(
                appendix_a(x1),
                APPENDIX_COST,
                mode="two_phase",
                lagged=history(old),
                backend=backend,
            )
            return int(plan.length[0])

        np.testing.assert_allclose(first_token_law(length), P, atol=1e-15)


def floor_by_suspending_the_stop(a: np.ndarray, sps: np.ndarray, floor: list[int]) -> list[int]:
    """L1, the wrong way: Algorithm 1 that runs on until every floor is met."""
    order = sorted(
        ((r, j) for r in range(a.shape[0]) for j in range(a.shape[1]) if a[r, j] > 0),
        key=lambda c: (-a[c], c[1], c[0]),
    )
    batch, tau, length = a.shape[0], float(a.shape[0]), [0] * a.shape[0]
    best, chosen = tau * sps[batch], list(length)
    for r, j in order:
        length[r] = j + 1
        batch, tau = batch + 1, tau + float(a[r, j])
        if tau * sps[batch] > best:
            best, chosen = tau * sps[batch], list(length)
        elif all(n >= f for n, f in zip(length, floor, strict=True)):
            break
    return [max(n, f) for n, f in zip(chosen, floor, strict=True)]


def test_l1_floors(backend: str) -> None:
    cost = ms(2, 1, 0.6, 0.6, 0.5)

    def ours(x1: int) -> int:
        a = appendix_a(x1, (0.3, 0.0))
        plan = dx.prefix_schedule(a, cost, min_len=[0, 1], max_len=[2, 1], backend=backend)
        assert plan.length[1] == 1
        return int(plan.length[0])

    def wrong(x1: int) -> int:
        sps = 1000 / cost
        return floor_by_suspending_the_stop(appendix_a(x1, (0.3, 0.0)), sps, [0, 1])[0]

    np.testing.assert_allclose(first_token_law(ours), P, atol=1e-15)
    np.testing.assert_allclose(first_token_law(wrong), [0.85, 0.15], atol=1e-12)


@pytest.mark.parametrize("shared", [False, True], ids=["distinct-seeds", "equal-seeds"])
def test_l2_seeds_must_differ(backend: str, shared: bool) -> None:
    """B's admission may depend on A's drafts, so A's drafts must not be B's."""
    cost = ms(2, 1, 1, 0.783, 0.78)

    def length_of_b(x_a: int) -> int:
        a = np.array([[0.9, 0.81 if x_a == 0 else 0.0], [0.8, 0.0]], np.float32)
        return int(dx.prefix_schedule(a, cost, max_len=[2, 1], backend=backend).length[1])

    assert [length_of_b(0), length_of_b(1)] == [1, 0]
    law = np.zeros(2)
    for x_a in range(2):
        for x_b in range(2):
            weight = Q[x_a] * (float(x_a == x_b) if shared else Q[x_b])
            law = law + weight * emitted(x_b, length_of_b(x_a) >= 1)
    np.testing.assert_allclose(law, [0.85, 0.15] if shared else P, atol=1e-12)


def test_l6_a_rising_survival_cannot_pull_its_own_draft_in(backend: str) -> None:
    """A user's a_2 above a_1 that depends on draft 1: the running minimum takes it away."""

    def raw(x1: int) -> np.ndarray:
        return np.array([[0.5, 0.9 if x1 == 0 else 0.1], [0.6, 0.0]], np.float32)

    def length(x1: int) -> int:
        plan = dx.prefix_schedule(raw(x1), mode="two_phase", budget=1, backend=backend)
        assert plan.length[1] == 1
        return int(plan.length[0])

    def wrong(x1: int) -> int:  # the largest raw value wins and drags its prefix in
        best = np.unravel_index(np.argmax(raw(x1)), (2, 2))
        return int(best[1]) + 1 if best[0] == 0 else 0

    np.testing.assert_allclose(first_token_law(length), P, atol=1e-15)
    assert not np.allclose(first_token_law(wrong), P, atol=0.01)


def rounded_to_a_bucket(a: np.ndarray, sps: np.ndarray) -> list[int]:
    """L3, the wrong way: the live number of admissions is cut down to an even number."""
    plan = dx.prefix_schedule(a, 1000 / sps)
    keep = int(plan.length.sum()) // 2 * 2
    return dx.prefix_schedule(a, mode="two_phase", budget=keep).length.tolist()


def test_l3_rounding_the_live_count_leaks() -> None:
    """Admitted 2 when x1 = A, 1 rounded down to 0 when x1 = B."""
    sps = np.array([1, 1, 0.9, 0.8])

    def wrong(x1: int) -> int:
        return rounded_to_a_bucket(appendix_a(x1), sps)[0]

    assert [wrong(0), wrong(1)] == [2, 0]
    np.testing.assert_allclose(first_token_law(wrong), [0.85, 0.15], atol=1e-12)


def variations(
    rng: np.random.Generator, requests: int, gamma: int
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Pairs of conditionals that agree on all that is known before draft j of request r."""
    c = rng.choice(np.array([0.0, 0.3, 0.6, 0.9, 1.0], np.float32), (requests, gamma))
    for r in range(requests):
        for j in range(gamma):
            other = c.copy()
            other[r, j + 1 :] = rng.choice(np.array([0.0, 0.5, 1.0], np.float32), gamma - j - 1)
            yield r, j + 1, c, other


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    requests=st.integers(1, 4),
    gamma=st.integers(1, 4),
    mode=st.sampled_from(["causal", "two_phase", "budget", "threshold", "off"]),
)
def test_admission_never_depends_on_what_comes_later(
    seed: int, requests: int, gamma: int, mode: str
) -> None:
    """{l_r >= j} is the same whatever the confidences behind draft j of request r say."""
    rng = np.random.default_rng(seed)
    tokens = requests * (gamma + 1)
    k: dict[str, Any] = {
        "mode": "two_phase" if mode == "budget" else mode,
        "min_len": rng.integers(0, 2, requests).astype(np.int32),
        "max_len": rng.integers(0, gamma + 1, requests).astype(np.int32),
        "capacity": int(rng.integers(requests, tokens + 1)),
    }
    if mode in ("causal", "two_phase"):
        k["cost"] = 1 + rng.uniform(0, 0.5) * np.arange(tokens + 1) + rng.uniform(0, 1, tokens + 1)
    if mode == "two_phase":
        k["lagged"] = history(rng.uniform(0, 1, (requests, gamma)).astype(np.float32))
    if mode == "budget":
        k["budget"] = int(rng.integers(0, tokens))
    for r, j, one, other in variations(rng, requests, gamma):
        admitted = []
        for c in (one, other):
            extra = {"conditional": c, "threshold": 0.5} if mode == "threshold" else {}
            plan = dx.prefix_schedule(np.cumprod(c, axis=1), **k, **extra)
            admitted.append(int(plan.length[r]) >= j)
        assert admitted[0] == admitted[1], (r, j)


def test_the_check_above_catches_a_leak(rng: np.random.Generator) -> None:
    """A full search over live survivals breaks the same invariant (else the test proves little)."""
    broken = 0
    for _ in range(60):
        cost = np.maximum.accumulate(rng.uniform(1, 3, 7))
        for r, j, one, other in variations(rng, 2, 2):
            plans = [
                dx.prefix_schedule(a, cost, mode="two_phase", lagged=history(a))
                for a in (np.cumprod(one, axis=1), np.cumprod(other, axis=1))
            ]
            broken += (plans[0].length[r] >= j) != (plans[1].length[r] >= j)
    assert broken > 0
