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
from dspark.scheduling.profile import fingerprint, measure

__all__ = [
    "Calibration",
    "Reliability",
    "evaluate",
    "fingerprint",
    "fit",
    "measure",
    "reliability",
    "survival_labels",
]
