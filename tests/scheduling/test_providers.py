# SPDX-License-Identifier: Apache-2.0
"""Confidences from elsewhere: what they know, and who refuses the unsafe ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.engine import Engine
from dspark.scheduling.providers import ConstantPrior, DraftProbability, OnlineAcceptance
from dspark_ext.toy import ToyDrafter, ToyTarget

V, GAMMA = 6, 3
COST = dx.CostTable.from_points([1, 20], [1.0, 2.0])


def models(confidence: bool = False) -> tuple[ToyTarget, ToyDrafter]:
    target = ToyTarget(V, seed=3)
    return target, ToyDrafter(V, GAMMA, seed=3, like=target, confidence=confidence)


def started(*params: dx.SamplingParams) -> tuple[dx.RoundState, ToyTarget, ToyDrafter]:
    target, drafter = models()
    state = dx.RoundState.create(len(params), GAMMA, page_size=4, max_len=64)
    for p in params:
        state.add([1], p)
    dx.prefill(target, state)
    return state, target, drafter


SAMPLED = dx.SamplingParams(1.0, seed=1, max_new_tokens=20)
DEAF = [
    dx.SamplingParams(0.0, max_new_tokens=20),
    dx.SamplingParams(1.0, seed=1, max_new_tokens=20, draft_temperature=0.0),
    dx.SamplingParams(1.0, seed=1, max_new_tokens=20, rule="match"),
]


@pytest.mark.parametrize("mode", ["causal", "two_phase", "threshold"])
def test_unsafe_and_sampled_is_refused_before_anything_happens(mode: str) -> None:
    scheduler = dx.Scheduler(mode, cost=COST, threshold=0.3, confidence=DraftProbability())
    state, target, drafter = started(DEAF[0], SAMPLED)
    before = {k: v.copy() for k, v in vars(state.host).items()}
    with pytest.raises(dx.ArgumentError, match=r"DraftProbability.*slots \[1\].*greedy drafts"):
        dx.decode_round(target, drafter, state, scheduler)
    assert all(np.array_equal(before[k], v) for k, v in vars(state.host).items())


@pytest.mark.parametrize("params", DEAF, ids=["greedy", "greedy-drafts", "match"])
def test_unsafe_is_allowed_where_no_schedule_can_leak(params: dx.SamplingParams) -> None:
    scheduler = dx.Scheduler("causal", cost=COST, confidence=DraftProbability())
    state, target, drafter = started(params)
    got = dx.decode_round(target, drafter, state, scheduler)
    assert got.confidence is not None
    # lse is that of T = 1 where drafts are greedy
    q = np.exp(np.asarray(got.draft.logit) - got.draft.lse)
    np.testing.assert_allclose(got.confidence.conditional, q, rtol=1e-5)
    assert np.all(np.asarray(got.confidence.conditional) <= 1)


def test_modes_that_do_not_read_confidences_do_not_care() -> None:
    for scheduler in (
        dx.Scheduler("off", confidence=DraftProbability()),
        dx.Scheduler("fixed", fixed_len=1, confidence=DraftProbability()),
    ):
        state, target, drafter = started(SAMPLED)
        assert dx.decode_round(target, drafter, state, scheduler).drafted


def test_the_engine_refuses_before_the_first_prefill() -> None:
    target, drafter = models()
    scheduler = dx.Scheduler("causal", cost=COST, confidence=DraftProbability())
    engine = Engine(target, drafter, scheduler=scheduler, max_len=32, framework="numpy")
    with pytest.raises(dx.ArgumentError, match=r"DraftProbability.*prompts \[1\]"):
        engine.complete([[1], [2]], [DEAF[1], SAMPLED])
    assert engine.prefill_tokens == 0
    answer = engine.complete([[1]], dx.SamplingParams(max_new_tokens=6))
    assert answer == [target.greedy([1], 6)]


def test_a_provider_has_to_declare_itself() -> None:
    class Silent:
        def conditional(self, *_: Any) -> Any:
            raise AssertionError

    for silent in (Silent(), type("Odd", (Silent,), {"safe_with_sampled_drafts": "yes"})()):
        with pytest.raises(dx.ArgumentError, match=r"confidence: got safe_with_sampled_drafts"):
            dx.Scheduler("causal", cost=COST, confidence=silent)


def test_a_constant_is_what_the_scheduler_sees() -> None:
    found = ConstantPrior(0.5).conditional(dx.RoundState.create(2, GAMMA), None)
    assert found.shape == (2, GAMMA) and np.all(found == 0.5)
    state, target, drafter = started(SAMPLED)
    scheduler = dx.Scheduler("threshold", threshold=0.4, confidence=ConstantPrior(0.5))
    got = dx.decode_round(target, drafter, state, scheduler)
    assert got.length.tolist() == [GAMMA]
    np.testing.assert_allclose(got.confidence.survival[0], [0.5, 0.25, 0.125])
    with pytest.raises(dx.ArgumentError, match="acceptance"):
        ConstantPrior(1.5)


def test_the_estimator_finds_rates_by_position_and_by_request(rng: np.random.Generator) -> None:
    """Two kinds of requests, rates that fall with the position; flags as the sampler's."""
    rate = np.array([[0.95, 0.9, 0.8], [0.5, 0.4, 0.3]])
    state = dx.RoundState.create(2, GAMMA)
    for _ in range(2):
        state.add([1], dx.SamplingParams(max_new_tokens=5))
    online = OnlineAcceptance(memory=0.99)
    for _ in range(600):
        hit = (rng.random((2, GAMMA)) < rate).astype(int)
        alive = np.cumprod(np.concatenate([np.ones((2, 1), int), hit[:, :-1]], axis=1), axis=1)
        online.learn(state, [0, 1], np.where(alive == 1, hit, -1))
    found = online.estimate(state)
    assert np.all(found[0] > found[1] + 0.2)
    assert np.abs(found[:, 0] - rate[:, 0]).max() < 0.12
    population = online.rates()
    assert np.all(np.diff(population[1:]) < 0)
    state.remove(0)
    state.add([1], dx.SamplingParams(max_new_tokens=5))
    np.testing.assert_allclose(online.estimate(state)[0], population)
    assert online.estimate(state)[1, 0] == pytest.approx(found[1, 0])


