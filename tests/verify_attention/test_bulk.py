# SPDX-License-Identifier: Apache-2.0
"""Pages copied whole, by tensor maps, or row by row: the same bytes, whatever else they hold."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dspark_ext as dx
from dspark_ext import Status, _simt

KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)

BF16, F16, F8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def bits(result: Any) -> list[torch.Tensor]:
    """Of out and lse. There is one NaN: a GPU makes no other, and a CPU gives them signs."""
    out, lse = (torch.where(x.isnan(), float("nan"), x) for x in result)
    return [out.view(torch.int16), lse.view(torch.int32)]


def map_caches(batch: Any, change: Any) -> Any:
    """The batch with caches changed as bytes (torch moves no one-byte floats)."""
    caches = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(batch, name)
        size = torch.uint8 if cache.dtype == F8 else torch.int16
        caches[name] = change(cache.view(size)).view(cache.dtype)
    return dataclasses.replace(batch, **caches)


def heads_first(batch: Any) -> Any:
    return map_caches(batch, lambda c: c.transpose(1, 2).contiguous().transpose(1, 2))


def half_pages(batch: Any) -> Any:
    """The same rows in twice as many pages."""
    table = torch.stack([2 * batch.page_table, 2 * batch.page_table + 1], 2).flatten(1)
    other = map_caches(batch, lambda c: c.reshape(2 * len(c), c.shape[1] // 2, *c.shape[2:]))
    return dataclasses.replace(other, page_table=torch.where(table < 0, -1, table))


def waits_for_copies(run: Callable[[], Any]) -> bool:
    """Whether the emulated kernel waits for the copy engine somewhere."""
    library = ctypes.CDLL(str(_simt._loaded))
    library.dspark_simt_record.restype = ctypes.c_char_p
    library.dspark_simt_record(1)
    run()
    return b"mbarrier_wait csrc/cuda/verify_attention/ring.cuh" in library.dspark_simt_record(0)


@pytest.mark.parametrize(
    ("types", "d", "page_size", "heads"),
    [
        ((BF16, BF16), 64, 16, (4, 2)),
        ((F16, F16), 128, 48, (5, 1)),  # rows for two groups of warps
        ((BF16, BF16), 256, 16, (2, 1)),
        ((BF16, F8), 64, 16, (4, 2)),
        ((F16, F8), 128, 48, (5, 1)),
        ((BF16, F8), 256, 16, (1, 1)),
    ],
    ids=str,
)
def test_no_byte_depends_on_how_pages_are_copied(
    backend: str, make_batch: Any, monkeypatch: pytest.MonkeyPatch,
    types: tuple[torch.dtype, torch.dtype], d: int, page_size: int, heads: tuple[int, int],
) -> None:  # fmt: skip
    # Rows that no request owns are NaN, here and there an infinity: only whole pages bring them.
    batch = make_batch([1, 9, 3], [45, 150, 7], heads=heads, d=d, page_size=page_size,
                       dtype=types[0], cache_dtype=types[1])  # fmt: skip
    for cache in (batch.k_cache, batch.v_cache):
        if types[1] != F8:
            cache[..., 1][cache[..., 1].isnan()] = float("-inf")
    if heads[1] > 1:
        batch = heads_first(batch)
    for options in ({"causal": False, "window": 50}, {"batch_invariant": True}):
        if "window" in options:  # behind the window of request 1: somebody else's page by now
            batch.page_table[1, 0] = -1
        else:
            batch.page_table[2, 0] = 10**6
        results = []
        for other, bulk in ((batch, "1"), (batch, "0"), (half_pages(batch), "1")):
            monkeypatch.setenv("DSPARK_VERIFY_ATTENTION_BULK", bulk)
            status = torch.empty(3, dtype=torch.int32)
            out = other.call(return_lse=True, status=status, backend=backend, **options)
            results.append([*bits(out), status])
        assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))
        finite = torch.cat([out[0][batch.rows(r)] for r in range(3) if status[r] == 0])
        assert finite.isfinite().all()
        assert status.tolist() == [0, 0, 0] if "window" in options else [0, 1, 1]


def test_a_cache_without_pages(backend: str, make_batch: Any) -> None:
    batch = make_batch([2], [20], heads=(2, 1), d=64, dtype=BF16, cache_dtype=BF16)
    batch = map_caches(batch, lambda c: c[:0])
    status = torch.empty(1, dtype=torch.int32)
    out = batch.call(status=status, backend=backend)
    assert status.tolist() == [Status.BAD_PAGE]
    assert out.isnan().all()


def test_which_pages_are_copied_whole(
    backend: str, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "simt":
        pytest.skip("a device does not tell")
    kinds: dict[str, Any] = {"heads": (2, 1), "d": 64, "dtype": BF16, "cache_dtype": BF16}
    batch = make_batch([2], [20], **kinds)
    half = half_pages(batch)
    batch.call(backend=backend)
    assert waits_for_copies(lambda: batch.call(backend=backend))
    assert not waits_for_copies(lambda: half.call(backend=backend))
    odd = map_caches(batch, lambda c: torch.cat([c, c[..., :8]], -1)[..., :64])  # 144 bytes a row
    assert waits_for_copies(lambda: odd.call(backend=backend))
    monkeypatch.setenv("DSPARK_SIMT_CAPABILITY", "80")
    assert not waits_for_copies(lambda: batch.call(backend=backend))
