# SPDX-License-Identifier: Apache-2.0
"""Penalties, min-tokens and lists of the likeliest ids, on every row of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import Status

V = 300


def verify(rows: Any, drafts: Any, backend: str, **changes: Any) -> Any:
    """One request that scheduled all its drafts; greedy unless told otherwise."""
    drafts = np.atleast_2d(drafts)
    rows = np.asarray(rows, np.float32)
    call: dict[str, Any] = {
        "draft_len": [drafts.shape[1]],
        "cu_seqlens": [0, len(rows)],
        "seed": [3],
        "position": [9],
    }
    return dx.rejection_sample(rows, drafts, backend=backend, **(call | changes))


def softmax_log(z: Any) -> np.ndarray:
    z = np.asarray(z, np.float64)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def pack(ids: Any, vocab: int = V) -> np.ndarray:
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[list(ids)] = True
    words = np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little")
    return words.view(np.int32).reshape(1, -1)


def test_v24_row_2_counts_two_more_fives(backend: str) -> None:
    """Drafts (5, 5): the logit of 5 falls by the frequency penalty at every row."""
    row = np.full(10, -9.0)
    row[5], row[7] = 3.0, 1.5
    got = verify([row] * 3, [5, 5], backend, frequency_penalty=0.8)
    assert got.tokens.tolist() == [[5, 5, 7]]  # 3, 2.2, 1.4 against 1.5
    for i, count in enumerate((0, 1, 2)):
        z = row.copy()
        z[5] -= 0.8 * count
        np.testing.assert_allclose(
            got.logprob[0, i], softmax_log(z)[got.tokens[0, i]], rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            got.logprob_raw[0, i], softmax_log(row)[got.tokens[0, i]], rtol=1e-5, atol=1e-6
        )


def test_v24_repetition_acts_once_it_is_seen(backend: str) -> None:
    row = np.full(10, -9.0)
    row[5], row[7] = 3.0, 2.0
    got = verify([row] * 3, [5, 5], backend, repetition_penalty=2.0)
    assert got.tokens.tolist() == [[5, 7, -1]] and got.accepted.tolist() == [[1, 0]]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_v24_penalties_count_drafts_in_the_law_of_later_rows(backend: str, rule: str) -> None:
    """Forced draws at the end of the support show the law of row 2."""
    row = np.full(10, -np.inf)
    row[5], row[7] = 1.0, 0.0
    top = np.array([[0, 0, 2**53 - 1]], np.uint64)
    got = verify(
        [row] * 3, [5, 5], backend, temperature=1.0, rule=rule, presence_penalty=1.0,
        frequency_penalty=0.5, debug_uniform=top,
    )  # fmt: skip
    assert got.tokens.tolist() == [[5, 5, 7]]
    for i, penalty in enumerate((0.0, 1.5, 2.0)):
        want = softmax_log([1.0 - penalty, 0.0])[0 if i < 2 else 1]
        np.testing.assert_allclose(got.logprob[0, i], want, rtol=1e-5, atol=1e-6)


def random_history(rng: Any) -> dict[str, Any]:
    counts = rng.integers(0, 3, (1, V)).astype(np.int32) * (rng.random((1, V)) < 0.3)
    return {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.25,
        "output_counts": counts.astype(np.int32),
        "prompt_mask": pack(np.flatnonzero(rng.random(V) < 0.4)),
    }


def penalised(z: np.ndarray, h: dict[str, Any], extra: Any) -> np.ndarray:
    """The formula, written apart."""
    counts = h["output_counts"][0] + np.bincount(extra, minlength=V)
    words = h["prompt_mask"].view(np.uint32)[0]
    prompt = np.array([words[i // 32] >> (i % 32) & 1 for i in range(V)], bool)
    out = z.copy()
    for i in range(V):
        if prompt[i] or counts[i]:
            out[i] = out[i] / np.float32(1.3) if out[i] > 0 else out[i] * np.float32(1.3)
        if counts[i]:
            out[i] = out[i] - np.float32(0.25) * np.float32(counts[i]) - np.float32(0.6)
    return out


@pytest.mark.parametrize("anchor", [None, -1, 17, 299])
def test_all_penalties_and_the_anchor(backend: str, rng: Any, anchor: int | None) -> None:
    history = random_history(rng)
    bias = rng.normal(size=(1, V)).astype(np.float32)
    rows = rng.normal(size=(3, V)).astype(np.float32) * 3
    drafts: list[int] = []
    first = [] if anchor in (None, -1) else [anchor]
    for i in range(2):  # the drafts that will be accepted
        z = penalised(rows[i] + bias[0], history, first + drafts)
        drafts.append(int(np.argmax(z)))
    extra = {} if anchor is None else {"anchor": [anchor]}
    got = verify(rows, drafts, backend, logit_bias=bias, **history, **extra)
    want = [*drafts, int(np.argmax(penalised(rows[2] + bias[0], history, first + drafts)))]
    assert got.tokens.tolist() == [want] and got.status[0] == 0
    z = penalised(rows[2] + bias[0], history, first + drafts)
    np.testing.assert_allclose(got.logprob[0, 2], softmax_log(z)[want[2]], rtol=2e-5)


def test_an_anchor_past_the_vocabulary_is_a_status_bit(backend: str) -> None:
    rows = np.zeros((2, 10))
    got = verify(rows, [0], backend, anchor=[10], presence_penalty=1.0)
    assert got.status[0] == Status.BAD_DRAFT_ID and got.tokens.tolist() == [[0, 1]]
    assert verify(rows, [0], backend, anchor=[10]).status[0] == 0  # nothing counts it


def test_penalties_off_change_no_bit(backend: str, rng: Any) -> None:
    rows = rng.normal(size=(3, V)).astype(np.float32)
    history = random_history(rng) | {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    got = verify(rows, [3, 4], backend, temperature=0.8, **history, anchor=[2])
    want = verify(rows, [3, 4], backend, temperature=0.8)
    for field in ("tokens", "logprob", "logprob_raw", "status"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field))


def test_min_tokens_forbid_stops_row_by_row(backend: str) -> None:
    """Two more tokens are due: rows 0 and 1 emit no stop, row 2 may."""
    row = np.full(10, -9.0)
    row[2], row[6] = 5.0, 3.0
    got = verify([row] * 3, [6, 6], backend, stop_ids=[2, 4], min_tokens_left=2)
    assert got.tokens.tolist() == [[6, 6, 2]] and got.finish[0] == 1
    free = verify([row] * 3, [6, 6], backend, stop_ids=[2, 4], min_tokens_left=0)
    assert free.tokens.tolist() == [[2, -1, -1]] and free.finish[0] == 1


def test_a_drafted_stop_is_rejected_with_its_residual(backend: str) -> None:
    row = np.log([0.5, 0.3, 0.2])
    got = verify([row] * 2, [0], backend, temperature=1.0, stop_ids=[0], min_tokens_left=1)
    assert got.accepted[0, 0] == 0 and got.tokens[0, 0] in (1, 2)
    assert got.status[0] == Status.FORCED_REJECT


def test_only_stops_allowed_is_an_empty_row(backend: str) -> None:
    row = np.zeros(40)
    mask = np.array([[0b110, 0]], np.int32)
    got = verify([row], [[0]], backend, draft_len=[0], token_mask=mask, stop_ids=[1, 2],
                 min_tokens_left=1)  # fmt: skip
    assert got.status[0] == Status.EMPTY_SUPPORT and got.tokens[0, 0] == 0
    mask[0, 1] = 1 << 5
    mask[0, 0] = 0b10
    got = verify([row], [[0]], backend, draft_len=[0], token_mask=mask, stop_ids=[1],
                 min_tokens_left=1)  # fmt: skip
    assert got.status[0] == 0 and got.tokens[0, 0] == 37


@pytest.mark.parametrize("n", [1, 5, 128])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_ids(backend: str, rng: Any, n: int, temperature: float) -> None:
    rows = np.round(rng.normal(size=(3, V)) * 4) / 4  # many ties
    mask = np.full((3, 10), -1, np.int32)
    mask[:, 3] = 0
    drafts = rows[:2].argmax(1)
    drafts = np.where((drafts >= 96) & (drafts < 128), 0, drafts)
    got = verify(
        rows, drafts, backend, temperature=temperature, token_mask=mask, top_logprobs=n, top_k=40
    )
    allowed = (np.arange(V) < 96) | (np.arange(V) >= 128)
    for i in range(got.num_emitted[0]):
        raw = softmax_log(rows[i])
        order = np.lexsort((np.arange(V), -raw))
        assert got.top_ids_raw[0, i].tolist() == order[:n].tolist()
        np.testing.assert_allclose(got.top_logprob_raw[0, i], raw[order[:n]], rtol=1e-5, atol=1e-6)
        order = order[allowed[order]]
        kept = order if temperature == 0 else order[:40]
        law = softmax_log(rows[i][kept] / (np.float64(np.float32(temperature)) or 1))
        m = min(n, len(kept))
        assert got.top_ids[0, i, :m].tolist() == kept[:m].tolist()
        np.testing.assert_allclose(got.top_logprob[0, i, :m], law[:m], rtol=1e-5, atol=1e-6)
        assert (got.top_ids[0, i, m:] == -1).all()
        assert (got.top_logprob[0, i, m:] == -np.inf).all()
    assert (got.top_ids[0, got.num_emitted[0] :] == -1).all()
    assert (got.top_logprob_raw[0, got.num_emitted[0] :] == 0).all()


def test_lists_of_a_block_are_of_their_own_rows(backend: str) -> None:
    rows = np.log([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])
    got = verify(rows, [0, 1], backend, temperature=1.0, rule="block", top_logprobs=2,
                 debug_uniform=np.zeros((1, 3), np.uint64))  # fmt: skip
    assert got.top_ids.tolist() == [[[0, 1], [1, 2], [2, 0]]]


def test_no_lists_unless_asked(backend: str) -> None:
    assert verify(np.zeros((2, 4)), [0], backend).top_ids is None
