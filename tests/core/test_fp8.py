# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3: every byte, every tie between neighbours, saturation and NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dspark_ext._C import _testing
from dspark_ext.reference.rounding import round_to

Array = np.ndarray[Any, Any]


def _map(name: str, x: Array, dtype: type) -> Array:
    x, out = np.ascontiguousarray(x), np.empty(x.shape, dtype)
    getattr(_testing, name)(x.ctypes.data, out.ctypes.data, x.size)
    return out


def _decode(x: Array) -> Array:
    return _map("f8_to_f32", x.astype(np.uint8), np.float32)


def _encode(x: Array) -> Array:
    return _map("f32_to_f8", x.astype(np.float32), np.uint8)


def _formula(byte: int) -> float:
    """The format's definition: 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    if exponent == 0:
        return float(sign * mantissa * 2.0**-9)
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_byte() -> None:
    got = _decode(np.arange(256))
    want = np.array([_formula(b) for b in range(256)], np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.arange(256) > 127)
    torch_says = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(got, torch_says)


def test_every_byte_comes_back() -> None:
    bytes_ = np.arange(256)
    np.testing.assert_array_equal(_encode(_decode(bytes_)), bytes_)


def _reference(x: Array) -> Array:
    return round_to(x, "f8_e4m3").astype(np.float32)


def _nearest(x: Array) -> Array:
    """By search over all finite values; of two at the same distance the one with an even byte."""
    values = _decode(np.arange(127)).astype(np.float64)
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - values)
    distance[:, 1::2] += np.where(distance[:, 1::2] == distance.min(1, keepdims=True), 1e-12, 0)
    return np.copysign(values[distance.argmin(1)], x).astype(np.float32)


@pytest.mark.parametrize(
    "encode", [lambda x: _decode(_encode(x)), _reference], ids=["compiled", "reference"]
)
def test_rounding_to_nearest_even(
    rng: np.random.Generator, encode: Callable[[Array], Array]
) -> None:
    values = _decode(np.arange(127))
    middle = (values[1:] + values[:-1]) / 2  # exact in float32: the ties
    around = [np.nextafter(middle, np.float32(s), dtype=np.float32) for s in (-1, 1e9)]
    x = np.concatenate([middle, *around, rng.uniform(-448, 448, 2000), rng.normal(0, 0.01, 2000)])
    x = np.concatenate([x, -x]).astype(np.float32)
    np.testing.assert_array_equal(encode(x), _nearest(x))
    np.testing.assert_array_equal(np.signbit(encode(x)), np.signbit(x))


def test_saturation_zeros_and_nan() -> None:
    large = np.array([448, 449, 463.99, 464, 465, 480, 1e30, np.finfo(np.float32).max, np.inf])
    assert set(_encode(large)) == {0x7E}
    assert set(_encode(-large)) == {0xFE}
    np.testing.assert_array_equal(_reference(-large), -448)
    small = np.array([0.0, 1e-45, 2.0**-126, 2.0**-10])  # 2^-10 lies half way to 2^-9
    assert set(_encode(small)) == {0}
    assert set(_encode(-small)) == {0x80}
    assert _encode(np.array([np.nextafter(np.float32(2.0**-10), np.float32(1))]))[0] == 1
    nan = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001], np.uint32)
    assert _encode(nan.view(np.float32)).tolist() == [0x7F, 0x7F, 0x7F, 0xFF, 0xFF]
    assert np.isnan(_decode(np.array([0x7F, 0xFF]))).all()
    assert np.isnan(_reference(np.array([np.nan]))).all()
