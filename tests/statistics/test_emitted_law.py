# SPDX-License-Identifier: Apache-2.0
"""The emitted law is the target's: drafts from markov_loop, verified end to end, by chi-square.

Each test has a control with a known fault that the same statistic must refuse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx
from dspark_ext.results import Draft, Verification

#: A right implementation fails one test in 10^5; the controls are far beyond it.
LEVEL = 1e-5


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    """Chi-square over cells with at least five expected draws, the rest pooled."""
    law = np.asarray(law, np.float64)
    counts = np.bincount(tokens, minlength=len(law))
    if counts[law == 0].any():
        return 0.0
    expected = law / law.sum() * len(tokens)
    big = expected >= 5
    observed, cells = counts[big], expected[big]
    if expected[~big].sum() > 0:
        observed = np.append(observed, counts[~big].sum())
        cells = np.append(cells, expected[~big].sum())
    return float(stats.chisquare(observed, cells).pvalue)


def draft_from(q: np.ndarray, count: int, gamma: int, seed: int = 0, **kwargs: Any) -> Draft:
    """``count`` requests whose slots all have the logits q [V_d]: markov_loop without a bias."""
    vocab = kwargs.pop("vocab", len(q))
    return dx.markov_loop(
        np.broadcast_to(q, (count, gamma, len(q))),
        np.zeros((vocab, 1), np.float32),
        np.zeros((len(q), 1), np.float32),
        anchor=np.zeros(count, np.int32),
        seed=np.arange(seed, seed + count, dtype=np.uint64),
        position=77,
        **({"temperature": 1.0} | kwargs),
    )


def verify(
    p: np.ndarray, q: np.ndarray | None, draft: Draft, seed: int = 0, **kwargs: Any
) -> Verification:
    """Every row has the logits p; the law is q, or one-hot without it."""
    count, gamma = draft.tokens.shape
    rows = count * (gamma + 1)
    if q is not None:
        kwargs["draft_logits"] = np.broadcast_to(q, (count, gamma, len(q)))
        kwargs |= {"draft_logit": draft.logit, "draft_lse": draft.lse}
    return dx.rejection_sample(
        np.broadcast_to(p, (rows, len(p))),
        draft.tokens,
        draft_len=gamma,
        cu_seqlens=np.arange(count + 1) * (gamma + 1),
        seed=np.arange(seed, seed + count, dtype=np.uint64),
        position=77,
        **({"temperature": 1.0} | kwargs),
    )


P8 = np.array([0.3, 0.22, 0.16, 0.12, 0.09, 0.06, 0.04, 0.01])
Q8 = np.array([0.1, 0.3, 0.05, 0.2, 0.05, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_every_emitted_position_follows_p(rule: str, gamma: int) -> None:
    """Position j, given that it is emitted, has the law p; so do pairs of positions."""
    p, q = log(P8), log(Q8)
    draft = draft_from(q, 100_000, gamma)
    got = verify(p, q, draft, rule=rule)
    for j in range(gamma + 1):
        emitted = got.tokens[got.num_emitted > j, j]
        assert p_value(emitted, P8) > LEVEL
    both = got.num_emitted > 1
    pairs = got.tokens[both, 0] * 8 + got.tokens[both, 1]
    first = np.bincount(got.tokens[both, 0], minlength=8) / both.sum()
    assert p_value(pairs, np.outer(first, P8).reshape(-1)) > LEVEL
    # control: the drafts themselves are not p
    assert p_value(draft.tokens[:, 0], P8) < LEVEL


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize(
    "truncation",
    [
        pytest.param({"top_k": 3}, id="top-k"),
        pytest.param({"top_p": 0.7}, id="top-p"),
        pytest.param({"min_p": 0.25}, id="min-p"),
        pytest.param({"min_p": 0.15, "top_k": 5, "top_p": 0.8}, id="all"),
        pytest.param({"temperature": 0.7}, id="temperature"),
    ],
)
def test_truncated_targets(rule: str, truncation: dict[str, Any]) -> None:
    z = log(P8)
    t = truncation.get("temperature", 1.0)
    law = P8 ** (1 / t)
    kept = {"top_k": 3, "top_p": 4, "min_p": 5}.get(next(iter(truncation)), 8)
    if len(truncation) == 3:  # min-p keeps 6 ids, top-k 5 of them, top-p .8 of their .89
        kept = 4
    law = np.where(np.arange(8) < kept, law, 0) / law[:kept].sum()
    q = log(Q8)
    draft = draft_from(q, 100_000, 1)
    got = verify(z, q, draft, rule=rule, draft_temperature=1.0, **truncation)
    assert p_value(got.tokens[:, 0], law) > LEVEL
    assert p_value(got.tokens[:, 0], P8) < LEVEL  # control: the untruncated law is refused


def test_v13_truncation_holds_in_the_residual() -> None:
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.1, 0.4, 0.4])
    kept = np.array([4 / 7, 3 / 7, 0, 0])
    draft = draft_from(log(q), 100_000, 1)
    got = verify(log(p), log(q), draft, top_k=2)
    assert p_value(got.tokens[:, 0], kept) > LEVEL
    assert stats.binomtest(int(got.num_accepted.sum()), 100_000, 0.2).pvalue > LEVEL
    residual = got.tokens[got.num_accepted == 0, 0]
    assert p_value(residual, np.array([0.5893, 0.4107, 0, 0])) > LEVEL
    assert p_value(residual, kept) < LEVEL  # control: p' itself in place of the residual


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_reduced_draft_vocabulary(rule: str) -> None:
    """Ids the draft cannot propose are reached through the residual."""
    ids = np.array([1, 4, 6], np.int32)
    q = log([0.5, 0.2, 0.3])
    draft = draft_from(q, 100_000, 1, vocab=8, draft_to_target=ids)
    assert set(np.unique(draft.tokens).tolist()) <= {1, 4, 6}
    got = verify(log(P8), q, draft, rule=rule, draft_to_target=ids)
    assert not got.status.any()
    assert p_value(got.tokens[:, 0], P8) > LEVEL
    # control: columns taken for target ids
    wrong = verify(log(P8), log([0.5, 0.2, 0.3, 0, 0, 0, 0, 0]), draft, rule="token")
    assert p_value(wrong.tokens[:, 0], P8) < LEVEL


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_penalties_count_the_drafts_of_the_round(rule: str) -> None:
    """Pairs of tokens: the second is penalised by the first, whether that was a draft or not."""
    penalty = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.7}
    z, q = log(P8), log(Q8)
    draft = draft_from(q, 100_000, 2)
    got = verify(z, q, draft, rule=rule, **penalty)
    both = got.num_emitted > 1
    first = np.bincount(got.tokens[both, 0], minlength=8) / both.sum()
    seen = np.where(np.eye(8) > 0, z * 1.5 - 1.2, z)  # all logits are negative
    second = np.exp(seen) / np.exp(seen).sum(1, keepdims=True)
    pairs = got.tokens[both, 0] * 8 + got.tokens[both, 1]
    assert p_value(got.tokens[:, 0], P8) > LEVEL
    assert p_value(pairs, (first[:, None] * second).reshape(-1)) > LEVEL
    # control: penalties counted once a request
    assert p_value(pairs, np.outer(first, P8).reshape(-1)) < LEVEL


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_min_tokens_and_a_bias(rule: str) -> None:
    """Token 0 is a stop that row 0 must not emit and row 1 may."""
    z, q = log(P8), log(Q8)
    bias = np.where(np.arange(8) == 3, 1.0, 0.0).astype(np.float32)
    draft = draft_from(q, 60_000, 1)
    got = verify(
        z, q, draft, rule=rule, stop_ids=[0], min_tokens_left=1,
        logit_bias=np.broadcast_to(bias, (60_000, 8)),
    )  # fmt: skip
    biased = P8 * np.exp(bias)
    assert p_value(got.tokens[:, 0], np.where(np.arange(8) == 0, 0, biased)) > LEVEL
    assert p_value(got.tokens[got.num_emitted > 1, 1], biased) > LEVEL
    assert p_value(got.tokens[:, 0], biased) < LEVEL


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.6}], ids=["top-k", "top-p"])
def test_truncated_drafts(truncation: dict[str, Any]) -> None:
    """The draft's own truncation is part of q: markov_loop returns it, -inf outside."""
    q = log(Q8)
    draft = draft_from(q, 100_000, 1, store_logits=True, **truncation)
    assert len(np.unique(draft.tokens)) < 8
    got = dx.rejection_sample(
        np.broadcast_to(log(P8), (200_000, 8)),
        draft.tokens,
        draft_len=1,
        cu_seqlens=np.arange(100_001) * 2,
        seed=np.arange(100_000, dtype=np.uint64),
        position=77,
        temperature=1.0,
        draft_logit=draft.logit,
        draft_lse=draft.lse,
        draft_logits=draft.logits,
    )
    assert not got.status.any()
    assert p_value(got.tokens[:, 0], P8) > LEVEL
    # control: the untruncated law in the residual
    wrong = verify(log(P8), q, draft)
    assert p_value(wrong.tokens[:, 0], P8) < LEVEL


