# SPDX-License-Identifier: Apache-2.0
"""Keys, the tree sum and the inverse CDF of core/sampler.h against exact integers."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dspark_ext._C import _testing

Array = np.ndarray[Any, Any]


def pick(weights: Array, u53: int) -> int:
    w = np.ascontiguousarray(weights, np.float32)
    assert w.shape == (128,)
    return int(_testing.inner_pick(w.ctypes.data, u53))


def exact_pick(weights: Array, u53: int) -> int:
    integers = [int(Fraction(float(np.float32(w))) * 2**55) for w in weights]
    target = u53 * sum(integers) // 2**53
    total = 0
    for i, amount in enumerate(integers):
        total += amount
        if total > target:
            return i
    return -1


def test_inverse_cdf_is_exact(rng: np.random.Generator) -> None:
    for _ in range(300):
        w = np.exp(-rng.exponential(rng.choice([0.1, 3, 30]), 128)).astype(np.float32)
        w[rng.random(128) < rng.choice([0, 0.5, 0.95])] = 0
        w[rng.integers(128)] = 1
        u53 = int(rng.integers(2**53))
        assert pick(w, u53) == exact_pick(w, u53)


def test_inverse_cdf_at_cell_boundaries() -> None:
    w = np.zeros(128, np.float32)
    w[[3, 70, 127]] = [0.5, 1.0, 0.5]
    quarter = 2**51
    expected = {0: 3, quarter - 1: 3, quarter: 70, 3 * quarter - 1: 70, 3 * quarter: 127}
    assert {u: pick(w, u) for u in expected} == expected
    assert pick(w, 2**53 - 1) == 127  # never past the last id with mass


def test_no_mass_is_reported() -> None:
    assert pick(np.zeros(128), 0) == -1
    assert pick(np.full(128, 2.0**-60), 2**53 - 1) == -1  # below the integer grid


@pytest.mark.parametrize("u53", [0, 2**53 - 1])
def test_a_zero_weight_never_comes_out(u53: int, rng: np.random.Generator) -> None:
    for _ in range(50):
        w = np.where(rng.random(128) < 0.1, rng.random(128), 0).astype(np.float32)
        w[rng.integers(128)] = 1
        assert w[pick(w, u53)] > 0


def test_tree_sum_has_the_documented_order(rng: np.random.Generator) -> None:
    w = rng.random(128).astype(np.float32)
    t = w.copy()
    for half in (64, 32, 16, 8, 4, 2, 1):
        t = t[:half] + t[half:]
    assert _testing.halving_sum(w.ctypes.data) == t[0]


def test_packed_keys_order_by_key_then_by_lower_segment(rng: np.random.Generator) -> None:
    keys = np.sort(np.concatenate([rng.normal(0, 50, 200), [0.0, 1e300, -1e300]]))
    packed = [_testing.pack_key(float(k), int(rng.integers(2**19))) for k in keys]
    assert packed == sorted(packed)
    for key in (-3.25, 7.5):
        one, two = _testing.pack_key(key, 8), _testing.pack_key(key, 9)
        assert one > two and one >> 19 == two >> 19
    for segment in (0, 1, 1186, 2**19 - 1):
        assert _testing.packed_segment(_testing.pack_key(-1.5, segment)) == segment


def test_ordered_floats_keep_their_order(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.normal(0, 1e3, 500), [np.inf, -np.inf, 0.0, 1e-45]]).astype(np.float32)
    x.sort()
    y = np.empty(x.shape, np.uint32)
    _testing.ordered_f32(x.ctypes.data, y.ctypes.data, x.size)
    np.testing.assert_array_equal(np.diff(y.astype(np.int64)) > 0, np.diff(x) > 0)
    zeros = np.array([0.0, -0.0], np.float32)
    out = np.empty(2, np.uint32)
    _testing.ordered_f32(zeros.ctypes.data, out.ctypes.data, 2)
    assert out[0] == out[1]  # equal logits tie


def test_log_add(rng: np.random.Generator) -> None:
    for a, b in rng.normal(0, 300, (500, 2)):
        assert _testing.log_add(a, b) == pytest.approx(np.logaddexp(a, b), rel=4e-16, abs=1e-15)
    assert _testing.log_add(-np.inf, 2.5) == 2.5
    assert _testing.log_add(-np.inf, -np.inf) == -np.inf
