# SPDX-License-Identifier: Apache-2.0
"""Every byte of the caches after an append, any layout, and what wrong data does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_ext as dx
from dspark_ext import Status

TYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.dtype])


def _canary(shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """A cache of random bit patterns: NaN payloads and subnormals included."""
    raw = torch.from_numpy(rng.integers(-(2**15), 2**15, shape, dtype=np.int64))
    return raw.to(BITS[dtype]).view(dtype)


@pytest.mark.parametrize("cache_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_byte(rng: np.random.Generator, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    heads, d, page_size = 3, 20, 4
    table = torch.tensor([[5, 2, -1], [0, 7, 3], [-1, -1, -1]], dtype=torch.int32)
    kv_len, cu = torch.tensor([3, 6, 0], dtype=torch.int32), [0, 4, 10, 10]
    k, v = (torch.from_numpy(rng.standard_normal((12, heads, d)) * 10).to(dtype) for _ in "kv")
    caches = [_canary((9, page_size, heads, d), cache_dtype, rng) for _ in "kv"]
    want = [c.clone() for c in caches]
    for r in range(3):
        for i in range(cu[r + 1] - cu[r]):
            column, row = divmod(int(kv_len[r]) + i, page_size)
            for cache, new in zip(want, (k, v), strict=True):
                cache[int(table[r, column]), row] = new[cu[r] + i].to(cache_dtype)
    status = dx.paged_kv_append(k, v, *caches, page_table=table, kv_len=kv_len, cu_seqlens=cu)
    assert status.tolist() == [0, 0, 0]
    assert kv_len.tolist() == [3, 6, 0]
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(_bits(cache), _bits(expected))


@pytest.mark.parametrize("before", [-1, 0, 3, 5], ids=lambda n: f"{n}-before-the-boundary")
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a7_six_tokens_at_a_page_boundary(
    backend: str, rng: np.random.Generator, page_size: int, before: int
) -> None:
    kv_len = 2 * page_size + 6 - before  # gamma + 1 = 6 tokens: `before` of them fit in the page
    table = torch.from_numpy(rng.permutation(20)[:16].astype(np.int32)).reshape(1, 16)
    k, v = (torch.from_numpy(rng.standard_normal((6, 1, 8))).float() for _ in "kv")
    caches = [torch.full((20, page_size, 1, 8), 7.0) for _ in "kv"]
    status = dx.paged_kv_append(
        k, v, *caches, page_table=table, kv_len=[kv_len], cu_seqlens=[0, 6], backend=backend
    )
    assert status.tolist() == [0]
    others = sorted(set(range(20)) - set(table[0].tolist()))
    for cache, new in zip(caches, (k, v), strict=True):
        dense = cache[table[0].long()].reshape(-1, 1, 8)
        assert torch.equal(dense[kv_len : kv_len + 6], new)
        assert (dense[:kv_len] == 7).all()
        assert (dense[kv_len + 6 :] == 7).all()
        assert (cache[others] == 7).all()


@pytest.mark.parametrize("requests", [0, 1, 33])
def test_number_of_requests(backend: str, rng: np.random.Generator, requests: int) -> None:
    q_len = rng.integers(0, 4, requests)
    cu = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    table = np.arange(2 * requests, dtype=np.int32).reshape(requests, 2)
    k = rng.standard_normal((int(cu[-1]), 2, 4)).astype(np.float32)
    caches = np.zeros((2, 2 * requests + 1, 4, 2, 4), np.float32)
    kv_len = rng.integers(0, 5, requests).astype(np.int32)
    status = dx.paged_kv_append(
        k, -k, *caches, page_table=table, kv_len=kv_len, cu_seqlens=cu, backend=backend
    )
    assert isinstance(status, np.ndarray)
    assert not status.any()
    dense = caches[:, : 2 * requests].reshape(2, requests, 8, 2, 4)
    for r in range(requests):
        rows = slice(int(kv_len[r]), int(kv_len[r] + q_len[r]))
        np.testing.assert_array_equal(dense[0, r, rows], k[cu[r] : cu[r + 1]])
        np.testing.assert_array_equal(dense[1, r, rows], -k[cu[r] : cu[r + 1]])
    assert np.count_nonzero(dense[0].any(axis=(-1, -2))) == q_len.sum()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_only_the_new_rows(backend: str, rng: np.random.Generator, kind: torch.dtype) -> None:
    """A drafter appends rows 0..num_new-1 of each request's rows of the plan."""
    cu, num_new = [0, 4, 4, 9, 12], torch.tensor([2, 0, 5, 0], dtype=kind)
    table = torch.from_numpy(rng.permutation(12).astype(np.int32)).reshape(4, 3)
    k = torch.from_numpy(rng.standard_normal((12, 2, 4))).float()
    k[[2, 3, 9, 10, 11]] = float("nan")  # rejected rows are not looked at
    caches = [torch.full((13, 4, 2, 4), 7.0) for _ in "kv"]
    status = dx.paged_kv_append(
        k, -k, *caches, page_table=table, kv_len=[3, 5, 4, 0], cu_seqlens=cu, num_new=num_new,
        backend=backend,
    )  # fmt: skip
    assert status.tolist() == [0] * 4
    want = torch.full((13, 4, 2, 4), 7.0)
    want[int(table[0, 0]), 3], want[int(table[0, 1]), 0] = k[0], k[1]
    want[int(table[2, 1])], want[int(table[2, 2]), 0] = k[4:8], k[8]
    assert torch.equal(caches[0], want)
    assert torch.equal(caches[1], torch.where(want == 7, want, -want))


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
def test_more_new_rows_than_there_are(backend: str, bad: int) -> None:
    k = np.ones((3, 1, 2), np.float32)
    caches = np.zeros((2, 2, 4, 1, 2), np.float32)
    status = dx.paged_kv_append(
        k, k, *caches, page_table=np.array([[0], [1]], np.int32), kv_len=[1, 1],
        cu_seqlens=[0, 2, 3], num_new=np.array([bad, 1], np.int32), backend=backend,
    )  # fmt: skip
    assert status.tolist() == [Status.BAD_PARAM, 0]
    assert not caches[:, 0].any()
    assert caches[:, 1, 1].all()


