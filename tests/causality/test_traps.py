# SPDX-License-Identifier: Apache-2.0
"""Mistakes that bend the law, each with the number it gives; the right way beside it is exact.

The target's law is (.7, .3) at every position and the drafter's (.5, .5). A schedule that verifies
the first draft only if it is A emits (.85, .15); one that drops it exactly if it is A emits
(.55, .45). One-hot drafts would hide all of this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from joint_law import Request, World, distance, first_token, outcomes
from policies import (
    Ours,
    cost_of,
    cut_before,
    dropped_above,
    raw_survivals,
    retrospective,
    rounded_down,
    suspended_stop,
)

import dspark_ext as dx
from dspark_ext.reference.philox import Kind, philox4x32
from dspark_ext.toy import ToyDrafter, ToyTarget

P, Q = ((0.7, 0.3),) * 2, ((0.5, 0.5),) * 2
RIGHT, KEPT_IF_A, LOST_IF_A = [0.7, 0.3], [0.85, 0.15], [0.55, 0.45]
EXACT = 1e-12


def same(law: Any, stated: list[float]) -> bool:
    return bool(np.allclose(law, stated, atol=EXACT, rtol=0))


def system(*confidences: Any, floors: Any = None, caps: Any = None, **more: Any) -> World:
    floors, caps = floors or [0] * len(confidences), caps or [2] * len(confidences)
    requests = [
        Request(3, c, floor=f, cap=k) for c, f, k in zip(confidences, floors, caps, strict=True)
    ]
    return World(more.get("p", P), more.get("q", Q), tuple(requests))


def bait(first: float, after_a: float, after_b: float) -> Any:
    """c_1 whatever comes before; c_2 by the first draft."""
    return ((first, first), (after_a, after_b))


APPENDIX = bait(0.8, 0.9, 0.0)
APPENDIX_COST = cost_of(1, 1.0, 0.5, 0.45, 0.01)


def test_s1_appendix_a() -> None:
    world = system(APPENDIX)
    assert same(first_token(world, retrospective(APPENDIX_COST)), KEPT_IF_A)
    assert same(first_token(world, Ours("causal", APPENDIX_COST)), RIGHT)
    for mode in ("causal", "two_phase"):
        assert distance(world, Ours(mode, APPENDIX_COST)) < EXACT


def test_l1_a_stop_that_waits_for_a_floor() -> None:
    table = cost_of(2, 1, 0.6, 0.6, 0.5)
    world = system(APPENDIX, bait(0.3, 0.0, 0.0), floors=[0, 1], caps=[2, 1])
    assert same(first_token(world, suspended_stop(table)), KEPT_IF_A)
    assert distance(world, Ours("causal", table)) < EXACT
    assert distance(world, Ours("two_phase", table)) < EXACT


@pytest.mark.parametrize(("equal", "law"), [(False, RIGHT), (True, KEPT_IF_A)])
def test_l2_equal_seeds(equal: bool, law: list[float]) -> None:
    """B's only draft is admitted if A's first draft was A; with equal seeds that is B's own."""
    table = cost_of(2, 1, 1, 0.783, 0.78)
    got = np.zeros(2)
    for a in range(2):
        live = np.array([[0.9, 0.81 if a == 0 else 0.0], [0.8, 0.0]], np.float32)
        length = int(dx.prefix_schedule(live, table, max_len=[2, 1]).length[1])
        for b in range(2):
            chance = 0.5 * (float(a == b) if equal else 0.5)
            for tokens, _, mass in outcomes(P, Q, 0, (b, 0), length, "token"):
                got[tokens[0]] += chance * mass
    assert same(got, law)


