# SPDX-License-Identifier: Apache-2.0
"""Accuracy of exp, log and expm1 of core/math.h against extended precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_ext._C import _testing

Array = np.ndarray[Any, Any]
LONG = np.longdouble

pytestmark = pytest.mark.skipif(
    np.finfo(LONG).nmant < 63, reason="the oracle needs a long double wider than a double"
)


def apply(name: str, x: Array, out: type = np.float64) -> Array:
    x = np.ascontiguousarray(x)
    y = np.empty(x.shape, out)
    getattr(_testing, name)(x.ctypes.data, y.ctypes.data, x.size)
    return y


def ulps(got: Array, exact: Array) -> Array:
    """Error in units of the last place of the result type, exact in long double."""
    spacing = np.spacing(np.abs(exact.astype(got.dtype))).astype(LONG)
    return np.abs(got.astype(LONG) - exact) / spacing


def spread(rng: np.random.Generator, low: float, high: float, n: int) -> Array:
    """Random points, the ends and values close to 0."""
    tiny = rng.choice([-1.0, 1.0], n // 4) * 10.0 ** rng.uniform(-18, 0, n // 4)
    tiny = tiny[(tiny > low) & (tiny < high)]
    return np.concatenate([rng.uniform(low, high, n), tiny, [low, high]])


def test_exp_f32(rng: np.random.Generator) -> None:
    x = spread(rng, -87, 88, 200_000).astype(np.float32)
    got = apply("exp_f32", x, np.float32)
    exact = np.exp(x.astype(LONG))
    assert ulps(got, exact).max() <= 1.1
    assert np.max(np.abs(got.astype(LONG) - exact) / exact) < 1.3e-7


def test_exp_f32_is_exact_at_zero_and_zero_below_its_range() -> None:
    x = np.array([0.0, -0.0, -87.0001, -1e30, -np.inf], np.float32)
    assert apply("exp_f32", x, np.float32).tolist() == [1, 1, 0, 0, 0]


def test_exp_f32_is_monotone_over_a_dense_grid() -> None:
    x = np.linspace(-20, 0, 400_001, dtype=np.float32)
    drops = np.diff(apply("exp_f32", x, np.float32).astype(np.float64))
    assert drops.min() >= -(2.0**-23)  # at most one last place of a value near 1


def test_exp2_weight(rng: np.random.Generator) -> None:
    x = spread(rng, -125, 0, 200_000).astype(np.float32)
    got = apply("exp2_weight", x, np.float32)
    exact = np.exp2(x.astype(LONG))
    assert np.max(np.abs(got.astype(LONG) - exact) / exact) < 1.7e-7


def test_exp2_weight_is_one_at_zero_and_nothing_beside_it_below_its_range() -> None:
    assert apply("exp2_weight", np.array([0.0, -0.0], np.float32), np.float32).tolist() == [1, 1]
    below = np.array([-125.0001, -1e30, -np.inf, np.nan], np.float32)
    got = apply("exp2_weight", below, np.float32)
    assert np.all((got > 0) & (got <= 2.0**-124))


def test_exp_f64_nonpositive_is_exp_f64_down_to_its_end(rng: np.random.Generator) -> None:
    x = spread(rng, -700, 0, 200_000)
    assert np.array_equal(apply("exp_f64_nonpositive", x), apply("exp_f64", x))
    below = np.array([-700.0001, -1e300, -np.inf])
    assert apply("exp_f64_nonpositive", below).tolist() == [0, 0, 0]


def test_exp_f64(rng: np.random.Generator) -> None:
    x = spread(rng, -708, 709, 200_000)
    assert ulps(apply("exp_f64", x), np.exp(x.astype(LONG))).max() <= 2
    assert apply("exp_f64", np.array([0.0, -708.5, -np.inf])).tolist() == [1, 0, 0]


def test_expm1_f64(rng: np.random.Generator) -> None:
    x = -np.abs(spread(rng, -60, 0, 200_000))
    x = np.concatenate([x, [-0.5, np.nextafter(-0.5, -1), -1e-300, -745.0]])
    assert ulps(apply("expm1_f64", x), np.expm1(x.astype(LONG))).max() <= 3
    assert apply("expm1_f64", np.array([0.0, -np.inf])).tolist() == [0, -1]


@pytest.mark.parametrize("around", ["one", "wide", "tiny"])
def test_log_f64(rng: np.random.Generator, around: str) -> None:
    n = 200_000
    if around == "one":  # where cancellation would show
        x = 1 + rng.choice([-1.0, 1.0], n) * 2.0 ** rng.uniform(-52, -1, n)
    elif around == "wide":
        x = np.exp(rng.uniform(-700, 700, n))
    else:
        x = 2.0 ** rng.uniform(-1022, -1000, n)
    x = np.concatenate([x, [1.0, np.sqrt(0.5), np.sqrt(2.0)]])
    assert ulps(apply("log_f64", x), np.log(x.astype(LONG))).max() <= 2


def test_gumbel_noise(rng: np.random.Generator) -> None:
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    words = np.concatenate([rng.integers(0, 2**32, 100_000), edges]).astype(np.uint32)
    v = (words.astype(LONG) + LONG(0.5)) * LONG(2.0) ** -32
    exact = -np.log(-np.log1p(-v))
    error = np.abs(apply("gumbel", words).astype(LONG) - exact)
    # Two logs of 2 ulp each; the outer one is conditioned like 1 near 0, so the bound is absolute.
    assert np.max(error / np.maximum(1, np.abs(exact))) < 8 * 2.0**-53


def test_binary16_of_every_pattern() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    got = apply("f16_to_f32", bits, np.float32)
    np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float32))
    finite = ~np.isnan(got)
    back = apply("f32_to_f16", got, np.uint16)
    np.testing.assert_array_equal(back[finite], bits[finite])
    assert np.isnan(back[~finite].view(np.float16)).all()


def test_bfloat16_of_every_pattern() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    got = apply("bf16_to_f32", bits, np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)
    back = apply("f32_to_bf16", got, np.uint16)
    finite = ~np.isnan(got)
    np.testing.assert_array_equal(back[finite], bits[finite])
    assert np.isnan(apply("bf16_to_f32", back[~finite], np.float32)).all()


def test_rounding_to_nearest_even(rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, 400_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = np.arange(2**16, dtype=np.uint32) << 16 | 0x8000  # ties of bfloat16
    eighths = np.arange(2**18, dtype=np.uint32) << 13 | 0x1000  # and some of binary16
    x = np.concatenate([x, halves.view(np.float32), eighths.view(np.float32)])
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(apply("f32_to_f16", x, np.uint16), expected)
    u = x.view(np.uint32).astype(np.uint64)
    down, rest = u >> 16, u & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (down & 1 == 1))
    np.testing.assert_array_equal(apply("f32_to_bf16", x, np.uint16), (down + up).astype(np.uint16))


@pytest.mark.parametrize("top", [0.8, 10.0, 2.0**20, 2.0**33], ids=str)
def test_sine_and_cosine(rng: np.random.Generator, top: float) -> None:
    """Angles of positions: absolute errors, up to the largest position."""
    quarter_turns = np.arange(200) * (np.pi / 2)
    x = np.concatenate([spread(rng, -top, top, 50_000), quarter_turns[quarter_turns < top]])
    for name, exact in (("sin_f64", np.sin(x.astype(LONG))), ("cos_f64", np.cos(x.astype(LONG)))):
        assert np.max(np.abs(apply(name, x).astype(LONG) - exact)) <= 2.0**-51
