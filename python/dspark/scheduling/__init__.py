# SPDX-License-Identifier: Apache-2.0
"""What the prefix scheduler is fed with: measured step costs and calibrated confidences."""

from __future__ import annotations

from dspark.scheduling.calibration import (
    Calibration,
    Reliability,
    evaluate,
    fit,
    reliability,
    survival_labels,
)
from dspark.scheduling.monitor import Monitor
from dspark.scheduling.profile import fingerprint, measure
from dspark.scheduling.providers import ConstantPrior, DraftProbability, OnlineAcceptance

__all__ = [
    "Calibration",
    "ConstantPrior",
    "DraftProbability",
    "Monitor",
    "OnlineAcceptance",
    "Reliability",
    "evaluate",
    "fingerprint",
    "fit",
    "measure",
    "reliability",
    "survival_labels",
]
