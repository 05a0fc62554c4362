# SPDX-License-Identifier: Apache-2.0
"""Hundreds of configurations against a dense softmax in float64, within derived bounds."""

from __future__ import annotations

import functools
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from attention_sweep import Config, pairs_of, pairwise, sample

Array = np.ndarray[Any, Any]

F8 = torch.float8_e4m3fn
USABLE = bool(dx.info()["cuda"]["usable"])
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f8": F8}
#: Half an ulp, relative.
UNIT = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
#: Rounding of the weights where a kernel multiplies them with values of this type; a cache in FP8
#: is multiplied in binary16.
WEIGHT_UNIT = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11, "f8": 2.0**-11}
NAN_BITS = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}

DOMAIN: dict[str, list[Any]] = {
    "q_len": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    "batch": [1, 2, 5, 16, 33],
    "kv_len": [1, 8, 63, 64, 65, 300, 511, 513, 1000, 3000],
    "page_size": [1, 3, 16, 64, 256],
    "group": [1, 2, 3, 4, 7, 8, 16],
    "kv_heads": [1, 2, 4],
    "head_dim": [20, 64, 80, 128, 256],
    "dtype": ["f32", "bf16", "f16"],
    "cache": ["f32", "bf16", "f16", "f8"],
    "causal": [True, False],
    "window": [0, 1, 17, 700],
    "soft_cap": [0.0, 4.0],
}
LONG = {**DOMAIN, "batch": [1, 2], "kv_len": [8192, 12345, 30000], "kv_heads": [1, 2],
        "head_dim": [64, 128], "group": [1, 4]}  # fmt: skip
SMALL = {**DOMAIN, "batch": [1, 3], "kv_len": [1, 40, 130], "kv_heads": [1, 2], "window": [0, 17],
         "q_len": [0, 1, 5, 9], "group": [1, 4, 7], "head_dim": [20, 64, 128, 256]}  # fmt: skip


def _cost(c: Config) -> float:
    """Multiply-adds of the scores, at most."""
    return float(c["batch"] * max(c["q_len"], 1) * c["kv_len"] * c["group"] * c["kv_heads"]
                 * c["head_dim"])  # fmt: skip


def _cells(c: Config) -> float:
    return float(c["batch"] * c["kv_len"] * c["kv_heads"] * c["head_dim"])


def _affordable(c: Config) -> bool:
    return _cost(c) <= 2e7 and _cells(c) <= 1e6


def _long_enough(c: Config) -> bool:
    return c["q_len"] > 0 and _cells(c) <= 4e6 and _cost(c) <= 6e7


@functools.cache
def _configs() -> dict[str, Config]:
    """About 300 at random, every pair of values, and a few long ones."""
    rng = np.random.default_rng(20260607)
    found = [*pairwise(DOMAIN, _affordable, rng)]
    found += sample(DOMAIN, 300 - 8, _affordable, rng)
    found += sample(LONG, 8, _long_enough, rng)
    return {_name(i, c): c for i, c in enumerate(found)}


@functools.cache
def _small_configs() -> dict[str, Config]:
    rng = np.random.default_rng(7)
    return {_name(i, c): c for i, c in enumerate(pairwise(SMALL, lambda c: _cost(c) < 2e6, rng))}


def _name(i: int, c: Config) -> str:
    mask = ("causal" if c["causal"] else "both") + f"-w{c['window']}-c{c['soft_cap']:g}"
    heads = f"{c['group']}x{c['kv_heads']}x{c['head_dim']}"
    return (f"{i}:q{c['q_len']}-b{c['batch']}-kv{c['kv_len']}-p{c['page_size']}-{heads}-"
            f"{c['dtype']}-{c['cache']}-{mask}")  # fmt: skip


@functools.cache
def _pool() -> torch.Tensor:
    """Normal numbers to cut caches from: drawing them anew would be most of the time."""
    return torch.from_numpy(np.random.default_rng(1).standard_normal(1 << 22, dtype=np.float32))


@dataclass
class Case:
    """Arguments of a call."""

    q: torch.Tensor
    caches: list[torch.Tensor]
    table: torch.Tensor
    kv_len: Array
    cu: Array
    scales: dict[str, torch.Tensor]


