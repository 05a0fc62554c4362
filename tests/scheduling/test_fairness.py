# SPDX-License-Identifier: Apache-2.0
"""Ageing in decode_round: nobody waits for ever, and the count belongs to the request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.toy import ToyDrafter, ToyTarget

V, GAMMA = 7, 2


def lengths(ageing: dx.Ageing | None, mode: str, rounds: int = 24) -> np.ndarray:
    """Verified drafts [rounds, 2] where a row is dear and slot 1's confidence is always lower."""
    target, drafter = ToyTarget(V, seed=1), ToyDrafter(V, GAMMA, seed=1)
    drafter.hidden[...] = 0.0
    drafter.head = dx.DraftHead(
        w1=drafter.head.w1, w2=drafter.head.w2,
        confidence_weight=np.zeros(7, np.float32), confidence_bias=1.0,
    )  # fmt: skip
    cost = dx.CostTable.from_points([2, 3, 4, 6], [1.0, 1.2, 1.75, 4.0])  # one draft pays, not two
    scheduler = dx.Scheduler(mode, cost=cost, skip=False, ageing=ageing)
    state = dx.RoundState.create(2, GAMMA, page_size=4, max_len=128)
    for weight in (1.0, 0.9):
        state.add([1], dx.SamplingParams(max_new_tokens=100, weight=weight, max_draft=1))
    dx.prefill(target, state)
    return np.array(
        [dx.decode_round(target, drafter, state, scheduler).length for _ in range(rounds)]
    )


@pytest.mark.parametrize("mode", ["causal", "two_phase"])
def test_without_ageing_the_weaker_request_starves(mode: str) -> None:
    got = lengths(None, mode)
    assert got[4:, 0].all() and not got[4:, 1].any()


@pytest.mark.parametrize("mode", ["causal", "two_phase"])
def test_a_floor_gives_one_draft_in_every_few_rounds(mode: str) -> None:
    got = lengths(dx.Ageing(rounds=5), mode)
    served = np.flatnonzero(got[:, 1])
    assert len(served) >= 3 and set(np.diff(served)) == {6}


def test_a_weight_lets_the_schedule_decide() -> None:
    """From weight 0.9 over 1.0 on, the draft of slot 1 goes first; then its age is 0 again."""
    got = lengths(dx.Ageing(rounds=3, floor=0, weight=0.5), "causal")
    assert 3 <= np.count_nonzero(got[:, 1]) <= 8
    assert np.all(got.sum(axis=1) <= 2)


def test_the_count_follows_the_request_and_its_rounds() -> None:
    target, drafter = ToyTarget(V, seed=1), ToyDrafter(V, GAMMA, seed=1)
    state = dx.RoundState.create(2, GAMMA, page_size=4, max_len=64)
    slots = [state.add([1], dx.SamplingParams(max_new_tokens=40, max_draft=m)) for m in (2, 0)]
    dx.prefill(target, state)
    nothing = dx.Scheduler("threshold", threshold=1.0)
    for _ in range(3):
        dx.decode_round(target, drafter, state, nothing)
    assert state.host.starved.tolist() == [3, 0], "max_draft 0 is not starvation"
    dx.decode_round(target, drafter, state, dx.Scheduler("fixed", fixed_len=0))
    assert state.host.starved.tolist() == [3, 0], "a round without a draft does not count"
    dx.decode_round(target, drafter, state, dx.Scheduler("fixed", fixed_len=1))
    assert state.host.starved[0] == 0
    dx.decode_round(target, drafter, state, nothing)
    state.remove(slots[0])
    assert state.add([1], dx.SamplingParams(max_new_tokens=4)) == slots[0]
    assert state.host.starved[slots[0]] == 0


def test_weights_end_at_the_operators_bound() -> None:
    ageing: Any = dx.Ageing(rounds=1, floor=16, weight=100.0)
    floor, weight = ageing.apply(np.array([10**6]), np.array([3]), np.array([128.0]))
    assert weight.tolist() == [128.0] and floor.tolist() == [3 + 256]


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"floor": 17}, {"weight": -1.0}])
def test_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(dx.ArgumentError, match=next(iter(wrong))):
        dx.Ageing(**wrong)