def test_unscheduled_and_unobserved_drafts_teach_nothing() -> None:
    state = dx.RoundState.create(1, GAMMA)
    online = OnlineAcceptance(prior=0.5)
    online.learn(state, [0], np.array([[-2, -2, -2]]))
    np.testing.assert_allclose(online.estimate(state), 0.5)
    online.learn(state, [0], np.array([[0, -1, -2]]))
    assert online.rates()[0] < 0.5 and np.all(online.rates()[1:] == 0.5)


def test_an_engine_runs_on_estimates_alone() -> None:
    """A drafter without a confidence head, a causal schedule, greedy text unchanged."""
    target, drafter = models()
    online = OnlineAcceptance()
    scheduler = dx.Scheduler("causal", cost=COST, confidence=online)
    engine = Engine(target, drafter, scheduler=scheduler, max_len=64, framework="numpy")
    prompts = [[1], [2, 3], [4]]
    params = dx.SamplingParams(max_new_tokens=30)
    assert engine.complete(prompts, params) == [target.greedy(p, 30) for p in prompts]
    with pytest.raises(dx.ArgumentError, match="without confidence head"):
        Engine(
            target, drafter, scheduler=dx.Scheduler("causal", cost=COST), max_len=64,
            framework="numpy",
        ).complete(prompts, params)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"prior": 1.0}, "prior"), ({"strength": 0.0}, "strength"), ({"memory": 0.0}, "memory")],
)
def test_arguments(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(dx.ArgumentError, match=name):
        OnlineAcceptance(**wrong)