def verify_list(p: np.ndarray, draft: Draft, **kwargs: Any) -> Verification:
    """The draft's law as markov_loop's lists of ids."""
    law = {"draft_logit": draft.logit, "draft_lse": draft.lse}
    law |= {"support_ids": draft.support_ids, "support_logits": draft.support_logits}
    return verify(p, None, draft, **(law | kwargs))


@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, {"draft_to_target": [1, 3, 4, 6]}], ids=str)
def test_drafts_from_the_m_largest(extra: dict[str, Any]) -> None:
    """A draft law on M ids: exact, and only the acceptance shows it."""
    extra = {k: np.array(v) if isinstance(v, list) else v for k, v in extra.items()}
    columns = extra.get("draft_to_target", np.arange(8))
    draft = draft_from(log(Q8)[columns], 100_000, 2, vocab=8, topk_support=3, **extra)
    assert len(np.unique(draft.tokens)) < 4
    got = verify_list(log(P8), draft)
    assert not got.status.any()
    for j in range(3):
        assert p_value(got.tokens[got.num_emitted > j, j], P8) > LEVEL
    # control: the last member is left out of the list, so the residual has its mass too
    short = np.where(np.arange(3) == 2, -1, draft.support_ids).astype(np.int32)
    wrong = verify_list(log(P8), draft, support_ids=short)
    assert p_value(wrong.tokens[:, 0], P8) < LEVEL


