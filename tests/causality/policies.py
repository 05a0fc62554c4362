# SPDX-License-Identifier: Apache-2.0
"""Schedules for the enumerator: the project's own, and mistakes that must show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from joint_law import Batch, Past

import dspark_ext as dx


def cost_of(first: int, *steps_per_second: float) -> np.ndarray:
    """Milliseconds by batch size from SPS(first), SPS(first + 1), ...; entries below are unused."""
    return np.concatenate([np.ones(first), 1000 / np.array(steps_per_second)])


@dataclass
class Ours:
    """``dx.prefix_schedule``; two_phase remembers the survivals of a request's last two rounds."""

    mode: str
    cost: Any = None
    backend: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    asked: dict[Any, Sequence[int]] = field(default_factory=dict)  # of one system

    def start(self) -> Any:
        return ()

    def remember(self, memory: Any, past: Past) -> Any:
        return (*memory, tuple(past.live.tolist()))[-2:] if self.mode == "two_phase" else ()

    def lengths(self, batch: Batch) -> Sequence[int]:
        old = tuple(m[-2] if len(m) == 2 else None for m in batch.memory)
        seen = (batch.live, batch.active, batch.cap, batch.floor, batch.weight)
        key = (*(x.tobytes() for x in seen), old)
        if key not in self.asked:
            self.asked[key] = self._ask(batch)
        return self.asked[key]

    def _ask(self, batch: Batch) -> Sequence[int]:
        options = dict(self.options)
        if self.mode == "two_phase" and "budget" not in options:
            options["lagged"] = self.lagged(batch)
        if self.mode == "threshold":
            before = np.maximum(np.roll(batch.live, 1, axis=1), 1e-9)
            before[:, 0] = 1
            options["conditional"] = batch.live / before
        plan = dx.prefix_schedule(
            batch.live, self.cost, self.mode, active=batch.active, max_len=batch.cap,
            min_len=batch.floor, weight=batch.weight, backend=self.backend, **options,
        )  # fmt: skip
        return plan.length.tolist()

    def lagged(self, batch: Batch) -> dx.LaggedSurvival:
        lagged = dx.LaggedSurvival()
        for age in (2, 1):
            known = [r for r, m in enumerate(batch.memory) if len(m) >= age]
            if known:
                rows = np.array([batch.memory[r][-age] for r in known], np.float32)
                lagged.push(rows, known)
        return lagged


@dataclass
class Wrong:
    """A mistake without memory: ``choose(batch)``."""

    choose: Callable[[Batch], Sequence[int]]

    def start(self) -> Any:
        return ()

    def remember(self, memory: Any, past: Past) -> Any:
        del memory, past
        return ()

    def lengths(self, batch: Batch) -> Sequence[int]:
        return np.minimum(self.choose(batch), batch.cap).tolist()


def causal_length(batch: Batch, cost: np.ndarray) -> np.ndarray:
    """What Algorithm 1 admits, for mistakes that start from it."""
    plan = dx.prefix_schedule(batch.live, cost, active=batch.active, max_len=batch.cap)
    return np.asarray(plan.length)


def retrospective(cost: np.ndarray) -> Wrong:
    """A full search over the survivals of the drafts that it decides about."""

    def choose(batch: Batch) -> Sequence[int]:
        lagged = dx.LaggedSurvival()
        for _ in range(2):
            lagged.push(batch.live)
        plan = dx.prefix_schedule(
            batch.live, cost, "two_phase", lagged=lagged, active=batch.active, max_len=batch.cap
        )
        return plan.length.tolist()

    return Wrong(choose)


def suspended_stop(cost: np.ndarray) -> Wrong:
    """L1: walks past a Theta that does not rise while some floor is not met."""

    def choose(batch: Batch) -> Sequence[int]:
        a, count = batch.live, len(batch.live)
        order = sorted((-a[r, j], j, r) for r, j in np.ndindex(a.shape) if a[r, j] > 0)
        length, tau = np.zeros(count, int), float(count)
        best, kept = tau / cost[count], length.copy()
        for b, (key, j, r) in enumerate(order, start=count + 1):
            if b >= len(cost):
                break
            length[r], tau = j + 1, tau - key
            if tau / cost[b] > best:
                best, kept = tau / cost[b], length.copy()
            elif np.all(length >= batch.floor):
                break
        return np.maximum(kept, batch.floor).tolist()

    return Wrong(choose)


def rounded_down(cost: np.ndarray, bucket: int) -> Wrong:
    """L3: the number of drafts that Algorithm 1 admits is cut to a multiple of a bucket."""

    def choose(batch: Batch) -> Sequence[int]:
        keep = int(causal_length(batch, cost).sum()) // bucket * bucket
        plan = dx.prefix_schedule(batch.live, mode="two_phase", budget=keep, max_len=batch.cap)
        return plan.length.tolist()

    return Wrong(choose)


def dropped_above(cost: np.ndarray, most: int) -> Wrong:
    """L3, L5: a request whose scheduled drafts do not fit loses all of them.

    Zeroed in the schedule, or preempted and decoded plainly later: the law is the same.
    """

    def choose(batch: Batch) -> Sequence[int]:
        length = causal_length(batch, cost)
        return np.where(length.sum() > most, 0, length).tolist()

    return Wrong(choose)


def cut_before(token: int) -> Wrong:
    """L4: the prefix ends in front of a draft that a grammar forbids."""

    def choose(batch: Batch) -> Sequence[int]:
        return [block.index(token) if token in block else len(block) for block in batch.drafts]

    return Wrong(choose)


def raw_survivals(budget: int) -> Wrong:
    """L6: the largest raw survivals, wherever they stand, drag their prefixes in."""

    def choose(batch: Batch) -> Sequence[int]:
        a, length = batch.live, np.zeros(len(batch.live), int)
        order = sorted((-a[r, j], j, r) for r, j in np.ndindex(a.shape))
        for _, j, r in order[:budget]:
            length[r] = max(length[r], j + 1)
        return length.tolist()

    return Wrong(choose)


def looks_at_its_own_draft(confidence: Sequence[float], cost: np.ndarray) -> Wrong:
    """A confidence that has seen the draft it rates, under Algorithm 1 itself."""

    def choose(batch: Batch) -> Sequence[int]:
        c = np.array([[confidence[x] for x in block] for block in batch.drafts], np.float32)
        plan = dx.prefix_schedule(
            np.cumprod(c, axis=1), cost, active=batch.active, max_len=batch.cap
        )
        return plan.length.tolist()

    return Wrong(choose)
