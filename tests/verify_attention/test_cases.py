# SPDX-License-Identifier: Apache-2.0
"""Known answers, shapes, element types and the rules of visibility, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx


def test_a1_zero_queries_give_the_mean(backend: str, make_batch: Any) -> None:
    batch = make_batch([2, 3], [16, 64], d=8, page_size=256)
    batch.q.zero_()
    out, lse = batch.call(causal=False, return_lse=True, backend=backend)
    for r, n in ((0, 16), (1, 64)):
        mean = batch.dense_cache(batch.v_cache, r).mean(axis=0)
        want = np.broadcast_to(mean, out[batch.rows(r)].shape)
        np.testing.assert_allclose(out[batch.rows(r)].numpy(), want, atol=n * 2**-24 * 4)
        np.testing.assert_allclose(lse[batch.rows(r)].numpy(), np.log(n), rtol=2**-22)


def test_a2_causal_is_bottom_right(backend: str) -> None:
    # Values are one-hot position codes: the result shows which keys a row saw, equally weighted.
    v = np.eye(4, dtype=np.float32).reshape(1, 4, 1, 4)
    out = dx.verify_attention(
        np.zeros((2, 1, 4), np.float32), np.zeros_like(v), v,
        page_table=np.array([[0]], np.int32), kv_len=[3], cu_seqlens=[0, 2], max_q_len=2,
        backend=backend,
    )  # fmt: skip
    np.testing.assert_allclose(out[:, 0], [[1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0]],
                               rtol=2**-22)  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_a3_ragged_batches(
    backend: str, make_batch: Any, check_dense: Any, rng: np.random.Generator, group: int,
    page_size: int,
) -> None:  # fmt: skip
    q_len = list(range(1, 10))
    kv_len = [n + int(rng.integers(0, 80)) for n in q_len]
    check_dense(make_batch(q_len, kv_len, heads=(2 * group, 2), page_size=page_size), backend)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a3_position_code_shows_every_row(
    backend: str, make_batch: Any, page_size: int, group: int
) -> None:
    # A key that only its own query matches: each row must return exactly the value at its position.
    batch = make_batch([5, 9], [70, 200], heads=(group, 1), d=2, page_size=page_size)
    for r in range(2):
        for p in range(int(batch.kv_len[r])):
            page = int(batch.page_table[r, p // page_size])
            at = batch.k_cache[page, p % page_size, 0], batch.v_cache[page, p % page_size, 0]
            angle = 2 * np.pi * p / 256
            at[0][:] = torch.tensor([np.cos(angle), np.sin(angle)])
            at[1][:] = torch.tensor([p, r])
        rows = batch.rows(r)
        for i, row in enumerate(range(rows.start, rows.stop)):
            angle = 2 * np.pi * (int(batch.kv_len[r]) - rows.stop + rows.start + i) / 256
            batch.q[row] = 1e6 * torch.tensor([np.cos(angle), np.sin(angle)])
    out = batch.call(backend=backend)
    for r in range(2):
        n, q = int(batch.kv_len[r]), batch.rows(r).stop - batch.rows(r).start
        want = torch.tensor([[n - q + i, r] for i in range(q)], dtype=torch.float32)
        assert torch.equal(out[batch.rows(r)], want[:, None].expand(q, group, 2))


def test_a4_window_bounds_the_past(backend: str, make_batch: Any, check_dense: Any) -> None:
    batch = make_batch([3], [20])
    check_dense(batch, backend, window=8)
    out = batch.call(window=8, backend=backend)
    batch.v_cache[int(batch.page_table[0, 0]), :10] = 1e30  # row 0 sits at 17: it sees 10..17
    assert torch.equal(batch.call(window=8, backend=backend), out)
    batch.v_cache[int(batch.page_table[0, 0]), 10] = 1e30
    changed = batch.call(window=8, backend=backend) != out
    assert changed[0].all()
    assert not changed[1:].any()


def test_a5_replay_with_other_contents(make_batch: Any, rng: np.random.Generator) -> None:
    # The same buffers with other lengths and pages, as a captured graph would see them.
    first = make_batch([3, 3, 3], [90, 90, 90], page_size=16)
    out, status = torch.empty_like(first.q), torch.empty(3, dtype=torch.int32)
    for _ in range(20):
        other = make_batch([3, 3, 3], [int(n) for n in rng.integers(3, 91, 3)], page_size=16)
        first.page_table.fill_(-1)
        first.k_cache.fill_(float("nan"))
        first.v_cache.fill_(float("nan"))
        pages, columns = len(other.k_cache), other.page_table.shape[1]
        first.page_table[:, :columns] = other.page_table
        first.k_cache[:pages], first.v_cache[:pages] = other.k_cache, other.v_cache
        first.kv_len[:], first.q[:] = other.kv_len, other.q
        first.call(out=out, status=status, max_q_len=3)
        assert torch.equal(out, other.call())
        assert not status.any()


@pytest.mark.parametrize("q_len", [[0, 2, 3], [2, 0, 3], [2, 3, 0], [0, 0, 0], [0, 1, 0]])
def test_a6_requests_without_rows(
    backend: str, make_batch: Any, check_dense: Any, q_len: list[int]
) -> None:
    check_dense(make_batch(q_len, [17, 33, 5]), backend)


@pytest.mark.parametrize("requests", [0, 1, 33])
def test_number_of_requests(
    backend: str, make_batch: Any, check_dense: Any, rng: np.random.Generator, requests: int
) -> None:
    q_len = [int(n) for n in rng.integers(0, 4, requests)]
    check_dense(make_batch(q_len, [n + int(rng.integers(0, 30)) for n in q_len], d=8), backend)


@pytest.mark.parametrize("d", [1, 64, 80, 128, 256])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_sizes_and_types(
    make_batch: Any, check_dense: Any, dtype: torch.dtype, cache_dtype: torch.dtype, d: int
) -> None:
    batch = make_batch([1, 6], [40, 130], d=d, dtype=dtype, cache_dtype=cache_dtype)
    check_dense(batch, "cpu")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [0, 1, 7, 63, 64, 65, 1000])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0], ids=["plain", "capped"])
def test_masks(
    make_batch: Any, check_dense: Any, causal: bool, window: int, soft_cap: float
) -> None:
    batch = make_batch([8, 1, 3], [200, 65, 3], d=16)
    batch.q *= 3
    check_dense(batch, "cpu", causal=causal, window=window, soft_cap=soft_cap, scale=0.3)


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 511, 512, 513, 1024, 1300])
def test_lengths_around_blocks_and_splits(make_batch: Any, check_dense: Any, kv_len: int) -> None:
    check_dense(make_batch([1], [kv_len], d=16), "cpu")
    check_dense(make_batch([min(kv_len, 9)], [kv_len], d=16), "cpu", window=600)


def test_prefill_of_many_rows(make_batch: Any, check_dense: Any) -> None:
    check_dense(make_batch([150, 1], [150, 4], d=8), "cpu")


def test_rows_without_keys(backend: str, make_batch: Any, check_dense: Any) -> None:
    batch = make_batch([4, 2], [2, 0])  # rows at positions -2, -1, 0, 1 and -2, -1
    check_dense(batch, backend)
    out, lse = batch.call(return_lse=True, backend=backend)
    assert not out[:2].any()
    assert torch.isneginf(lse[:2]).all()
    assert torch.isneginf(batch.call(return_lse=True, causal=False, backend=backend)[1][4:]).all()


def test_padding_rows_are_left_alone(backend: str, make_batch: Any) -> None:
    batch = make_batch([2, 1], [9, 4], spare_tokens=3)
    batch.q[3:] = float("nan")
    out, lse = torch.full_like(batch.q, 7), torch.full(batch.q.shape[:2], 7.0)
    got = batch.call(out=(out, lse), return_lse=True, backend=backend)
    assert got[0] is out
    assert got[1] is lse
    assert (out[3:] == 7).all()
    assert (lse[3:] == 7).all()
    fresh, fresh_lse = batch.call(return_lse=True, backend=backend)
    assert not fresh[3:].any()
    assert torch.isneginf(fresh_lse[3:]).all()


def test_strided_views(make_batch: Any, check_dense: Any) -> None:
    batch = make_batch([2, 3], [20, 40], heads=(6, 2), d=16)
    wide = torch.full((5, 10, 16), float("nan"))
    wide[:, 2:8] = batch.q
    caches = torch.full((2, len(batch.k_cache), 2, 16, 3, 32), float("nan"))
    for i, cache in enumerate((batch.k_cache, batch.v_cache)):
        caches[i, :, :, :, :, :16] = cache[:, None, :, [0, 0, 1]]
    table = torch.full((2, 9), -5, dtype=torch.int32)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    batch.q = wide[:, 2:8]
    batch.k_cache, batch.v_cache = (c[:, 1, :, 1:, :16] for c in caches)
    batch.page_table = table[:, : batch.page_table.shape[1]]
    check_dense(batch, "cpu")


def test_numpy_arrays_give_numpy_results(make_batch: Any) -> None:
    batch = make_batch([2, 1], [9, 4])
    names = ("q", "k_cache", "v_cache", "page_table", "kv_len", "cu_seqlens")
    arrays = {name: getattr(batch, name).numpy() for name in names}
    for _ in range(2):  # the second call takes the short way
        got = dx.verify_attention(**arrays, max_q_len=2)
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, batch.call().numpy())
