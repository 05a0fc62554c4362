# SPDX-License-Identifier: Apache-2.0
"""Ageing, the gate and the online estimator read past rounds only: the joint law stays exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from joint_law import Batch, Past, Request, World, distance
from policies import Ours, Wrong

import dspark_ext as dx
from dspark.scheduling.providers import OnlineAcceptance
from dspark_ext.gate import GateRecord

EXACT = 1e-12
P, Q = ((0.7, 0.3), (0.2, 0.8)), ((0.5, 0.5), (0.6, 0.4))
BAIT, DULL = ((0.8, 0.8), (0.95, 0.05)), ((0.3, 0.1), (0.2, 0.0))
COSTS = {
    "causal": dx.CostTable.from_points([1, 2, 3, 4, 5, 6], [1.0, 1.1, 1.5, 1.9, 2.4, 3.0]),
    "two_phase": dx.CostTable.from_points([1, 2, 3, 4, 5, 6], [1.0, 1.1, 1.3, 1.5, 1.9, 2.4]),
}


def two(**more: Any) -> World:
    return World(P, Q, (Request(3, BAIT, **more), Request(3, DULL, start=1, **more)))


def follows() -> World:
    """The second request takes the slot of the first, whose record must not pass on."""
    return World(P, Q, (Request(2, DULL), Request(3, BAIT, follows=0), Request(3, DULL, start=1)))


@dataclass
class Aged(Ours):
    """Ours, with floors and weights of :class:`dspark_ext.Ageing`; counts who was passed over."""

    ageing: dx.Ageing = field(default_factory=dx.Ageing)
    helped: set[Any] = field(default_factory=set)

    def start(self) -> Any:
        return 0, super().start()

    def remember(self, memory: Any, past: Past) -> Any:
        starved, older = memory
        return 0 if past.length else starved + 1, super().remember(older, past)

    def lengths(self, batch: Batch) -> Sequence[int]:
        starved = np.array([m[0] for m in batch.memory])
        floor, weight = self.ageing.apply(starved, batch.floor, batch.weight)
        self.helped |= set(np.flatnonzero((floor > batch.floor) | (weight > batch.weight)))
        inner = replace_memory(batch, [m[1] for m in batch.memory])
        inner = replace(inner, floor=np.minimum(floor, batch.cap), weight=weight)
        return super().lengths(inner)


def replace_memory(batch: Batch, memory: Sequence[Any]) -> Batch:
    return replace(batch, memory=tuple(memory))


@pytest.mark.parametrize(
    ("mode", "rule"), [("causal", "token"), ("causal", "block"), ("two_phase", "token")]
)
@pytest.mark.parametrize(
    "ageing",
    [dx.Ageing(rounds=1), dx.Ageing(rounds=1, floor=0, weight=2.0), dx.Ageing(1, 2, 1.0)],
    ids=["floor", "weight", "both"],
)
def test_ageing(ageing: dx.Ageing, mode: str, rule: str) -> None:
    policy = Aged(mode, COSTS[mode], ageing=ageing)
    assert distance(two(rule=rule), policy) < EXACT
    assert policy.helped, "it never helped anybody"
    if rule == "token":
        assert distance(follows(), Aged(mode, COSTS[mode], ageing=ageing)) < EXACT


@dataclass
class Gated(Ours):
    """Ours, with the requests that draft chosen by :class:`dspark_ext.Gate`."""

    gate: dx.Gate = field(default_factory=lambda: dx.Gate(warmup=1, probe_every=1, smoothing=0.5))
    draft_ms: float = 0.15
    decisions: set[Any] = field(default_factory=set)

    def start(self) -> Any:
        return (0, 0.0, 0.0, 0, self.gate.probe_every), super().start()

    def cost_of(self, requests: int) -> dx.CostTable:
        return self.cost.with_draft_ms(self.draft_ms * requests)

    def record(self, rows: Sequence[Any]) -> GateRecord:
        columns = list(zip(*rows, strict=True))
        kinds = (np.int64, float, float, np.int64, np.int64)
        return GateRecord(*(np.array(c, k) for c, k in zip(columns, kinds, strict=True)))

    def remember(self, memory: Any, past: Past) -> Any:
        row, older = memory
        record, drafted = self.record([row]), np.array([past.length >= 0])
        accepted = np.array([sum(f == 1 for f in past.flags)])
        self.gate.learn(record, drafted, accepted, np.array([max(past.length, 0)]))
        return tuple(x[0].item() for x in vars(record).values()), super().remember(older, past)

    def drafting(self, batch: Batch) -> Sequence[bool]:
        on = np.flatnonzero(batch.active)
        chosen = np.zeros(len(batch.active), bool)
        record = self.record([batch.memory[r][0] for r in on])
        chosen[on] = self.gate.choose(record, self.cost_of)
        self.decisions.add(tuple(chosen[on]))
        return chosen.tolist()

    def lengths(self, batch: Batch) -> Sequence[int]:
        inner, drafting = replace_memory(batch, [m[1] for m in batch.memory]), self.drafting(batch)
        inner = replace(inner, cap=np.where(drafting, batch.cap, 0).astype(np.int32))
        return np.where(drafting, super().lengths(inner), -1).tolist()


@pytest.mark.parametrize(
    ("mode", "rule"), [("causal", "token"), ("causal", "block"), ("two_phase", "token")]
)
def test_the_gate(mode: str, rule: str) -> None:
    policy = Gated(mode, COSTS[mode])
    assert distance(two(rule=rule), policy) < EXACT
    assert len(policy.decisions) > 1 and any(len(set(d)) == 2 for d in policy.decisions)
    if rule == "token":
        assert distance(follows(), Gated(mode, COSTS[mode])) < EXACT


class Watched(Ours):
    """Temperatures and explorations as a monitor makes them: from counts of rounds that are over.

    Survivals are raised to a power that grows with the request's rejections; every second round of
    a request is explored.
    """

    def start(self) -> Any:
        return 0, 0

    def remember(self, memory: Any, past: Past) -> Any:
        rounds, rejected = memory
        return rounds + 1, rejected + (0 in past.flags)

    def lengths(self, batch: Batch) -> Sequence[int]:
        rounds, rejected = np.array(batch.memory).T
        live = (batch.live ** (1 + rejected[:, None])).astype(np.float32)
        floor = np.where(rounds % 2 == 1, batch.cap, batch.floor)
        return super().lengths(replace(batch, live=live, floor=floor, memory=((),) * len(live)))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_monitored(rule: str) -> None:
    assert distance(two(rule=rule), Watched("causal", COSTS["causal"])) < EXACT
    assert distance(follows(), Watched("causal", COSTS["causal"])) < EXACT


@dataclass
class Whole(Ours):
    """A real Scheduler on a real RoundState: history, floors, the decision to skip the draft."""

    scheduler: Any = None
    skipped: set[bool] = field(default_factory=set)

    def remember(self, memory: Any, past: Past) -> Any:
        drafted = tuple(past.live.tolist()) if past.length >= 0 else None
        return (*memory, drafted)[-3:]

    def _ask(self, batch: Batch) -> Sequence[int]:
        count, gamma = batch.live.shape
        state = dx.RoundState.create(count, gamma, max_len=16)
        state.host.active[...], state.host.max_draft[...] = batch.active, batch.cap
        state.host.left[...], state.host.weight[...] = gamma + 1, batch.weight
        for age in (3, 2, 1):
            known = [r for r, m in enumerate(batch.memory) if len(m) >= age and m[-age]]
            rows = np.zeros((count, gamma), np.float32)
            for r in known:
                rows[r] = batch.memory[r][-age]
            if known:
                state.history.push(rows, known)
        state.host.drafting[...] = self.scheduler.drafting(state)
        self.skipped.add(not state.host.drafting.any())
        if not state.host.drafting.any():
            return [-1] * count
        draft = SimpleNamespace(tokens=np.array(batch.drafts, np.int32))
        found = SimpleNamespace(survival=batch.live)
        return self.scheduler.plan(state, draft, found).length.tolist()

    def lengths(self, batch: Batch) -> Sequence[int]:
        key = (batch.live.tobytes(), batch.active.tobytes(), batch.cap.tobytes(), batch.memory)
        if key not in self.asked:
            self.asked[key] = self._ask(batch)
        return self.asked[key]


@pytest.mark.parametrize("mode", ["causal", "two_phase"])
def test_the_scheduler_itself_with_skipped_drafts(mode: str) -> None:
    tables = {n: COSTS["two_phase"].with_draft_ms(0.04 * n) for n in (1, 2)}
    policy = Whole(mode, scheduler=dx.Scheduler(mode, cost=tables, probe_every=10**6))
    world = World(P, Q, (Request(4, BAIT), Request(3, DULL, start=1)))
    assert distance(world, policy) < EXACT
    assert policy.skipped == {True, False}


@pytest.mark.parametrize("mode", ["causal", "threshold"])
def test_confidences_from_past_acceptance(mode: str) -> None:
    """The estimator as the confidence: one round old, over both requests' own pasts."""

    class Estimated(Ours):
        def remember(self, memory: Any, past: Past) -> Any:
            return (*memory, past.flags)

        def lengths(self, batch: Batch) -> Sequence[int]:
            state = dx.RoundState.create(len(batch.live), batch.live.shape[1])
            online = OnlineAcceptance(strength=0.5)
            for slot, rounds in enumerate(batch.memory):
                for flags in rounds:
                    online.learn(state, [slot], np.array([flags]))
            conditional = online.conditional(state, None)
            survival = np.cumprod(conditional, axis=1)
            return super()._ask(replace(batch, live=survival, memory=((),) * len(batch.live)))

    options = {"threshold": 0.6} if mode == "threshold" else {}
    world = World(P, Q, (Request(3, BAIT), Request(3, DULL, start=1)))
    assert distance(world, Estimated(mode, COSTS["causal"], options=options)) < EXACT


@pytest.mark.parametrize(
    ("help_by", "gap"), [("ageing", 0.02), ("gate", 0.02)], ids=["ageing", "gate"]
)
def test_the_same_help_from_the_present_round_leaks(help_by: str, gap: float) -> None:
    """The control: a floor, or a closed gate, for those whose live confidences are low."""

    def floor_if_low(batch: Batch) -> Sequence[int]:
        return np.where(batch.live[:, 1] < 0.1, 1, 0).tolist()

    def closed_if_low(batch: Batch) -> Sequence[int]:
        return np.where(batch.live.sum(axis=1) < 1, 0, 2).tolist()

    choose: Callable[[Batch], Sequence[int]] = (
        floor_if_low if help_by == "ageing" else closed_if_low
    )
    assert distance(two(), Wrong(choose)) > gap
