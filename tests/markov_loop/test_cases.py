# SPDX-License-Identifier: Apache-2.0
"""Small cases with known answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import dspark_ext as dx

Case = dict[str, Any]
WHERE: Case = {"seed": [0], "position": [0]}


def f32(x: Any) -> np.ndarray:
    return np.asarray(x, dtype=np.float32)


def test_bias_at_slot_one_comes_from_the_anchor(backend: str) -> None:
    draft = dx.markov_loop(
        f32([[[0.25, -1, 2]]]),
        f32([[9, 9], [2, -1], [9, 9]]),
        f32([[1, 0.5], [-2, 1], [0.25, -0.75]]),
        anchor=[1],
        **WHERE,
        store_logits=True,
        backend=backend,
    )
    assert draft.logits.tolist() == [[[1.75, -6, 3.25]]]
    assert draft.tokens.tolist() == [[2]] and draft.logit.tolist() == [[3.25]]


@pytest.mark.parametrize("embedded", [True, False], ids=["h-and-e", "h"])
def test_confidence_logit(backend: str, embedded: bool) -> None:
    draft = dx.markov_loop(
        f32([[[0, 5, 0], [0, 0, 5]]]),
        f32([[0.25, -2], [1, 3], [0, 0]]),
        np.zeros((3, 2), np.float32),
        anchor=[0],
        **WHERE,
        hidden=f32([[[1, 2], [-1, 0.5]]]),
        confidence_weight=f32([0.5, -1, 2, 0.25] if embedded else [0.5, -1]),
        confidence_bias=-0.5,
        backend=backend,
    )
    assert draft.confidence_logit is not None
    assert draft.confidence_logit.tolist() == [[-2.0, 1.25]] if embedded else [[-2.0, -1.5]]


def test_slots_are_not_shifted(backend: str) -> None:
    ones, zeros = np.ones((5, 3), np.float32), np.zeros((5, 3), np.float32)
    base = np.eye(5, dtype=np.float32)[None]
    draft = dx.markov_loop(base, ones, zeros, anchor=[4], **WHERE, backend=backend)
    assert draft.tokens.tolist() == [[0, 1, 2, 3, 4]]


def test_sampled_from_the_law_that_is_returned() -> None:
    """bf16 logits half a bf16 step apart: the law is that of the rounded values, exactly."""
    rows, gamma, t = 4096, 16, 0.7
    base = torch.tensor([8, 7.96875, 7.9375], dtype=torch.bfloat16).expand(rows, gamma, 3)
    zero = torch.zeros(3, 1)
    counts = np.zeros(3)
    for block in range(16):
        draft = dx.markov_loop(
            base,
            zero,
            zero,
            anchor=torch.zeros(rows, dtype=torch.int32),
            seed=torch.arange(rows) + block * rows,
            position=torch.full((rows,), 17),
            temperature=t,
        )
        counts += np.bincount(draft.tokens.numpy().ravel(), minlength=3)
    q = np.array([0.3483, 0.3331, 0.3186])
    exact = np.exp(np.array([8, 7.96875, 7.9375]) / t - 8 / t)
    exact /= exact.sum()
    np.testing.assert_allclose(exact, q, atol=6e-5)
    assert counts.sum() == 2**20
    assert stats.chisquare(counts, exact * counts.sum()).pvalue > 1e-4
    log_q = draft.logit.numpy().astype(np.float64) / t - draft.lse.numpy()
    np.testing.assert_allclose(np.exp(log_q), exact[draft.tokens.numpy()], rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ties_go_to_the_lowest_id(threads: int) -> None:
    base = torch.full((2, 1, 151_936), -3.0, dtype=torch.bfloat16)
    base[:, :, [3, 8191, 8192, 100_000]] = 2.5
    zero = torch.zeros(151_936, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        draft = dx.markov_loop(base, zero, zero, anchor=[0, 9], seed=[0, 1], position=[0, 5])
    finally:
        torch.set_num_threads(before)
    assert draft.tokens.tolist() == [[3], [3]]


def test_zeros_of_either_sign_tie(backend: str) -> None:
    base = f32([[[-1, -0.0, 0.0, -1]]])
    zero = np.zeros((4, 1), np.float32)
    assert dx.markov_loop(base, zero, zero, anchor=[0], **WHERE, backend=backend).tokens == 1


@pytest.mark.parametrize("t", [0.0, 1.0], ids=["greedy", "sampled"])
def test_padding_never_wins(backend: str, t: float, make: Callable[..., Case]) -> None:
    case = make(4, 3, 163_840 if backend == "cpu" else 1000, 2)
    want = dx.markov_loop(**case, temperature=t, backend=backend)
    garbage = np.full((4, 3, 128), 1e4, np.float32)
    garbage[..., ::2] = np.nan
    case["base_logits"] = np.concatenate([case["base_logits"], garbage], axis=2)
    got = dx.markov_loop(**case, temperature=t, backend=backend)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lse, want.lse)
    assert not got.status.any()


@pytest.mark.parametrize("u53", [0, 2**53 - 1], ids=["lowest", "highest"])
def test_one_finite_logit(backend: str, u53: int) -> None:
    base = np.full((1, 1, 600), -np.inf, np.float32)
    base[0, 0, 311] = -2.5
    zero = np.zeros((600, 1), np.float32)
    draft = dx.markov_loop(
        base,
        zero,
        zero,
        anchor=[0],
        **WHERE,
        temperature=0.8,
        debug_uniform=[[u53]],
        backend=backend,
    )
    assert draft.tokens == 311 and draft.logit == -2.5
    assert draft.lse == pytest.approx(-2.5 / 0.8)
    assert draft.status == 0


def test_the_tail_of_a_peaked_law_is_drawn_and_uniform() -> None:
    """A 24-bit uniform cannot resolve this tail; its ids would not be equally likely."""
    vocab, rows, gamma, blocks = 4096, 256, 16, 64
    row = np.full(vocab, -16.34, np.float32)
    row[1000] = 0
    base = np.broadcast_to(row, (rows, gamma, vocab))
    zero = np.zeros((vocab, 16), np.float32)
    tokens = np.concatenate(
        [
            dx.markov_loop(
                base,
                zero,
                zero,
                anchor=np.zeros(rows, np.int32),
                seed=np.arange(rows, dtype=np.uint64) + np.uint64(b * rows),
                position=np.full(rows, 3),
                temperature=1.0,
            ).tokens.ravel()
            for b in range(blocks)
        ]
    )
    weight = (vocab - 1) * np.exp(-16.34, dtype=np.float64)
    tail = tokens[tokens != 1000]
    assert stats.binomtest(len(tail), len(tokens), weight / (1 + weight)).pvalue > 1e-4
    groups = np.bincount(tail // 512, minlength=8)
    assert stats.chisquare(groups).pvalue > 1e-4


@pytest.mark.parametrize("rows", [1, 2])
def test_ties_below_the_resolution_of_bf16(rows: int) -> None:
    base = torch.full((rows, 1, 9), -4.0, dtype=torch.bfloat16)
    base[:, :, [3, 6]] = 8.0
    w2 = torch.zeros(9, 1)
    w2[6] = 0.01  # float32 sees the difference, bfloat16 does not
    where: Case = {"anchor": [0] * rows, "seed": [0] * rows, "position": [0] * rows}
    ones = torch.ones(9, 1)
    assert dx.markov_loop(base, ones, w2, **where).tokens.tolist() == [[3]] * rows
    assert dx.markov_loop(base.float(), ones, w2, **where).tokens.tolist() == [[6]] * rows


def test_inactive_requests_are_neither_read_nor_written(
    backend: str, make: Callable[..., Case]
) -> None:
    case = make(4, 3, 200, 6, head="gated", confidence=True)
    want = dx.markov_loop(**case, temperature=0.9, store_logits=True, backend=backend)
    for name in ("base_logits", "hidden"):
        case[name][1] = np.nan
    case["anchor"][1] = -7
    shape = (4, 3)
    out = dx.Draft(
        np.full(shape, 77, np.int32),
        np.full(shape, 77, np.float32),
        np.full(shape, 77, np.float32),
        np.full(shape, 77, np.float32),
        np.full((*shape, 200), 77, np.float32),
        None,
        None,
        np.full(4, 77, np.int32),
    )
    t = [0.9, -1.0, 0.9, 0.9]
    active = [True, False, True, True]
    got = dx.markov_loop(
        **case, temperature=t, active=active, store_logits=True, out=out, backend=backend
    )
    assert got.tokens is out.tokens
    for name in ("tokens", "logit", "lse", "confidence_logit", "logits", "status"):
        result = getattr(got, name)
        assert np.all(result[1] == 77), name
        np.testing.assert_array_equal(result[[0, 2, 3]], getattr(want, name)[[0, 2, 3]], name)


def test_no_requests(backend: str, make: Callable[..., Case]) -> None:
    draft = dx.markov_loop(**make(0, 5, 40, 3), temperature=1.0, backend=backend)
    assert draft.tokens.shape == (0, 5) and draft.status.shape == (0,)
