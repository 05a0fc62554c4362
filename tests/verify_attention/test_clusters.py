# SPDX-License-Identifier: Apache-2.0
"""Few tiles on CUDA: clusters that have a tile each and merge it in their shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspark_ext as dx
from dspark_ext import Status

KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)

BF16 = {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}
F8 = {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}


@pytest.fixture
def clusters_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask for a size, on a device that has room for it."""
    monkeypatch.setenv("DSPARK_SIMT_SMS", "17")

    def ask(size: int | str, **simt: str) -> None:
        monkeypatch.setenv("DSPARK_VERIFY_ATTENTION_CLUSTER", str(size))
        for name, value in simt.items():
            monkeypatch.setenv(f"DSPARK_SIMT_{name}", value)

    return ask


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize(
    ("d", "kinds"),
    [(64, BF16), (128, F8), (256, BF16), (20, {})],
    ids=["64", "128-f8", "256", "20"],
)
def test_every_tile(
    backend: str, make_batch: Any, check_dense: Any, clusters_of: Any, d: int, kinds: Any, size: int
) -> None:
    # Rows of a KV head in one tile or several, tiles that do not exist, fewer units than CTAs.
    clusters_of(size)
    batch = make_batch([1, 9, 0, 4], [40, 330, 7, 66], heads=(14, 2), d=d, **kinds)
    check_dense(batch, backend)
    if size == 16:
        check_dense(batch, backend, causal=False, window=133, soft_cap=2.0, scale=0.5)


def test_few_keys(backend: str, make_batch: Any, check_dense: Any, clusters_of: Any) -> None:
    clusters_of(4)
    lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1030]
    batch = make_batch([2] * len(lengths), lengths, heads=(2, 1), d=64, **BF16)
    check_dense(batch, backend)


@pytest.mark.parametrize("lengths", [[2000], [40, 1900], [1, 900, 70]], ids=str)
def test_few_requests_of_unequal_lengths(
    backend: str, make_batch: Any, check_dense: Any, clusters_of: Any, lengths: list[int]
) -> None:  # fmt: skip
    clusters_of("")  # the library's own choice
    batch = make_batch([3] * len(lengths), lengths, heads=(2, 1), d=64, **BF16)
    check_dense(batch, backend)


@pytest.mark.parametrize("order", range(3))
def test_any_order_of_threads(
    backend: str, make_batch: Any, check_dense: Any, clusters_of: Any, order: int
) -> None:
    if backend != "simt":
        pytest.skip("the order of threads is the device's")
    clusters_of(4, SEED=str(order), ASYNC=["late", "early", "random"][order])
    check_dense(make_batch([8, 2], [700, 90], heads=(8, 1), d=128, **BF16), backend)
    check_dense(make_batch([3], [200], d=16), backend)


@pytest.mark.parametrize("d", [64, 16])
def test_trouble(backend: str, make_batch: Any, clusters_of: Any, d: int) -> None:
    # A bad page in the part of any CTA, also of another tile of the request; requests that are
    # settled without any attention; what is not theirs stays as it is in equal shares.
    batch = make_batch([2, 40, 0, 3, 1, 2], [700, 900, 9, 60, 70, 10], heads=(2, 1), d=d, **BF16)
    clusters_of(0)
    clean = batch.call(backend=backend, return_lse=True)
    batch.kv_len[3], batch.kv_len[4] = 10**6, -1
    bits = [0, Status.BAD_PAGE, 0, Status.KV_OVERFLOW, Status.BAD_PARAM, 0]
    bits[3] |= Status.BAD_PAGE  # behind its own pages the table has none
    results = []
    for size in (8, 0):
        clusters_of(size)
        for column in (0, 30, 899 // 16):  # the last one is seen by the last rows alone
            kept = int(batch.page_table[1, column])
            batch.page_table[1, column] = 10**6
            status = torch.full((6,), 99, dtype=torch.int32)
            out, lse = batch.call(backend=backend, return_lse=True, status=status)
            batch.page_table[1, column] = kept
            assert status.tolist() == bits
            bad = [*range(2, 42), 42, 43, 44, 45]
            good = [0, 1, 46, 47]
            assert out[bad].isnan().all()
            assert lse[bad].isnan().all()
            results.append((out[good], lse[good]))
            torch.testing.assert_close(out[good], clean[0][good], rtol=2**-6, atol=2**-6)
    for out, lse in results[1:3]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_cluster_that_is_refused(backend: str, make_batch: Any, clusters_of: Any) -> None:
    if backend != "simt":
        pytest.skip("a device takes them or not")
    batch = make_batch([3, 1], [900, 130], heads=(2, 1), d=64, **BF16)
    clusters_of(0)
    want = batch.call(backend=backend)
    clusters_of(8, COOPERATIVE="3")  # no cooperative launch either
    torch.testing.assert_close(batch.call(backend=backend), want, rtol=2**-7, atol=2**-7)
    clusters_of(4, CAPABILITY="80", COOPERATIVE="1")
    torch.testing.assert_close(batch.call(backend=backend), want, rtol=2**-7, atol=2**-7)
