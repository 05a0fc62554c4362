# SPDX-License-Identifier: Apache-2.0
"""What each primitive does, by small kernels: in the emulation and, where there is one, on a GPU.

The answers are computed here, from CUDA's manual. For a GPU, ``DSPARK_CONFORMANCE`` names the
library that nvcc makes of the same kernels (README.md has the command).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import hopper_answers as hopper
import numpy as np
import pytest

from dspark_ext import _C

Array = np.ndarray[Any, Any]
U32, F64 = np.uint32, np.float64


# ---- answers, from the 32-bit words that a kernel reads


def shuffles(words: Array) -> Array:
    lane = np.arange(32)

    def inside(source: Array, width: int) -> Array:
        return np.where(source // width == lane // width, source, lane)

    narrow = lane // 16 * 16 + 19 % 16
    xor = np.where((lane ^ 9) // 8 > lane // 8, lane, lane ^ 9)
    sources = [
        lane * 7 % 32,
        lane ^ 5,
        np.where(lane < 3, lane, lane - 3),
        np.where(lane > 28, lane, lane + 3),
        narrow,
        xor,
        inside(np.where(lane % 8 < 3, lane, lane - 3), 8),
        inside(np.where(lane % 8 > 4, lane, lane + 3), 8),
    ]
    return np.concatenate([words[s] for s in sources])


def bits(flags: Array) -> int:
    return int(sum(1 << int(i) for i in np.flatnonzero(flags)))


def votes(words: Array) -> Array:
    rows = [
        [bits(words % 3 == 0)] * 32,
        [1] * 32,
        [int((words % 2 == 0).all())] * 32,
        [bits(words % 5 == v % 5) for v in words],
        [bits(words[:16] % 2 == 0)] * 16 + [0] * 16,
    ]
    return np.array(rows, U32).reshape(-1)


def reductions(words: Array) -> Array:
    signed = words.view(np.int32)
    totals = [
        words.sum(dtype=U32),
        words.min(),
        words.max(),
        signed.min().view(U32),
        signed.max().view(U32),
        np.bitwise_and.reduce(words | U32(0xFFFF0000)),
        np.bitwise_or.reduce(words & U32(0x0F0F0F0F)),
    ]
    return np.repeat(np.array(totals, U32), 32)


def block_votes(words: Array) -> Array:
    return np.full(96, 1 | int((words % 2).sum()) << 2, U32)


def integers(words: Array) -> Array:
    rows = []
    for a, b in words.reshape(32, 2).tolist():
        wide = a << 32 | b
        high = wide * 0x9E3779B97F4A7C15 >> 64
        shifted, left = a >> (31 if b % 33 == 32 else b % 33), a << (b % 32) & 0xFFFFFFFF
        signed = [np.frombuffer(x.to_bytes(4, "little"), np.int8).astype(int) for x in (a, b)]
        both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        row = [
            a.bit_count(),
            32 - shifted.bit_length(),
            (left & -left).bit_length(),
            int(f"{a:032b}"[::-1], 2),
            a * b >> 32,
            high & 0xFFFFFFFF,
            high >> 32,
            (17 + int((signed[0] * signed[1]).sum())) & 0xFFFFFFFF,
            int.from_bytes(bytes(both[i] for i in (0, 6, 1, 7)), "little"),
            (wide_of(b, a) >> (b & 31)) & 0xFFFFFFFF,
            wide.bit_count(),
            64 - (wide >> 9).bit_length(),
        ]
        rows.append(row)
    return np.array(rows, U32).reshape(-1)


def wide_of(high: int, low: int) -> int:
    return high << 32 | low


def atomics(words: Array) -> Array:
    signed, wide = words.view(np.int32), words.astype(np.uint64)
    out = np.zeros(64, U32)
    out[0] = out[1] = out[7] = words.sum(dtype=U32)
    out[2] = words.max()
    out[3] = min(0, int(signed.min())) & 0xFFFFFFFF
    out[4] = np.bitwise_or.reduce(words & U32(0x11111111))
    out[5] = (words & U32(0xFF)).sum(dtype=U32)
    out[6] = 99
    index = np.arange(1024, dtype=np.uint64)
    out[16:20] = np.array([(wide << 20).sum(), ((wide << 20) | index).max()], np.uint64).view(U32)
    out[24:26] = np.array([((wide << 31) | index).max()], np.uint64).view(U32)
    return out


def handover(words: Array) -> Array:
    out = np.zeros(1088, U32)
    for turn in range(8):
        out[:1024] = out[:1024] * U32(3) + words + U32(turn)
    out[1024] = 8
    out[1040:1042] = np.array([7 << 40], np.uint64).view(U32)
    return out


def streams(words: Array) -> Array:
    four, two = words.reshape(64, 4), words[:128].reshape(64, 2)
    factors = np.array([1, 3, 5, 7], U32)
    parts = [(four * factors).sum(1, dtype=U32), (two * factors[:2]).sum(1, dtype=U32), words[:64]]
    return np.concatenate([*parts, words.view(np.uint16)[:64].astype(U32)])


def copies(words: Array) -> Array:
    data = words.view(np.uint8).reshape(64, 16)
    first = data * (np.arange(16) < np.arange(64)[:, None] % 17)
    both = np.concatenate([first[::-1], data])  # the second copy turns round what is turned again
    return np.ascontiguousarray(both.astype(np.uint8)).view(U32).reshape(-1)


def ring(words: Array) -> Array:
    return np.ascontiguousarray(words.reshape(8, 64)[:, ::-1]).reshape(-1)


def load_matrices(words: Array) -> Array:
    rows = words.reshape(32, 4)
    matrices = [rows[8 * m : 8 * m + 8].reshape(-1) for m in range(4)]
    turned = [rows[::-1][8 * m : 8 * m + 8].reshape(-1) for m in range(2)]
    return np.concatenate([*matrices, *turned])


def load_transposed(words: Array) -> Array:
    matrices = words.view(np.uint16).reshape(4, 8, 8)
    turned = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    return turned.reshape(-1).view(U32)


def conversions(words: Array) -> Array:
    byte = np.arange(256)
    body, sign = byte & 0x7F, np.where(byte < 128, 1.0, -1.0)
    exponent, fraction = body >> 3, body & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    halves = (sign * size).astype(np.float16).view(np.uint16).astype(U32)
    halves[[127, 255]] = [0x7FFF, 0xFFFF]
    x = np.ascontiguousarray(words.view(np.float32))
    bits16 = []
    for name in ("f32_to_bf16", "f32_to_f16"):
        out = np.zeros(256, np.uint16)
        getattr(_C._testing, name)(x.ctypes.data, out.ctypes.data, 256)
        bits16.append(out.astype(U32))
    return np.concatenate([h | h[::-1] << U32(16) for h in (halves, *bits16)])


def exponentials(words: Array) -> Array:
    x = words.view(np.float32)
    return np.concatenate([np.exp2(x.astype(F64)), 1 / (np.float32(1) - x).astype(F64)])


def multiply(convert: Callable[[Array], Array], words: Array) -> Array:
    values = convert(words.reshape(24, 8))
    start = np.tile(np.array([1, 2], values.dtype), (16, 4))
    start[8:] += 2
    return start + values[:16] @ values[16:].T


def bf16(words: Array) -> Array:
    return (words.view(np.uint16).astype(U32) << 16).view(np.float32).astype(F64)


def f16(words: Array) -> Array:
    return words.view(np.float16).astype(F64)


def s8(words: Array) -> Array:
    return words.view(np.int8).astype(np.int32)


def arithmetic(words: Array) -> Array:
    """The same functions compiled for the host: a GPU must give the same bits."""
    t, x = _C._testing, np.ascontiguousarray(words.view(np.float32))
    y = x.astype(F64)

    def apply(name: str, values: Array, dtype: Any) -> Array:
        out = np.zeros(len(values), dtype)
        getattr(t, name)(values.ctypes.data, out.ctypes.data, len(values))
        return out

    w = words.tolist()
    noise = [t.philox(w[i], i, 2, 3, 5, w[255 - i])[i % 4] for i in range(256)]
    halves = apply("f32_to_bf16", x, np.uint16).astype(U32) << U32(16)
    return np.concatenate(
        [
            apply("exp_f32", x, U32),
            apply("expm1_f32", x, U32),
            halves | apply("f32_to_f16", x, np.uint16),
            np.array(noise, U32),
            apply("exp_f64", y, F64).view(U32),
            apply("expm1_f64", y, F64).view(U32),
            apply("log_f64", 1.0 - y, F64).view(U32),
        ]
    )


ANSWERS: dict[str, Callable[[Array], Array]] = {
    f.__name__: f
    for f in (
        *(shuffles, votes, reductions, block_votes, integers, atomics, handover, streams, copies),
        *(ring, load_matrices, load_transposed, arithmetic, conversions, exponentials),
    )
} | {
    "multiply_bf16": lambda words: multiply(bf16, words),
    "multiply_f16": lambda words: multiply(f16, words),
    "multiply_s8": lambda words: multiply(s8, words),
    **hopper.ANSWERS,
}


def inputs(name: str, rng: np.random.Generator, count: int) -> Array:
    """Words that mean something to the case."""
    if name in hopper.PRODUCTS:
        return hopper.product_inputs(hopper.PRODUCTS[name], rng, count)
    if name == "multiply_bf16":
        values = rng.normal(0, 1, 2 * count).astype(np.float32)
        return np.ascontiguousarray((values.view(U32) >> 16).astype(np.uint16)).view(U32)
    if name == "multiply_f16":
        return rng.normal(0, 1, 2 * count).astype(np.float16).view(U32)
    if name == "conversions":
        return rng.normal(0, 1, count).astype(np.float32).view(U32)
    if name == "exponentials":
        x = np.concatenate([[0.0], rng.uniform(-126, 0, count - 2), [-np.inf]])
        return x.astype(np.float32).view(U32)
    if name == "arithmetic":
        return (-(rng.uniform(0, 1, count) ** 6) * 80).astype(np.float32).view(U32)
    return rng.integers(0, 2**32, count, dtype=U32)


# ---- running them


def bind(library: ctypes.CDLL, status: type) -> dict[str, tuple[int, int, int]]:
    """Declare the functions; return input bytes, output bytes and capability by name."""
    library.dspark_conformance.restype = status
    library.dspark_conformance.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    library.dspark_conformance_case.restype = ctypes.c_char_p
    cases: dict[str, tuple[int, int, int]] = {}
    while True:
        sizes = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
        name = library.dspark_conformance_case(len(cases), *map(ctypes.byref, sizes))
        if name is None:
            return cases
        cases[name.decode()] = (sizes[0].value, sizes[1].value, sizes[2].value)


def run_on_host(library: Any, name: str, words: Array, out_bytes: int) -> Array:
    out = np.zeros(out_bytes // 4, U32)
    library.dspark_simt_forget()
    library.register(words=words, out=out)
    status = library.dspark_conformance(name.encode(), words.ctypes.data, out.ctypes.data, None)
    assert status.code == 0, status.message.decode()
    return out


def check(name: str, words: Array, out: Array) -> None:
    if name in hopper.PRODUCTS:
        hopper.check_product(hopper.PRODUCTS[name], words, out)
        return
    expected = ANSWERS[name](words)
    if name == "exponentials":  # the bound of the PTX manual; 0 and -infinity are exact
        got = out.view(np.float32)
        np.testing.assert_array_less(np.abs(got - expected), 2.0**-22 * expected + 1e-45)
        assert got[0] == got[256] == 1
        assert got[255] == got[511] == 0
        return
    if name == "conversions":  # which NaN is not promised
        nan = (out[:256, None] >> U32([0, 16]) & U32(0x7FFF)) > 0x7C00
        np.testing.assert_array_equal(nan.any(1), np.isin(np.arange(256), [0, 127, 128, 255]))
        keep = ~np.isin(np.arange(768), [0, 127, 128, 255])
        np.testing.assert_array_equal(out[keep], expected[keep])
        return
    if not name.startswith("multiply") or name == "multiply_s8":
        np.testing.assert_array_equal(out, expected.reshape(-1).view(U32))
        return
    # 16 products and a start value; tensor cores may keep 2 bits less than float32 of the largest.
    got = out.view(np.float32).reshape(16, 8)
    size = 4 + multiply(lambda w: np.abs((bf16 if "bf" in name else f16)(w)), words)
    np.testing.assert_array_less(np.abs(got - expected), size * 17 * 2.0**-22)


@pytest.mark.parametrize("seed", ["0", "5"])
@pytest.mark.parametrize("kind", ["fast", "checked"])
@pytest.mark.parametrize("name", ANSWERS)
def test_emulation(
    open_library: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    name: str,
    kind: str,
    seed: str,
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_SEED", seed)
    library = open_library(kind)
    in_bytes, out_bytes, _ = bind(library, library.Status)[name]
    words = inputs(name, rng, in_bytes // 4)
    check(name, words, run_on_host(library, name, words, out_bytes))


def test_every_case_has_an_answer(fast: Any) -> None:
    assert set(ANSWERS) <= set(bind(fast, fast.Status))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ANSWERS if "DSPARK_CONFORMANCE" in os.environ else ["any"])
def test_gpu(rng: np.random.Generator, open_library: Callable[..., Any], name: str) -> None:
    path = os.environ.get("DSPARK_CONFORMANCE")
    if not path:
        pytest.skip("DSPARK_CONFORMANCE is not set: no library of nvcc's")
    torch = pytest.importorskip("torch")
    library = open_library(path)
    in_bytes, out_bytes, capability = bind(library, library.Status)[name]
    if torch.cuda.get_device_capability() < divmod(capability, 10):
        pytest.skip(f"needs compute capability {capability}")
    words = inputs(name, rng, in_bytes // 4)
    source = torch.from_numpy(words.view(np.int32)).cuda()
    out = torch.zeros(out_bytes // 4, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    status = library.dspark_conformance(name.encode(), source.data_ptr(), out.data_ptr(), stream)
    assert status.code == 0, status.message.decode()
    check(name, words, out.cpu().numpy().view(U32))
