# SPDX-License-Identifier: Apache-2.0
"""Schedules leave the joint law of several requests over several rounds alone, to 1e-12."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from joint_law import Request, World, distance, joint_law
from policies import Ours, cost_of, looks_at_its_own_draft, retrospective

EXACT = 1e-12
P = ((0.7, 0.3), (0.2, 0.8))
Q = ((0.5, 0.5), (0.6, 0.4))
# c by slot and previous token: slot 2 and later give the drafted token before them away
BAIT = ((0.8, 0.8), (0.95, 0.05))
OTHER = ((0.6, 0.9), (0.3, 1.0))
SURE = ((1.0, 1.0), (1.0, 0.0))  # ties: survivals of 1, and candidates of survival 0

SMOOTH = cost_of(1, 1.0, 0.72, 0.6, 0.5, 0.42, 0.36, 0.3, 0.27, 0.25, 0.2)
STAIRS = np.array([1, 1, 1, 1.6, 1.6, 1.6, 2.5, 2.5, 2.5, 5.0])

SYSTEMS: dict[str, tuple[Request, ...]] = {
    "alone": (Request(4, BAIT),),
    "two": (Request(3, BAIT), Request(3, OTHER, start=1)),
    "ties": (Request(3, SURE), Request(3, SURE)),
    "floors-caps": (Request(3, BAIT, cap=1), Request(3, OTHER, floor=1)),
    "weights": (Request(3, BAIT, weight=0.5), Request(3, BAIT, start=1, weight=2.0)),
    "joins": (Request(3, BAIT), Request(2, OTHER, joins=1)),
    "follows": (Request(3, BAIT), Request(2, OTHER, start=1, follows=0), Request(2, SURE, joins=1)),
}
POLICIES: dict[str, dict[str, Any]] = {
    "causal-smooth": {"mode": "causal", "cost": SMOOTH},
    "causal-stairs": {"mode": "causal", "cost": STAIRS},
    "two_phase-smooth": {"mode": "two_phase", "cost": SMOOTH},
    "two_phase-stairs": {"mode": "two_phase", "cost": STAIRS},
    "two_phase-cliff": {"mode": "two_phase"},
    "two_phase-capacity": {"mode": "two_phase", "options": {"capacity": 5}},
    "budget": {"mode": "two_phase", "options": {"budget": 2}},
    "threshold": {"mode": "threshold", "options": {"threshold": 0.5}},
}


def world(system: str, rule: str, gamma: int = 2) -> World:
    def of(r: Request) -> Request:
        deeper = r.confidence + r.confidence[1:] * (gamma - 2)
        return Request(**{**vars(r), "rule": rule, "confidence": deeper})

    return World(P, Q, tuple(of(r) for r in SYSTEMS[system]), gamma)


def cliff(requests: int, factor: float) -> np.ndarray:
    """The first draft costs as much as all of them: a full search weighs whole blocks."""
    return np.array([1.0] * (requests + 1) + [factor] * 6)


def ours(system: str, policy: str, **more: Any) -> Ours:
    options = {**POLICIES[policy], **more}
    if policy in ("two_phase-cliff", "two_phase-capacity"):
        options["cost"] = cliff(1, 1.9) if system == "alone" else cliff(2, 2.2)
    return Ours(**options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_joint_law_is_the_targets(system: str, policy: str) -> None:
    assert distance(world(system, "token"), ours(system, policy)) < EXACT


@pytest.mark.parametrize("policy", ["causal-smooth", "two_phase-stairs", "two_phase-cliff"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_joint_law_under_the_rule_block(system: str, policy: str) -> None:
    assert distance(world(system, "block"), ours(system, policy)) < EXACT


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_systems_catch_a_retrospective_search(system: str) -> None:
    """The control: every system above would show a look at live survivals."""
    tables = [cliff(1, 1.9)] + [cliff(2, factor) for factor in (1.9, 2.2)]
    gaps = [distance(world(system, "token"), retrospective(table)) for table in tables]
    assert max(gaps) > 5e-3


def test_the_lengths_differ_from_path_to_path() -> None:
    """Exact and constant would prove nothing: the schedules do react to the drafts."""
    seen: dict[str, set[Any]] = {}

    class Spy(Ours):
        def lengths(self, batch: Any) -> Any:
            chosen = super().lengths(batch)
            seen.setdefault(self.mode, set()).add(tuple(chosen))
            return chosen

    for policy in ("causal-smooth", "two_phase-stairs", "threshold"):
        joint_law(world("two", "token"), Spy(**POLICIES[policy]))
    assert all(len(lengths) >= 4 for lengths in seen.values()), seen


@pytest.mark.parametrize("policy", ["causal-smooth", "two_phase-stairs"])
@pytest.mark.parametrize("system", ["floors-caps", "joins"])
def test_with_the_lengths_of_the_reference(system: str, policy: str) -> None:
    laws = [
        joint_law(world(system, "token"), ours(system, policy, backend=backend))
        for backend in ("reference", "cpu")
    ]
    assert laws[0] == laws[1]  # the same lengths, so the same sums
    assert distance(world(system, "token"), ours(system, policy, backend="reference")) < EXACT


@pytest.mark.parametrize("policy", ["causal-smooth", "two_phase-stairs"])
def test_longer_blocks(policy: str) -> None:
    """Lag 2 and blocks of 4: positions are drafted again while their old survivals decide."""
    assert distance(world("alone", "token", gamma=4), ours("alone", policy)) < EXACT
    assert distance(world("alone", "block", gamma=3), ours("alone", policy)) < EXACT
    assert distance(world("joins", "token", gamma=3), ours("joins", policy)) < EXACT


@pytest.mark.parametrize("policy", ["causal-smooth", "two_phase-stairs"])
def test_mixed_rules_and_three_tokens(policy: str, rng: np.random.Generator) -> None:
    """A random vocabulary of three, a request under each rule."""

    def rows(low: float) -> Any:
        table = rng.uniform(low, 1, (3, 3))
        return tuple(map(tuple, table / table.sum(axis=1, keepdims=True)))

    def bait() -> Any:
        return tuple(map(tuple, rng.choice([0.0, 0.2, 0.7, 0.95, 1.0], (2, 3))))

    requests = (Request(2, bait(), rule="block"), Request(3, bait(), rule="token"))
    assert distance(World(rows(0.0), rows(0.05), requests), Ours(**POLICIES[policy])) < EXACT


def test_a_confidence_that_has_seen_its_own_draft_leaks_under_algorithm_1() -> None:
    """Why such a provider must say that it is not safe with sampled drafts."""
    unsafe = looks_at_its_own_draft((0.9, 0.1), SMOOTH)
    assert distance(world("alone", "token"), unsafe) > 0.05
