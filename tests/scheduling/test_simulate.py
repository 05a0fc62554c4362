# SPDX-License-Identifier: Apache-2.0
"""The closed loop of the simulator, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.scheduling.simulate import Point, Workload, run, sweep
from dspark.scheduling.simulate_costs import Curve
from dspark.scheduling.simulate_policies import Decider, Policy, default_policies
from dspark.scheduling.simulate_report import compare
from dspark.scheduling.simulate_traces import Synthetic


class Coin:
    """Every draft survives with the same probability, and the head says so."""

    def __init__(self, chance: float, gamma: int = 5) -> None:
        self.chance, self.gamma = chance, gamma

    def batch(self, slots: int, rng: np.random.Generator) -> Any:
        self.slots, self._rng = slots, rng
        return self

    def join(self, slots: Any) -> None:
        pass

    def round(self, progress: float) -> tuple[Any, Any]:
        assert 0 <= progress < 1
        hit = self._rng.random((self.slots, self.gamma)) < self.chance
        run = np.cumprod(hit, axis=1).sum(axis=1)
        return np.full(hit.shape, self.chance, np.float32), run


def line(most: int, first: float = 4.0, slope: float = 0.05, **k: Any) -> Curve:
    """A straight cost curve without KV."""
    tokens = np.arange(1, most + 1)
    return Curve("line", dx.CostTable.from_points(tokens, first + slope * tokens), **k)


def one(name: str, trace: Any, curve: Curve, load: int, work: Workload, **k: Any) -> Point:
    return run(Policy.parse(name), trace, curve, load, work, **k)


def test_plain_decoding_is_arithmetic() -> None:
    point = one("none", Coin(0.5), line(64, draft_ms=9.0), 8, Workload(tokens=4000))
    assert point.throughput == pytest.approx(8 * 1000 / 4.4)
    assert [point.user_p50, point.user_p1] == pytest.approx([1000 / 4.4] * 2)
    assert (point.budget, point.acceptance, point.batch) == (1, 1, 8)
    assert point.finished > 8


@pytest.mark.parametrize("length", [1, 3, 5])
def test_fixed_lengths_accept_what_the_law_says(length: int) -> None:
    """1 + c + ... + c^l tokens a round; long requests, so that their ends hardly count."""
    c, work = 0.7, Workload(output_tokens=2000, tokens=20_000)
    point = one(f"static{length}", Coin(c), line(200, draft_ms=1.0), 16, work)
    law = (1 - c ** (length + 1)) / (1 - c)
    # Five standard errors of a mean of independent rounds, and rounds that a request's end cuts.
    error = 5 * (length + 1) / 2 / np.sqrt(point.rounds * 16) + 2 * (length + 1) / 2000
    assert point.acceptance == pytest.approx(law, abs=error)
    assert point.step_ms == pytest.approx(4 + 0.05 * 16 * (1 + length) + 1.0, rel=0.01)
    assert point.throughput == pytest.approx(16e3 * point.acceptance / point.step_ms, rel=1e-9)


def test_kv_tokens_cost_time() -> None:
    free = one("none", Coin(0.5), line(8), 4, Workload(tokens=2000))
    table = dx.CostTable.from_points([1, 8], [4.05, 4.4], ms_per_kv_token=0.001)
    priced = one("none", Coin(0.5), Curve("kv", table), 4, Workload(tokens=2000))
    # On average a request in flight holds its prompt and something of its answer.
    extra = priced.step_ms - free.step_ms
    assert 4 * 512 * 0.001 * 0.6 < extra < 4 * (512 + 2 * 192) * 0.001 * 1.4


def test_the_oracle_wastes_nothing() -> None:
    point = one("oracle", Coin(0.6), line(200), 16, Workload(tokens=6000))
    assert point.budget == pytest.approx(point.acceptance)
    for name in ("none", "static1", "static3", "causal", "two_phase"):
        other = one(name, Coin(0.6), line(200), 16, Workload(tokens=6000))
        room = 4 * float(np.hypot(point.throughput_se, other.throughput_se))
        assert other.throughput < point.throughput + room


def test_equal_drafts_make_schedulers_fixed_lengths() -> None:
    """With one survival for all, a straight line has one best length, and all of them find it."""
    curve, work = line(200, slope=0.2), Workload(tokens=6000, output_tokens=1000)
    fixed = [one(f"static{n}", Coin(0.8), curve, 16, work) for n in range(6)]
    best = max(fixed, key=lambda p: p.throughput)
    assert best.policy not in ("static0", "static5")  # else the case shows nothing
    for name in ("causal", "two_phase", "two_phase:unsafe_lag0"):
        point = one(name, Coin(0.8), curve, 16, work)
        room = 4 * float(np.hypot(point.throughput_se, best.throughput_se))
        assert point.throughput > best.throughput - room
        assert abs(point.budget - best.budget) < 1


def test_steps_stop_causal_but_not_two_phase() -> None:
    curve, work = Curve.named("staircase", 512), Workload(tokens=8000)
    stuck, sees = (one(n, Synthetic(), curve, 64, work) for n in ("causal", "two_phase"))
    assert stuck.throughput < 0.75 * sees.throughput
    smooth = Curve.named("smooth", 512)
    a, b = (one(n, Synthetic(), smooth, 64, work) for n in ("causal", "two_phase"))
    assert a.throughput == pytest.approx(b.throughput, rel=0.05)


def test_a_free_draft_is_overused() -> None:
    curve = line(64, slope=0.4, draft_ms=30.0)
    work = Workload(tokens=4000)
    honest = one("causal", Coin(0.5), curve, 8, work)
    blind = one("causal", Coin(0.5), curve, 8, replace(work, draft_in_theta=False))
    # The drafter is paid either way: counting it makes every admitted draft share in its price.
    assert blind.budget < honest.budget
    assert blind.throughput < honest.throughput


def test_a_wrong_belief_costs() -> None:
    truth, work = line(400, slope=0.2), Workload(tokens=8000)
    flat = Curve("flat", dx.CostTable.from_points([1, 400], [4.0, 4.0]))
    right = one("two_phase", Synthetic(), truth, 32, work)
    wrong = one("two_phase", Synthetic(), truth, 32, work, believed=flat)
    assert wrong.budget > 7 > right.budget
    assert wrong.throughput < 0.9 * right.throughput


def test_equal_seeds_repeat_and_others_do_not() -> None:
    a, b, c = (
        one("two_phase", Synthetic(), line(64), 4, Workload(tokens=1000, seed=s)) for s in (1, 1, 2)
    )
    assert a == b
    assert a != c


def test_loads_and_policies_do_not_meet() -> None:
    """A point is the same alone and inside a sweep."""
    policies = [Policy.parse(n) for n in ("static2", "two_phase")]
    work = Workload(tokens=800)
    points = sweep(policies, Synthetic(), line(64), [2, 4], work)
    assert [(p.load, p.policy) for p in points] == [
        (2, "static2"), (2, "two_phase"), (4, "static2"), (4, "two_phase")]  # fmt: skip
    assert points[3] == run(policies[1], Synthetic(), line(64), 4, work)


@pytest.mark.parametrize("name", ["mtp_draft_share", "prior", "seed", "output_tokens"])
def test_a_wrong_workload(name: str) -> None:
    with pytest.raises(dx.ArgumentError, match=rf"Workload: 1 problem\n  {name}: got -1"):
        Workload(**{name: -1})  # type: ignore[arg-type]


def test_a_curve_that_is_too_short() -> None:
    with pytest.raises(dx.ArgumentError, match="static7 may send 32 rows for 4 requests"):
        one("static7", Synthetic(), line(31), 4, Workload(tokens=100))
    names = [p.policy for p in sweep(default_policies(7), Synthetic(), line(16), [4],
                                     Workload(tokens=300))]  # fmt: skip
    assert "static3" in names and "static4" not in names and "threshold0.5" not in names
    assert {"none", "causal", "two_phase", "oracle"} <= set(names)
    with pytest.raises(dx.ArgumentError, match="none may send 4 rows"):
        sweep([Policy.parse("none")], Synthetic(), line(3), [4])


# --- decisions are the operator's ----------------------------------------------------------------


def decisions(policy: str, rounds: int = 4) -> tuple[list[list[int]], list[Any], Any]:
    rng = np.random.default_rng(5)
    curve = line(200, slope=0.1)
    table = curve.at(6)
    decide = Decider(Policy.parse(policy), 6, 4, curve.at)
    drawn = [rng.beta(4, 1, (6, 4)).astype(np.float32) for _ in range(rounds)]
    caps = np.full(6, 4, np.int32)
    lengths = [decide.lengths(c, np.full(6, 2), caps, np.ones(6, np.int32)).tolist() for c in drawn]
    return lengths, [np.cumprod(c, axis=1) for c in drawn], table


@pytest.mark.parametrize(("policy", "lag"), [("two_phase", 2), ("two_phase:lag3", 3)])
def test_budgets_come_from_survivals_of_that_age(policy: str, lag: int) -> None:
    got, survivals, table = decisions(policy, 6)
    lagged = dx.LaggedSurvival(rounds=lag, prior=0.6)
    want = []
    for a in survivals:
        plan = dx.prefix_schedule(a, table, "two_phase", lagged=lagged)
        want.append(plan.length.tolist())
        lagged.push(a)
    assert got == want


@pytest.mark.parametrize("age", [0, 1])
def test_unsafe_budgets_come_from_younger_ones(age: int) -> None:
    got, survivals, table = decisions(f"two_phase:unsafe_lag{age}")
    prior = np.tile(np.float32(0.6) ** np.arange(1, 5), (6, 1)).astype(np.float32)
    for t, a in enumerate(survivals):
        old = a if age == 0 else survivals[t - 1] if t else prior
        thetas = []
        for budget in range(25):
            by_old = dx.prefix_schedule(old, table, "two_phase", budget=budget)
            thetas.append(float(by_old.theta))
        best = int(np.argmax(thetas))
        want = dx.prefix_schedule(a, table, "two_phase", budget=best)
        assert got[t] == want.length.tolist()


def test_a_new_request_starts_without_history() -> None:
    curve = line(64, slope=0.5)
    table = curve.at(2)
    decide = Decider(Policy.parse("two_phase"), 2, 3, curve.at)
    caps, kv, sure = np.full(2, 3, np.int32), np.ones(2, np.int32), np.ones((2, 3), np.float32)
    for _ in range(3):
        last = decide.lengths(sure, np.zeros(2, np.int64), caps, kv)
    assert last.sum() == 6
    decide.join(np.array([0, 1]))
    prior = dx.prefix_schedule(
        np.tile(np.float32(0.6) ** np.arange(1, 4, dtype=np.float32), (2, 1)), table, "two_phase",
        lagged=dx.LaggedSurvival(prior=0.6))  # fmt: skip
    assert decide.lengths(sure, np.zeros(2, np.int64), caps, kv).sum() == prior.length.sum() < 6


def test_floors_and_weights_reach_the_operator() -> None:
    dear = line(64, slope=3.0).at  # too dear for any draft
    c, zero = np.full((4, 3), 0.5, np.float32), np.zeros(4, np.int64)
    caps, kv = np.array([3, 3, 0, 3], np.int32), np.ones(4, np.int32)
    plain = Decider(Policy.parse("causal"), 4, 3, dear)
    floor = Decider(Policy.parse("causal+min1"), 4, 3, dear)
    assert plain.lengths(c, zero, caps, kv).tolist() == [0] * 4
    assert floor.lengths(c, zero, caps, kv).tolist() == [1, 1, 0, 1]
    heavy = Decider(Policy.parse("two_phase+weight9"), 4, 3, line(64, slope=0.4).at)
    assert heavy.lengths(c, zero, np.full(4, 3, np.int32), kv).tolist() == [2, 0, 2, 0]


def test_ageing_ends_a_drought() -> None:
    curve, work = line(64, slope=1.5), Workload(tokens=3000)
    trace = Synthetic(request_spread=3.0)  # some requests never promise anything
    plain, aged = (one(n, trace, curve, 8, work) for n in ("causal", "causal+age5"))
    assert plain.drought > 30
    assert aged.drought == 5
    assert aged.request_budget_p1 > plain.request_budget_p1
    assert aged.throughput < plain.throughput + 4 * plain.throughput_se


def test_the_gate_saves_drafts_that_do_not_pay() -> None:
    """A dear drafter and a coin that never falls right: plain decoding but for the probes."""
    curve, work = line(64, draft_ms=1.0, draft_ms_per_request=2.0), Workload(tokens=4000)
    plain, drafts, gated = (
        one(n, Coin(0.05), curve, 8, work) for n in ("none", "two_phase", "two_phase+gate")
    )
    assert drafts.throughput < 0.4 * plain.throughput
    assert gated.throughput > 0.8 * plain.throughput
    assert gated.budget < 1.2 < drafts.budget
    # Where drafts pay it stays out of the way.
    cheap = line(64, draft_ms=0.1)
    free, watched = (one(n, Coin(0.8), cheap, 8, work) for n in ("two_phase", "two_phase+gate"))
    assert watched.throughput == pytest.approx(free.throughput, rel=0.05)


@pytest.mark.parametrize(
    "name",
    ["", "static", "causal3", "static1.5", "two_phase:lag1", "two_phase:unsafe_lag2", "none+min1",
     "oracle:lag3", "threshold", "threshold5", "static2+gate", "causal+age", "two_phase+min0.5",
     "static2+weight2"],
)  # fmt: skip
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(dx.ArgumentError, match="policy: "):
        Policy.parse(name)


def test_unsafe_and_impossible_policies_say_so() -> None:
    unsafe = {p.name for p in default_policies(3) if not p.safe}
    assert unsafe == {"two_phase:unsafe_lag0", "two_phase:unsafe_lag1", "oracle"}


def test_comparison_names_the_best_fixed_length() -> None:
    base = one("none", Coin(0.5), line(8), 1, Workload(tokens=50))
    points = [
        replace(base, policy=n, throughput=t)
        for n, t in (("none", 10.0), ("static2", 20.0), ("mtp1", 90.0), ("causal", 30.0),
                     ("oracle", 40.0))
    ]  # fmt: skip
    (row,) = compare(points)
    assert (row["best_static"], row["causal"], row["causal/oracle"]) == ("static2", 1.5, 0.75)
