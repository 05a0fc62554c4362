# SPDX-License-Identifier: Apache-2.0
"""Golden values of the Markov loop, its laws, and the rules for broken input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from dspark_ext.reference.markov_loop import markov_loop
from dspark_ext.status import Status


def _model(rng: np.random.Generator, requests: int, gamma: int, vocab: int, r: int, d: int) -> Any:
    return {
        "base_logits": rng.normal(size=(requests, gamma, vocab)),
        "w1": rng.normal(size=(vocab, r)),
        "w2": rng.normal(size=(vocab, r)),
        "anchor": rng.integers(0, vocab, requests),
        "seed": rng.integers(0, 2**63, requests),
        "position": rng.integers(0, 1000, requests),
        "hidden": rng.normal(size=(requests, gamma, d)),
    }


def test_m1_vanilla_bias_at_slot_one() -> None:
    draft = markov_loop(
        [[[0.25, -1, 2]]],
        [[9, 9], [2, -1], [9, 9]],
        [[1, 0.5], [-2, 1], [0.25, -0.75]],
        anchor=[1],
        seed=[0],
        position=[0],
        store_logits=True,
    )
    assert draft.logits.tolist() == [[[1.75, -6, 3.25]]]
    assert draft.tokens.tolist() == [[2]]
    assert draft.logit.tolist() == [[3.25]]
    np.testing.assert_allclose(draft.lse, np.log(np.exp([1.75, -6, 3.25]).sum()), rtol=1e-6)


def test_m2_confidence_sees_hidden_then_the_previous_embedding() -> None:
    draft = markov_loop(
        [[[0.0, 5.0, 0.0], [0.0, 0.0, 5.0]]],
        [[0.25, -2], [1, 3], [0, 0]],
        np.zeros((3, 2)),
        anchor=[0],
        seed=[0],
        position=[0],
        hidden=[[[1, 2], [-1, 0.5]]],
        confidence_weight=[0.5, -1, 2, 0.25],
        confidence_bias=-0.5,
    )
    assert draft.confidence_logit.tolist() == [[-2.0, 1.25]]


def test_m3_rows_are_not_shifted() -> None:
    draft = markov_loop(
        np.eye(5)[None], np.ones((5, 3)), np.zeros((5, 3)), anchor=[4], seed=[0], position=[0]
    )
    assert draft.tokens.tolist() == [[0, 1, 2, 3, 4]]


def test_slot_one_uses_the_anchor() -> None:
    w1 = np.eye(4)
    w2 = np.roll(np.eye(4), 1, axis=0)  # previous token t pushes t + 1
    draft = markov_loop(np.zeros((1, 3, 4)), w1, w2, anchor=[2], seed=[0], position=[0])
    assert draft.tokens.tolist() == [[3, 0, 1]]


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads_against_their_equations(head: str, rng: np.random.Generator) -> None:
    r, d, gamma, vocab = 3, 4, 5, 7
    model = _model(rng, 1, gamma, vocab, r, d)
    shape = (r, d + r) if head == "gated" else (3 * r, 2 * r + d)
    weight, bias = rng.normal(size=shape), rng.normal(size=shape[0])
    draft = markov_loop(**model, head=head, head_weight=weight, head_bias=bias, store_logits=True)
    previous, s = model["anchor"][0], np.zeros(r)

    def sigma(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    for k in range(gamma):
        e, h = model["w1"][previous], model["hidden"][0, k]
        if head == "gated":
            inner = sigma(weight[:, :d] @ h + weight[:, d:] @ e + bias) * e
        else:
            v = np.r_[s, e, h]
            g = sigma(weight[:r] @ v + bias[:r])
            inner = np.tanh(weight[2 * r :] @ v + bias[2 * r :])
            s = g * s + (1 - g) * np.tanh(weight[r : 2 * r] @ v + bias[r : 2 * r])
        z = model["base_logits"][0, k] + model["w2"] @ inner
        np.testing.assert_allclose(draft.logits[0, k], z, rtol=1e-6)
        previous = int(np.argmax(z))
        assert draft.tokens[0, k] == previous


def test_int8_projection_has_row_scales(rng: np.random.Generator) -> None:
    model = _model(rng, 2, 2, 6, 4, 1)
    model["w2"] = rng.integers(-127, 128, (6, 4)).astype(np.int8)
    scale = rng.uniform(0.001, 0.01, 6).astype(np.float32)
    got = markov_loop(**model, w2_scale=scale, store_logits=True)
    model["w2"] = model["w2"] * scale[:, None]
    want = markov_loop(**model, store_logits=True)
    # each of the 4 elements of the vector is off by at most half a step, max|x| / 32512
    bound = 4 * 127 * 0.01 * np.abs(model["w1"]).max() / 32512 + 1e-6
    np.testing.assert_allclose(got.logits[:, 0], want.logits[:, 0], rtol=0, atol=bound)


@pytest.mark.parametrize(("dtype", "digits"), [("bf16", 8), ("f16", 11)])
def test_z_is_rounded_once_to_the_dtype(dtype: Any, digits: int, rng: np.random.Generator) -> None:
    model = _model(rng, 1, 1, 400, 3, 1)
    exact = model["base_logits"][0, 0] + model["w2"] @ model["w1"][model["anchor"][0]]
    z = markov_loop(**model, store_logits=True, dtype=dtype).logits[0, 0]
    significand, _ = np.frexp(z)
    assert np.array_equal(significand * 2**digits, np.rint(significand * 2**digits))
    assert np.all(np.abs(z - exact) <= np.abs(exact) * 2.0**-digits)


def test_m5_bf16_ties_go_to_the_lowest_id() -> None:
    u = np.full((2, 1, 9), -4.0)
    u[:, 0, 3], u[:, 0, 6] = 8.0, 8.0
    w1, w2 = np.ones((9, 1)), np.zeros((9, 1))
    w2[6] = 0.01  # below the resolution of bf16 at 8
    where = {"anchor": [0, 0], "seed": [0, 0], "position": [0, 0]}
    assert markov_loop(u, w1, w2, **where, dtype="bf16").tokens.tolist() == [[3], [3]]
    assert markov_loop(u, w1, w2, **where, dtype="f32").tokens.tolist() == [[6], [6]]


@pytest.mark.parametrize("truncate", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=["full", "k", "p"])
def test_returned_law_is_the_law_drawn_from(truncate: Any, rng: np.random.Generator) -> None:
    vocab, draws, t = 9, 3000, 0.8
    u = np.repeat(rng.normal(size=(1, 1, vocab)) * 1.5, draws, axis=0)
    draft = markov_loop(
        u,
        np.zeros((vocab, 1)),
        np.zeros((vocab, 1)),
        anchor=np.zeros(draws, int),
        seed=np.arange(draws),
        position=np.zeros(draws, int),
        temperature=t,
        store_logits=True,
        **truncate,
    )
    log_q = draft.logits[0, 0].astype(np.float64) / t - draft.lse[0, 0]
    q = np.exp(log_q)
    assert q.sum() == pytest.approx(1, abs=1e-6)
    picked = np.exp(draft.logit[:, 0].astype(np.float64) / t - draft.lse[:, 0])
    np.testing.assert_allclose(picked, q[draft.tokens[:, 0]], rtol=1e-6)
    counts = np.bincount(draft.tokens[:, 0], minlength=vocab)
    assert counts[q == 0].sum() == 0
    assert stats.chisquare(counts[q > 0], q[q > 0] / q.sum() * draws).pvalue > 1e-4
    if truncate:
        assert 0 < (q == 0).sum() < vocab


def test_neighbours_padding_and_gamma_do_not_change_tokens(rng: np.random.Generator) -> None:
    model = _model(rng, 4, 5, 150, 3, 1)
    t = np.array([1.0, 0.0, 0.6, 1.3])
    both = markov_loop(**model, temperature=t)
    for r in range(4):
        alone = {
            key: value if key in ("w1", "w2") else value[r : r + 1] for key, value in model.items()
        }
        alone["base_logits"] = np.pad(
            alone["base_logits"][:, :3], ((0, 0), (0, 0), (0, 10)), constant_values=1e4
        )
        got = markov_loop(**alone, temperature=t[r : r + 1])
        assert got.tokens.tolist() == both.tokens[r : r + 1, :3].tolist()


def test_draft_to_target_emits_target_ids(rng: np.random.Generator) -> None:
    d2t = np.array([1, 4, 5, 9])
    w1 = rng.normal(size=(10, 2))
    u = rng.normal(size=(3, 4, 4))
    where = {"anchor": [0, 8, 9], "seed": [1, 2, 3], "position": [5, 6, 7], "temperature": 1.0}
    draft = markov_loop(
        u, w1, rng.normal(size=(4, 2)), **where, draft_to_target=d2t, store_logits=True
    )
    assert np.isin(draft.tokens, d2t).all()
    columns = np.searchsorted(d2t, draft.tokens)
    picked = np.take_along_axis(draft.logits, columns[..., None], axis=2)[..., 0]
    np.testing.assert_array_equal(draft.logit, picked.astype(np.float32))


def test_nan_counts_as_minus_infinity_and_infinity_is_finite() -> None:
    u = np.array([[[np.nan, 0.0, 1.0]], [[0.0, np.inf, np.inf]], [[np.nan] * 3], [[0.0, 1, 2]]])
    zero = np.zeros((3, 1))
    draft = markov_loop(
        u, zero, zero, anchor=[0] * 4, seed=[0] * 4, position=[0] * 4, store_logits=True
    )
    assert draft.tokens[:, 0].tolist() == [2, 1, 0, 2]
    assert draft.logits[0, 0, 0] == -np.inf
    assert draft.logit[1, 0] == np.finfo(np.float32).max
    assert draft.lse[2, 0] == -np.inf
    nan, empty = int(Status.NAN_DRAFT), int(Status.EMPTY_SUPPORT)
    assert draft.status.tolist() == [nan, 0, nan | empty, 0]


@pytest.mark.parametrize("anchor", [-1, 3, 2**31 - 1])
def test_bad_anchor_is_a_bit_and_never_an_index(anchor: int) -> None:
    draft = markov_loop(
        [[[0.0, 2, 1]]], np.ones((3, 1)), [[5.0], [0], [0]], anchor=[anchor], seed=[0], position=[0]
    )
    assert draft.tokens.tolist() == [[1]]
    assert draft.status.tolist() == [int(Status.BAD_DRAFT_ID)]


@pytest.mark.parametrize("t", [-1.0, 5e-4, np.nan, np.inf])
def test_bad_temperature_is_greedy_with_a_bit(t: float, rng: np.random.Generator) -> None:
    model = _model(rng, 2, 3, 12, 2, 1)
    got = markov_loop(**model, temperature=[t, 1.0])
    assert got.tokens[0].tolist() == markov_loop(**model).tokens[0].tolist()
    assert got.status.tolist() == [int(Status.BAD_PARAM), 0]


def test_inactive_requests_are_not_read(rng: np.random.Generator) -> None:
    model = _model(rng, 3, 2, 6, 2, 1)
    want = markov_loop(**model)
    model["base_logits"][1] = np.nan
    model["anchor"][1] = -7
    got = markov_loop(**model, active=[1, 0, 1])
    assert got.tokens[[0, 2]].tolist() == want.tokens[[0, 2]].tolist()
    assert got.status.tolist() == [0, 0, 0]
