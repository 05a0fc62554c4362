# SPDX-License-Identifier: Apache-2.0
"""Many query rows of a KV head on Hopper: the kernel that multiplies with wgmma."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspark_ext as dx

KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)
BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("rows", "heads", "d", "dtype", "page_size", "options"),
    [
        (65, 1, 64, BF16, 16, {}),
        (128, 16, 128, F16, 64, {"window": 70}),
        (129, 3, 256, BF16, 16, {"soft_cap": 3.0}),
        (200, 8, 64, F16, 32, {"causal": False, "window": 40, "scale": -0.5}),
        (36, 4, 256, F16, 64, {}),  # a warpgroup has nothing to do
        (100, 10, 128, BF16, 48, {"soft_cap": 2.0, "window": 3}),
    ],
)
def test_rows(
    backend: str, make_batch: Any, check_dense: Any, rows: int, heads: int, d: int,
    dtype: torch.dtype, page_size: int, options: dict[str, Any],
) -> None:  # fmt: skip
    tokens = -(-rows // heads)
    batch = make_batch(
        [tokens, 1, 0], [tokens + 50, 70, 5], heads=(heads, 1), d=d, dtype=dtype,
        cache_dtype=dtype, page_size=page_size,
    )  # fmt: skip
    check_dense(batch, backend, **options)


@pytest.mark.parametrize("order", range(3))
def test_any_order_of_threads(
    backend: str, make_batch: Any, check_dense: Any, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    # Tiles that several blocks share, a ring that is filled again and again, heads before rows.
    if backend != "simt":
        pytest.skip("the order of threads is the device's")
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(order))
    monkeypatch.setenv("DSPARK_SIMT_ASYNC", ["late", "early", "random"][order])
    monkeypatch.setenv("DSPARK_SIMT_SHARED_KB", ["80", "227", "60"][order])
    monkeypatch.setenv("DSPARK_SIMT_SMS", "2")
    monkeypatch.setenv("DSPARK_VERIFY_ATTENTION_CLUSTER", ["0", "4", "2"][order])
    batch = make_batch(
        [9, 2], [700, 90], heads=(16, 2), d=64, dtype=BF16, cache_dtype=BF16, page_size=64
    )
    for name in ("k_cache", "v_cache"):
        cache = getattr(batch, name)
        setattr(batch, name, cache.transpose(1, 2).contiguous().transpose(1, 2))
    check_dense(batch, backend)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_stays_with_the_rows_that_see_it(
    backend: str, make_batch: Any, poison: float
) -> None:
    batch = make_batch([80, 1], [130, 40], heads=(2, 1), d=64, dtype=F16, cache_dtype=F16)
    clean = batch.call(backend=backend)
    for key in (20, 100):  # all rows see the first, those from position 100 on the other one
        page, row = int(batch.page_table[0, key // 16]), key % 16
        kept = batch.v_cache[page, row, 0, 3].clone()
        batch.v_cache[page, row, 0, 3] = poison
        out = batch.call(backend=backend)
        batch.v_cache[page, row, 0, 3] = kept
        expected = torch.zeros(out.shape, dtype=torch.bool)
        expected[max(0, key - 50) : 80, :, 3] = True
        assert torch.equal(out[~expected], clean[~expected])
        assert not out[expected].isfinite().any()


@pytest.mark.parametrize(
    ("serves", "environment", "options", "batch"),
    [
        (True, {}, {}, {}),
        (True, {}, {}, {"d": 256, "dtype": F16, "cache_dtype": F16}),
        (False, {}, {"batch_invariant": True}, {}),
        (False, {"DSPARK_SIMT_CAPABILITY": "100"}, {}, {}),
        (False, {"DSPARK_VERIFY_ATTENTION_BULK": "0"}, {}, {}),
        (False, {"DSPARK_SIMT_SHARED_KB": "48"}, {}, {}),
        (False, {}, {}, {"page_size": 24}),
        (False, {}, {}, {"cache_dtype": torch.float8_e4m3fn}),
        (False, {}, {}, {"heads": (8, 1)}),
    ],
    ids=["bf16", "f16", "invariant", "sm_100", "no-copies", "memory", "pages", "f8", "64-rows"],
)
def test_when_it_serves(
    backend: str, make_batch: Any, monkeypatch: pytest.MonkeyPatch, serves: bool,
    environment: dict[str, str], options: dict[str, Any], batch: dict[str, Any],
) -> None:  # fmt: skip
    # The products run in another order, so the bytes of some elements are others.
    if backend != "simt":
        pytest.skip("the device is what it is")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = {"heads": (9, 1), "d": 64, "dtype": BF16, "cache_dtype": BF16, **batch}
    made = make_batch([8], [100], **given)
    out = made.call(backend=backend, **options)
    monkeypatch.setenv("DSPARK_VERIFY_ATTENTION_WGMMA", "0")
    assert torch.equal(made.call(backend=backend, **options), out) != serves