def test_v7_a_greedy_drafts_law_is_one_hot() -> None:
    q, p = log([0.9, 0.1]), np.array([0.6, 0.4])
    draft = draft_from(q, 60_000, 1, temperature=0.0)
    assert not draft.tokens.any()
    got = verify(log(p), q, draft, draft_temperature=0.0)
    assert p_value(got.tokens[:, 0], p) > LEVEL
    # control: the ratio against the soft law gives (.667, .333)
    soft = verify(log(p), q, draft, draft_temperature=1.0)
    assert p_value(soft.tokens[:, 0], p) < LEVEL
    assert p_value(soft.tokens[:, 0], np.array([2 / 3, 1 / 3])) > LEVEL


def test_v8_bf16_logits_are_sampled_by_the_law_that_is_returned() -> None:
    torch = pytest.importorskip("torch")
    count = 1_000_000
    z = torch.tensor([8, 7.96875, 7.9375]).bfloat16()
    law = np.exp(z.double().numpy() / 0.7)
    law /= law.sum()
    np.testing.assert_allclose(law, [0.3483, 0.3331, 0.3186], atol=5e-5)
    ids = torch.arange(count, dtype=torch.int64)
    draft = dx.markov_loop(
        z.expand(count, 1, 3),
        torch.zeros(3, 1),
        torch.zeros(3, 1),
        anchor=torch.zeros(count, dtype=torch.int32),
        seed=ids,
        position=77,
        temperature=0.7,
    )
    got = dx.rejection_sample(
        z.expand(2 * count, 3),
        draft.tokens,
        draft_len=1,
        cu_seqlens=2 * torch.arange(count + 1),
        seed=ids,
        position=77,
        temperature=0.7,
        draft_logit=draft.logit,
        draft_lse=draft.lse,
        draft_logits=z.expand(count, 1, 3),
    )
    assert (got.num_accepted.numpy() == 1).mean() > 1 - 1e-5  # p = q but for the rounding of lse
    assert p_value(draft.tokens.numpy()[:, 0], law) > LEVEL
    assert p_value(got.tokens.numpy()[:, 0], law) > LEVEL
    # control: a softmax that is rounded to bf16 is another law
    rounded = (z / 0.7).softmax(0).bfloat16().double().numpy()
    assert p_value(draft.tokens.numpy()[:, 0], rounded / rounded.sum()) < LEVEL


