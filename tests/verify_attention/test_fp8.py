# SPDX-License-Identifier: Apache-2.0
"""Caches in FP8 E4M3: against the dense formula on the decoded values, scales, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import Status

F8 = torch.float8_e4m3fn
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("d", [16, 64, 5])
def test_dense_formula(
    backend: str, make_batch: Any, check_dense: Any, dtype: torch.dtype, d: int
) -> None:
    batch = make_batch([2, 0, 5, 1], [30, 9, 70, 1], heads=(6, 2), d=d, dtype=dtype, cache_dtype=F8)
    check_dense(batch, backend)
    batch.k_scale, batch.v_scale = torch.tensor([0.25, 3.0]), torch.tensor([0.01, 700.0])
    check_dense(batch, backend, window=20, soft_cap=5.0)
    batch.k_scale, batch.v_scale = torch.tensor([0.5]), None
    check_dense(batch, backend, causal=False)


def test_a_scale_is_a_factor(backend: str, make_batch: Any) -> None:
    batch = make_batch([3, 2], [40, 33], heads=(4, 2), cache_dtype=F8)
    plain, plain_lse = batch.call(return_lse=True, backend=backend)
    out, lse = batch.call(return_lse=True, v_scale=4.0, backend=backend)
    assert torch.equal(out, 4 * plain)  # powers of two: exact
    assert torch.equal(lse, plain_lse)
    out, lse = batch.call(return_lse=True, k_scale=[0.5, 0.5], scale=0.5, backend=backend)
    assert torch.equal(out, plain)  # 0.5 * 0.5 = 1 / sqrt(16)
    assert torch.equal(lse, plain_lse)


def test_the_append_and_the_attention_agree(backend: str, make_batch: Any) -> None:
    # Appending to FP8 and attending equals attending over the quantised values in float32.
    batch = make_batch([3, 4], [20, 37], heads=(4, 2), cache_dtype=F8)
    wide = [torch.full(c.shape, float("nan")) for c in (batch.k_cache, batch.v_cache)]
    scale = torch.tensor([0.5, 2.0])
    rng = np.random.default_rng(3)
    k, v = (torch.from_numpy(rng.standard_normal((57, 2, 16))).float() for _ in "kv")
    cu = torch.tensor([0, 20, 57], dtype=torch.int32)
    where = {"page_table": batch.page_table, "kv_len": torch.zeros(2, dtype=torch.int32)}
    dx.paged_kv_append(
        k, v, batch.k_cache, batch.v_cache, cu_seqlens=cu, **where, k_scale=scale, v_scale=scale,
        strict=True,
    )  # fmt: skip
    factor = scale[:, None]
    k8, v8 = ((x / factor).to(F8).float() * factor for x in (k, v))
    dx.paged_kv_append(k8, v8, *wide, cu_seqlens=cu, **where, strict=True)
    got = batch.call(k_scale=scale, v_scale=scale, backend=backend, strict=True)
    batch.k_cache, batch.v_cache = wide
    torch.testing.assert_close(got, batch.call(backend=backend), rtol=0, atol=1e-5)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_in_the_cache_stays_with_the_rows_that_see_it(
    backend: str, make_batch: Any, code: int
) -> None:
    batch = make_batch([2, 3], [18, 20], heads=(2, 1), cache_dtype=F8)
    clean = batch.call(backend=backend)
    page = int(batch.page_table[1, 18 // 16])
    batch.v_cache.view(torch.uint8)[page, 18 % 16, 0, 3] = code  # seen by rows 1 and 2 of request 1
    out = batch.call(backend=backend)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[3:5, :, 3] = True
    assert torch.equal(out.isnan(), expected)
    assert torch.equal(out[~expected], clean[~expected])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_mean_nothing(backend: str, make_batch: Any, bad: float) -> None:
    batch = make_batch([2], [9], heads=(4, 2), cache_dtype=F8)
    for scale in (bad, torch.tensor([1.0, bad])):
        for name in ("k_scale", "v_scale"):
            with pytest.raises(dx.ArgumentError, match=f"{name}: got .* positive finite"):
                batch.call(**{name: scale}, backend=backend)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_go_bad_later_give_nan(make_batch: Any, name: str) -> None:
    batch = make_batch([2, 0], [9, 5], heads=(4, 2), cache_dtype=F8)
    scale, status = torch.ones(2), torch.empty(2, dtype=torch.int32)
    setattr(batch, name, scale)
    batch.call(return_lse=True, status=status, strict=True)
    for bad in (0.0, -2.0, float("nan"), float("inf")):
        scale[1] = bad
        out, lse = batch.call(return_lse=True, status=status)
        assert status.tolist() == [Status.BAD_PARAM, 0]
        assert out.isnan().all()
        assert lse.isnan().all()


def test_wrong_arguments(make_batch: Any) -> None:
    batch = make_batch([2], [9], heads=(4, 2), cache_dtype=F8)
    with pytest.raises(dx.ArgumentError, match="k_scale: got shape"):
        batch.call(k_scale=torch.ones(3))
    batch.k_cache, batch.v_cache = batch.k_cache.float(), batch.v_cache.float()
    with pytest.raises(dx.ArgumentError, match="v_scale: got a scale, expected None"):
        batch.call(v_scale=1.0)
    batch.q = batch.q.to(F8)
    with pytest.raises(dx.ArgumentError, match="q: got float8_e4m3fn"):
        batch.call()
