# SPDX-License-Identifier: Apache-2.0
"""Golden values of the confidence reference."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_ext.reference.confidence import confidence
from dspark_ext.status import Status


def test_m2_sigmoid() -> None:
    got = confidence([[-2.0, 1.25]])
    np.testing.assert_allclose(got.conditional, [[0.119203, 0.777300]], atol=1e-6)
    np.testing.assert_allclose(got.survival, [[0.119203, 0.119203 * 0.777300]], atol=1e-6)


def test_m4_extremes() -> None:
    raw = [[1e4, np.inf], [-1e4, -np.inf], [np.nan, 5.0], [2.0, np.nan]]
    got = confidence(raw)
    assert got.conditional[:2].tolist() == [[1, 1], [0, 0]]
    assert got.conditional[2, 0] == 0
    assert got.survival[2].tolist() == [0, 0]
    nan = int(Status.NAN_CONFIDENCE)
    assert got.status.tolist() == [0, 0, nan, nan]


def test_sts_divides_the_logit_by_position() -> None:
    np.testing.assert_allclose(
        confidence([[2.0, 2.0]], temperature=[1.0, 2.0]).conditional,
        confidence([[2.0, 1.0]]).conditional,
    )


@pytest.mark.parametrize("tau", [0.0, -1.0, np.nan, np.inf])
def test_bad_temperature_is_a_bit_and_never_a_survivor(tau: float) -> None:
    got = confidence([[3.0, 3.0]], temperature=[1.0, tau])
    assert got.survival[0, 0] > 0.9
    assert got.survival[0, 1] == 0
    assert got.status[0] == Status.BAD_PARAM


def test_inactive_rows_stay_silent() -> None:
    got = confidence(probability=[[np.nan, 1.0], [2.0, 0.5]], active=[0, 1])
    assert got.status.tolist() == [0, 0]
    assert got.survival.tolist() == [[0, 0], [1, 0.5]]


def test_exactly_one_input() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        confidence()
    with pytest.raises(ValueError, match="exactly one"):
        confidence([[0.0]], probability=[[0.5]])