def test_v9_draft_and_recovery_do_not_share_a_stream() -> None:
    p, q = np.full(4, 0.25), np.array([0.55, 0.30, 0.10, 0.05])
    total, each = 4_000_000, 500_000
    counts = np.zeros(4)
    for part in range(total // each):
        draft = draft_from(log(q), each, 1, seed=part * each)
        got = verify(log(p), log(q), draft, seed=part * each)
        counts += np.bincount(got.tokens[:, 0], minlength=4)
    assert 0.5 * np.abs(counts / total - p).sum() < 1e-3
    # control: one uniform for the coin and for the recovered id
    uniform = np.random.default_rng(9).integers(0, 2**53, (each, 2), dtype=np.uint64)
    shared = verify(log(p), log(q), draft, debug_uniform=uniform)
    law = np.bincount(shared.tokens[:, 0], minlength=4) / each
    assert 0.5 * np.abs(law - p).sum() > 1e-2


def test_v10_the_accept_uniform_is_not_used_again() -> None:
    p, q = np.array([0.4, 0.3, 0.3]), log([1.0, 0, 0])
    draft = draft_from(q, 200_000, 1)
    got = verify(log(p), q, draft)
    assert p_value(got.tokens[:, 0], p) > LEVEL
    uniform = np.random.default_rng(10).integers(0, 2**53, (200_000, 2), dtype=np.uint64)
    reused = verify(log(p), q, draft, debug_uniform=uniform)
    assert p_value(reused.tokens[:, 0], p) < LEVEL
    assert p_value(reused.tokens[:, 0], np.array([0.4, 0.1, 0.5])) > LEVEL


@pytest.mark.slow
def test_v21_a_small_tail_keeps_its_mass() -> None:
    """One id at 0 and 262,143 at -20.5: coarse uniforms would lose the tail."""
    vocab, count = 262_144, 2_000_000
    z = np.full(vocab, -20.5, np.float32)
    z[131_000] = 0
    tail = (vocab - 1) * np.exp(-20.5)
    tail /= 1 + tail
    drafts = np.zeros((count, 1), np.int32)
    got = dx.rejection_sample(
        np.broadcast_to(z, (count, vocab)),
        drafts,
        draft_len=0,
        cu_seqlens=np.arange(count + 1),
        seed=np.arange(count, dtype=np.uint64),
        position=5,
        temperature=1.0,
    )
    drawn = got.tokens[:, 0]
    ids = drawn[drawn != 131_000]
    assert stats.binomtest(len(ids), count, tail).pvalue > LEVEL
    assert stats.kstest(ids / vocab, "uniform").pvalue > LEVEL
    assert stats.chisquare(np.bincount(ids % 128 // 16, minlength=8)).pvalue > LEVEL
    # control: a law whose tail is a tenth smaller is refused
    assert stats.binomtest(len(ids), count, 0.8 * tail).pvalue < LEVEL


def test_l4_a_forbidden_draft_is_verified_not_cut() -> None:
    """Cutting before a masked draft and sampling a bonus gives (.6, .4)."""
    p, q = np.array([0.7, 0.3, 0.0]), np.array([0.25, 0.25, 0.5])
    draft = draft_from(log(q), 100_000, 1)
    mask = np.full((200_000, 1), 0b011, np.int32)
    row = log([0.7, 0.3, 0.9])
    got = verify(row, log(q), draft, token_mask=mask)
    assert p_value(got.tokens[:, 0], p) > LEVEL
    cut = draft.tokens.copy()
    cut[cut == 2] = -1
    wrong = verify(row, log(q), Draft(**(vars(draft) | {"tokens": cut})), token_mask=mask)
    assert p_value(wrong.tokens[:, 0], p) < LEVEL


@pytest.mark.parametrize("vocab", [300, 4000])
def test_large_vocabularies_over_many_segments(vocab: int) -> None:
    """Laws over many segments, and a target truncated to half of them."""
    rng = np.random.default_rng(vocab)
    z = (rng.normal(size=vocab) * 1.5).astype(np.float32)
    q = (z + rng.normal(size=vocab) * 0.7).astype(np.float32)
    draft = draft_from(q, 12_000, 1)
    law = np.exp(z.astype(np.float64))
    got = verify(z, q, draft)
    assert p_value(got.tokens[:, 0], law) > LEVEL
    assert p_value(draft.tokens[:, 0], law) < LEVEL
    half = np.argsort(-z, kind="stable")[: vocab // 2]
    truncated = np.zeros(vocab)
    truncated[half] = law[half]
    got = verify(z, q, draft, top_k=vocab // 2)
    assert p_value(got.tokens[:, 0], truncated) > LEVEL