def _make(c: Config, rng: np.random.Generator) -> Case:
    """Ragged rows and lengths; what no request owns is NaN."""
    q_len = rng.integers(0, c["q_len"] + 1, c["batch"])
    q_len[rng.integers(c["batch"])] = c["q_len"]
    kv_len = np.maximum(rng.integers(1, c["kv_len"] + 1, c["batch"]), q_len)
    kv_len[rng.integers(c["batch"])] = max(c["kv_len"], c["q_len"])
    columns = -(-kv_len // c["page_size"])
    order = rng.permutation(int(columns.sum()) + 2)[: columns.sum()]
    table = np.full((c["batch"], columns.max() + 1), -1, np.int32)
    used = np.zeros((columns.sum() + 2, c["page_size"]), bool)
    for r, pages in enumerate(np.split(order, np.cumsum(columns)[:-1])):
        table[r, : len(pages)] = pages
        rows = np.arange(columns[r] * c["page_size"]) < kv_len[r]
        used[pages] = rows.reshape(-1, c["page_size"])
    shape = (*used.shape, c["kv_heads"], c["head_dim"])
    unused = torch.from_numpy(~used)
    caches = []
    for _ in "kv":
        size = int(np.prod(shape))
        start = int(rng.integers(len(_pool())))
        turned = _pool().roll(-start) if start + size > len(_pool()) else _pool()[start:]
        cache = turned.repeat(-(-size // len(turned)))[:size].reshape(shape).to(TYPES[c["cache"]])
        width = cache.element_size()
        bits = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width])
        bits[unused] = NAN_BITS[width]
        caches.append(cache)
    heads = c["group"] * c["kv_heads"]
    q = rng.standard_normal((int(q_len.sum()), heads, c["head_dim"]), dtype=np.float32)
    scales = {}
    if c["cache"] == "f8":
        for name in ("k_scale", "v_scale"):
            values = rng.uniform(0.2, 2, c["kv_heads"]).astype(np.float32)
            scales[name] = torch.from_numpy(values)
    cu = np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32)
    return Case(torch.from_numpy(q).to(TYPES[c["dtype"]]), caches, torch.from_numpy(table),
                kv_len.astype(np.int32), cu, scales)  # fmt: skip


def _dense(cache: torch.Tensor, case: Case, r: int, name: str) -> Array:
    """Keys or values of a request in order, float64 [Hkv, kv_len, D]."""
    n, size = int(case.kv_len[r]), cache.shape[1]
    pages = case.table[r, : -(-n // size)].long()
    rows = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype)
    dense = rows.reshape(-1, *cache.shape[2:])[:n].double().permute(1, 0, 2)
    if name in case.scales:
        dense = dense * case.scales[name].double()[:, None, None]
    return dense.numpy()


def _check_request(
    c: Config, case: Case, r: int, out: Array, lse: Array, weight_unit: float
) -> None:
    """Rows of one request against the formula; the bound counts the roundings on the way."""
    rows = slice(int(case.cu[r]), int(case.cu[r + 1]))
    count, n, d = rows.stop - rows.start, int(case.kv_len[r]), c["head_dim"]
    if count == 0:
        return
    k, v = (_dense(x, case, r, f"{s}_scale") for x, s in zip(case.caches, "kv", strict=True))
    q = case.q[rows].double().numpy() * d**-0.5
    q = q.reshape(count, c["kv_heads"], c["group"], d).transpose(1, 0, 2, 3)
    q = q.reshape(c["kv_heads"], -1, d)  # [Hkv, rows, D], the heads of a group side by side
    score = q @ k.transpose(0, 2, 1)
    u = 2.0**-24
    # A float32 dot product: D roundings of the running sum, those of query and scales.
    largest = np.abs(q).sum(-1) * np.abs(k).max((1, 2))[:, None]
    norm = np.sqrt((q**2).sum(-1) * (k**2).sum(-1).max(-1)[:, None])
    error = (d + 4) * u * np.minimum(largest, norm)
    if c["soft_cap"]:
        score = c["soft_cap"] * np.tanh(score / c["soft_cap"])
        error = error + 8 * u * c["soft_cap"]
    position = np.repeat(n - count + np.arange(count), c["group"])[:, None]
    at = np.arange(n)
    seen = (at <= position) | (not c["causal"])
    seen &= (at > position - c["window"]) | (c["window"] == 0)
    score = np.where(seen, score, -np.inf)
    top = score.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True)
    size = np.where(seen, np.abs(score), 0).max(-1)
    relative = 2 * error + 4 * u * (1 + size) + (seen.sum(-1) + 18) * u
    with np.errstate(divide="ignore", invalid="ignore"):
        want_lse = (top + np.log(total))[..., 0]
        share = np.where(total > 0, weight / total, 0)
    want = share @ v
    bound = 2 * (relative + weight_unit)[..., None] * (share @ np.abs(v))
    bound += UNIT[c["dtype"]] * np.abs(want) + 2.0**-25

    def as_rows(x: Array) -> Array:
        x = x.reshape(c["kv_heads"], count, c["group"], *x.shape[2:])
        return np.moveaxis(x, 0, 1).reshape(count, -1, *x.shape[3:])

    off = np.abs(out[rows] - as_rows(want))
    assert np.all(off <= as_rows(bound)), f"request {r}: {(off / as_rows(bound)).max():.3g} bounds"
    got, want_lse = lse[rows], as_rows(want_lse)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want_lse))
    live = np.isfinite(want_lse)
    # Where weights are rounded, their sum may be taken of the rounded ones.
    limit = as_rows(relative + weight_unit) + u * np.abs(want_lse)
    assert np.all(np.abs(got - want_lse)[live] <= limit[live])


