# SPDX-License-Identifier: Apache-2.0
"""Schedules must not know the drafts they admit: exact laws, with schedulers that cheat.

All cases: target law (.7, .3), sampled drafts from (.5, .5), and the confidence of slot 2 depends
on the drafted x_1, as a Markov confidence head's does. Admission that looks at x_1 shows up as
(.85, .15); ours leaves (.7, .3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark_ext.reference.draws import DRAFT, PhiloxDraws
from dspark_ext.reference.enumeration import Branches, exact_law
from dspark_ext.reference.philox import Kind, philox4x32
from dspark_ext.reference.prefix_scheduler import prefix_schedule
from dspark_ext.reference.rejection_sampler import rejection_sample
from dspark_ext.reference.sampler import make_law

P, Q = np.log([0.7, 0.3]), np.log([0.5, 0.5])
LAW_Q = make_law(Q, 1.0)
LEAK = [0.85, 0.15]
Lengths = Callable[[np.ndarray, np.ndarray], Any]


def ms(first: int, *steps_per_second: float) -> np.ndarray:
    return np.concatenate([np.ones(first), 1000 / np.array(steps_per_second)])


def first_token(draws: Any, drafts: list[int], length: int, position: int = 0) -> int:
    """Verify the scheduled drafts of one request; its first emitted token."""
    return int(_verify(draws, drafts, length, position).tokens[0, 0])


def _verify(draws: Any, drafts: list[int], length: int, position: int = 0) -> Any:
    gamma = len(drafts)
    return rejection_sample(
        np.tile(P, (length + 1, 1)),
        [drafts],
        draft_len=[length],
        cu_seqlens=[0, length + 1],
        seed=[0],
        position=[position],
        temperature=1.0,
        draws=[draws],
        draft_logit=np.full((1, gamma), Q[0]),
        draft_lse=np.zeros((1, gamma)),
        draft_logits=np.tile(Q, (1, gamma, 1)),
    )


def law_of_first_token(survivals: Callable[[int], Any], schedule: Any, request: int = 0) -> Any:
    """Exact law of a request's first token; ``survivals(x_1)`` of all requests [R, gamma]."""

    def run(draws: Branches) -> int:
        x1 = draws.categorical(0, DRAFT, LAW_Q).token
        length = int(np.asarray(schedule(np.array(survivals(x1))))[request])
        x2 = draws.categorical(1, DRAFT, LAW_Q).token if length > 1 else 0
        return first_token(draws, [x1, x2], length)

    law = exact_law(run)
    return [law.get(0, 0.0), law.get(1, 0.0)]


def ours(cost: np.ndarray, **more: Any) -> Any:
    return lambda a: prefix_schedule(a, cost, **more).length


def retrospective(cost: np.ndarray) -> Any:
    """The misuse that the API makes hard: a full search over live survivals."""
    return lambda a: prefix_schedule(a, cost, mode="two_phase", lagged=a).length


def appendix_a(x1: int) -> list[list[float]]:
    return [[0.8, 0.72 if x1 == 0 else 0.0]]


def test_s1_causal_stop_is_lossless_and_a_retrospective_search_is_not() -> None:
    table = ms(1, 1.0, 0.5, 0.45)
    np.testing.assert_allclose(law_of_first_token(appendix_a, ours(table)), [0.7, 0.3], atol=1e-12)
    np.testing.assert_allclose(
        law_of_first_token(appendix_a, retrospective(table)), LEAK, atol=1e-12
    )


def test_s1_one_hot_drafts_survive_any_scheduler() -> None:
    def run(draws: Branches) -> int:
        length = int(retrospective(ms(1, 1.0, 0.5, 0.45))(np.array(appendix_a(0)))[0])
        out = rejection_sample(
            np.tile(P, (length + 1, 1)),
            [[0, 0]],
            draft_len=[length],
            cu_seqlens=[0, length + 1],
            seed=[0],
            position=[0],
            temperature=1.0,
            draws=[draws],
        )
        return int(out.tokens[0, 0])

    assert exact_law(run) == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)


