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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {
    "rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64, "length": 500,
}  # fmt: skip
FORMS = {
    "half-split": {},
    "interleaved": {"interleaved": True},
    "partial": {"dim": 8},
    "partial-interleaved": {"dim": 16, "interleaved": True},
    "partial-odd-pieces": {"dim": 6},
    "yarn": {"scaling": YARN},
    "yarn-interleaved-partial": {"scaling": YARN, "interleaved": True, "dim": 24},
    "dynamic": {"scaling": DYNAMIC},
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
        p.set_arrays(*(x.ctypes.data for x in arrays), 0, 0, 0, status.ctypes.data)
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
        (1e4, {"rope_type": "yarn", "factor": 4}, "original_max_position_embeddings: got None"),
        (1e4, YARN | {"beta_fast": 0.0}, "beta_fast: got 0.0"),
        (1e4, DYNAMIC | {"length": None}, "length: got None"),
        (1e4, {**LLAMA3, "factor": 0, "low_freq_factor": "x"}, "low_freq_factor: got 'x'"),
    ],
)
def test_bad_frequencies_are_refused(theta: float, scaling: Any, text: str) -> None:
    with pytest.raises(dx.ArgumentError, match=text):
        dx.Rope(theta, scaling)


def test_other_scalings_are_not_here_yet() -> None:
    with pytest.raises(NotImplementedError, match="'longrope'"):
        dx.Rope(1e4, {"rope_type": "longrope", "factor": 4})


def test_odd_heads_cannot_turn() -> None:
    with pytest.raises(dx.ArgumentError, match="head_dim: got 7"):
        dx.Rope(1e4).inv_freq(7)


def _turned(x: np.ndarray[Any, Any], position: int, rope: dx.Rope) -> np.ndarray[Any, Any]:
    """The definition, element by element in float64."""
    out, e = x.copy(), rope.dim or x.shape[-1]
    for i, frequency in enumerate(rope.inv_freq(x.shape[-1])):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + e // 2)
        c, s = (rope.amplitude * f(position * frequency) for f in (np.cos, np.sin))
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


@pytest.mark.parametrize(
    ("form", "d"),
    [*((form, 32) for form in FORMS), *((f, 33) for f in FORMS if "dim" in FORMS[f])],
)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_form_against_its_definition(
    backend: str, rng: np.random.Generator, form: str, d: int, dtype: torch.dtype
) -> None:
    rope = dx.Rope(1e4, **FORMS[form])
    k = torch.from_numpy(rng.standard_normal((6, 3, d))).to(dtype)
    caches = [torch.full((4, 16, 3, d), 7.0) for _ in "kv"]
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    dx.paged_kv_append(
        k, k, *caches, page_table=table, kv_len=[14, 3], cu_seqlens=[0, 4, 6], rope=rope,
        backend=backend, strict=True,
    )  # fmt: skip
    positions = [14, 15, 16, 17, 3, 4]
    got = torch.cat([caches[0][2, 14:], caches[0][0, :2], caches[0][1, 3:5]]).double().numpy()
    want = np.stack(
        [_turned(x.double().numpy(), p, rope) for x, p in zip(k, positions, strict=True)]
    )
    # Cosine and sine, two products and a sum, each rounded to float32.
    bound = 4 * 2.0**-24 * rope.amplitude * 2 * float(k.abs().max())
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)
    rest = slice(rope.dim or d, d)
    np.testing.assert_array_equal(got[..., rest], k[..., rest].double().numpy())
    turned = rope.rotate(k, torch.tensor(positions))
    assert turned.dtype == dtype
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    np.testing.assert_allclose(turned.double().numpy(), want, rtol=half_ulp * 1.01, atol=bound)
    untouched = torch.ones(4, 16, dtype=torch.bool)
    untouched[2, 14:], untouched[0, :2], untouched[1, 3:5] = False, False, False
    assert all((cache[untouched] == 7).all() for cache in caches)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cache_dtype", [*TYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernels_and_cpu_write_the_same_bytes(
    rng: np.random.Generator, dtype: torch.dtype, cache_dtype: torch.dtype, form: str
) -> None:
    if not dx._simt.load():
        pytest.skip("the SIMT library is not built: run `make simt`")
    k, v = (torch.from_numpy(rng.standard_normal((6, 3, 32))).to(dtype) for _ in "kv")
    answers = []
    for backend in ("cpu", "simt"):
        caches = torch.zeros(2, 4, 16, 3, 32, dtype=cache_dtype)
        dx.paged_kv_append(
            k, v, *caches, page_table=torch.tensor([[2, 0]], dtype=torch.int32), kv_len=[14],
            cu_seqlens=[0, 6], rope=dx.Rope(5e5, **FORMS[form]), backend=backend, strict=True,
        )  # fmt: skip
        answers.append(caches.view(torch.uint8))
    assert torch.equal(*answers)


