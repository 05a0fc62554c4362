# SPDX-License-Identifier: Apache-2.0
"""Schedules that look where they must not bend the law; ours, given the same bait, do not.

Appendix A of the paper: p = (.7, .3), q = (.5, .5), SPS(1, 2, 3) = 1, .5, .45, c_1 = .8, c_2 = .9
after the draft A, 0 after B. A full search over live survivals verifies two drafts after A and none
after B: the emitted law becomes (.85, .15).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx
from dspark_ext.toy import ToyDrafter, ToyTarget

P = np.array([0.7, 0.3])
APPENDIX = dx.CostTable.from_points([1, 2, 3], [1.0, 2.0, 1 / 0.45])
REQUESTS = 40


class Retrospective(dx.Scheduler):
    """The mistake: the full search reads the survivals of the drafts it decides about."""

    def plan(self, state: Any, draft: Any, confidence: Any, backend: str | None = None) -> Any:
        if draft is not None:
            live = dx.LaggedSurvival()
            for _ in range(2):
                live.push(confidence.survival)
            state.history.lagged = live
        return super().plan(state, draft, confidence, backend)


class ByValue(dx.Scheduler):
    """L3 to L5: something drops the drafts of a request because of what they are."""

    def plan(self, state: Any, draft: Any, confidence: Any, backend: str | None = None) -> Any:
        if draft is not None:
            state.host.max_draft[:] = np.where(np.asarray(draft.tokens)[:, 0] == 0, state.gamma, 0)
        return super().plan(state, draft, confidence, backend)


def baited(gamma: int) -> tuple[ToyTarget, ToyDrafter]:
    """A constant target and a drafter whose confidence gives its tokens away."""
    target = ToyTarget(2)
    target.table[...] = np.log(P)
    drafter = ToyDrafter(2, gamma)
    drafter.base[...] = 0.0
    sign = np.array([[1.0], [-1.0]], np.float32)  # of the previous token: A or B
    high, low = float(np.log(9.0)), -30.0
    drafter.head = dx.DraftHead(
        w1=sign,
        w2=np.zeros((2, 1), np.float32),
        confidence_weight=np.array([1.0, 0.0, 0.0, (high - low) / 2], np.float32),
        confidence_bias=(high + low) / 2,
    )
    # slot 1 follows the anchor, which is no secret: make its confidence .8 after either
    drafter.hidden[...] = 0.0
    drafter.hidden[:, 0, 0] = np.log(4.0) - (np.array([high, low]))
    return target, drafter


def first_tokens(scheduler: dx.Scheduler, batch: int, count: int, rule: str = "token") -> float:
    """p value of the first token behind the prefill, over `count` requests."""
    target, drafter = baited(2)
    seen = np.zeros(2)
    for first in range(0, count, batch):
        state = dx.RoundState.create(batch, 2, page_size=4, max_len=16)
        for i in range(batch):
            params = dx.SamplingParams(1.0, seed=first + i, max_new_tokens=8, rule=rule)
            state.add([0], params)
        dx.prefill(target, state)
        got = dx.decode_round(target, drafter, state, scheduler)
        seen += np.bincount(got.tokens[:, 0], minlength=2)
    return float(stats.chisquare(seen, P * count).pvalue)


@pytest.mark.parametrize("mode", ["causal", "two_phase"])
@pytest.mark.parametrize("batch", [1, REQUESTS])
def test_appendix_a(mode: str, batch: int) -> None:
    """S1. With a batch the table is stretched so that the same choice stays at the margin."""
    scheduler = dx.Scheduler(mode, cost=stretched(batch), skip=False)
    assert first_tokens(scheduler, batch, 700 if batch == 1 else 2000) > 1e-6


def stretched(batch: int) -> dx.CostTable:
    tokens = np.arange(batch, 3 * batch + 1)
    steps = np.interp(tokens / batch, [1, 2, 3], [1.0, 2.0, 1 / 0.45])
    return dx.CostTable.from_points(tokens, steps)


@pytest.mark.parametrize(
    "wrong",
    [
        Retrospective("two_phase", cost=APPENDIX, skip=False),
        ByValue("off"),
    ],
    ids=["retrospective", "by-value"],
)
def test_wrong_schedules_are_caught(wrong: dx.Scheduler) -> None:
    """The same statistic sees (.85, .15)."""
    assert first_tokens(wrong, 1, 700) < 1e-6


def test_match_is_deaf_to_any_schedule() -> None:
    """With rule match the output equals plain decoding even under the wrong scheduler."""
    wrong = Retrospective("two_phase", cost=APPENDIX, skip=False)
    assert first_tokens(wrong, 1, 700, rule="match") > 1e-6


def test_old_budgets_do_not_leak_redrafted_tokens() -> None:
    """L7: gamma 4, lag 2, confidences that spell out the drafts; joint law of six tokens.

    A budget that is two rounds old was computed from a draft of a position that may be drafted
    again. Draws keyed by the position alone would repeat that draft: P(B) = .25 for .30.
    """
    gamma, length, count = 4, 6, 4000
    target, drafter = baited(gamma)
    seen = np.zeros(2**length)
    for first in range(0, count, REQUESTS):
        states = dx.RoundState.create(REQUESTS, gamma, page_size=4, max_len=32)
        scheduler = dx.Scheduler("two_phase", cost=long_table(REQUESTS), skip=False)
        slots = [
            states.add([0], dx.SamplingParams(1.0, seed=first + i, max_new_tokens=length + 1))
            for i in range(REQUESTS)
        ]
        answers: dict[int, list[int]] = {r: [] for r in slots}
        dx.prefill(target, states)
        while states.active_slots():
            got = dx.decode_round(target, drafter, states, scheduler)
            for r in got.slots:
                answers[r] += got.tokens[r, : got.num_emitted[r]].tolist()
        for tokens in answers.values():
            seen[int("".join(map(str, tokens)), 2)] += 1
    bits = np.array([[int(b) for b in f"{i:0{length}b}"] for i in range(2**length)])
    expected = np.prod(np.where(bits == 0, *P), axis=1) * count
    keep = expected >= 8
    observed = np.append(seen[keep], seen[~keep].sum())
    wanted = np.append(expected[keep], expected[~keep].sum())
    assert stats.chisquare(observed, wanted).pvalue > 1e-6


def long_table(batch: int) -> dx.CostTable:
    """Cheap enough that the budget moves with the survivals."""
    return dx.CostTable.from_points([batch, 2 * batch, 5 * batch], [1.0, 1.6, 3.4])
