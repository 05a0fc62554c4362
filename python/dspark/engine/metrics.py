# SPDX-License-Identifier: Apache-2.0
"""What rounds amounted to: lengths, acceptance by position, time by phase.

Words (docs/contract.md, section 7): a *round* is one verification of one request. Acceptance length
= emitted tokens / rounds, the target's own token included. Rates name their denominator: proposed,
scheduled, or observed (all earlier drafts of the round were accepted). A round that a stop id ends
inside its accepted drafts counts what it emitted, and its proposal ends there, too. The first
token of an answer comes from the prefill and belongs to no round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.scheduling.drift import CostDrift
from dspark_ext import Round

PHASES = ("draft", "schedule", "verify", "other")


def _zeros() -> NDArray[np.int64]:
    return np.zeros(16, dtype=np.int64)


@dataclass
class Metrics:
    """Sums over rounds.

    Examples
    --------
    >>> metrics = Metrics()
    >>> for drafts, accepted, emitted in ((7, 3, 4), (7, 7, 8), (7, 2, 2)):
    ...     metrics.count(drafts, drafts, accepted, emitted)
    >>> round(metrics.acceptance_length, 4), round(metrics.verify_rate, 4)
    (4.6667, 0.7368)
    """

    steps: int = 0  # target forwards
    rounds: int = 0
    drafted: int = 0  # rounds with a drafter
    proposed: int = 0  # drafts
    scheduled: int = 0
    proposal: int = 0  # scheduled drafts, cut at a stop
    accepted: int = 0
    emitted: int = 0
    cut: int = 0  # rounds that ended inside their accepted drafts
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    cost_drift: CostDrift = field(default_factory=CostDrift)  # without a cost table it stays empty
    scheduled_at: NDArray[np.int64] = field(default_factory=_zeros)
    observed_at: NDArray[np.int64] = field(default_factory=_zeros)
    accepted_at: NDArray[np.int64] = field(default_factory=_zeros)
    budgets: list[float] = field(default_factory=list)  # mean drafts verified, a request each
    droughts: list[int] = field(default_factory=list)  # longest run of rounds without any
    monitor: Any = None  # of the scheduler's calibration; its report joins to_dict()
    _open: dict[int, list[int]] = field(default_factory=dict)  # by slot: rounds, drafts, run, most

    def add(self, result: Round) -> None:
        """Add every request of one call of ``decode_round``."""
        self.steps += 1
        for phase in PHASES:
            self.seconds[phase] += result.seconds[phase]
        for r in result.slots:
            self.count(
                int(result.proposed[r]),
                int(result.length[r]),
                int(result.num_accepted[r]),
                int(result.num_emitted[r]),
            )
            if result.drafted:
                self._budget(r, int(result.length[r]))
            if result.finish[r]:
                self.close(r)

    def _budget(self, slot: int, length: int) -> None:
        account = self._open.setdefault(slot, [0, 0, 0, 0])
        account[0] += 1
        account[1] += length
        account[2] = 0 if length else account[2] + 1
        account[3] = max(account[3], account[2])

    def close(self, slot: int) -> None:
        """Take the request of a slot into the budgets: it has left."""
        rounds, drafts, _, longest = self._open.pop(slot, (0, 0, 0, 0))
        if rounds:
            self.budgets.append(drafts / rounds)
            self.droughts.append(longest)

    def budget_per_request(self) -> dict[str, Any]:
        """How the verified drafts are spread over the requests that have left.

        Examples
        --------
        >>> Metrics(budgets=[2.0, 0.0, 4.0], droughts=[0, 9, 1]).budget_per_request()["min"]
        0.0
        """
        if not self.budgets:
            return {"requests": 0, "min": None, "p1": None, "p50": None, "longest_drought": None}
        p1, p50 = np.percentile(self.budgets, (1, 50))
        return {
            "requests": len(self.budgets),
            "min": min(self.budgets),
            "p1": float(p1),
            "p50": float(p50),
            "longest_drought": max(self.droughts),
        }

    def count(self, proposed: int, scheduled: int, accepted: int, emitted: int) -> None:
        """Add one round of one request."""
        cut = emitted == accepted
        proposal = emitted if cut else scheduled
        self.rounds += 1
        self.drafted += proposed > 0
        self.proposed += proposed
        self.scheduled += scheduled
        self.proposal += proposal
        self.accepted += accepted
        self.emitted += emitted
        self.cut += cut
        self.scheduled_at[:scheduled] += 1
        self.observed_at[: min(proposal, accepted + 1)] += 1
        self.accepted_at[:accepted] += 1

    def merge(self, other: Metrics) -> None:
        """Add another sum."""
        for name in ("steps", "rounds", "drafted", "proposed", "scheduled", "proposal",
                     "accepted", "emitted", "cut"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cost_drift.merge(other.cost_drift)
        for phase in PHASES:
            self.seconds[phase] += other.seconds[phase]
        self.scheduled_at += other.scheduled_at
        self.observed_at += other.observed_at
        self.accepted_at += other.accepted_at
        self.budgets += other.budgets
        self.droughts += other.droughts
        self.monitor = other.monitor if self.monitor is None else self.monitor

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_scheduled(self) -> float:
        """Drafts verified per round."""
        return self.scheduled / self.rounds if self.rounds else 0.0

    @property
    def verify_rate(self) -> float:
        """Emitted tokens per verified row: how much of the target's work was kept."""
        rows = self.proposal + self.rounds
        return self.emitted / rows if rows else 0.0

    @property
    def total_seconds(self) -> float:
        """Time inside ``decode_round``."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second inside ``decode_round``."""
        return self.emitted / self.total_seconds if self.total_seconds else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Acceptance of draft j given that the drafts before it were accepted; NaN unobserved."""
        last = int(np.flatnonzero(self.observed_at).max(initial=-1)) + 1
        with np.errstate(invalid="ignore"):
            rates = self.accepted_at[:last] / self.observed_at[:last]
        return [float(x) for x in rates]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        total = self.total_seconds
        found = {
            "rounds": self.rounds,
            "target_steps": self.steps,
            "drafts_proposed": self.proposed,
            "drafts_scheduled": self.scheduled,
            "drafts_accepted": self.accepted,
            "tokens_emitted": self.emitted,
            "rounds_cut_by_stop": self.cut,
            "acceptance_length": self.acceptance_length,
            "mean_scheduled_length": self.mean_scheduled,
            "verify_rate": self.verify_rate,
            "acceptance_given_prefix": self.acceptance_by_position(),
            "observed": [int(n) for n in self.observed_at[: len(self.acceptance_by_position())]],
            "tokens_per_second": self.tokens_per_second,
            "seconds": total,
            "cost_drift": self.cost_drift.to_dict(),
            "time_share": {p: self.seconds[p] / total if total else 0.0 for p in PHASES},
            "budget_per_request": self.budget_per_request(),
        }
        if self.monitor is not None:
            found["calibration"] = self.monitor.to_dict()
        return found
