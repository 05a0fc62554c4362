# SPDX-License-Identifier: Apache-2.0
"""The rotation of k, its frequencies, and Rope itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

TYPES = [torch.float32, torch.bfloat16, torch.float16]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kv_len", [0, 1, 1000, 2**20, 2**31 - 2**13])
@pytest.mark.parametrize("d", [2, 64, 80])
def test_rotation_is_exact_far_out(
    rng: np.random.Generator, dtype: torch.dtype, kv_len: int, d: int
) -> None:
    # Only the page in use exists; the table in front of it is empty and never looked at.
    page_size = 4096
    table = torch.full((1, kv_len // page_size + 1), -1, dtype=torch.int32)
    table[0, -1] = 1
    k = torch.from_numpy(rng.standard_normal((8, 2, d))).to(dtype)
    cache, values = torch.zeros(2, page_size, 2, d), torch.zeros(2, page_size, 2, d)
    dx.paged_kv_append(
        k, k, cache, values, page_table=table, kv_len=[kv_len], cu_seqlens=[0, 8],
        rope=dx.Rope(10000.0), strict=True,
    )  # fmt: skip
    angle = (kv_len + np.arange(8.0))[:, None, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
    a, b = np.split(k.double().numpy(), 2, axis=-1)
    c, s = np.cos(angle), np.sin(angle)
    want = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    size = np.concatenate([np.hypot(a, b)] * 2, axis=-1)
    # Rounding of cosine, sine, two products and a sum; the angle itself has 53 bits.
    bound = 4 * 2.0**-24 * size + size * (kv_len + 8) * 2.0**-52
    start = kv_len % page_size
    got = cache[1, start : start + 8].double().numpy()
    assert np.all(np.abs(got - want) <= bound)
    assert torch.equal(values[1, start : start + 8], k.float())


@pytest.mark.parametrize(
    "scaling", [None, {"type": "linear", "factor": 4}, LLAMA3], ids=["default", "linear", "llama3"]
)
def test_append_and_rotate_agree(
    backend: str, rng: np.random.Generator, scaling: dict[str, Any] | None
) -> None:
    rope = dx.Rope(1e5, scaling)
    k = torch.from_numpy(rng.standard_normal((6, 2, 16))).float()
    cache, values = torch.zeros(4, 16, 2, 16), torch.zeros(4, 16, 2, 16)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    dx.paged_kv_append(
        k, k, cache, values, page_table=table, kv_len=[14, 3], cu_seqlens=[0, 4, 6], rope=rope,
        backend=backend, strict=True,
    )  # fmt: skip
    got = torch.cat([cache[2, 14:], cache[0, :2], cache[1, 3:5]])
    want = rope.rotate(k, torch.tensor([14, 15, 16, 17, 3, 4]))
    torch.testing.assert_close(got, want, rtol=0, atol=8 * 2**-24 * float(k.abs().max()))
    assert torch.equal(torch.cat([values[2, 14:], values[0, :2], values[1, 3:5]]), k)


def test_theta_alone_gives_the_same_frequencies(rng: np.random.Generator) -> None:
    # A C caller may leave rope_inv_freq out: the library derives theta^(-2i / D).
    k = rng.standard_normal((3, 1, 8)).astype(np.float32)
    caches = np.zeros((2, 2, 1, 4, 1, 8), np.float32)
    table, status = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    kv_len, cu = np.array([1], np.int32), np.array([0, 3], np.int32)
    for pair, frequencies in zip(caches, (dx.Rope(1e4).inv_freq(8).ctypes.data, 0), strict=True):
        p = dx._C.PagedKvParams()
        p.num_requests = p.num_kv_heads = p.num_pages = p.max_pages = p.page_table_stride = 1
        p.head_dim, p.page_size, p.num_tokens, p.num_threads = 8, 4, 3, 1
        p.k_token_stride = p.k_head_stride = p.v_token_stride = p.v_head_stride = 8
        p.page_stride, p.row_stride, p.head_stride = 32, 8, 8
        p.rope_theta, p.rope_inv_freq = 1e4, frequencies
        arrays = (k, k, pair[0], pair[1], table, kv_len, cu)
        p.set_arrays(*(x.ctypes.data for x in arrays), 0, 0, status.ctypes.data)
        dx._backend.run("paged_kv", p)
    assert caches[0].any()
    np.testing.assert_allclose(caches[1], caches[0], rtol=0, atol=2**-22)


def test_llama3_keeps_fast_turns_and_stretches_slow_ones() -> None:
    plain, scaled = dx.Rope(1e4).inv_freq(64), dx.Rope(1e4, LLAMA3).inv_freq(64)
    turns = 128 * plain / (2 * np.pi)
    ratio = scaled / plain
    np.testing.assert_allclose(ratio[turns > 4], 1)
    np.testing.assert_allclose(ratio[turns < 1], 1 / 8)
    assert np.all(np.diff(ratio) <= 1e-15)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert np.all((ratio[between] > 1 / 8) & (ratio[between] < 1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rotation_keeps_lengths_and_dtype(rng: np.random.Generator, dtype: torch.dtype) -> None:
    x = torch.from_numpy(rng.standard_normal((5, 3, 32))).to(dtype)
    y = dx.Rope(1e4).rotate(x, torch.arange(5))
    assert y.dtype == dtype
    assert torch.equal(y[0], x[0])
    norm = x.double().pow(2).sum(-1)
    torch.testing.assert_close(y.double().pow(2).sum(-1), norm, rtol=2**-6, atol=0)


@pytest.mark.parametrize(
    ("theta", "scaling", "text"),
    [
        (0, None, "theta: got 0"),
        (float("nan"), None, "theta: got nan"),
        (1e4, {"rope_type": "linear"}, "factor: got None"),
        (1e4, {"rope_type": "linear", "factor": -1}, "factor: got -1"),
        (1e4, {**LLAMA3, "factor": 0, "low_freq_factor": "x"}, "low_freq_factor: got 'x'"),
    ],
)
def test_bad_frequencies_are_refused(theta: float, scaling: Any, text: str) -> None:
    with pytest.raises(dx.ArgumentError, match=text):
        dx.Rope(theta, scaling)


def test_other_scalings_are_not_here_yet() -> None:
    with pytest.raises(NotImplementedError, match="'yarn'"):
        dx.Rope(1e4, {"rope_type": "yarn", "factor": 4})


def test_odd_heads_cannot_turn() -> None:
    with pytest.raises(dx.ArgumentError, match="head_dim: got 7"):
        dx.Rope(1e4).inv_freq(7)