def test_a_kept_call_reads_the_new_rows_of_now() -> None:
    k, caches = torch.ones(4, 1, 2), torch.zeros(2, 1, 4, 1, 2)
    zero, cu = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    number = torch.zeros(1, dtype=torch.int32)
    for count in (1, 3, 0, 4):
        number[0] = count
        caches.zero_()
        dx.paged_kv_append(
            k, k, *caches, page_table=zero[None], kv_len=zero, cu_seqlens=cu, num_new=number,
            strict=True,
        )  # fmt: skip
        assert caches[:, 0, :, 0, 0].tolist() == [[1.0] * count + [0.0] * (4 - count)] * 2


def test_a_round_appended_committed_and_overwritten(backend: str, rng: np.random.Generator) -> None:
    """Append gamma + 1 rows, commit fewer, append again: the rejected rows are written over."""
    table = torch.tensor([[4, 1, 0, 3, 2]], dtype=torch.int32)
    caches = [torch.full((6, 4, 1, 2), 7.0) for _ in "kv"]
    kv_len, position = torch.tensor([2], dtype=torch.int32), torch.tensor([2])
    kept = []
    for emitted in (3, 1, 6, 2):
        k = torch.from_numpy(rng.standard_normal((6, 1, 2))).float()
        dx.paged_kv_append(
            k, k, *caches, page_table=table, kv_len=kv_len, cu_seqlens=[0, 6], strict=True,
            backend=backend,
        )  # fmt: skip
        kept.append(k[:emitted])
        dx.paged_kv_commit(kv_len, position, [emitted], backend=backend)
    assert kv_len.tolist() == position.tolist() == [14]
    for cache in caches:
        dense = cache[table[0].long()].reshape(-1, 1, 2)
        assert torch.equal(dense[2:14], torch.cat(kept))
        assert (dense[:2] == 7).all()
        assert (cache[5] == 7).all()  # the page of nobody


def test_strided_arguments(rng: np.random.Generator) -> None:
    qkv = torch.from_numpy(rng.standard_normal((5, 4, 3, 16))).float()  # heads x (q, k, v)
    pool = torch.zeros(2, 6, 3, 4, 2, 20)  # k or v, pages, layers, rows, heads, padded D
    k, v = qkv[:, 1:3, 1], qkv[:, 1:3, 2]
    caches = [pool[i, :, 1, :, :, 2:18] for i in range(2)]
    wide = torch.full((2, 8), -9, dtype=torch.int32)
    wide[:, 1:3] = torch.tensor([[1, 0], [4, 5]])
    status = dx.paged_kv_append(
        k, v, *caches, page_table=wide[:, 1:3], kv_len=[3, 0], cu_seqlens=[0, 2, 5]
    )
    assert status.tolist() == [0, 0]
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[1, 3], new[0])
        assert torch.equal(cache[0, 0], new[1])
        assert torch.equal(cache[4, :3], new[2:])
    assert int((pool != 0).sum()) == 2 * 5 * 2 * 16


def test_large_appends_use_threads_and_give_the_same_bytes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = (torch.from_numpy(rng.standard_normal((2000, 4, 64))).bfloat16() for _ in "kv")
    table = torch.from_numpy(rng.permutation(140).astype(np.int32)).reshape(2, 70)
    answers = []
    for threads in (1, 3):
        monkeypatch.setattr(dx._backend, "num_threads", lambda n=threads: n)
        caches = torch.zeros(2, 140, 16, 4, 64)
        dx.paged_kv_append(
            k, v, *caches, page_table=table, kv_len=[5, 90], cu_seqlens=[0, 1100, 2000],
            rope=dx.Rope(1e4), strict=True,
        )  # fmt: skip
        answers.append(caches)
    assert torch.equal(*answers)


