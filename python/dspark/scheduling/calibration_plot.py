# SPDX-License-Identifier: Apache-2.0
"""Reliability diagrams of survivals, before and after calibration, in the shape of DSpark figure 6.

They need matplotlib, ``pip install 'dspark[plots]'``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.scheduling.calibration import (
    BINS,
    Reliability,
    _bin,
    reliability,
    survival_labels,
    survivals,
)
from dspark.scheduling.plotting import pyplot
from dspark_ext import ArgumentError

__all__ = ["Curve", "curves", "plot_reliability"]

F64 = NDArray[np.float64]
BEFORE, AFTER, COUNTS = "#c2571a", "#1f5fa8", "#c9ccd1"


@dataclass(frozen=True)
class Curve:
    """The bins of one position: what was predicted and what happened."""

    count: NDArray[np.int64]  # [bins]
    prediction: F64  # [bins] means; NaN in an empty bin
    label: F64
    measures: Reliability


def curves(
    logit: ArrayLike, accepted: ArrayLike, temperature: ArrayLike | None = None, bins: int = BINS
) -> list[Curve]:
    """The reliability curve of a_k at every position.

    Parameters
    ----------
    logit : array_like, shape (N, gamma)
        Raw logits.
    accepted : array_like, shape (N, gamma), int
        Flags of the sampler; rounds that did not schedule a position do not count there.
    temperature : array_like, shape (gamma,), optional
        STS temperatures; 1 when absent.
    bins : int
        Equal bins, those of the ECE.

    Returns
    -------
    list of Curve
        One a position. Their counts, means and ECE belong together:
        ``ECE = sum_b count_b |prediction_b - label_b| / sum_b count_b``.

    Examples
    --------
    >>> curve = curves([[0.0], [0.0]], [[1], [0]])[0]
    >>> int(curve.count[10]), float(curve.prediction[10]), float(curve.label[10])
    (2, 0.5, 0.5)
    """
    label, known = survival_labels(accepted)
    a = survivals(logit, temperature)
    if a.shape != label.shape:
        raise ArgumentError(
            f"curves: logit: got shape {list(a.shape)}, expected {list(label.shape)} like accepted"
        )
    found = []
    for k in range(a.shape[1]):
        p, y = a[known[:, k], k], label[known[:, k], k]
        index = _bin(p, bins)
        count = np.bincount(index, minlength=bins)
        with np.errstate(invalid="ignore"):
            mean_p, mean_y = (np.bincount(index, x, minlength=bins) / count for x in (p, y))
        found.append(Curve(count, mean_p, mean_y, reliability(p, y, bins)))
    return found


def plot_reliability(
    path: str | Path, logit: ArrayLike, accepted: ArrayLike, temperature: ArrayLike | None = None
) -> None:
    """Write one panel a position: before calibration, and after it when ``temperature`` is given.

    Grey bars are the counts of the uncalibrated predictions. The file is the same for the same
    rounds.

    Raises
    ------
    ArgumentError
        When matplotlib is missing, or arrays do not fit each other.
    """
    plots = pyplot()
    before = curves(logit, accepted)
    after = None if temperature is None else curves(logit, accepted, temperature)
    columns = min(4, len(before))
    rows = -(-len(before) // columns)
    size = (3.1 * columns, 3.2 * rows)
    figure, axes = plots.subplots(rows, columns, figsize=size, squeeze=False, sharey=True)
    for k, axis in enumerate(axes.flat):
        if k < len(before):
            _panel(axis, k, before[k], None if after is None else after[k])
        else:
            axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("observed survival")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.04 + 0.04 / rows, 1, 1))
    figure.savefig(path, dpi=120, format="png", metadata={"Software": None})
    plots.close(figure)


def _panel(axis: Any, k: int, before: Curve, after: Curve | None) -> None:
    share = before.count / max(int(before.count.max()), 1)
    width = 1 / len(share)
    middle = (np.arange(len(share)) + 0.5) * width
    axis.bar(middle, 0.3 * share, width=0.9 * width, color=COUNTS, label="predictions, before")
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    drawn = [("before", before, BEFORE, "o--")]
    drawn += [] if after is None else [("after", after, AFTER, "o-")]
    for name, curve, color, style in drawn:
        used = curve.count > 0
        x, y = curve.prediction[used], curve.label[used]
        axis.plot(x, y, style, color=color, markersize=3.5, linewidth=1.3, label=name)
    last = before if after is None else after
    ece = f"{100 * before.measures.ece:.1f} %"
    ece += "" if after is None else f" → {100 * after.measures.ece:.1f} %"
    auc = "–" if math.isnan(last.measures.auc) else f"{last.measures.auc:.3f}"
    axis.set_title(f"draft {k + 1}: ECE {ece}, AUC {auc}", fontsize=9)
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted survival")
