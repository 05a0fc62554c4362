# SPDX-License-Identifier: Apache-2.0
"""Predictions beside their labels: how far apart, and what chance explains of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.scheduling.calibration import BINS, Reliability, _bin, _ece

__all__ = ["Gap", "PositionReport", "Usual", "gap_of", "known_flags"]

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Usual:
    """What was left over when the temperatures in use were fitted."""

    gap: float  # mean label less mean prediction
    ece: float

    @classmethod
    def of(cls, reports: Sequence[Reliability], k: int) -> Usual | None:
        """Of position k + 1; ``None`` where nothing was measured."""
        if k >= len(reports) or not reports[k].count:
            return None
        return cls(reports[k].label_mean - reports[k].prediction_mean, reports[k].ece)


@dataclass(frozen=True)
class Gap:
    """Predictions of one kind beside their labels."""

    count: int
    prediction: float  # mean; NaN without labels
    label: float
    sigma: float  # standard error of the difference of the means if the predictions are right
    ece: float
    ece_noise: float  # what right predictions would show on as many labels, on average
    ece_sigma: float  # and the standard deviation of that

    def exceeds(self, least: float, sigmas: float, usual: Usual | None = None) -> bool:
        """Whether means or ECE have moved by more than ``least`` and than what chance explains."""
        was = Usual(0.0, 0.0) if usual is None else usual
        moved = abs(self.label - self.prediction - was.gap)
        excess = self.ece - self.ece_noise - was.ece
        means = moved > least and moved > sigmas * self.sigma
        return bool(means or (excess > least and excess > sigmas * self.ece_sigma))


def gap_of(prediction: F64, label: F64) -> Gap:
    """Compare predictions (N,) with labels (N,) in [0, 1].

    Examples
    --------
    >>> gap = gap_of(np.full(100, 0.8), np.repeat([1.0, 0.0], 50))
    >>> round(gap.label - gap.prediction, 6), round(gap.sigma, 6), gap.exceeds(0.05, 4)
    (-0.3, 0.04, True)
    """
    n = prediction.size
    if not n:
        return Gap(0, *[math.nan] * 6)
    spread = prediction * (1 - prediction)
    bins = np.bincount(_bin(prediction, BINS), weights=spread, minlength=BINS)
    return Gap(
        count=int(n),
        prediction=float(prediction.mean()),
        label=float(label.mean()),
        sigma=float(np.sqrt(spread.sum()) / n),
        ece=_ece(prediction, label, BINS),
        # A bin's sum of errors is close to normal: E|x| = sigma sqrt(2 / pi).
        ece_noise=float(np.sqrt(bins * 2 / np.pi).sum() / n),
        ece_sigma=float(np.sqrt(bins.sum() * (1 - 2 / np.pi)) / n),
    )


@dataclass(frozen=True)
class PositionReport:
    """What is known of one position of a bucket."""

    position: int  # from 1
    scheduled: int  # rounds in which it was verified
    conditional: Gap  # of c_k, at scheduled drafts
    survival: Gap  # of a_k, where the draft was due
    fitted_ece: float | None  # of a_k, when the temperatures in use were fitted
    drift: bool


def known_flags(
    accepted: NDArray[Any], drafts: NDArray[Any], stop_ids: NDArray[Any]
) -> NDArray[np.int8]:
    """Flags (R, gamma) with everything behind a drafted stop id unknown (-2), in both outcomes.

    Examples
    --------
    >>> known_flags(np.array([[0, -1], [1, -2]]), np.array([[7, 1], [7, 1]]), np.array([[7]] * 2))
    array([[ 0, -2],
           [ 1, -2]], dtype=int8)
    """
    stops = (drafts[:, :, None] == stop_ids[:, None, :]) & (stop_ids[:, None, :] >= 0)
    behind = np.cumsum(stops.any(axis=2), axis=1) - stops.any(axis=2) > 0
    return np.where(behind, -2, accepted).astype(np.int8)
