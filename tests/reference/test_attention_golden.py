# SPDX-License-Identifier: Apache-2.0
"""Attention and cache cases: masks by position code, pages in any order, rows without keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_ext.reference.paged_kv import paged_kv_append, paged_kv_commit
from dspark_ext.reference.verify_attention import verify_attention
from dspark_ext.status import Status


class Paged:
    """Random sequences in a shuffled paged cache, and the dense arrays they came from."""

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: list[int],
        page_size: int,
        hkv: int = 2,
        d: int = 8,
    ) -> None:
        most = -(-max(lengths) // page_size)
        pages = len(lengths) * most + 3
        self.k = [rng.normal(size=(n, hkv, d)) for n in lengths]
        self.v = [rng.normal(size=(n, hkv, d)) for n in lengths]
        self.k_cache = np.full((pages, page_size, hkv, d), np.nan)
        self.v_cache = np.full((pages, page_size, hkv, d), np.nan)
        order = rng.permutation(pages)[: len(lengths) * most]
        self.table = order.reshape(len(lengths), most).astype(np.int32)
        self.lengths = np.array(lengths)
        status = paged_kv_append(
            np.concatenate(self.k),
            np.concatenate(self.v),
            self.k_cache,
            self.v_cache,
            page_table=self.table,
            kv_len=np.zeros(len(lengths), int),
            cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        )
        assert not status.any()

    def attend(self, q: np.ndarray, q_len: list[int], **more: Any) -> Any:
        return verify_attention(
            q,
            self.k_cache,
            self.v_cache,
            page_table=self.table,
            kv_len=self.lengths,
            cu_seqlens=np.concatenate([[0], np.cumsum(q_len)]),
            **more,
        )


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, cap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Whole-matrix attention with an explicit mask [q_len, kv_len]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    score = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    if cap:
        score = cap * np.tanh(score / cap)
    score = np.where(mask, score, -np.inf)
    weight = np.exp(score)
    total = weight.sum(axis=2)
    return np.einsum("hij,jhd->ihd", weight / total[..., None], v), np.log(total).T


@pytest.mark.parametrize("length", [16, 64])
def test_a1_zero_queries_average_the_valid_keys(length: int, rng: np.random.Generator) -> None:
    cache = Paged(rng, [length], page_size=32)
    out, lse = cache.attend(np.zeros((1, 2, 8)), [1], causal=False, return_lse=True)
    np.testing.assert_allclose(out[0], cache.v[0].mean(axis=0))
    np.testing.assert_allclose(lse, np.log(length), rtol=1e-6)


def test_a2_bottom_right_causal(rng: np.random.Generator) -> None:
    cache = Paged(rng, [3], page_size=4)
    out = cache.attend(np.zeros((2, 2, 8)), [2])
    np.testing.assert_allclose(out[0], cache.v[0][:2].mean(axis=0))
    np.testing.assert_allclose(out[1], cache.v[0].mean(axis=0))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_a3_equals_dense(
    page_size: int, group: int, soft_cap: float, rng: np.random.Generator
) -> None:
    q_len = [3, 0, 1, 9]
    lengths = [20, 5, 1, 70]
    cache = Paged(rng, lengths, page_size)
    q = rng.normal(size=(sum(q_len), 2 * group, 8)) * 2
    out, lse = cache.attend(q, q_len, soft_cap=soft_cap, return_lse=True)
    first = 0
    for r, n in enumerate(q_len):
        keys = np.arange(lengths[r])
        mask = keys <= (lengths[r] - n + np.arange(n))[:, None]
        rows = slice(first, first + n)
        want, want_lse = dense(q[rows], cache.k[r], cache.v[r], mask, soft_cap)
        np.testing.assert_allclose(out[rows], want, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-6, atol=1e-6)
        first += n


@pytest.mark.parametrize("causal", [True, False])
def test_a4_window_bounds_the_past_only(causal: bool, rng: np.random.Generator) -> None:
    cache = Paged(rng, [20], page_size=4)
    cache.table[0, :2] = -1  # positions 0..7 are behind every row's window and may be gone
    status = np.zeros(1, np.int32)
    out = cache.attend(np.zeros((3, 2, 8)), [3], window=8, causal=causal, status=status)
    for i in range(3):
        position = 17 + i
        end = position + 1 if causal else 20
        np.testing.assert_allclose(out[i], cache.v[0][position - 7 : end].mean(axis=0))
    assert status[0] == 0


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a6_requests_without_rows(empty: int, rng: np.random.Generator) -> None:
    lengths, q_len = [9, 9, 9], [2, 2, 2]
    q_len[empty] = 0
    cache = Paged(rng, lengths, page_size=4)
    q = rng.normal(size=(4, 2, 8))
    got = cache.attend(q, q_len)
    others = [r for r in range(3) if r != empty]
    for n, r in enumerate(others):
        alone = verify_attention(
            q[2 * n : 2 * n + 2],
            cache.k_cache,
            cache.v_cache,
            page_table=cache.table[[r]],
            kv_len=[9],
            cu_seqlens=[0, 2],
        )
        np.testing.assert_array_equal(got[2 * n : 2 * n + 2], alone)


def test_a7_append_across_a_page_boundary(rng: np.random.Generator) -> None:
    k_cache, v_cache = np.full((2, 4, 4, 1, 2), -9.0)
    k, v = rng.normal(size=(2, 6, 1, 2))
    status = paged_kv_append(
        k, v, k_cache, v_cache, page_table=[[2, 0, 3]], kv_len=[3], cu_seqlens=[0, 6]
    )
    assert status.tolist() == [0]
    for cache, new in ((k_cache, k), (v_cache, v)):
        np.testing.assert_array_equal(cache[2, 3], new[0])
        np.testing.assert_array_equal(cache[0], new[1:5])
        np.testing.assert_array_equal(cache[3, 0], new[5])
        assert (cache[1] == -9).all()
        assert (cache[3, 1:] == -9).all()
        assert (cache[2, :3] == -9).all()


def test_row_without_keys_is_zero_and_minus_infinity(rng: np.random.Generator) -> None:
    cache = Paged(rng, [1], page_size=4)
    out, lse = cache.attend(rng.normal(size=(2, 2, 8)), [2], return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -np.inf).all()
    np.testing.assert_allclose(out[1], cache.v[0][0])


def test_missing_pages_are_bits_and_nan_rows(rng: np.random.Generator) -> None:
    cache = Paged(rng, [8, 8], page_size=4)
    cache.table[0, 1] = 99
    status = np.zeros(2, np.int32)
    out = cache.attend(np.zeros((2, 2, 8)), [1, 1], status=status)
    assert np.isnan(out[0]).all()
    np.testing.assert_allclose(out[1], cache.v[1].mean(axis=0))
    assert status.tolist() == [int(Status.BAD_PAGE), 0]
    cache.lengths[1] = 12
    out = cache.attend(np.zeros((2, 2, 8)), [1, 1], status=status)
    assert np.isnan(out).all()
    assert status.tolist() == [int(Status.BAD_PAGE), int(Status.KV_OVERFLOW)]


def test_append_reports_and_goes_on() -> None:
    cache = np.zeros((2, 2, 2, 1, 1))
    ones = np.ones((9, 1, 1))
    status = paged_kv_append(
        ones,
        ones,
        *cache,
        page_table=[[0, 7], [1, -1], [0, 0]],
        kv_len=[1, 3, -1],
        cu_seqlens=[0, 4, 6, 9],
    )
    overflow, page = int(Status.KV_OVERFLOW), int(Status.BAD_PAGE)
    assert status.tolist() == [overflow | page, overflow | page, int(Status.BAD_PARAM)]
    assert cache[0, :, :, 0, 0].tolist() == [[0, 1], [0, 0]]


def test_append_rotates_at_the_position_and_rounds_once() -> None:
    cache = np.zeros((2, 1, 8, 1, 4))
    k = np.array([[[1.0, 2.0, 3.0, 4.0]], [[0.5, -1.0, 2.0, 0.25]]])
    paged_kv_append(
        k, k, *cache, page_table=[[0]], kv_len=[5], cu_seqlens=[0, 2], rope=100.0, dtype="bf16"
    )
    for i in range(2):
        angle = (5 + i) * np.array([1.0, 0.1])
        turned = (k[i, 0, :2] + 1j * k[i, 0, 2:]) * np.exp(1j * angle)
        want = np.r_[turned.real, turned.imag]
        np.testing.assert_allclose(cache[0, 0, 5 + i, 0], want, rtol=2.0**-8)
        np.testing.assert_array_equal(cache[1, 0, 5 + i, 0], k[i, 0])


def test_commit_moves_active_requests_together() -> None:
    kv_len, position = np.array([4, 5, 6], np.int32), np.array([4, 5, 6], np.int64)
    paged_kv_commit(kv_len, position, [2, 0, 3], active=[1, 1, 0])
    assert kv_len.tolist() == [6, 5, 6]
    assert position.tolist() == [6, 5, 6]


def test_offsets_outside_the_batch_are_flagged(rng: np.random.Generator) -> None:
    cache = Paged(rng, [4], page_size=4)
    status = np.zeros(1, np.int32)
    out = verify_attention(
        rng.normal(size=(2, 2, 8)),
        cache.k_cache,
        cache.v_cache,
        page_table=cache.table,
        kv_len=[4],
        cu_seqlens=[0, 3],
        status=status,
    )
    assert status.tolist() == [int(Status.BAD_PARAM)]
    assert not out.any()


def test_scales_are_factors_of_keys_and_values() -> None:
    # One row over two keys: scores 0 and ln 3 after the scale, so the weights are 1/4 and 3/4.
    keys, values = np.zeros((1, 2, 1, 1)), np.array([4.0, 8.0]).reshape(1, 2, 1, 1)
    keys[0, 1] = 2 * np.log(3)
    out, lse = verify_attention(
        np.ones((1, 1, 1)), keys, values, page_table=[[0]], kv_len=[2], cu_seqlens=[0, 1],
        k_scale=0.5, v_scale=[10.0], return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0, 0], 70.0)
    np.testing.assert_allclose(lse[0, 0], np.log(4), rtol=1e-6)
