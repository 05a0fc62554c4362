# SPDX-License-Identifier: Apache-2.0
"""What is drawn follows the law that is returned; a planted bias of a few per cent is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
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


#: Draws of one call of the kernels: .01 more of a cell with p = .004 are ten standard deviations.
KERNEL_ROWS = 4096
KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("backend", KERNELS, indirect=True)
def test_law_of_the_kernels(
    head: str, backend: str, make: Callable[..., Case], rng: np.random.Generator
) -> None:
    """4096 draws against the float64 softmax of z; .01 of total variation does not pass."""
    vocab, rare = 160, 130  # two segments
    case = make(1, 1, vocab, 16, head=head)
    u = np.full(vocab, -40.0)
    u[rng.choice(vocab, 24, replace=False)] = rng.normal(0, 0.5, 24)
    one = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    for name in ("w1", "w2"):
        one[name] = (one[name] / 4).bfloat16()
    one["base_logits"] = torch.from_numpy(u[None, None]).float()
    z = dx.markov_loop(**one, store_logits=True).logits[0, 0].double().numpy()
    # One cell of the second segment has p = .004.
    others = np.delete(np.exp(z / TEMPERATURE), rare).sum()
    u[rare] += TEMPERATURE * np.log(others / 249) - z[rare]
    one["base_logits"] = torch.from_numpy(u[None, None]).float()
    z = dx.markov_loop(**one, store_logits=True).logits[0, 0].double().numpy()
    law = np.exp((z - z.max()) / TEMPERATURE)
    law /= law.sum()

    for name in ("base_logits", "hidden"):
        if name in one:
            one[name] = one[name].expand(KERNEL_ROWS, *one[name].shape[1:])
    one["anchor"] = one["anchor"].repeat(KERNEL_ROWS)
    one["seed"] = torch.from_numpy(rng.integers(0, 2**63, KERNEL_ROWS))
    one["position"] = torch.from_numpy(rng.integers(0, 2**31, KERNEL_ROWS))
    if backend == "cuda":
        one = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in one.items()}
    tokens = dx.markov_loop(**one, temperature=TEMPERATURE, backend=backend).tokens[:, 0]
    drawn = tokens.cpu().numpy()
    assert p_value(drawn, law) > REJECT

    biased = drawn.copy()
    biased[rng.random(KERNEL_ROWS) < 0.01] = rare
    assert p_value(biased, law) < REJECT


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
