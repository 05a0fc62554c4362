# SPDX-License-Identifier: Apache-2.0
"""Small cases with known right answers: each stands for a kind of fault.

Cases about the law of what is emitted are in test_laws.py, those of penalties and of the rule block
in files of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx
from dspark_ext import Status
from dspark_ext.results import Verification

sys.path.insert(0, str(Path(__file__).resolve().parent))
from beside_cpu import sample

INF = np.inf


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def verify(rows: Any, drafts: Any, backend: str = "cpu", **kwargs: Any) -> Verification:
    """Requests of equal length l: ``rows`` [R, l + 1, V], ``drafts`` [R, gamma >= l]."""
    rows, drafts = np.asarray(rows), np.asarray(drafts)
    count, each, vocab = rows.shape
    defaults: dict[str, Any] = {
        "draft_len": each - 1,
        "cu_seqlens": np.arange(count + 1) * each,
        "seed": np.arange(count),
        "position": 100,
        "temperature": 1.0,
    }
    return sample(rows.reshape(-1, vocab), drafts, backend, **(defaults | kwargs))


def law(q: Any, drafts: Any) -> dict[str, np.ndarray]:
    """Stored law: q [R, gamma, V] probabilities."""
    z = log(q)
    picked = np.maximum(np.asarray(drafts), 0)[..., None]
    logit = np.take_along_axis(z, picked, -1)[..., 0]
    lse = log(np.nansum(q, -1))
    return {"draft_logit": logit, "draft_lse": lse.astype(np.float32), "draft_logits": z}


def force(u: float, shape: tuple[int, int]) -> np.ndarray:
    return np.full(shape, min(int(u * 2**53), 2**53 - 1), np.uint64)


@pytest.mark.parametrize(
    ("draft", "u", "accepted", "token"),
    [
        pytest.param(0, 1.0, 1, 0, id="A-always"),
        pytest.param(1, 0.599, 1, 1, id="B-below-.6"),
        pytest.param(1, 0.601, 0, 0, id="B-above-.6-gives-residual-A"),
    ],
)
def test_v1_the_rule(backend: str, draft: int, u: float, accepted: int, token: int) -> None:
    p, q = [[log([0.7, 0.3])] * 2], [[[0.5, 0.5]]]
    got = verify(p, [[draft]], backend, debug_uniform=force(u, (1, 2)), **law(q, [[draft]]))
    assert got.accepted.tolist() == [[accepted]]
    assert got.tokens[0, 0] == token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_v2_a_nan_row_among_normal_requests(backend: str, temperature: float) -> None:
    vocab = 129_280
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(3, 2, vocab)).astype(np.float32)
    rows[1, 0] = np.nan
    drafts = np.array([[5], [0], [9]])
    got = verify(rows, drafts, backend, temperature=temperature)
    assert got.num_emitted[1] == 1 and 0 <= got.tokens[1, 0] < vocab
    assert got.status[1] & Status.NAN_TARGET and got.status[1] & Status.EMPTY_SUPPORT
    assert got.logprob[1, 0] == -INF
    alone = verify(rows[::2], drafts[::2], backend, seed=[0, 2], temperature=temperature)
    np.testing.assert_array_equal(got.tokens[::2], alone.tokens)
    np.testing.assert_array_equal(got.logprob[::2], alone.logprob)
    assert not got.status[::2].any()


def test_v3_a_nan_draft_law_emits_from_p(backend: str) -> None:
    count = {"reference": 400, "simt": 50}.get(backend, 4000)
    p = np.broadcast_to(log([1e-22, 0.97, 0.03]), (count, 2, 3))
    drafts = np.zeros((count, 1), int)
    q = law(np.full((count, 1, 3), np.nan), drafts)
    q["draft_lse"][:] = np.nan
    got = verify(p, drafts, backend, **q)
    assert (got.status == Status.NAN_DRAFT | Status.FORCED_REJECT).all()
    assert not got.num_accepted.any() and not (got.tokens[:, 0] == 0).any()
    share = (got.tokens[:, 0] == 1).mean()
    assert abs(share - 0.97) < 5 * np.sqrt(0.97 * 0.03 / count)


def test_a_nan_in_another_column_refuses_before_the_coin(backend: str) -> None:
    q = law([[[0.2, 0.3, 0.5]]], [[0]])
    q["draft_logits"][0, 0, 2] = np.nan
    got = verify([[log([0.9, 0.05, 0.05])] * 2], [[0]], backend, **q)
    assert got.accepted[0, 0] == 0 and got.status[0] == Status.NAN_DRAFT | Status.FORCED_REJECT


def test_v4_a_placeholder_ends_the_prefix(backend: str) -> None:
    drafts = np.array([[1, 0, 1, -1, -1]])
    rows = np.stack(
        [log([0.1, 0.9, 0]), log([0.9, 0.1, 0]), log([0.1, 0.9, 0])] + [log([0, 0, 1])] * 3
    )
    q = np.stack([[0.0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])[None]
    uniform = np.zeros((1, 6), np.uint64)
    got = verify(rows[None], drafts, backend, debug_uniform=uniform, **law(q, drafts))
    assert got.tokens.tolist() == [[1, 0, 1, 2, -1, -1]]
    assert got.accepted.tolist() == [[1, 1, 1, -2, -2]]
    assert got.status[0] == Status.BAD_DRAFT_ID


@pytest.mark.parametrize("bad", [-1, 3, 2**31 + 1, 2**32 + 1, -(2**40)])
@pytest.mark.parametrize("rule", ["greedy", "token", "match"])
def test_ids_out_of_range_never_index(backend: str, bad: int, rule: str) -> None:
    got = verify([[log([0.2, 0.3, 0.5])] * 2], np.array([[bad]]), backend, rule=rule)
    assert got.status[0] == Status.BAD_DRAFT_ID
    assert got.num_emitted[0] == 1 and 0 <= got.tokens[0, 0] < 3


def test_v4_zero_draft_mass_ends_the_prefix(backend: str) -> None:
    got = verify([[log([0.2, 0.8])] * 2], [[0]], backend, **law([[[0.0, 1.0]]], [[0]]))
    assert got.status[0] == Status.BAD_DRAFT_ID and got.accepted[0, 0] == -2


@pytest.mark.parametrize("stored", [False, True], ids=["one-hot", "stored"])
def test_v5_zero_probability_is_never_accepted(backend: str, stored: bool) -> None:
    extra = law([[[0.4, 0.3, 0.3]]], [[0]]) if stored else {}
    uniform = np.zeros((1, 2), np.uint64)
    got = verify([[log([0, 0.4, 0.6])] * 2], [[0]], backend, debug_uniform=uniform, **extra)
    assert got.accepted[0, 0] == 0 and got.tokens[0, 0] in (1, 2)
    assert got.status[0] == Status.FORCED_REJECT


@pytest.mark.parametrize("garbage", [np.nan, 1e9, 0.0])
def test_v6_a_greedy_draft_reads_no_law(backend: str, garbage: float) -> None:
    drafts = np.array([[0, 1]] * 16)
    p = [[log([0.6, 0.4])] * 3] * 16
    full = np.full((16, 2), garbage, np.float32)
    stored = {"draft_logit": full, "draft_lse": full, "draft_logits": full[..., None].repeat(2, 2)}
    want = verify(p, drafts, backend)
    got = verify(p, drafts, backend, draft_temperature=0.0, **stored)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert not got.status.any()


@pytest.mark.parametrize("top_k", [2, 3, 4])
def test_v11_top_k_ties_go_to_the_lower_id(backend: str, top_k: int) -> None:
    count = {"reference": 300, "simt": 50}.get(backend, 3000)
    p = np.broadcast_to(log([0.4, 0.3, 0.3, 0]), (count, 1, 4))
    got = verify(p, np.zeros((count, 1), int), backend, top_k=top_k)
    assert set(got.tokens[:, 0].tolist()) == ({0, 1} if top_k == 2 else {0, 1, 2})
    if top_k == 2:
        np.testing.assert_allclose(
            np.exp(got.logprob[:, 0]), np.where(got.tokens[:, 0] == 0, 4 / 7, 3 / 7), rtol=1e-6
        )


def test_v12_min_p_acts_on_verified_rows(backend: str) -> None:
    row = np.array([3, 2, 0, -2], np.float32)
    uniform = np.zeros((1, 2), np.uint64)
    got = verify([[row] * 2], [[2]], backend, min_p=0.3, debug_uniform=uniform)
    assert got.accepted[0, 0] == 0 and got.status[0] == Status.FORCED_REJECT
    bonus = verify([[row]], [[2]], backend, min_p=0.3, debug_uniform=force(1.0, (1, 2)))
    assert bonus.tokens[0, 0] == 1  # the last id of the support
    np.testing.assert_allclose(np.exp(bonus.logprob[0, 0]), 0.26894, atol=1e-5)


def test_v14_greedy_is_exact_in_a_mixed_batch(backend: str) -> None:
    rows = np.array([[[1, 1, 0]], [[0.3, 0.2, 0.1]]], np.float32)
    for seed in range(30):
        mixed = verify(
            rows, [[0], [0]], backend, temperature=np.float32([0, 1]), seed=[seed, seed + 7]
        )
        alone = verify(rows[1:], [[0]], backend, seed=[seed + 7])
        assert mixed.tokens[0, 0] == 0
        assert mixed.tokens[1, 0] == alone.tokens[0, 0]


def test_v15_ties_over_segments(backend: str) -> None:
    for ids in ([3, 8191, 8192, 100_000], [8191, 8192], [127, 128]):
        row = np.full((1, 1, 100_352), -3, np.float16)
        row[0, 0, ids] = 2.5
        got = verify(row, [[0]], backend, temperature=0.0)
        assert got.tokens.tolist() == [[ids[0], -1]]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_v15_ties_give_the_lowest_id(threads: int) -> None:
    torch = pytest.importorskip("torch")
    row = torch.full((1, 100_352), -3.0, dtype=torch.bfloat16)
    row[0, [3, 8191, 8192, 100_000]] = 2.5
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = dx.rejection_sample(
            row, torch.tensor([[0]]), draft_len=0, cu_seqlens=[0, 1], seed=1, position=1
        )
    finally:
        torch.set_num_threads(before)
    assert got.tokens.tolist() == [[3, -1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.5])
def test_v16_padding_never_wins(backend: str, temperature: float) -> None:
    rows = np.random.default_rng(16).normal(size=(2, 1, 163_968)).astype(np.float32)
    rows[..., 163_840:] = 1e4
    got = verify(rows, [[0], [0]], backend, temperature=temperature, vocab_size=163_840, top_k=50)
    assert (got.tokens[:, 0] < 163_840).all() and (got.logprob[:, 0] < 0).all()


def test_v17_offsets_past_2_31_elements(backend: str) -> None:
    """The last row starts at element 2^31 + 5; untouched pages cost no memory."""
    vocab, stride = 300, (2**31 + 5) // 7
    try:
        memory = np.zeros(7 * stride + vocab, np.float16)
    except MemoryError:
        pytest.skip("4.3 GB of address space are not to be had on this machine")
    rows = np.lib.stride_tricks.as_strided(memory, (8, vocab), (2 * stride, 2))
    wanted = np.random.default_rng(17).normal(size=(8, vocab)).astype(np.float16)
    rows[:] = wanted
    drafts = np.argmax(wanted[:7], axis=1)[None]
    kwargs: dict[str, Any] = {"draft_len": 7, "cu_seqlens": [0, 8], "seed": 3, "position": 8}
    kwargs["backend"] = backend
    got = dx.rejection_sample(rows, drafts, **kwargs)
    small = dx.rejection_sample(wanted, drafts, **kwargs)
    assert got.num_emitted[0] == 8
    np.testing.assert_array_equal(got.tokens, small.tokens)
    np.testing.assert_array_equal(got.logprob, small.logprob)


@pytest.mark.parametrize("stops", [[1], np.array([[-1, 1]])], ids=["shared", "per-request"])
def test_v18_nothing_is_emitted_behind_a_stop(backend: str, stops: Any) -> None:
    rows = np.full((1, 4, 10), -9, np.float32)
    for i, token in enumerate((7, 1, 9, 4)):
        rows[0, i, token] = 9
    got = verify(rows, [[7, 1, 9]], backend, temperature=0.0, stop_ids=stops)
    assert got.tokens.tolist() == [[7, 1, -1, -1]]
    assert got.num_accepted[0] == got.num_emitted[0] == 2
    assert got.finish[0] == 1 and got.status[0] == Status.STOPPED and got.next_anchor[0] == 1
    assert got.accepted.tolist() == [[1, 1, -2]]


@pytest.mark.parametrize(
    ("cap", "tokens", "finish"),
    [
        pytest.param(1, [7, -1, -1, -1], 2, id="cap-first"),
        pytest.param(2, [7, 1, -1, -1], 1, id="stop-wins-a-tie"),
        pytest.param(3, [7, 1, -1, -1], 1, id="stop-first"),
    ],
)
def test_first_of_stop_and_cap(backend: str, cap: int, tokens: list[int], finish: int) -> None:
    rows = np.full((1, 4, 10), -9, np.float32)
    for i, token in enumerate((7, 1, 9, 4)):
        rows[0, i, token] = 9
    got = verify(rows, [[7, 1, 9]], backend, temperature=0.0, stop_ids=[1], max_new_tokens=[cap])
    assert got.tokens.tolist() == [tokens] and got.finish[0] == finish
    assert got.status[0] == Status.STOPPED


@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_v19_the_mask_holds_on_every_row(backend: str, padded: bool, temperature: float) -> None:
    rows = np.zeros((1, 4, 40), np.float32)
    rows[0, 0, 8] = 30
    rows[0, 1, 3] = 30
    mask = np.full((4, 2), -1, np.int32)
    mask[1, 0] = ~np.int32(1 << 3)
    got = verify(
        rows,
        np.array([[8, -1, -1]]),
        backend,
        temperature=temperature,
        token_mask=mask[None] if padded else mask,
    )
    assert got.num_emitted[0] == 2 and got.tokens[0, 0] == 8 and got.tokens[0, 1] != 3


@pytest.mark.parametrize("u", [0.0, 1.0], ids=["u=0", "u=max"])
@pytest.mark.parametrize("finite", [0, 77, 300])
def test_v20_one_finite_logit(backend: str, u: float, finite: int) -> None:
    row = np.full(301, -INF, np.float32)
    row[finite] = -3
    for forced in ({"debug_uniform": force(u, (1, 2))}, {}):
        got = verify([[row]], [[0]], backend, **forced)
        assert got.tokens[0, 0] == finite and got.logprob[0, 0] == 0 and got.status[0] == 0


def test_v21_a_small_tail_keeps_its_mass(backend: str) -> None:
    """4,095 ids at -16.34 share 3.3e-4; the whole size is in tests/statistics."""
    row = np.full(4096, -16.34, np.float32)
    row[1000] = 0

    def draw(backend: str, seeds: Any) -> Verification:
        rows = np.broadcast_to(row, (len(seeds), 1, 4096))
        return verify(rows, np.zeros((len(seeds), 1), int), backend, seed=seeds, vocab_size=4096)

    if backend == "simt":  # the bits of the CPU, whose law is tested; most of all in the tail
        want = draw("cpu", np.arange(20_000))
        rare = np.flatnonzero(want.tokens[:, 0] != 1000)
        assert len(rare) > 0
        seeds = np.concatenate([rare, np.arange(30)])
        got = draw(backend, seeds)
        np.testing.assert_array_equal(got.tokens, want.tokens[seeds])
        np.testing.assert_array_equal(got.logprob, want.logprob[seeds])
        return
    count = {"reference": 2000}.get(backend, 20_000)
    got = draw(backend, np.arange(count))
    tail = 4095 * np.exp(-16.34)
    tail /= 1 + tail
    drawn = got.tokens[:, 0]
    seen = int((drawn != 1000).sum())
    assert stats.binomtest(seen, count, tail).pvalue > 1e-5
    np.testing.assert_allclose(got.logprob[drawn == 1000, 0], np.log1p(-tail), atol=2e-7)
    assert np.isin(drawn, np.arange(4096)).all()


def test_v22_another_gamma_draws_the_same(backend: str, rng: Any) -> None:
    rows = rng.normal(size=(6, 3, 200)).astype(np.float32)
    drafts = rows[:, :2].argmax(-1)
    wide = np.pad(drafts, ((0, 0), (0, 4)), constant_values=7)
    for rule in ("token", "block", "match"):
        got = verify(rows, wide, backend, rule=rule)
        want = verify(rows, drafts, backend, rule=rule)
        np.testing.assert_array_equal(got.tokens[:, :3], want.tokens)
        np.testing.assert_array_equal(got.accepted[:, :2], want.accepted)


def test_v22_the_slot_in_the_batch_does_not_matter(backend: str, rng: Any) -> None:
    rows = rng.normal(size=(7, 3, 300)).astype(np.float32)
    drafts = rows[:, :2].argmax(-1)
    order = rng.permutation(7)
    for rule in ("token", "block", "match"):
        whole = verify(rows, drafts, backend, rule=rule, seed=np.arange(7))
        moved = verify(rows[order], drafts[order], backend, rule=rule, seed=order)
        np.testing.assert_array_equal(moved.tokens, whole.tokens[order])
        alone = verify(rows[4:5], drafts[4:5], backend, rule=rule, seed=[4])
        np.testing.assert_array_equal(alone.tokens[0], whole.tokens[4])
        other = verify(rows, drafts, backend, rule=rule, seed=np.arange(7), position=101)
        assert (other.tokens != whole.tokens).any()


def test_v23_the_residual_has_no_token_with_q_above_p(backend: str) -> None:
    count, vocab = {"reference": (60, 40), "simt": (100, 300)}.get(backend, (2000, 300))
    p = np.full(vocab, 1.0 / vocab)
    q = p * np.where(np.arange(vocab) % 2 == 0, 1 + 1e-4, 1 - 1e-4)
    rows = np.broadcast_to(log(p), (count, 2, vocab))
    drafts = np.zeros((count, 1), int)
    stored = law(np.broadcast_to(q, (count, 1, vocab)), drafts)
    # a ratio that rejects always: the draft's own q is said to be huge
    stored["draft_logit"] = stored["draft_logit"] + 60
    stored["draft_lse"] = np.zeros_like(stored["draft_lse"])
    got = verify(rows, drafts, backend, **stored)
    assert not got.num_accepted.any()
    assert not (got.tokens[:, 0] % 2 == 0).any()


def test_v23_equal_laws_have_no_residual(backend: str) -> None:
    p = np.full(200, 1 / 200)
    stored = law([[p]], [[0]])
    stored["draft_logit"] = stored["draft_logit"] + 60
    stored["draft_lse"][:] = 0
    stored["draft_logits"] = stored["draft_logits"] + np.float32(1e-3)  # q > p everywhere
    got = verify([[log(p)] * 2], [[0]], backend, **stored)
    assert got.status[0] == Status.ZERO_RESIDUAL and 0 <= got.tokens[0, 0] < 200


def test_v25_log_probs_come_from_the_requests_own_rows(backend: str, rng: Any) -> None:
    length = np.array([0, 3, 1])
    cu = np.concatenate([[0], np.cumsum(1 + length)])
    rows = rng.normal(size=(7, 50)).astype(np.float32)
    best = rows.argmax(1)
    drafts = np.array([[0, 0, 0], [best[1], (best[2] + 1) % 50, 0], [best[5], 0, 0]])
    got = dx.rejection_sample(
        rows, drafts, draft_len=length, cu_seqlens=cu, seed=[1, 2, 3], position=5, backend=backend
    )
    assert got.num_emitted.tolist() == [1, 2, 2]
    full = rows.astype(np.float64)
    want = full - np.log(np.exp(full).sum(1, keepdims=True))
    for r, n in enumerate(got.num_emitted):
        for j in range(n):
            value = want[cu[r] + j, got.tokens[r, j]]
            np.testing.assert_allclose(got.logprob[r, j], value, rtol=1e-5)
            np.testing.assert_allclose(got.logprob_raw[r, j], value, rtol=1e-5)


def test_log_probs_processed_and_raw(backend: str) -> None:
    row = np.array([[[2.0, 1.0, 0.0, -1.0]]], np.float32)
    mask = np.array([[0b1110]], np.int32)
    bias = np.array([[0, 0, 3, 0]], np.float32)
    got = verify(row, [[0]], backend, temperature=0.5, top_k=1, token_mask=mask, logit_bias=bias)
    raw = row[0, 0].astype(float)
    assert got.tokens[0, 0] == 2 and got.logprob[0, 0] == 0.0
    np.testing.assert_allclose(got.logprob_raw[0, 0], raw[2] - np.log(np.exp(raw).sum()), rtol=1e-6)


def test_infinite_logits_are_the_largest_finite(backend: str) -> None:
    rows = np.array([[[0, INF, 3]]], np.float32)
    for temperature in (0.0, 1.0):
        got = verify(rows, [[0]], backend, temperature=temperature)
        assert got.tokens[0, 0] == 1 and got.logprob[0, 0] == 0 and got.status[0] == 0


def test_two_infinite_logits_share_the_mass_of_top_p(backend: str) -> None:
    rows = np.array([[[INF, 5, INF, 0]]], np.float32)
    tokens = [
        int(verify(rows, [[0]], backend, top_p=0.9, seed=[seed]).tokens[0, 0]) for seed in range(40)
    ]
    assert set(tokens) == {0, 2}


def test_empty_rows_emit_the_lowest_allowed_id(backend: str) -> None:
    rows = np.full((1, 2, 70), -INF, np.float32)
    mask = np.zeros((2, 3), np.int32)
    mask[0] = [0, 1 << 4, 0]
    for rule in ("greedy", "token", "match"):
        got = verify(rows, [[36]], backend, token_mask=mask, rule=rule)
        assert got.tokens.tolist() == [[36, -1]] and got.accepted.tolist() == [[0]]
        assert got.status[0] & Status.EMPTY_SUPPORT and got.logprob[0, 0] == -INF