def _published_yarn(
    theta: float, d: int, factor: float, length: float, fast: float, slow: float, truncate: bool
) -> list[float]:
    """YaRN as published: NTK-by-parts with a linear ramp over the number of turns in the context.

    Written from the paper (section 3.2 and appendix) with the ramp over the index of the frequency,
    as checkpoints in the Transformers format use it.
    """
    pi = np.pi

    def correction(turns: float) -> float:
        return float(d * np.log(length / (turns * 2 * pi)) / (2 * np.log(theta)))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high += 0.001 * (low == high)
    found = []
    for i in range(d // 2):
        ramp = min(max((i - low) / (high - low), 0), 1)  # 0: as trained, 1: stretched
        plain = 1 / theta ** (2 * i / d)
        found.append((1 - ramp) * plain + ramp * plain / factor)
    return found


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("d", [64, 128, 2])
@pytest.mark.parametrize(("factor", "length"), [(4.0, 32768), (16.0, 4096), (1.0, 2048)])
def test_yarn_frequencies(d: int, factor: float, length: int, truncate: bool) -> None:
    scaling = {
        "type": "yarn", "factor": factor, "original_max_position_embeddings": length,
        "beta_fast": 24, "beta_slow": 2, "truncate": truncate,
    }  # fmt: skip
    rope = dx.Rope(1e6, scaling)
    want = _published_yarn(1e6, d, factor, length, 24, 2, truncate)
    np.testing.assert_allclose(rope.inv_freq(d), want, rtol=1e-14)
    np.testing.assert_allclose(rope.amplitude, 0.1 * np.log(factor) + 1, rtol=1e-15)
    plain = dx.Rope(1e6).inv_freq(d)
    assert rope.inv_freq(d)[0] == plain[0]
    if d > 2:  # the slowest turn is stretched in full
        np.testing.assert_allclose(rope.inv_freq(d)[-1], plain[-1] / factor)


def test_yarn_amplitudes() -> None:
    assert dx.Rope(1e4, YARN | {"attention_factor": 0.75}).amplitude == 0.75
    deep = dx.Rope(1e4, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5})
    np.testing.assert_allclose(deep.amplitude, (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1))
    assert dx.Rope(1e4, YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}).amplitude == 1
    assert dx.Rope(1e4, YARN | {"factor": 0.5}).amplitude == 1


def test_dynamic_base_grows_with_the_length() -> None:
    d = 32
    for length, stretch in ((64, 1.0), (32, 1.0), (500, 2 * 500 / 64 - 1)):
        rope = dx.Rope(1e4, DYNAMIC | {"length": length})
        base = 1e4 * stretch ** (d / (d - 2))
        np.testing.assert_allclose(rope.inv_freq(d), base ** (-2 * np.arange(d // 2) / d))
    # The slowest frequency is divided by what the linear rule would divide all of them by.
    slowest = dx.Rope(1e4).inv_freq(d)[-1] / rope.inv_freq(d)[-1]
    np.testing.assert_allclose(slowest, 2 * 500 / 64 - 1)


@pytest.mark.parametrize("dim", [0, 3, -2, 2.5, True])
def test_dim_must_be_even(dim: Any) -> None:
    with pytest.raises(dx.ArgumentError, match="dim: got"):
        dx.Rope(1e4, dim=dim)


def test_dim_beyond_the_head() -> None:
    k, cache = torch.ones(1, 1, 4), torch.zeros(1, 4, 1, 4)
    with pytest.raises(dx.ArgumentError, match=r"k: got head size 4, expected at least rope.dim"):
        dx.paged_kv_append(
            k, k, cache, cache.clone(), page_table=torch.zeros(1, 1, dtype=torch.int32), kv_len=[0],
            cu_seqlens=[0, 1], rope=dx.Rope(1e4, dim=6),
        )  # fmt: skip
