# SPDX-License-Identifier: Apache-2.0
"""Random batches over a shuffled page table, and the dense float64 formula with its error bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

#: Rounding of an element type: half an ulp, relative.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Head sizes whose weights the kernels round to 16 bits, to multiply them on tensor cores.
TENSOR_CORES = (64, 128, 256)


@dataclass
class Batch:
    """Arguments of one call, and the same keys and values dense, per request, in float64."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    kv_len: torch.Tensor
    cu_seqlens: torch.Tensor
    max_q_len: int
    k_scale: torch.Tensor | None = None  # of a cache in FP8
    v_scale: torch.Tensor | None = None

    def call(self, **options: Any) -> Any:
        """Run the operator on this batch."""
        names = ("page_table", "kv_len", "cu_seqlens", "max_q_len", "k_scale", "v_scale")
        given = {name: getattr(self, name) for name in names} | options
        return dx.verify_attention(self.q, self.k_cache, self.v_cache, **given)

    def rows(self, r: int) -> slice:
        """Rows of request ``r``."""
        return slice(int(self.cu_seqlens[r]), int(self.cu_seqlens[r + 1]))

    def dense_cache(self, cache: torch.Tensor, r: int) -> np.ndarray[Any, Any]:
        """The first kv_len rows of a request in order, float64 [kv_len, Hkv, D]."""
        pages = self.page_table[r][self.page_table[r] >= 0].long()
        flat = cache[pages].reshape(-1, *cache.shape[2:])
        scale = self.k_scale if cache is self.k_cache else self.v_scale
        dense = flat[: int(self.kv_len[r])].double()
        return (dense if scale is None else dense * scale.double().reshape(-1, 1)).numpy()

    def dense(
        self,
        causal: bool = True,
        window: int = 0,
        soft_cap: float = 0.0,
        scale: Any = None,
        weight_unit: float = 0.0,
    ) -> tuple[np.ndarray[Any, Any], ...]:
        """Return out, lse, and bounds on the error of each, from the formula of a dense softmax.

        ``weight_unit`` is the rounding of the weights, relative to each and to the largest.
        """
        b, heads, d = self.q.shape
        out, lse = np.zeros((b, heads, d)), np.full((b, heads), -np.inf)
        out_bound, lse_bound = np.zeros((b, heads, d)), np.zeros((b, heads))
        factor = d**-0.5 if scale is None else scale
        for r in range(len(self.kv_len)):
            k, v = self.dense_cache(self.k_cache, r), self.dense_cache(self.v_cache, r)
            rows, n = self.rows(r), int(self.kv_len[r])
            for row in range(rows.start, rows.stop):
                position = n - (rows.stop - row)
                seen = np.arange(n)
                seen = seen[(seen <= position) | (not causal)]
                seen = seen[(seen > position - window) | (window == 0)]
                for h in range(heads):
                    one = _attend(self.q[row, h].double().numpy() * factor, h, heads, k, v, seen,
                                  soft_cap, weight_unit)  # fmt: skip
                    out[row, h], lse[row, h], out_bound[row, h], lse_bound[row, h] = one
        rounding = UNIT[self.q.dtype] * np.abs(out) + 2.0**-25  # half the smallest float16
        return out, lse, out_bound + rounding, lse_bound


