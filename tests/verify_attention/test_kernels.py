# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels: every tile, sharing among blocks, bytes of one request alone, replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import Status

KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)

BF16, F16, F8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
#: Element types of queries and cache that the tensor cores serve.
TYPES = {"bf16": (BF16, BF16), "f16": (F16, F16), "f8": (BF16, F8), "f8-f16": (F16, F8)}


@pytest.fixture(autouse=True)
def equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clusters (test_clusters.py), which few tiles would otherwise have."""
    monkeypatch.setenv("DSPARK_VERIFY_ATTENTION_CLUSTER", "0")


def typed(name: str) -> dict[str, Any]:
    """Arguments of make_batch."""
    return dict(zip(("dtype", "cache_dtype"), TYPES[name], strict=True))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_tile(backend: str, make_batch: Any, check_dense: Any, types: str, d: int) -> None:
    # 1 to 63 rows of a KV head: one tile, several, a second set of warps, a second tile of work.
    batch = make_batch([1, 9, 0, 4], [40, 150, 7, 66], heads=(14, 2), d=d, **typed(types))
    check_dense(batch, backend)
    check_dense(batch, backend, causal=False, window=33, soft_cap=2.0, scale=0.5)


@pytest.mark.parametrize("types", ["bf16", "f8"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 100])
def test_pages(backend: str, make_batch: Any, check_dense: Any, page_size: int, types: str) -> None:
    batch = make_batch([2, 8], [131, 64], heads=(4, 2), d=64, page_size=page_size, **typed(types))
    check_dense(batch, backend, window=50)
    for name in ("k_cache", "v_cache"):  # heads before rows, as some engines have them
        cache = getattr(batch, name)
        setattr(batch, name, cache.transpose(1, 2).contiguous().transpose(1, 2))
    check_dense(batch, backend)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 64, 65, 128, 129, 1023, 1025, 2100])
def test_lengths_around_steps_units_and_splits(
    backend: str, make_batch: Any, check_dense: Any, kv_len: int
) -> None:
    batch = make_batch([min(3, kv_len)], [kv_len], heads=(2, 1), d=64, dtype=BF16, cache_dtype=BF16)
    check_dense(batch, backend)
    check_dense(batch, backend, batch_invariant=True)


@pytest.mark.parametrize("multiprocessors", ["1", "2", "17"])
@pytest.mark.parametrize("cooperative", ["1", "2", "3"], ids=["waits", "no-cooperation", "refused"])
@pytest.mark.parametrize("d", [16, 64])
def test_any_number_of_blocks(
    backend: str, make_batch: Any, check_dense: Any, monkeypatch: pytest.MonkeyPatch,
    multiprocessors: str, cooperative: str, d: int,
) -> None:  # fmt: skip
    # Tiles shared by two blocks, by many, by none; who merges, and whether blocks wait.
    if backend != "simt":
        pytest.skip("a device has the multiprocessors it has")
    monkeypatch.setenv("DSPARK_SIMT_SMS", multiprocessors)
    monkeypatch.setenv("DSPARK_SIMT_COOPERATIVE", cooperative)
    batch = make_batch([3, 1, 5], [900, 130, 1400], heads=(2, 1), d=d, dtype=BF16, cache_dtype=BF16)
    check_dense(batch, backend)
    wanted = batch.call(backend="simt", batch_invariant=True)
    monkeypatch.setenv("DSPARK_SIMT_SMS", "3")
    assert torch.equal(batch.call(backend="simt", batch_invariant=True), wanted)


@pytest.mark.parametrize("order", range(4))
def test_any_order_of_threads(
    backend: str, make_batch: Any, check_dense: Any, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    if backend != "simt":
        pytest.skip("the order of threads is the device's")
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(order))
    monkeypatch.setenv("DSPARK_SIMT_ASYNC", ["late", "early", "random"][order % 3])
    batch = make_batch([8, 2], [700, 90], heads=(8, 1), d=128, dtype=BF16, cache_dtype=BF16)
    check_dense(batch, backend)


def _alone(batch: Any, r: int, rows: int, kv_len: int, backend: str, **options: Any) -> Any:
    """The first ``rows`` query rows of request ``r``, as a batch of its own."""
    return dx.verify_attention(
        batch.q[batch.rows(r)][:rows], batch.k_cache, batch.v_cache,
        page_table=batch.page_table[r : r + 1], kv_len=[kv_len], cu_seqlens=[0, rows],
        max_q_len=rows, batch_invariant=True, return_lse=True, backend=backend, **options,
    )  # fmt: skip


@pytest.mark.parametrize("window", [0, 1100])
@pytest.mark.parametrize(("types", "d"), [("bf16", 64), ("f16", 128), ("f8", 64), (None, 16)])
def test_a8_bytes_depend_on_the_request_alone(
    backend: str, make_batch: Any, window: int, types: str | None, d: int
) -> None:
    q_len = [8] * 64
    kv_len = [8 + 37 * r % 120 for r in range(64)]
    kv_len[7], kv_len[33] = 1400, 2108  # past one and two splits of 1024
    given = {} if types is None else typed(types)
    # 40 rows: at D = 128 a second set of warps, which the shorter calls do without.
    batch = make_batch(q_len, kv_len, heads=(5, 1), d=d, **given)
    together = batch.call(batch_invariant=True, window=window, return_lse=True, backend=backend)
    for r in (0, 7, 33, 63):
        rows = batch.rows(r)
        whole = _alone(batch, r, 8, kv_len[r], backend, window=window)
        short = _alone(batch, r, 1 + r % 4, kv_len[r] - 7 + r % 4, backend, window=window)
        for i in range(2):
            assert torch.equal(together[i][rows], whole[i])
            assert torch.equal(whole[i][: 1 + r % 4], short[i])


def test_a8_other_pages_and_another_order(
    backend: str, make_batch: Any, rng: np.random.Generator
) -> None:
    batch = make_batch([3, 8, 1], [1200, 300, 70], heads=(4, 2), d=64, **typed("bf16"))
    want = batch.call(batch_invariant=True, backend=backend)
    order = torch.tensor([2, 0, 1])
    pages = torch.from_numpy(rng.permutation(len(batch.k_cache)))
    moved = torch.argsort(pages)  # page p lies at moved[p]
    q = torch.cat([batch.q[batch.rows(int(r))] for r in order])
    got = dx.verify_attention(
        q, batch.k_cache[pages], batch.v_cache[pages],
        page_table=torch.where(batch.page_table < 0, -1, moved[batch.page_table]).int()[order],
        kv_len=batch.kv_len[order], cu_seqlens=[0, 1, 4, 12], max_q_len=8, batch_invariant=True,
        backend=backend,
    )  # fmt: skip
    assert torch.equal(got, torch.cat([want[batch.rows(int(r))] for r in order]))


@pytest.mark.parametrize(
    ("types", "poison"),  # e4m3 has no infinity
    [("bf16", np.nan), ("bf16", np.inf), ("bf16", -np.inf), ("f8", np.nan)],
)
def test_poison_stays_with_the_rows_that_see_it(
    backend: str, make_batch: Any, types: str, poison: float
) -> None:
    batch = make_batch([2, 4, 3], [40, 70, 33], heads=(4, 2), d=64, **typed(types))
    clean = batch.call(backend=backend)
    page, row = int(batch.page_table[1, 68 // 16]), 68 % 16  # seen by rows 2 and 3 of request 1
    kept = batch.v_cache[page, row, 1, 3].clone()
    batch.v_cache[page, row, 1, 3] = torch.tensor(poison).to(batch.v_cache.dtype)
    out = batch.call(backend=backend)
    expected = torch.zeros(out.shape, dtype=torch.bool)
    expected[4:6, 2:, 3] = True
    assert torch.equal(out[~expected], clean[~expected])
    assert torch.equal(out[expected], torch.full((4,), poison).to(out)) or np.isnan(poison)
    assert not out[expected].isfinite().any()
    batch.v_cache[page, row, 1, 3] = kept
    batch.k_cache[page, row, 1, 3] = torch.tensor(float("nan")).to(batch.v_cache.dtype)
    rows = batch.call(backend=backend).isnan().all(-1)
    assert rows.sum() == 4
    assert rows[4:6, 2:].all()


@pytest.mark.parametrize("bad", [10**6, -(2**31)])
@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
def test_a_bad_page_of_a_shared_tile(
    backend: str, make_batch: Any, bad: int, invariant: bool
) -> None:
    # Whoever reads it, all rows of the request are NaN, also those of other tiles.
    batch = make_batch([2, 70, 1], [1500, 1300, 10], heads=(2, 1), d=64, **typed("bf16"))
    clean = batch.call(backend=backend, batch_invariant=invariant)
    for column in (0, 40, 1299 // 16):  # the last one is seen by the last rows alone
        kept = int(batch.page_table[1, column])
        batch.page_table[1, column] = bad
        status = torch.empty(3, dtype=torch.int32)
        out = batch.call(status=status, backend=backend, batch_invariant=invariant)
        assert status.tolist() == [0, Status.BAD_PAGE, 0]
        assert out[2:72].isnan().all()
        assert torch.equal(out[[0, 1, 72]], clean[[0, 1, 72]])
        batch.page_table[1, column] = kept


def test_queries_of_any_alignment(backend: str, make_batch: Any, check_dense: Any) -> None:
    batch = make_batch([2, 3], [20, 40], heads=(6, 2), d=64, **typed("bf16"))
    wide = torch.full((5, 7, 66), float("nan"), dtype=BF16)
    wide[:, 1:, 1:65] = batch.q
    batch.q = wide[:, 1:, 1:65]
    check_dense(batch, backend)


def test_a5_replay_over_one_workspace(
    backend: str, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a graph does: the same addresses and workspace, other lengths, tables and contents.
    from dspark_ext import _C
    from dspark_ext.ops import verify_attention as module

    if backend != "simt":
        pytest.skip("graphs are captured in test_graph.py")
    first = make_batch([3, 2, 3], [1500, 40, 700], heads=(2, 1), d=64, **typed("bf16"))
    rng, memory = np.random.default_rng(1), np.empty(0, np.uint8)
    params: Any = None

    def keep(_: str, p: Any, *__: Any) -> None:
        nonlocal params
        params = p

    run = module._backend.run
    module._backend.run = keep
    out, status = torch.empty_like(first.q), torch.empty(3, dtype=torch.int32)
    try:
        first.call(out=out, status=status, backend="simt", max_q_len=8)
    finally:
        module._backend.run = run
    for turn in range(20):
        lengths = [int(n) for n in rng.integers(0, 700, 3)]
        q_len = [int(n) for n in rng.multinomial(8, [0.3, 0.3, 0.4])]
        other = make_batch(q_len, lengths, heads=(2, 1), d=64, **typed("bf16"))
        first.page_table.fill_(-1)
        first.page_table[:, : other.page_table.shape[1]] = other.page_table
        first.k_cache[: len(other.k_cache)] = other.k_cache
        first.v_cache[: len(other.v_cache)] = other.v_cache
        first.kv_len[:], first.q[:], first.cu_seqlens[:] = other.kv_len, other.q, other.cu_seqlens
        params.batch_invariant = turn % 2
        monkeypatch.setenv("DSPARK_VERIFY_ATTENTION_CLUSTER", "4" if turn % 5 < 2 else "0")
        needed = _C.verify_attention_workspace(_C.SIMT, params)
        if len(memory) < needed + 256:  # garbage once, then what the launch before has left
            memory = np.frombuffer(rng.bytes(needed + 256), np.uint8).copy()
        start = memory.ctypes.data + -memory.ctypes.data % 256
        _C.verify_attention(_C.SIMT, params, start, needed, 0)
        want = other.call(backend="simt", max_q_len=8, batch_invariant=bool(turn % 2))
        assert torch.equal(out, want)
        assert not status.any()
