# SPDX-License-Identifier: Apache-2.0
"""The segment sampler draws the law it is given: chi-square, order rules, corner cases."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dspark_ext.reference.philox import Kind
from dspark_ext.reference.rounding import LARGEST, clean, round_to
from dspark_ext.reference.sampler import Noise, argmax, make_law, sample


def _noise(position: int, forced: int | None = None) -> Noise:
    return Noise(11, position, Kind.DRAFT_SEGMENT, Kind.DRAFT_INNER, 1, forced)


def _p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """Chi-square test; the rarest ids share a cell of at least five expected draws."""
    assert counts[probability == 0].sum() == 0
    expected = probability * counts.sum()
    order = np.argsort(expected)
    last_small = np.searchsorted(np.cumsum(expected[order]), 5)
    cell = np.maximum(np.arange(len(order)), last_small) - last_small
    observed = np.bincount(cell, weights=counts[order])
    return float(stats.chisquare(observed, np.bincount(cell, weights=expected[order])).pvalue)


@pytest.mark.parametrize("vocab", [3, 128, 129, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_law_by_chi_square(vocab: int, temperature: float) -> None:
    z = np.random.default_rng(vocab).normal(size=vocab) * 1.5
    law = make_law(z, temperature)
    counts = np.zeros(vocab)
    for position in range(2000):
        counts[sample(law, _noise(position)).token] += 1
    probability = np.exp(law.log_prob())
    assert _p_value(counts, probability) > 1e-4
    # control: the same counts refuse the law of another temperature
    assert _p_value(counts, np.exp(make_law(z, temperature * 2.0).log_prob())) < 1e-4


def test_factor_multiplies_the_law() -> None:
    z = np.random.default_rng(5).normal(size=300)
    factor = np.random.default_rng(6).uniform(size=300) * (np.arange(300) % 3 > 0)
    law = make_law(z, 1.0)
    counts = np.zeros(300)
    for position in range(2000):
        counts[sample(law, _noise(position), factor).token] += 1
    expected = np.exp(law.log_prob()) * factor
    assert _p_value(counts, expected / expected.sum()) > 1e-4


def test_t10_temperature() -> None:
    law = make_law(np.array([1.0, 2.0, 0.5]), 0.7)
    np.testing.assert_allclose(np.exp(law.log_prob()), [0.1766, 0.7369, 0.0865], atol=1e-4)
    assert argmax(np.array([1.0, 2.0, 0.5])).token == 1


def test_v11_top_k_cuts_ties_by_id() -> None:
    with np.errstate(divide="ignore"):
        law = make_law(np.log([0.4, 0.3, 0.3, 0.0]), 1.0, top_k=2)
    np.testing.assert_allclose(np.exp(law.log_prob()), [4 / 7, 3 / 7, 0, 0])


def test_top_p_keeps_the_crossing_id_and_renormalises_after_top_k() -> None:
    z = np.log([0.5, 0.25, 0.125, 0.125])
    assert make_law(z, 1.0, top_p=0.5).support.tolist() == [True, False, False, False]
    assert make_law(z, 1.0, top_p=0.51).support.tolist() == [True, True, False, False]
    # .5 of what top-k left is .6667 for id 0, so .6 stops there, where .6 of the whole would not
    assert make_law(z, 1.0, top_k=2, top_p=0.6).support.tolist() == [True, False, False, False]
    assert make_law(z, 1.0, top_p=0.6).support.tolist() == [True, True, False, False]


def test_min_p_comes_before_top_k() -> None:
    law = make_law(np.array([3.0, 2.0, 0.0, -2.0]), 1.0, min_p=0.3)
    np.testing.assert_allclose(np.exp(law.log_prob()), [0.731, 0.269, 0, 0], atol=1e-3)
    assert make_law(np.zeros(4), 1.0, min_p=1.0).support.all()


@pytest.mark.parametrize("forced", [0, 2**53 - 1], ids=["u=0", "u=max"])
@pytest.mark.parametrize("finite", [0, 77, 300])
def test_v20_one_finite_logit(forced: int, finite: int) -> None:
    z = np.full(301, -np.inf)
    z[finite] = -3.0
    assert sample(make_law(z, 1.0), _noise(0, forced)).token == finite
    assert sample(make_law(z, 1.0), _noise(0)).token == finite


def test_no_mass_is_no_draw() -> None:
    assert sample(make_law(np.full(5, -np.inf), 1.0), _noise(0)) is None
    assert sample(make_law(np.zeros(5), 1.0), _noise(0), np.zeros(5)) is None


def test_mass_below_the_integer_grid_takes_the_last_positive_id() -> None:
    factor = np.array([0.0, 1e-30, 1e-30, 0.0])
    assert sample(make_law(np.zeros(4), 1.0), _noise(0), factor).token == 2


def test_padding_does_not_change_a_draw() -> None:
    z = np.random.default_rng(9).normal(size=200)
    padded = np.concatenate([z, np.full(400, -np.inf)])
    for position in range(50):
        one = sample(make_law(z, 1.0), _noise(position))
        two = sample(make_law(padded, 1.0), _noise(position))
        assert one.token == two.token


def test_forced_draws_walk_the_cells() -> None:
    law = make_law(np.log([0.25, 0.5, 0.25]), 1.0)
    u = [0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2.0**-53]
    tokens = [sample(law, _noise(0, int(x * 2.0**53))).token for x in u]
    assert tokens == [0, 0, 1, 1, 2, 2]


def test_argmax_lowest_id_on_ties() -> None:
    assert argmax(np.array([0.0, 2.0, 2.0])).token == 1


@pytest.mark.parametrize(
    ("value", "bf16"),
    [
        pytest.param(1 + 2.0**-8, 1.0, id="half-to-even-down"),
        pytest.param(1 + 3 * 2.0**-8, 1 + 2.0**-6, id="half-to-even-up"),
        pytest.param(1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7, id="one-rounding-not-two"),
        pytest.param(2.0**-133 * 1.5, 2.0**-132, id="subnormal"),
        pytest.param(3.4e38, np.inf, id="overflow"),
    ],
)
def test_bf16_rounding(value: float, bf16: float) -> None:
    assert float(round_to(value, "bf16")) == bf16
    assert float(round_to(-value, "bf16")) == -bf16


def test_rounding_equals_numpys_for_the_types_it_has() -> None:
    x = np.random.default_rng(1).normal(size=2000) * np.exp(
        np.random.default_rng(2).normal(size=2000) * 6
    )
    with np.errstate(over="ignore"):
        assert np.array_equal(round_to(x, "f16"), x.astype(np.float16).astype(np.float64))
    assert np.array_equal(round_to(x, "f32"), x.astype(np.float32).astype(np.float64))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_special_values(dtype: str) -> None:
    values, nan = clean([np.nan, np.inf, -np.inf, 2.0], dtype)
    assert nan
    assert values.tolist() == [-np.inf, LARGEST[dtype], -np.inf, 2.0]