def _run(c: Config, backend: str, rng: np.random.Generator) -> None:
    case = _make(c, rng)
    status = torch.empty(c["batch"], dtype=torch.int32)
    out, lse = dx.verify_attention(
        case.q, *case.caches, page_table=case.table, kv_len=torch.from_numpy(case.kv_len),
        cu_seqlens=torch.from_numpy(case.cu), max_q_len=c["q_len"], causal=c["causal"],
        window=c["window"], soft_cap=c["soft_cap"], return_lse=True, backend=backend,
        status=status, batch_invariant=bool(rng.integers(2)), **case.scales,
    )  # fmt: skip
    assert not status.any()
    kernels = backend in ("simt", "cuda")
    unit = WEIGHT_UNIT[c["cache"]] if kernels else 0.0
    for r in range(c["batch"]):
        _check_request(c, case, r, out.double().numpy(), lse.double().numpy(), unit)


@pytest.mark.parametrize("backend", ["cpu", "cuda"] if USABLE else ["cpu"], indirect=True)
@pytest.mark.parametrize("name", _configs())
def test_sweep(backend: str, name: str) -> None:
    _run(_configs()[name], backend, np.random.default_rng(zlib.crc32(name.encode())))


@pytest.mark.parametrize("name", _small_configs())
def test_sweep_of_small_sizes(backend: str, name: str) -> None:
    _run(_small_configs()[name], backend, np.random.default_rng(zlib.crc32(name.encode())))


def test_every_pair_is_covered() -> None:
    found = set().union(*(pairs_of(c) for c in pairwise(SMALL, lambda _: True,
                                                        np.random.default_rng(3))))  # fmt: skip
    names = list(SMALL)
    want = sum(len(SMALL[a]) * len(SMALL[b]) for i, a in enumerate(names) for b in names[i + 1 :])
    assert len(found) == want
    assert sum(c["kv_len"] > 8000 for c in _configs().values()) <= 10
    assert len(_configs()) > 300


@pytest.mark.parametrize("fault", ["value", "key", "length", "scale"])
def test_a_fault_is_outside_the_bounds(backend: str, fault: str) -> None:
    """The bounds are not so wide that a wrong row would pass."""
    c = {"q_len": 4, "batch": 1, "kv_len": 300, "page_size": 16, "group": 2, "kv_heads": 1,
         "head_dim": 64, "dtype": "f32", "cache": "f8", "causal": True, "window": 0,
         "soft_cap": 0.0}  # fmt: skip
    case = _make(c, np.random.default_rng(11))
    given = {"kv_len": [300]} | case.scales
    if fault == "length":
        given["kv_len"] = [299]
    elif fault == "scale":
        given["k_scale"] = case.scales["k_scale"] * (1 + 2.0**-9)
    else:
        cache = case.caches[fault == "value"].view(torch.uint8).clone()
        cache[int(case.table[0, 9]), 7] ^= 1  # the last bit of the elements of one row
    arrays = list(case.caches)
    if fault in ("value", "key"):
        arrays[fault == "value"] = cache.view(F8)
    out, lse = dx.verify_attention(
        case.q, *arrays, page_table=case.table, cu_seqlens=case.cu, max_q_len=4, return_lse=True,
        backend=backend, **given,
    )  # fmt: skip
    unit = WEIGHT_UNIT["f8"] if backend in ("simt", "cuda") else 0.0
    with pytest.raises(AssertionError):
        _check_request(c, case, 0, out.double().numpy(), lse.double().numpy(), unit)
