# SPDX-License-Identifier: Apache-2.0
"""A draft law on the M largest base logits: the choice, the law, and what is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

import dspark_ext as dx

Case = dict[str, Any]
WHERE: Case = {"anchor": [0], "seed": [0], "position": [0]}


def chosen(u: np.ndarray, m: int) -> np.ndarray:
    """The M first columns in the order (logit descending, column ascending), NaN last."""
    ranked = sorted(range(len(u)), key=lambda c: (-u[c] if u[c] == u[c] else np.inf, c))
    return np.sort(ranked[:m])


def flat(row: np.ndarray, m: int, backend: str, **extra: Any) -> dx.Draft:
    """One slot without a bias."""
    zero = np.zeros((row.shape[-1], 2), np.float32)
    base = np.asarray(row, np.float32).reshape(1, 1, -1)
    return dx.markov_loop(base, zero, zero, **WHERE, topk_support=m, backend=backend, **extra)


def test_ties_at_the_threshold_go_to_the_lowest_ids(backend: str) -> None:
    row = np.full(700, 1.0)
    row[[3, 699]] = 2
    got = flat(row, 5, backend)
    assert got.support_ids.tolist() == [[[0, 1, 2, 3, 699]]]
    assert got.support_logits.tolist() == [[[1, 1, 1, 2, 2]]]
    assert got.tokens == 3


def test_zeros_of_either_sign_tie(backend: str) -> None:
    row = np.full(300, -0.0)
    row[[7, 200]] = 0.0
    assert flat(row, 3, backend).support_ids.tolist() == [[[0, 1, 2]]]


def test_nan_counts_as_minus_infinity_and_sets_the_bit(backend: str) -> None:
    row = np.arange(300.0)
    row[299] = np.nan
    got = flat(row, 2, backend)
    assert got.support_ids.tolist() == [[[297, 298]]] and got.tokens == 298
    assert got.status == dx.Status.NAN_DRAFT
    row[:] = -np.inf
    row[[5, 250]] = [np.nan, 1.0]
    got = flat(row, 7, backend)
    assert got.support_ids.tolist() == [[[0, 1, 2, 3, 4, 5, 250]]]
    assert got.support_logits.tolist() == [[[-np.inf] * 6 + [1.0]]]
    assert got.status == dx.Status.NAN_DRAFT and got.tokens == 250 and got.lse == 1.0


def test_plus_infinity_is_in_the_support(backend: str) -> None:
    row = np.zeros(200)
    row[150] = np.inf
    got = flat(row, 1, backend)
    assert got.tokens == 150 and got.logit == np.finfo(np.float32).max and got.status == 0


@pytest.mark.parametrize("t", [0.0, 1.0], ids=["greedy", "sampled"])
def test_no_support_at_all(backend: str, t: float) -> None:
    got = flat(np.full(300, -np.inf), 4, backend, temperature=t)
    assert got.tokens == 0 and got.status == dx.Status.EMPTY_SUPPORT
    assert got.logit == -np.inf and got.lse == -np.inf
    assert got.support_ids.tolist() == [[[0, 1, 2, 3]]]


def test_fewer_columns_than_members(backend: str) -> None:
    """V_d < M: every column takes part; ids -1 and logits -inf behind; padding is never read."""
    row = np.float32([1, 3, 2, 99, np.nan])
    zero = np.zeros((3, 2), np.float32)
    got = dx.markov_loop(
        row.reshape(1, 1, 5), zero, zero, **WHERE, topk_support=6, vocab_size=3, backend=backend
    )
    assert got.support_ids.tolist() == [[[0, 1, 2, -1, -1, -1]]]
    assert got.support_logits.tolist() == [[[1, 3, 2, -np.inf, -np.inf, -np.inf]]]
    assert got.tokens == 1 and got.status == 0


def test_one_member_is_the_argmax_of_the_base_logits(
    backend: str, rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    case = make(4, 5, 513, 8)
    got = dx.markov_loop(
        **case, topk_support=1, temperature=[0, 1, 0.3, 2], store_logits=True, backend=backend
    )
    np.testing.assert_array_equal(got.tokens, case["base_logits"].argmax(axis=2))
    np.testing.assert_array_equal(got.support_ids[..., 0], got.tokens)
    np.testing.assert_array_equal(got.support_logits[..., 0], got.logit)
    assert (np.isfinite(got.logits).sum(axis=2) == 1).all()
    log_q = got.logit / np.float32([1, 1, 0.3, 2])[:, None] - got.lse
    np.testing.assert_allclose(log_q, 0, atol=3e-6)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("m", [700, 1024], ids=["M=V", "M>V"])
def test_all_columns_give_the_bits_of_the_full_law(
    head: str, m: int, backend: str, make: Callable[..., Case]
) -> None:
    case = make(4, 4, 700, 12, head=head, confidence=True)
    extra: Case = {
        "temperature": np.float32([0, 0.7, 1, 1.3]),
        "top_k": np.int32([0, 0, 30, 0]),
        "top_p": np.float32([1, 1, 1, 0.8]),
        "store_logits": True,
        "backend": backend,
    }
    want = dx.markov_loop(**case, **extra)
    got = dx.markov_loop(**case, **extra, topk_support=m)
    for name in ("tokens", "logit", "lse", "confidence_logit", "logits", "status"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
    np.testing.assert_array_equal(got.support_logits[..., :700], want.logits)


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("t", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_law_is_the_full_one_masked(
    dtype: torch.dtype, t: float, int8: bool, rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    """The same tokens and lse as a full row whose other base logits are -inf."""
    case = make(5, 4, 901, 20)
    case = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    base = torch.from_numpy(rng.normal(0, 2, (5, 4, 901))).to(dtype)
    if int8:
        case["w2"], case["w2_scale"] = dx.quantize_rows(case["w2"])
    got = dx.markov_loop(
        **case | {"base_logits": base}, topk_support=37, temperature=t, store_logits=True
    )
    masked = torch.full_like(base, -np.inf)
    for r, k in np.ndindex(5, 4):
        ids = chosen(base[r, k].double().numpy(), 37)
        assert got.support_ids[r, k].tolist() == ids.tolist()
        masked[r, k, ids] = base[r, k, ids]
    want = dx.markov_loop(**case | {"base_logits": masked}, temperature=t, store_logits=True)
    for name in ("tokens", "logit", "lse", "logits", "status"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    picked = torch.take_along_dim(want.logits, got.support_ids.long(), 2)
    assert torch.equal(got.support_logits, picked)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_against_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="entropy"))
    rows, gamma = draw(st.integers(0, 4), label="R"), draw(st.integers(1, 5), label="gamma")
    vocab, m = draw(st.integers(1, 600), label="V"), draw(st.integers(1, 70), label="M")
    levels = draw(st.sampled_from([2, 5, 1000]), label="distinct logits")
    base = rng.integers(0, levels, (rows, gamma, vocab)).astype(np.float32) / 8
    special = draw(st.sampled_from([None, np.nan, np.inf, -np.inf]), label="special")
    if special is not None:
        base[rng.random(base.shape) < 0.1] = special
    case: Case = {
        "base_logits": base,
        "w1": (rng.integers(-16, 17, (vocab, 6)) / 16).astype(np.float32),
        "w2": (rng.integers(-16, 17, (vocab, 6)) / 16).astype(np.float32),
        "anchor": rng.integers(0, vocab, rows),
        "seed": rng.integers(0, 2**63, rows),
        "position": rng.integers(0, 2**31, rows),
        "temperature": rng.choice([0, 0.5, 1], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 100], rows).astype(np.int32),
        "topk_support": m,
        "store_logits": True,
    }
    got, want = (dx.markov_loop(**case, backend=name) for name in ("cpu", "reference"))
    np.testing.assert_array_equal(got.support_ids, want.support_ids)
    same = np.cumprod(got.tokens == want.tokens, axis=1).astype(bool)
    assert same.all(axis=1).sum() >= rows - 1  # a sampled token may sit on a cell boundary
    before = np.concatenate([np.ones((rows, 1), bool), same[:, :-1]], axis=1)
    np.testing.assert_array_equal(got.logits[before], want.logits[before])
    np.testing.assert_array_equal(got.support_logits[before], want.support_logits[before])
    if same.all():
        np.testing.assert_array_equal(got.status, want.status)
        np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6, atol=1e-5)


def test_a_reduced_vocabulary_lists_target_ids(
    backend: str, rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    case = make(2, 3, 900, 7)
    columns = np.sort(rng.choice(900, 211, replace=False))
    case["base_logits"] = case["base_logits"][:, :, :211].copy()
    case["w2"] = case["w2"][:211].copy()
    got = dx.markov_loop(
        **case, draft_to_target=columns, topk_support=9, temperature=1.0, backend=backend
    )
    for r, k in np.ndindex(2, 3):
        want = columns[chosen(case["base_logits"][r, k], 9)]
        np.testing.assert_array_equal(got.support_ids[r, k], want)
        assert got.tokens[r, k] in want


def test_truncation_cuts_among_the_members(backend: str) -> None:
    row = np.zeros(400)
    row[[10, 20, 300, 390]] = [4, 3, 2, 1]
    got = flat(row, 4, backend, temperature=1.0, top_k=3, store_logits=True)
    assert got.support_ids.tolist() == [[[10, 20, 300, 390]]]
    assert got.support_logits.tolist() == [[[4, 3, 2, -np.inf]]]
    assert np.isfinite(got.logits).sum() == 3
    np.testing.assert_allclose(got.lse, np.log(np.exp([4, 3, 2]).sum()), rtol=1e-6)


def test_the_full_vocabulary(rng: np.random.Generator, make: Callable[..., Case]) -> None:
    case = make(2, 3, 151_936, 16)
    base = torch.from_numpy(rng.normal(0, 2, (2, 3, 151_936))).bfloat16()  # hundreds of ties
    case = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    got = dx.markov_loop(**case | {"base_logits": base}, topk_support=64, temperature=1.0)
    values = base.float().numpy()
    order = np.argsort(-values, axis=2, kind="stable")[..., :64]
    np.testing.assert_array_equal(got.support_ids.numpy(), np.sort(order, axis=2))


def test_batch_threads_and_inactive_rows(
    rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    case = make(6, 4, 777, 40, head="rnn")
    for name in ("base_logits", "w1", "w2"):
        case[name] = rng.normal(0, 1, case[name].shape).astype(np.float32)
    extra: Case = {"topk_support": 50, "temperature": 0.9}
    want = dx.markov_loop(**case, **extra)
    active = np.array([1, 1, 0, 1, 0, 1], bool)
    out = dx.Draft(*(None if x is None else np.full_like(x, 77) for x in vars(want).values()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        got = dx.markov_loop(**case, **extra, active=active, out=out)
    finally:
        torch.set_num_threads(before)
    for name in ("tokens", "logit", "lse", "support_ids", "support_logits", "status"):
        result = getattr(got, name)
        np.testing.assert_array_equal(result[active], getattr(want, name)[active], name)
        assert (result[~active] == 77).all(), name


def test_drawn_from_the_law_that_is_listed(rng: np.random.Generator) -> None:
    """2^18 draws against softmax over the support; one per cent of bias is seen."""
    vocab, m, rows, t = 700, 12, 2**18, 0.8
    row = rng.normal(0, 0.6, (1, 1, vocab)).astype(np.float32)
    w1 = rng.normal(0, 0.5, (vocab, 4)).astype(np.float32)
    w2 = rng.normal(0, 0.5, (vocab, 4)).astype(np.float32)
    one = dx.markov_loop(row, w1, w2, **WHERE, topk_support=m, temperature=t)
    ids, z = one.support_ids[0, 0], one.support_logits[0, 0].astype(np.float64)
    assert ids.max() - ids.min() > 256  # more than one segment
    law = np.exp(z / t - one.lse[0, 0])
    assert law.sum() == pytest.approx(1, abs=1e-6)
    law /= law.sum()
    tokens = dx.markov_loop(
        np.broadcast_to(row, (rows, 1, vocab)),
        w1,
        w2,
        anchor=np.zeros(rows, np.int32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.zeros(rows, np.int64),
        topk_support=m,
        temperature=t,
    ).tokens[:, 0]
    assert np.isin(tokens, ids).all()
    places = np.searchsorted(ids, tokens)

    def p_value(places: np.ndarray) -> float:
        return float(stats.chisquare(np.bincount(places, minlength=m), law * rows).pvalue)

    assert p_value(places) > 1e-6
    moved = places.copy()  # .01 of total variation
    moved[np.flatnonzero(places == 0)[: rows // 100]] = 1
    assert p_value(moved) < 1e-6


def test_verification_takes_the_lists_or_the_row(make: Callable[..., Case]) -> None:
    case = make(2, 2, 300, 4)
    draft = dx.markov_loop(**case, topk_support=5, temperature=1.0, store_logits=True)
    target = np.zeros((6, 300), np.float32)
    call: Case = {
        "draft_len": [2, 2],
        "cu_seqlens": [0, 3, 6],
        "seed": [1, 2],
        "position": [3, 4],
        "temperature": 1.0,
        "draft_logit": draft.logit,
        "draft_lse": draft.lse,
    }
    lists = dx.rejection_sample(
        target,
        draft.tokens,
        **call,
        support_ids=draft.support_ids,
        support_logits=draft.support_logits,
    )
    got = dx.rejection_sample(target, draft.tokens, **call, draft_logits=draft.logits)
    assert not (got.status & int(dx.Status.NAN_DRAFT | dx.Status.BAD_DRAFT_ID)).any()
    np.testing.assert_array_equal(lists.tokens, got.tokens)
