# SPDX-License-Identifier: Apache-2.0
"""confidence: STS, running product, and the status of NaN inputs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit

import dspark_ext as dx


@pytest.mark.parametrize("gamma", [1, 5, 7, 16])
@pytest.mark.parametrize("requests", [0, 1, 33])
def test_matches_float64(backend: str, rng: np.random.Generator, requests: int, gamma: int) -> None:
    logit = rng.normal(0, 4, (requests, gamma)).astype(np.float32)
    tau = rng.uniform(0.5, 3, gamma).astype(np.float32)
    got = dx.confidence(logit, tau, backend=backend)
    c = expit(logit.astype(np.float64) / tau)
    np.testing.assert_allclose(got.conditional, c, rtol=2**-23)
    np.testing.assert_allclose(got.survival, np.cumprod(c, axis=1), rtol=2 * gamma * 2**-24)
    assert not np.any(got.status)


def test_saturates_and_counts_nan_as_zero(backend: str) -> None:
    raw = np.array([[1e4, -1e4], [np.inf, -np.inf], [np.nan, 3.0], [2.0, 3.0]], np.float32)
    got = dx.confidence(raw, backend=backend)
    np.testing.assert_array_equal(got.conditional[:3, 0], [1, 1, 0])
    np.testing.assert_array_equal(got.conditional[:2, 1], [0, 0])
    np.testing.assert_array_equal(got.status, [0, 0, dx.Status.NAN_CONFIDENCE, 0])
    assert got.survival[2].tolist() == [0, 0]


def test_probabilities_are_clamped(backend: str) -> None:
    given = np.array([[1.5, -0.25, 0.5]], np.float32)
    got = dx.confidence(probability=given, backend=backend)
    assert got.conditional.tolist() == [[1.0, 0.0, 0.5]]


def test_inactive_rows_are_not_written(backend: str) -> None:
    out = dx.Confidence(
        np.full((2, 3), 7, np.float32), np.full((2, 3), 7, np.float32), np.full(2, 7, np.int32)
    )
    dx.confidence(np.full((2, 3), np.nan, np.float32), active=[0, 1], out=out, backend=backend)
    assert out.survival[0].tolist() == [7, 7, 7] and out.status[0] == 7
    assert out.status[1] == dx.Status.NAN_CONFIDENCE


def test_errors_name_everything_at_once() -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.confidence(np.zeros((2, 17)), temperature=-1.0, active=[1, 1, 1])
    text = str(error.value)
    for part in ("logit: got float64", "gamma: got 17", "temperature: got", "active: got shape"):
        assert part in text


def test_strict_raises_with_the_request(backend: str) -> None:
    with pytest.raises(dx.StatusError, match="request 1: NAN_CONFIDENCE"):
        dx.confidence(np.array([[1], [np.nan]], np.float32), strict=True, backend=backend)