@pytest.mark.parametrize("equal", [False, True])
def test_l2_in_decode_round(equal: bool) -> None:
    """The same pair with real random numbers; the two laws are five deviations apart."""
    target, drafter = ToyTarget(2), ToyDrafter(2, 2)
    target.table[...], drafter.base[...] = np.log(P[0]), 0.0
    # log-odds of c: slot 1 as below for either anchor, slot 2 by the draft before it
    low, high = -30.0, float(np.log(9.0))
    drafter.hidden[...] = 0.0
    drafter.head = dx.DraftHead(
        w1=np.array([[1.0], [-1.0]], np.float32), w2=np.zeros((2, 1), np.float32),
        confidence_weight=np.array([1.0, 0.0, 0.0, (high - low) / 2], np.float32),
        confidence_bias=(high + low) / 2,
    )  # fmt: skip
    drafter.hidden[:, 0, 0] = np.log(9.0) - np.array([high, low])  # c_1 = .9
    # The third candidate pays with A's second draft (.81) and not with B's first (.85 x .9); B's
    # then comes fourth.
    table = dx.CostTable.from_points([2, 3, 4, 5], 1 / np.array([1.0, 1.0, 0.7775, 0.77]))
    scheduler = dx.Scheduler("causal", cost=table, skip=False)
    count, seen = 250, 0
    for seed in range(count):
        state = dx.RoundState.create(2, 2, page_size=4, max_len=16)
        for weight, most in ((1.0, 2), (0.85, 1)):
            state.add([0], dx.SamplingParams(1.0, seed=seed, max_new_tokens=8, weight=weight,
                                             max_draft=most))  # fmt: skip
        assert state.host.seed[0] != state.host.seed[1], "the library keeps them apart"
        if equal:
            state.host.seed[1] = state.host.seed[0]
        dx.prefill(target, state)
        seen += int(dx.decode_round(target, drafter, state, scheduler).tokens[1, 0])
    assert (seen / count - 0.3 < -3.5 * np.sqrt(0.21 / count)) == equal
    assert abs(seen / count - (0.15 if equal else 0.3)) < 4.5 * np.sqrt(0.21 / count)


def test_l3_a_live_count_rounded_down_to_a_bucket() -> None:
    table = cost_of(1, 1.0, 0.9, 0.8, 0.1)
    world = system(APPENDIX)
    assert same(first_token(world, rounded_down(table, 2)), KEPT_IF_A)
    assert distance(world, Ours("causal", table)) < EXACT
    # a bucket that is chosen before the drafts is a budget, or a capacity: both are exact
    for options in ({"capacity": 2}, {"capacity": 3}):
        assert distance(world, Ours("causal", table, options=options)) < EXACT


def test_l3_a_request_zeroed_when_over_capacity() -> None:
    table = cost_of(1, 1.0, 0.9, 0.8, 0.1)
    assert same(first_token(system(APPENDIX), dropped_above(table, most=1)), LOST_IF_A)


def test_l4_a_prefix_cut_before_a_forbidden_draft() -> None:
    p, q = ((0.7, 0.3, 0.0),) * 3, ((0.25, 0.25, 0.5),) * 3
    world = system(((0.9,) * 3,) * 2, p=p, q=q)
    assert same(first_token(world, cut_before(2)), [0.6, 0.4, 0.0])
    assert distance(world, Ours("off")) < EXACT


def test_l5_a_preemption_decided_by_the_scheduled_lengths() -> None:
    """Both requests need pages by what was scheduled; the last one in is put back and redone."""
    table = cost_of(2, 1.0, 0.98, 0.95, 0.9, 0.86, 0.2)
    world = system(APPENDIX, bait(0.7, 0.0, 0.0), caps=[2, 1])
    wrong = first_token(world, dropped_above(table, most=2))
    assert same(wrong, LOST_IF_A)
    assert distance(world, Ours("causal", table)) < EXACT
    assert distance(world, Ours("causal", table, options={"capacity": 4})) < EXACT


def test_l6_a_survival_that_rises() -> None:
    """a_1 = .5, a_2 = .9 or .1 by x_1, a rival at .6, one draft in all."""
    world = system(bait(0.5, 1.8, 0.2), bait(0.6, 0.0, 0.0))
    assert same(first_token(world, raw_survivals(budget=1)), KEPT_IF_A)
    assert distance(world, Ours("two_phase", options={"budget": 1})) < EXACT


