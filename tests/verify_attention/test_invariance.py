# SPDX-License-Identifier: Apache-2.0
"""Bytes of a row depend on its request alone; threads, SIMD levels and NaN neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx


def _alone(batch: Any, r: int, rows: int, kv_len: int, **options: Any) -> torch.Tensor:
    """The first ``rows`` query rows of request ``r``, as a batch of its own."""
    q = batch.q[batch.rows(r)][:rows]
    return dx.verify_attention(
        q,
        batch.k_cache,
        batch.v_cache,
        page_table=batch.page_table[r : r + 1],
        kv_len=[kv_len],
        cu_seqlens=[0, rows],
        max_q_len=rows,
        batch_invariant=True,
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_a8_any_draft_length_and_any_batch(make_batch: Any, window: int, dtype: Any) -> None:
    q_len = [8] * 64
    kv_len = [8 + 17 * r for r in range(64)]  # past two splits of 512
    batch = make_batch(q_len, kv_len, d=16, dtype=dtype, cache_dtype=dtype)
    together = batch.call(batch_invariant=True, window=window)
    for r in (0, 1, 29, 30, 31, 60, 63):
        whole = _alone(batch, r, 8, kv_len[r], window=window)
        assert torch.equal(together[batch.rows(r)], whole)
        for rows in (1, 2, 5):  # l = 0, 1, 4: the later keys are not written yet
            short = _alone(batch, r, rows, kv_len[r] - 8 + rows, window=window)
            assert torch.equal(whole[:rows], short)


def test_a8_later_keys_do_not_matter(make_batch: Any) -> None:
    batch = make_batch([8], [603])
    before = batch.call(batch_invariant=True)
    last = int(batch.page_table[0, 602 // 16])
    batch.k_cache[last, 602 % 16] = float("nan")
    batch.v_cache[last, 602 % 16] = float("inf")
    after = batch.call(batch_invariant=True)
    assert torch.equal(before[:7], after[:7])
    assert after[7].isnan().all()


def test_page_size_does_not_matter(make_batch: Any) -> None:
    batch = make_batch([5], [700], page_size=1)
    want = batch.call()
    for page_size in (16, 64, 100):
        other = make_batch([5], [700], page_size=page_size)
        for name in ("k_cache", "v_cache"):
            dense = torch.from_numpy(batch.dense_cache(getattr(batch, name), 0)).float()
            for p in range(700):
                page = int(other.page_table[0, p // page_size])
                getattr(other, name)[page, p % page_size] = dense[p]
        other.q[:] = batch.q
        assert torch.equal(other.call(), want)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poison_stays_with_the_rows_that_see_it(make_batch: Any, poison: float) -> None:
    batch = make_batch([2, 4, 3], [40, 70, 33], heads=(4, 2))
    clean = batch.call()
    page, row = int(batch.page_table[1, 68 // 16]), 68 % 16  # seen by rows 2 and 3 of request 1
    batch.v_cache[page, row, 1, 3] = poison
    out = batch.call()
    changed = out.view(torch.int32) != clean.view(torch.int32)
    expected = torch.zeros_like(changed)
    expected[4:6, 2:, 3] = True
    assert torch.equal(changed, expected)
    assert torch.equal(out[expected], torch.full((4,), poison).to(out)) or np.isnan(poison)
    batch.v_cache[page, row, 1, 3] = 0
    batch.k_cache[page, row, 1, 3] = float("nan")
    rows = batch.call().isnan().all(-1)
    assert rows.sum() == 4
    assert rows[4:6, 2:].all()


def test_scores_of_minus_infinity_have_no_weight(backend: str, make_batch: Any) -> None:
    batch = make_batch([1], [40], heads=(1, 1), d=2)
    batch.q[:] = torch.tensor([1.0, 0.0])
    page = int(batch.page_table[0, 0])
    want = batch.dense()[0]
    batch.k_cache[page, :16, 0, 0] = float("-inf")  # a whole page out, the rest as before
    batch.k_cache[page, :16, 0, 1] = 0
    out, lse = batch.call(return_lse=True, backend=backend)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert not np.allclose(out.numpy(), want)
    for page in batch.page_table[0, :3].tolist():
        batch.k_cache[page, :, 0] = torch.tensor([float("-inf"), 0])
    out, lse = batch.call(return_lse=True, backend=backend)
    assert not out.any()
    assert torch.isneginf(lse).all()


_PROBE = """
import hashlib, sys, numpy as np, dspark_ext as dx
rng = np.random.default_rng(5)
threads = int(sys.argv[1])
dx._backend.num_threads = lambda: threads
pages = 130
cache = rng.standard_normal((2, pages, 16, 2, 40)).astype(np.float32)
out = []
for kv in ([1500], [700, 30, 1290]):
    n = len(kv)
    table = rng.permutation(pages)[: n * 100 % pages].astype(np.int32)
    table = rng.integers(0, pages, (n, 100)).astype(np.int32)
    q = rng.standard_normal((4 * n, 6, 40)).astype(np.float32)
    for window in (0, 600):
        o, lse = dx.verify_attention(q, *cache, page_table=table, kv_len=kv, return_lse=True,
            cu_seqlens=[4 * i for i in range(n + 1)], max_q_len=4, window=window, soft_cap=3.0)
        out += [o.tobytes(), lse.tobytes()]
sys.stdout.buffer.write(b"".join(out))
"""


def _probe(threads: int, level: str) -> bytes:
    environment = os.environ | {"DSPARK_CPU_LEVEL": level, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _PROBE, str(threads)], env=environment, capture_output=True,
        check=True,
    )  # fmt: skip
    return run.stdout


def test_threads_do_not_change_a_bit() -> None:
    one = _probe(1, "")
    assert one == _probe(2, "")
    assert one == _probe(5, "")  # more threads than pieces: the splits run side by side


def test_python_threads_do_not_share_anything(make_batch: Any) -> None:
    # The C call releases the lock; kept params and scratch memory belong to one thread each.
    batches = [make_batch([4, 1], [300 + n, 20], d=16) for n in range(4)]
    wants = [batch.call() for batch in batches]

    def repeat(i: int) -> bool:
        return all(torch.equal(batches[i].call(), wants[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def test_simd_levels_agree() -> None:
    best = np.frombuffer(_probe(1, ""), np.float32)
    for level in ("baseline", "x86-64-v3"):
        other = np.frombuffer(_probe(1, level), np.float32)
        np.testing.assert_allclose(other, best, rtol=0, atol=1500 * 2**-24 * 4)