@pytest.mark.parametrize("t", [0.5, 0.85])
def test_threshold_on_the_conditional_is_lossless(t: float) -> None:
    def schedule(a: np.ndarray) -> Any:
        c = np.column_stack([a[:, 0], a[:, 1] / a[:, 0]])
        return prefix_schedule(a, mode="threshold", conditional=c, threshold=t).length

    law = law_of_first_token(appendix_a, schedule)
    np.testing.assert_allclose(law, [0.7, 0.3], atol=1e-12)


def test_two_phase_with_a_budget_from_elsewhere_is_lossless() -> None:
    for budget in range(3):
        law = law_of_first_token(appendix_a, ours(np.ones(4), mode="two_phase", budget=budget))
        np.testing.assert_allclose(law, [0.7, 0.3], atol=1e-12)


def _stop_suspended_for_floors(table: np.ndarray, floor: list[int]) -> Any:
    """Wrong: walks past a Theta that does not rise while some floor is not yet met."""

    def schedule(a: np.ndarray) -> list[int]:
        order = sorted((-a[r, j], j, r) for r in range(len(a)) for j in range(a.shape[1]))
        length, tau = [0] * len(a), float(len(a))
        best, chosen = tau * 1000 / table[len(a)], list(length)
        for b, (key, j, r) in enumerate(order, start=len(a) + 1):
            if key == 0 or b >= len(table):
                break
            length[r], tau = j + 1, tau - key
            theta = tau * 1000 / table[b]
            if theta > best:
                best, chosen = theta, list(length)
            elif all(n >= f for n, f in zip(length, floor, strict=True)):
                break
        return [max(n, f) for n, f in zip(chosen, floor, strict=True)]

    return schedule


def test_l1_floors_are_admitted_first() -> None:
    table = ms(2, 1, 0.6, 0.6, 0.5)

    def both(x1: int) -> Any:
        return [*appendix_a(x1), [0.3, 0.0]]

    law = law_of_first_token(both, ours(table, min_len=[0, 1]))
    np.testing.assert_allclose(law, [0.7, 0.3], atol=1e-12)
    wrong = law_of_first_token(both, _stop_suspended_for_floors(table, [0, 1]))
    np.testing.assert_allclose(wrong, LEAK, atol=1e-12)


@pytest.mark.parametrize("equal", [False, True], ids=["distinct", "equal"])
def test_l2_equal_seeds_make_another_requests_tokens_ones_own(equal: bool) -> None:
    table = ms(2, 1, 1, 0.783, 0.78)

    def run(draws: Branches) -> int:
        a1 = draws.categorical(0, DRAFT, LAW_Q).token
        b1 = a1 if equal else draws.categorical(0, DRAFT, LAW_Q).token
        survival = [[0.9, 0.81 if a1 == 0 else 0.0], [0.8, 0.0]]
        length = int(prefix_schedule(survival, table).length[1])
        return first_token(draws, [b1, 0], length)

    law = exact_law(run)
    want = LEAK if equal else [0.7, 0.3]
    np.testing.assert_allclose([law[0], law[1]], want, atol=1e-12)


def test_l2_equal_seeds_do_draw_equal_drafts() -> None:
    one, same, other = (PhiloxDraws(seed, 50) for seed in (3, 3, 4))
    tokens = [
        [draws.categorical(k, DRAFT, make_law(np.zeros(500), 1.0)).token for k in range(8)]
        for draws in (one, same, other)
    ]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


def test_l4_a_forbidden_draft_is_verified_not_cut() -> None:
    p, q = np.array([0.7, 0.3, 0.0]), np.array([0.25, 0.25, 0.5])
    with np.errstate(divide="ignore"):
        log_p, law_q = np.log(p), make_law(np.log(q), 1.0)

    def run(draws: Branches, cut: bool) -> int:
        x = draws.categorical(0, DRAFT, law_q).token
        length = 0 if cut and x == 2 else 1
        out = rejection_sample(
            np.tile(log_p, (length + 1, 1)),
            [[x]],
            draft_len=[length],
            cu_seqlens=[0, length + 1],
            seed=[0],
            position=[0],
            temperature=1.0,
            draws=[draws],
            draft_logit=[[law_q.z[x]]],
            draft_lse=[[0.0]],
            draft_logits=law_q.z[None, None],
        )
        return int(out.tokens[0, 0])

    right = exact_law(lambda draws: run(draws, False))
    wrong = exact_law(lambda draws: run(draws, True))
    assert right == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)
    assert wrong == pytest.approx({0: 0.6, 1: 0.4}, abs=1e-12)


