# SPDX-License-Identifier: Apache-2.0
"""What is drawn follows the law that is returned; a planted bias of a few per cent is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx

Case = dict[str, Any]
ROWS = 20_000
VOCAB = 300  # three segments
REJECT = 1e-6
TEMPERATURE = 0.9


def truncated(z: np.ndarray, t: float, top_k: int, top_p: float) -> np.ndarray:
    """The law by sorting, as the contract words it."""
    order = np.lexsort((np.arange(len(z)), -z))
    p = np.exp((z - z.max()) / t)
    if top_k:
        order = order[:top_k]
    mass = p[order] / p[order].sum()
    order = order[np.concatenate([[0], np.cumsum(mass)[:-1]]) < top_p]
    law = np.zeros(len(z))
    law[order] = p[order] / p[order].sum()
    return law


def p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(law))
    if counts[law == 0].sum():
        return 0.0
    common = law * len(tokens) >= 8  # pool the cells that are too small for the test
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(law[common], law[~common].sum()) * len(tokens)
    keep = expected > 0
    return float(stats.chisquare(observed[keep], expected[keep]).pvalue)


def shared(case: Case) -> Case:
    """One request repeated ROWS times with different seeds."""
    many = dict(case)
    for name in ("base_logits", "hidden"):
        if name in case:
            many[name] = np.broadcast_to(case[name], (ROWS, *case[name].shape[1:]))
    many["anchor"] = np.repeat(case["anchor"], ROWS)
    many["seed"] = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    many["position"] = np.repeat(case["position"], ROWS)
    return many


CUTS = [(0, 1.0), (20, 1.0), (0, 0.8), (40, 0.9)]


@pytest.mark.parametrize(("top_k", "top_p"), CUTS, ids=["full", "top-k", "top-p", "both"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_law_of_both_slots(
    head: str, top_k: int, top_p: float, make: Callable[..., Case], rng: np.random.Generator
) -> None:
    case = make(1, 2, VOCAB, 6, head=head)
    case["base_logits"] = rng.normal(0, 1.5, (1, 2, VOCAB)).astype(np.float32)
    # slot 1 has one favourite, so that slot 2 can be tested given it
    case["base_logits"][0, 0, 200] = 6.5
    many = shared(case)
    cut: Case = {"top_k": top_k, "top_p": top_p}
    draft = dx.markov_loop(**many, **cut, temperature=TEMPERATURE)
    one = dx.markov_loop(**case, store_logits=True)  # untruncated z of slot 1
    law = truncated(one.logits[0, 0].astype(np.float64), TEMPERATURE, top_k, top_p)
    first = draft.tokens[:, 0]
    assert p_value(first, law) > REJECT
    log_q = draft.logit[:, 0].astype(np.float64) / TEMPERATURE - draft.lse[:, 0]
    np.testing.assert_allclose(np.exp(log_q), law[first], rtol=3e-6)

    favourite = int(np.bincount(first).argmax())
    chosen = first == favourite
    assert chosen.sum() > 1500
    case["base_logits"][0, 0, favourite] = 1e4  # force it, greedy: z of slot 2 given it
    given = dx.markov_loop(**case, store_logits=True)
    law = truncated(given.logits[0, 1].astype(np.float64), TEMPERATURE, top_k, top_p)
    assert p_value(draft.tokens[chosen, 1], law) > REJECT

    # The control: draws at a temperature 10 % off must fail the same test.
    biased = dx.markov_loop(**many, **cut, temperature=1.1 * TEMPERATURE)
    law = truncated(one.logits[0, 0].astype(np.float64), TEMPERATURE, top_k, top_p)
    assert p_value(biased.tokens[:, 0], law) < REJECT


def test_slots_are_drawn_independently(make: Callable[..., Case]) -> None:
    """Without a bias the two tokens of a request are independent; one stream for both is not."""
    case = make(1, 2, 4, 1)
    case["base_logits"] = np.zeros((1, 2, 4), np.float32)
    case["w2"][:] = 0
    tokens = dx.markov_loop(**shared(case), temperature=1.0).tokens
    table = np.zeros((4, 4))
    np.add.at(table, (tokens[:, 0], tokens[:, 1]), 1)
    assert stats.chi2_contingency(table).pvalue > REJECT
    np.add.at(table, (tokens[:, 0], tokens[:, 0]), 1000 / ROWS)  # 5 % of one stream for both
    assert stats.chi2_contingency(table).pvalue < REJECT


def test_redrafting_a_position_from_another_anchor_draws_anew(make: Callable[..., Case]) -> None:
    """Position n + 2 reached as slot 2 of n and as slot 1 of n + 1: independent draws."""
    case = make(1, 2, 4, 1)
    case["base_logits"] = np.zeros((1, 2, 4), np.float32)
    case["w2"][:] = 0
    many = shared(case)
    early = dx.markov_loop(**many, temperature=1.0).tokens[:, 1]
    many["position"] = many["position"] + 1
    late = dx.markov_loop(**many, temperature=1.0).tokens[:, 0]
    table = np.zeros((4, 4))
    np.add.at(table, (early, late), 1)
    assert stats.chi2_contingency(table).pvalue > REJECT
