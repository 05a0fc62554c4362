# SPDX-License-Identifier: Apache-2.0
"""Caches in FP8 E4M3 with scales: the bytes that are written, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import Status

F8 = torch.float8_e4m3fn
TYPES = [torch.float32, torch.bfloat16, torch.float16]
CANARY = 0x35

SCALES = {
    "none": (None, None),
    "number": (0.25, 2.0),
    "one": (torch.tensor([0.125]), torch.tensor(4.0)),
    "heads": (torch.tensor([0.5, 1.0, 3e-3]), torch.tensor([7.0, 0.3, 1.0])),
}


def _case(rng: np.random.Generator, dtype: torch.dtype = torch.float32, d: int = 24) -> Any:
    """Ten tokens of two requests, values from far below the smallest to far above 448."""
    size = 10 ** rng.uniform(-4, 4, (10, 3, d))
    k, v = (torch.from_numpy(rng.standard_normal(size.shape) * size).to(dtype) for _ in "kv")
    k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    caches = [torch.full((7, 4, 3, d), CANARY, dtype=torch.uint8).view(F8) for _ in "kv"]
    arguments = {
        "page_table": torch.tensor([[5, 2, -1], [0, 6, 3]], dtype=torch.int32),
        "kv_len": torch.tensor([3, 5], dtype=torch.int32), "cu_seqlens": [0, 4, 10],
    }  # fmt: skip
    return k, v, caches, arguments


def _places(arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Page and row of each token, from the definition."""
    cu, table, kv_len = (arguments[n] for n in ("cu_seqlens", "page_table", "kv_len"))
    where = [(r, int(kv_len[r]) + i) for r in range(2) for i in range(cu[r + 1] - cu[r])]
    return [(int(table[r, p // 4]), p % 4) for r, p in where]


def _quantise(x: torch.Tensor, scale: Any) -> torch.Tensor:
    """Bytes of x / scale: torch rounds alike, but makes NaN of what is beyond the range."""
    scale = torch.as_tensor(1.0 if scale is None else scale).float().expand(3)[:, None]
    return (x.float() / scale).clamp(-448, 448).to(F8).view(torch.uint8)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("d", [24, 3])
def test_every_byte(
    backend: str, rng: np.random.Generator, dtype: torch.dtype, name: str, d: int
) -> None:
    k, v, caches, arguments = _case(rng, dtype, d)
    k_scale, v_scale = SCALES[name]
    status = dx.paged_kv_append(
        k, v, *caches, **arguments, k_scale=k_scale, v_scale=v_scale, backend=backend
    )
    assert status.tolist() == [0, 0]
    for cache, new, scale in zip(caches, (k, v), (k_scale, v_scale), strict=True):
        want = torch.full(cache.shape, CANARY, dtype=torch.uint8)
        for token, place in zip(_quantise(new, scale), _places(arguments), strict=True):
            want[place] = token
        got = cache.view(torch.uint8)
        if backend == "reference":  # rounds once where a compiled backend rounds x / scale first
            apart = got.view(F8).float() != want.view(F8).float()
            apart &= ~want.view(F8).float().isnan()
            assert apart.float().mean() < 1e-3
            got = torch.where(apart, want, got)
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rotated_keys_have_the_bytes_of_the_cpu(
    backend: str, rng: np.random.Generator, dtype: torch.dtype
) -> None:
    k, v, caches, arguments = _case(rng, dtype, 32)
    k = k.nan_to_num(1.0)
    options = {"rope": dx.Rope(1e4), "k_scale": 0.3, **arguments}
    dx.paged_kv_append(k, v, *caches, **options, strict=True, backend=backend)
    wide = torch.zeros(7, 4, 3, 32)
    dx.paged_kv_append(k, v, wide, wide.clone(), rope=dx.Rope(1e4), **arguments, backend="cpu")
    places = _places(arguments)
    got = torch.stack([caches[0][place].view(torch.uint8) for place in places])
    want = _quantise(torch.stack([wide[place] for place in places]), 0.3)
    if backend == "reference":
        assert (got != want).float().mean() < 1e-2
    else:
        assert torch.equal(got, want)


def test_a_kept_call_reads_the_scales_of_now(rng: np.random.Generator) -> None:
    k, v, caches, arguments = _case(rng)
    arguments["cu_seqlens"] = torch.tensor(arguments["cu_seqlens"], dtype=torch.int32)
    scale = torch.tensor([1.0, 2.0, 3.0])
    for factor in (1.0, 8.0):
        for other in (scale, scale[:1].clone(), None):
            if other is not None:
                other *= factor
            dx.paged_kv_append(k, v, *caches, **arguments, v_scale=other, strict=True)
            got = torch.stack([caches[1][place].view(torch.uint8) for place in _places(arguments)])
            assert torch.equal(got, _quantise(v, other))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_mean_nothing_are_refused(
    backend: str, rng: np.random.Generator, bad: float
) -> None:
    k, v, caches, arguments = _case(rng)
    for scale in (bad, torch.tensor([1.0, bad, 1.0])):
        for name in ("k_scale", "v_scale"):
            with pytest.raises(dx.ArgumentError, match=f"{name}: got .* positive finite"):
                dx.paged_kv_append(k, v, *caches, **arguments, **{name: scale}, backend=backend)
    assert all((cache.view(torch.uint8) == CANARY).all() for cache in caches)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_go_bad_later_write_nothing(rng: np.random.Generator, name: str) -> None:
    # A kept call does not look at values again: the operator must, as it does on a device.
    k, v, caches, arguments = _case(rng)
    arguments["cu_seqlens"] = torch.tensor(arguments["cu_seqlens"], dtype=torch.int32)
    scale = torch.ones(3)
    dx.paged_kv_append(k, v, *caches, **arguments, **{name: scale}, strict=True)
    for bad in (0.0, -2.0, float("nan"), float("inf")):
        scale[2] = bad
        before = [cache.view(torch.uint8).clone() for cache in caches]
        status = dx.paged_kv_append(k + 1, v + 1, *caches, **arguments, **{name: scale})
        assert status.tolist() == [Status.BAD_PARAM] * 2
        assert all(torch.equal(c.view(torch.uint8), b) for c, b in zip(caches, before, strict=True))


def test_wrong_arguments(rng: np.random.Generator) -> None:
    k, v, caches, arguments = _case(rng)
    wide = [cache.float() for cache in caches]
    with pytest.raises(dx.ArgumentError, match="k_scale: got a scale, expected None with a cache"):
        dx.paged_kv_append(k, v, *wide, **arguments, k_scale=1.0)
    with pytest.raises(dx.ArgumentError, match="v_scale: got shape"):
        dx.paged_kv_append(k, v, *caches, **arguments, v_scale=torch.ones(2))
    with pytest.raises(dx.ArgumentError, match="v_cache: got float32"):
        dx.paged_kv_append(k, v, caches[0], wide[1], **arguments)
    with pytest.raises(dx.ArgumentError, match="k: got float8_e4m3fn"):
        dx.paged_kv_append(k.to(F8), v.to(F8), *caches, **arguments)


def test_ml_dtypes_arrays(backend: str, rng: np.random.Generator) -> None:
    f8 = pytest.importorskip("ml_dtypes").float8_e4m3fn
    k, v, caches, arguments = _case(rng)
    arrays = [np.full(caches[0].shape, CANARY, np.uint8).view(f8) for _ in "kv"]
    numpy = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    dx.paged_kv_append(
        k.numpy(), v.numpy(), *arrays, **numpy, k_scale=0.5, strict=True, backend=backend
    )
    dx.paged_kv_append(k, v, *caches, **arguments, k_scale=0.5, strict=True)
    for array, cache in zip(arrays, caches, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), cache.view(torch.uint8).numpy())