def _one_live_key(a: np.ndarray) -> list[int]:
    """Wrong: K = 1 goes to the largest raw survival, wherever it stands in its request."""
    r, j = np.unravel_index(np.argmax(a), a.shape)
    return [int(j) + 1 if r == i else 0 for i in range(len(a))]


def test_l6_a_survival_that_rises_is_replaced_by_its_running_minimum() -> None:
    def rising(x1: int) -> Any:
        return [[0.5, 0.9 if x1 == 0 else 0.1], [0.6, 0.0]]

    law = law_of_first_token(rising, ours(np.ones(9), mode="two_phase", budget=1))
    np.testing.assert_allclose(law, [0.7, 0.3], atol=1e-12)
    wrong = law_of_first_token(rising, _one_live_key)
    np.testing.assert_allclose(wrong, LEAK, atol=1e-12)


def test_l7_the_budget_of_the_simulation_below() -> None:
    table = ms(1, 1.0, 0.4, 0.3, 0.24, 0.21)  # a full block pays only when every slot survives
    for fourth, want in ((1.0, 4), (0.0, 0)):
        plan = prefix_schedule(
            np.ones((1, 4)), table, mode="two_phase", lagged=[[1.0, 1.0, 1.0, fourth]]
        )
        assert plan.length.tolist() == [want]


def _share_of_b(requests: int, rounds: int, anchor_in_key: bool) -> tuple[float, int]:
    """Share of token B in the output of many requests, and the number of tokens.

    gamma 4, two_phase; c_4 sees x_3: it is 1 behind A and 0 behind B. The budget comes from the
    survivals of two rounds before and is all or nothing, as in the test above.
    """
    keys = np.stack([np.arange(requests), np.full(requests, 77)], axis=-1)
    position = np.zeros(requests, dtype=np.int64)

    def uniform(kind: Kind, k: int) -> np.ndarray:
        word = int(kind) << 8 | (k if anchor_in_key else 0)
        counters = np.stack(
            [np.zeros_like(position), position + k, position * 0, np.full_like(position, word)],
            axis=-1,
        )
        return philox4x32(counters, keys)[:, 0] * 2.0**-32

    history = [np.zeros(requests, bool)] * 2
    b_seen = total = 0
    for _ in range(rounds):
        drafts = np.stack([uniform(Kind.DRAFT_INNER, k) >= 0.5 for k in range(1, 5)])
        full = ~drafts[2]  # every slot survives iff x_3 = A
        length = np.where(history[0], np.where(full, 4, 3), 0)
        history = [history[1], full]
        running, emitted = np.ones(requests, bool), np.zeros(requests, dtype=np.int64)
        for k in range(1, 6):
            verified = running & (k <= length)
            bonus = running & (k == length + 1)
            accepted = ~drafts[min(k, 4) - 1] | (uniform(Kind.ACCEPT, k) < 0.6)
            b_seen += int((verified & accepted & drafts[min(k, 4) - 1]).sum())  # the residual is A
            b_seen += int((bonus & (uniform(Kind.BONUS_INNER, k) >= 0.7)).sum())
            emitted += verified | bonus
            running &= verified & accepted
        total += int(emitted.sum())
        position = position + emitted
    return b_seen / total, total


def test_l7_a_lagged_budget_is_lossless_because_the_anchor_is_in_the_key() -> None:
    """A position behind a rejection is drafted again: it must not repeat its old draw."""
    share, tokens = _share_of_b(requests=3000, rounds=20, anchor_in_key=True)
    assert abs(share - 0.3) < 5 * np.sqrt(0.21 / tokens)
    leaking, tokens = _share_of_b(requests=3000, rounds=20, anchor_in_key=False)
    assert abs(leaking - 0.3) > 10 * np.sqrt(0.21 / tokens)