def _attend(
    q: np.ndarray[Any, Any],
    h: int,
    heads: int,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    seen: np.ndarray[Any, Any],
    soft_cap: float,
    weight_unit: float,
) -> tuple[Any, ...]:
    kv_head = h // (heads // k.shape[1])
    keys, values = k[seen, kv_head], v[seen, kv_head]
    if not len(seen):
        return 0.0, -np.inf, 0.0, 0.0
    score = keys @ q
    # Float32 dot products: D roundings of the running sum, one of the scaled query.
    u, d = 2.0**-24, len(q)
    error = (d + 2) * u * (np.abs(keys) @ np.abs(q)).max()
    if soft_cap > 0:
        score = soft_cap * np.tanh(score / soft_cap)
        error += 8 * u * soft_cap  # of the tanh itself
    top = score.max()
    weight = np.exp(score - top)
    total = weight.sum()
    # exp is good to 2^-22; sums run over lanes and blocks, at worst one rounding a key.
    relative = 2 * error + 4 * u * (1 + np.abs(score).max()) + (len(seen) + 16) * u
    lse = top + np.log(total)
    out_bound = 2 * (relative + weight_unit) * (weight @ np.abs(values)) / total + 1e-37
    # A weight below the smallest binary16 is 0: half of it is lost, beside the largest, 1.
    if weight_unit > 0:
        out_bound = out_bound + 2.0**-25 * np.abs(values).sum(0) / total
    return weight @ values / total, lse, out_bound, relative + u * abs(lse)


MakeBatch = Callable[..., Batch]


@pytest.fixture
def make_batch(rng: np.random.Generator) -> MakeBatch:
    """Factory of random batches."""

    def make(
        q_len: Sequence[int],
        kv_len: Sequence[int],
        *,
        heads: tuple[int, int] = (3, 1),
        d: int = 16,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float32,
        spare_tokens: int = 0,
    ) -> Batch:
        def normal(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

        q_heads, kv_heads = heads
        needed = [-(-n // page_size) for n in kv_len]
        pages = sum(needed) + 3
        table = torch.full((len(kv_len), max([0, *needed]) + 1), -1, dtype=torch.int32)
        free = list(rng.permutation(pages))
        for r, n in enumerate(needed):
            table[r, :n] = torch.tensor([free.pop() for _ in range(n)], dtype=torch.int32)
        # What no request owns is NaN: a single stray read shows in the result.
        caches = []
        for _ in range(2):
            cache = torch.full((pages, page_size, kv_heads, d), float("nan"))
            for r, n in enumerate(kv_len):
                for p in range(n):
                    page, row = int(table[r, p // page_size]), p % page_size
                    cache[page, row] = normal(kv_heads, d)
            caches.append(cache.to(cache_dtype))
        cu = torch.tensor(np.concatenate([[0], np.cumsum(q_len)]), dtype=torch.int32)
        return Batch(
            normal(int(cu[-1]) + spare_tokens, q_heads, d).to(dtype),
            *caches,
            table,
            torch.tensor(kv_len, dtype=torch.int32),
            cu,
            max([0, *q_len]),
        )

    return make


def weight_unit(batch: Batch, backend: str) -> float:
    """Rounding of the weights where a backend multiplies them with 16-bit values."""
    kind = batch.k_cache.dtype
    narrow = kind in (batch.q.dtype, torch.float8_e4m3fn) and batch.q.dtype != torch.float32
    if backend not in ("simt", "cuda") or not narrow or batch.q.shape[2] not in TENSOR_CORES:
        return 0.0
    return UNIT[kind if kind in UNIT else torch.float16]


Compare = Callable[..., None]


@pytest.fixture
def check_dense() -> Compare:
    """Compare a call with the dense formula, within the derived bounds."""

    def check(batch: Batch, backend: str, **options: Any) -> None:
        out, lse = batch.call(return_lse=True, backend=backend, strict=True, **options)
        options.pop("batch_invariant", None)
        want_out, want_lse, out_bound, lse_bound = batch.dense(
            **options, weight_unit=weight_unit(batch, backend)
        )
        live = int(batch.cu_seqlens[-1])
        error = np.abs(out.double().numpy() - want_out)[:live]
        assert out.dtype == batch.q.dtype
        assert lse.dtype == torch.float32
        assert np.all(error <= out_bound[:live]), (error / out_bound[:live]).max()
        got, want = lse.double().numpy()[:live], want_lse[:live]
        empty = np.isneginf(want)
        np.testing.assert_array_equal(np.isneginf(got), empty)
        difference = np.abs(got[~empty] - want[~empty])
        assert np.all(difference <= lse_bound[:live][~empty])

    return check