GAMMA = 4
TABLE = cost_of(1, 1.0, 0.4, 0.3, 0.24, 0.21)  # pays for all of a sure block, or for nothing


def budget_of(third: int) -> int:
    """Drafts in the round two behind one whose c_4 gave its third draft away; prior 0 before."""
    lagged = dx.LaggedSurvival(prior=0.0)
    row = np.array([[1.0, 1.0, 1.0, 1.0 if third == 0 else 0.0]], np.float32)
    before = dx.prefix_schedule(row, TABLE, "two_phase", lagged=lagged)
    lagged.push(row)
    assert before.length.tolist() == [0]
    assert dx.prefix_schedule(row, TABLE, "two_phase", lagged=lagged).length.tolist() == [0]
    lagged.push(row)
    plan = dx.prefix_schedule(np.ones((1, GAMMA), np.float32), TABLE, "two_phase", lagged=lagged)
    return int(plan.length[0])


@pytest.mark.parametrize(("anchored", "third"), [(True, RIGHT), (False, KEPT_IF_A)])
def test_l7_keys_without_the_anchor(anchored: bool, third: list[float]) -> None:
    """Rounds 0 and 1 send nothing, so round 2 drafts position 3 again, which round 0 drafted third.

    Its budget is what round 0's survivals say. Keyed by position alone the draft is the same one.
    """
    assert [budget_of(0), budget_of(1)] == [GAMMA, 0]
    law = np.zeros(2)
    for old in range(2):
        for new in range(2):
            chance = 0.5 * (0.5 if anchored else float(old == new))
            block = (new, *(0,) * (GAMMA - 1))
            for tokens, _, mass in outcomes(P, Q, 0, block, budget_of(old), "token"):
                law[tokens[0]] += chance * mass
    assert same(law, third)
    share_of_b = (0.3 + 0.3 + law[1]) / 3  # of the three tokens
    assert share_of_b == pytest.approx(0.3 if anchored else 0.25, abs=EXACT)


@pytest.mark.parametrize(("anchored", "share"), [(True, 0.30), (False, 0.25)])
def test_l7_with_the_generator_itself(anchored: bool, share: float) -> None:
    """Three rounds of 60,000 requests on Philox; the counter holds the anchor or leaves it out."""
    count = 60_000
    keys = np.stack([np.arange(count), np.full(count, 5)], axis=-1)

    def uniform(kind: Kind, position: int, anchor: int) -> np.ndarray:
        word = int(kind) << 8 | (position - anchor if anchored else 0)
        counter = np.array([0, position, 0, word])
        return philox4x32(np.tile(counter, (count, 1)), keys)[:, 0] * 2.0**-32

    tokens_b = sum(int((uniform(Kind.BONUS_INNER, n, n - 1) >= 0.7).sum()) for n in (1, 2))
    old, new = (uniform(Kind.DRAFT_INNER, 3, anchor) >= 0.5 for anchor in (0, 2))
    verified = np.array([budget_of(0), budget_of(1)])[old.astype(int)] > 0
    taken = ~new | (uniform(Kind.ACCEPT, 3, 2) < 0.6)  # a rejected B becomes A
    plain = uniform(Kind.BONUS_INNER, 3, 2) >= 0.7
    tokens_b += int(np.where(verified, new & taken, plain).sum())
    assert abs(tokens_b / (3 * count) - share) < 5 * np.sqrt(0.21 / (3 * count))


@pytest.mark.parametrize("rounds", [1, 0, -1])
def test_survivals_younger_than_two_rounds_are_refused(rounds: int) -> None:
    with pytest.raises(dx.ArgumentError, match=r"rounds: got .* expected an integer >= 2"):
        dx.LaggedSurvival(rounds=rounds)


def test_live_survivals_are_refused_as_a_history() -> None:
    live: Any = np.ones((1, 2), np.float32)
    with pytest.raises(dx.ArgumentError, match="lagged"):
        dx.prefix_schedule(live, np.ones(4), "two_phase", lagged=live)
