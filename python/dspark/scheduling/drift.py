# SPDX-License-Identifier: Apache-2.0
"""Whether steps still cost what the cost table says.

A table is measured once, and a machine changes: clocks fall, a neighbour arrives, contexts grow, a
kernel is replaced. A wrong table makes no wrong token, only worse decisions, so nothing else would
tell. :class:`CostDrift` sets the time of every round beside the prediction.

Times are the wall time of whole rounds, which the engine takes anyway. A round reads its lengths
from the device, so on a GPU, too, that is the time between two such readings, and nothing waits
for the sake of this measurement.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_ext._arrays import Checker

if TYPE_CHECKING:
    import dspark_ext as dx

__all__ = ["CostDrift"]

_KEPT = 256  # newest rounds of a class of batch sizes


class CostDrift:
    """Measured over predicted time of rounds, by batch size.

    The ratio is a median over the newest rounds: a hiccup of the machine moves it by one rank, not
    by its length. Batches are told apart by powers of two (rows 1, 2-3, 4-7, ...), since a table
    may be right for small ones and wrong for large ones.

    Parameters
    ----------
    factor : float
        A ratio above it, or below its inverse, is reported as drift. > 1. The default leaves room
        for what the table does not hold: sampling, scheduling and the engine's own bookkeeping.
    min_count : int
        Rounds before a ratio is judged, at least 1.

    Raises
    ------
    ArgumentError
        Lists every argument that is out of its range.

    Examples
    --------
    >>> drift = CostDrift(factor=1.5, min_count=3)
    >>> for ms in (20.0, 22.0, 500.0, 22.0):
    ...     drift.observe(rows=8, predicted_ms=10.0, measured_ms=ms)
    >>> drift.ratio, drift.drifted
    (2.2, True)
    >>> print(drift.text())
    cost table: rounds take 2.20 times what it says (4 rounds; 8-15 rows: 2.20): measure a new one
    """

    def __init__(self, factor: float = 1.5, min_count: int = 32) -> None:
        check = Checker("CostDrift")
        check.number("factor", factor, lambda x: 1 < x < math.inf, "> 1, finite")
        check.whole("min_count", min_count, 1)
        check.done()
        self.factor, self.min_count = float(factor), int(min_count)
        self.count = 0
        self._ratios: dict[int, deque[float]] = {}

    def observe(self, rows: int, predicted_ms: float, measured_ms: float) -> None:
        """Take one round: rows of the target's batch, both times in milliseconds.

        One that the table does not price (NaN) is left out.
        """
        if not (predicted_ms > 0 and measured_ms > 0 and math.isfinite(predicted_ms)):
            return
        self.count += 1
        kept = self._ratios.setdefault(int(rows).bit_length() - 1, deque(maxlen=_KEPT))
        kept.append(measured_ms / predicted_ms)

    def observe_round(
        self, scheduler: dx.Scheduler, state: dx.RoundState, result: dx.Round
    ) -> None:
        """Take a round of the engine, priced by the scheduler's own table."""
        table = scheduler.cost(len(result.slots)) if result.slots else None
        if table is None or result.plan is None:
            return
        slots = list(result.slots)
        rows = len(slots) + int(result.length[slots].sum())
        kv = float((state.host.kv_len[slots] - result.num_emitted[slots]).sum())
        predicted = float(table.ms(rows)) + table.ms_per_kv_token * kv
        drafting = int(np.count_nonzero(result.proposed[slots]))
        if drafting:
            priced = scheduler.cost(drafting)
            predicted += table.draft_ms if priced is None else priced.draft_ms
        self.observe(rows, predicted, 1e3 * sum(result.seconds.values()))

    def merge(self, other: CostDrift) -> None:
        """Add the rounds of another one."""
        self.count += other.count
        for key, ratios in other._ratios.items():
            self._ratios.setdefault(key, deque(maxlen=_KEPT)).extend(ratios)

    @property
    def ratio(self) -> float:
        """Median of measured over predicted time, of the rounds kept; NaN without any."""
        ratios = [x for kept in self._ratios.values() for x in kept]
        return float(np.median(ratios)) if ratios else math.nan

    @property
    def drifted(self) -> bool:
        """Whether enough rounds say that the table is off, at all sizes together or at one."""
        return self._off(self.ratio, self.count) or any(
            self._off(float(np.median(kept)), len(kept)) for kept in self._ratios.values()
        )

    def _off(self, ratio: float, count: int) -> bool:
        return count >= self.min_count and not 1 / self.factor <= ratio <= self.factor

    def by_rows(self) -> dict[str, float]:
        """Ratio by batch size; classes with fewer than ``min_count`` rounds are left out."""
        return {
            f"{1 << k}-{(2 << k) - 1}" if k else "1": float(np.median(kept))
            for k, kept in sorted(self._ratios.items())
            if len(kept) >= self.min_count
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "ratio": self.ratio if self.count else None,
            "rounds": self.count,
            "factor": self.factor,
            "min_count": self.min_count,
            "drifted": self.drifted,
            "by_rows": self.by_rows(),
        }

    def text(self) -> str:
        """Return one line for people; empty without rounds."""
        if not self.count:
            return ""
        sizes = "".join(f"; {rows} rows: {x:.2f}" for rows, x in self.by_rows().items())
        advice = ": measure a new one" if self.drifted else ""
        return (
            f"cost table: rounds take {self.ratio:.2f} times what it says "
            f"({self.count} rounds{sizes}){advice}"
        )