TROUBLE = {
    "overflow": ([0, 1], 6, Status.KV_OVERFLOW, 2),
    "hole": ([0, -1], 2, Status.BAD_PAGE, 2),
    "too-large": ([0, 9], 2, Status.BAD_PAGE, 2),
    "first-page": ([-1, 1], 2, Status.BAD_PAGE, 2),
    "one-of-four": ([-1, 1], 3, Status.BAD_PAGE, 3),
    "negative-length": ([0, 1], -1, Status.BAD_PARAM, 0),
    "int-max": ([0, 1], 2**31 - 1, Status.KV_OVERFLOW, 0),
    "page-and-table": ([0, -1], 6, Status.BAD_PAGE | Status.KV_OVERFLOW, 0),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_bad_tokens_are_not_written(backend: str, name: str) -> None:
    pages, kv_len, bits, written = TROUBLE[name]
    k = np.ones((5, 1, 2), np.float32)
    caches = np.zeros((2, 4, 4, 1, 2), np.float32)
    arguments = {
        "page_table": np.array([pages, [2, 3]], np.int32), "kv_len": [kv_len, 0],
        "cu_seqlens": [0, 4, 5], "backend": backend,
    }  # fmt: skip
    status = dx.paged_kv_append(k, k, *caches, **arguments)
    assert status.tolist() == [bits, 0]
    assert int(caches[0].sum()) == int(caches[1].sum()) == 2 * (written + 1)
    assert caches[:, 2, 0].all()  # the neighbour's token
    with pytest.raises(dx.StatusError, match="request 0: "):
        dx.paged_kv_append(k, k, *caches, strict=True, **arguments)


@pytest.mark.parametrize("cu", [[0, 3, 1, 4], [0, 9, 2, 4], [0, -1, 2, 4], [-(2**31), 2, 3, 4]])
def test_bounds_out_of_order_write_nothing(backend: str, cu: list[int]) -> None:
    k = np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1)
    caches = np.zeros((2, 3, 4, 1, 1), np.float32)
    status = dx.paged_kv_append(
        k, k, *caches, page_table=np.array([[0], [1], [2]], np.int32), kv_len=[0, 0, 0],
        cu_seqlens=cu, backend=backend,
    )  # fmt: skip
    for r in range(3):
        good = 0 <= cu[r] <= cu[r + 1] <= 4
        assert status[r] == (0 if good else Status.BAD_PARAM)
        rows = range(cu[r], cu[r + 1]) if good else range(0)
        assert caches[0, r, : len(rows), 0, 0].tolist() == [k[i, 0, 0] for i in rows]
        assert not caches[0, r, len(rows) :].any()


def test_padding_rows_are_not_read(backend: str) -> None:
    k = np.full((9, 1, 2), np.nan, np.float32)
    k[:2] = 1
    caches = np.zeros((2, 2, 4, 1, 2), np.float32)
    dx.paged_kv_append(
        k, k, *caches, page_table=np.array([[1], [-1]], np.int32), kv_len=[1, 3],
        cu_seqlens=[0, 2, 2], strict=True, backend=backend,
    )  # fmt: skip
    assert caches.sum() == 8


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_compiled_equals_reference(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    requests, heads = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
    d, page_size = data.draw(st.sampled_from([2, 6, 16])), data.draw(st.sampled_from([1, 3, 16]))
    pages, max_pages = data.draw(st.integers(4, 30)), data.draw(st.integers(1, 5))
    # No two requests may write one page: hand out distinct pages, and -1 when they run out.
    table = np.full(requests * max_pages, -1, np.int32)
    free = rng.permutation(pages)[: len(table)]
    table[: len(free)] = free
    table[rng.random(len(table)) < 0.1] = data.draw(st.sampled_from([-1, pages, 2**31 - 1]))
    q_len = rng.integers(0, 7, requests)
    kv_len = rng.integers(-1, max_pages * page_size, requests)
    kinds = [np.float32, np.float16]
    dtype, cache_dtype = data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from(kinds))
    k, v = (rng.standard_normal((int(q_len.sum()) + 1, heads, d)).astype(dtype) for _ in "kv")
    rope = data.draw(st.sampled_from([None, dx.Rope(1e4), dx.Rope(10.0)]))
    start = rng.standard_normal((2, pages, page_size, heads, d)).astype(cache_dtype)
    answers = []
    for backend in ("cpu", "reference"):
        caches = start.copy()
        status = dx.paged_kv_append(
            k, v, *caches, page_table=table.reshape(requests, max_pages), rope=rope,
            kv_len=kv_len, cu_seqlens=np.concatenate([[0], np.cumsum(q_len)]), backend=backend,
        )  # fmt: skip
        answers.append((status, caches))
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    np.testing.assert_array_equal(answers[0][1][1], answers[1][1][1])
    half = cache_dtype == np.float16
    np.testing.assert_allclose(
        answers[0][1][0], answers[1][1][0], rtol=2**-10 if half else 0, atol=8 * 5 * 2**-24
    )
