# SPDX-License-Identifier: Apache-2.0
"""The online monitor: labels without bias, drift, exploration, refits in place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import dspark_ext as dx
from dspark.engine import Engine
from dspark.scheduling import calibration as cal
from dspark.scheduling.gaps import known_flags
from dspark.scheduling.monitor import Monitor, bucket_of
from dspark_ext.toy import ToyDrafter, ToyTarget

GAMMA = 2
P = np.array([[0.7, 0.3], [0.2, 0.8]])  # target and drafter by the previous token
Q = np.array([[0.5, 0.5], [0.6, 0.4]])
C = np.minimum(P, Q).sum(axis=1)  # what a perfect head says behind each token
SPS = np.array([1.0, 1.0, 0.58, 0.44])  # of 1, 2, 3 tokens: one draft pays, a second may


def logit(c: Any) -> Any:
    return np.log(c) - np.log1p(-np.asarray(c, dtype=np.float64))


class Seen(NamedTuple):
    """A round of one request: its probability, and what there is to learn from."""

    chance: float
    c: np.ndarray
    flags: np.ndarray
    ratio: np.ndarray  # min(1, p/q) of each draft
    length: int

    @property
    def gap(self) -> float:
        """Survival of all drafts less a_gamma, as if every one of them were known."""
        return float(np.all(self.flags == 1)) - float(np.prod(self.c))


def rounds(explored: bool) -> Iterator[Seen]:
    """Every round of one request behind token 0.

    Algorithm 1 chooses the length from the perfect head's c, or the whole block is due.
    """
    for x in itertools.product(range(2), repeat=GAMMA):
        before = (0, x[0])
        c = C[list(before)]
        drawn = float(np.prod([Q[b, y] for b, y in zip(before, x, strict=True)]))
        a = np.cumprod(c).astype(np.float32)[None]
        floor = GAMMA if explored else 0
        length = int(dx.prefix_schedule(a, 1000 / SPS, min_len=floor).length[0])
        keep = np.minimum(1, [P[b, y] / Q[b, y] for b, y in zip(before, x, strict=True)])
        for hit in itertools.product((1, 0), repeat=length):
            chance = float(np.prod([k if h else 1 - k for k, h in zip(keep, hit, strict=False)]))
            flags = np.full(GAMMA, -2)
            flags[:length] = np.where(np.cumprod([1, *hit[:-1]])[:length] == 1, hit, -1)
            yield Seen(drawn * chance, c, flags, keep, length)


def expectation(gap: Any, explored: bool = False) -> float:
    """Mean of ``gap(seen)`` over the rounds in which it is not None."""
    found = [(seen.chance, gap(seen)) for seen in rounds(explored) if seen.chance > 0]
    kept = [(w, g) for w, g in found if g is not None]
    return sum(w * g for w, g in kept) / sum(w for w, _ in kept)


def test_the_schedule_selects_by_value() -> None:
    lengths = {seen.length for seen in rounds(False) if seen.chance > 0}
    assert lengths == {1, 2}, "the second draft is sent behind one first draft and not the other"
    assert sum(seen.chance for seen in rounds(False)) == pytest.approx(1, abs=1e-12)


NAIVE: dict[str, Any] = {
    "unscheduled-is-rejected": lambda seen: seen.gap,
    "zeros-behind-any-rejection": lambda seen: (
        None if seen.length < 2 and seen.flags[0] == 1 else seen.gap
    ),
    "survival-where-it-was-sent": lambda seen: None if seen.length < 2 else seen.gap,
}


#: E[survival of draft 2 less a_2] over all proposals. It is not 0: accepted drafts have another law
#: than drafts, and behind token 0 the head says more.
TRUTH = 0.5 * 1 * 0.8 + 0.5 * 0.6 * 0.6 - 0.5 * 0.8 * (0.8 + 0.6)


def test_without_a_schedule_all_averages_agree() -> None:
    for gap in NAIVE.values():
        assert expectation(gap, explored=True) == pytest.approx(TRUTH, abs=1e-12)


@pytest.mark.parametrize("name", NAIVE)
def test_naive_averages_are_biased_under_a_schedule(name: str) -> None:
    assert abs(expectation(NAIVE[name]) - TRUTH) > 0.04


def test_our_labels_are_not() -> None:
    """By enumeration: no gap of c_k whatever was selected; that of a_k where it was due."""
    for k in range(GAMMA):
        flag = expectation(lambda s, k=k: s.flags[k] - s.c[k] if s.flags[k] >= 0 else None)
        ratio = expectation(lambda s, k=k: s.ratio[k] - s.c[k] if k < s.length else None)
        assert max(abs(flag), abs(ratio)) < 1e-12


def drawn(rng: np.random.Generator, explored: bool, count: int) -> Any:
    table = [x for x in rounds(explored) if x[0] > 0]
    chance = np.array([x[0] for x in table])
    pick = rng.choice(len(table), count, p=chance / chance.sum())
    return tuple(np.stack([table[i][j] for i in pick]) for j in (1, 2, 3))


def test_the_monitor_takes_the_right_averages(rng: np.random.Generator) -> None:
    """The same rounds, drawn; and the average that it must not take would have called it drift."""
    monitor = Monitor(GAMMA, window=40_000, drift=0.01)
    for explored, count in ((False, 30_000), (True, 3000)):
        c, flags, _ = drawn(rng, explored, count)
        monitor.record("token@1", logit(c), flags, due=GAMMA if explored else 0)
        if not explored:
            sent = flags[:, 1] != -2
            a, y = np.prod(c[sent], axis=1), np.all(flags[sent] == 1, axis=1)
            sigma = float(np.sqrt(np.sum(a * (1 - a))) / len(a))
            assert abs(float(np.mean(y - a)) - TRUTH) > 8 * sigma
    first, second = monitor.report()["token@1"]
    assert not first.drift
    assert not second.conditional.exceeds(0.01, 4)
    survival = second.survival
    assert abs(survival.label - survival.prediction - TRUTH) < 4 * survival.sigma
    assert first.scheduled == 33_000 and second.survival.count == 3000
    assert first.conditional.count == 33_000 > second.conditional.count > second.survival.count


def test_drift_is_measured_from_what_the_fit_left_over(rng: np.random.Generator) -> None:
    """STS makes a_2 right and c_2 wrong by as much; neither counts as drift, a change does."""
    c, flags, _ = drawn(rng, True, 20_000)
    found = cal.fit(logit(c), flags)
    assert found.conditional[1].ece > 0.05, "the price of a right product"
    for change, want in ((0, False), (1, True)):
        monitor = Monitor(GAMMA, found, window=20_000)
        c, flags, _ = drawn(rng, True, 6000)
        if change:  # a target that takes the first draft half as often
            lost = (rng.random(6000) < 0.5) & (flags[:, 0] == 1)
            flags[lost] = (0, -1)
        monitor.record("token@1", logit(c), flags, due=GAMMA)
        assert any(row.drift for row in monitor.report()["token@1"]) is want
    monitor.refit()
    assert not any(row.drift for row in monitor.report()["token@1"])


def test_ratios_are_labels_behind_rejections_too(rng: np.random.Generator) -> None:
    c, flags, ratio = drawn(rng, True, 4000)
    plain, rich = Monitor(GAMMA), Monitor(GAMMA)
    plain.record("token@1", logit(c), flags, due=0)
    rich.record("token@1", logit(c), flags, due=0, ratio=ratio)
    counts = [m.report()["token@1"][1].conditional.count for m in (plain, rich)]
    assert counts[0] < 4000 == counts[1]
    assert not rich.report()["token@1"][1].conditional.exceeds(0.03, 4)
    assert rich.report()["token@1"][1].survival.count == 0, "nothing was due"


def test_drift_needs_counts_size_and_significance(rng: np.random.Generator) -> None:
    z = np.full((1000, 1), logit(0.8))
    for truth, count, want in ((0.8, 1000, False), (0.6, 1000, True), (0.6, 100, False),
                               (0.77, 1000, False)):  # fmt: skip
        monitor = Monitor(1, min_rounds=200)
        flags = (np.arange(count) < truth * count).astype(int)[:, None]
        monitor.record("greedy", z[:count], flags, due=1)
        assert monitor.report()["greedy"][0].drift is want
        assert monitor.to_dict()["drifting"] == (["greedy"] if want else [])


def scaled(rng: np.random.Generator, count: int, scale: float) -> tuple[Any, Any]:
    z = rng.normal(1.0, 3.0, (count, 3))
    hit = rng.random((count, 3)) < 1 / (1 + np.exp(-z / scale))
    alive = np.cumprod(np.concatenate([np.ones((count, 1)), hit[:, :-1]], axis=1), axis=1)
    return z, np.where(alive == 0, -1, hit.astype(int))


def test_a_refit_finds_the_temperatures_in_place(rng: np.random.Generator) -> None:
    """Position 1 and 2 by survivals, position 3 was never due: by its conditional labels."""
    z, flags = scaled(rng, 40_000, 2.0)
    monitor = Monitor(3, window=40_000)
    monitor.record("token@1", z, flags, due=2)
    assert any(row.drift for row in monitor.report()["token@1"])
    tau = monitor.refit()["token@1"]
    assert np.abs(tau - 2.0).max() <= 0.15
    held = monitor.fitted["token@1"]
    assert not any(row.drift for row in monitor.report()["token@1"])
    z, flags = scaled(rng, 40_000, 1.0)
    monitor.record("token@1", z, flags, due=2)
    monitor.refit()
    assert monitor.fitted["token@1"] is held and np.abs(held - 1.0).max() <= 0.1


def test_a_refit_on_the_same_rounds_is_the_offline_fit(rng: np.random.Generator) -> None:
    z, flags = scaled(rng, 3000, 1.6)
    monitor = Monitor(3)
    monitor.record("token@1", z, flags, due=3)
    offline = cal.fit(z.astype(np.float32), flags)
    np.testing.assert_allclose(monitor.refit()["token@1"], offline.temperature, rtol=1e-6)


def test_thin_positions_keep_their_temperature(rng: np.random.Generator) -> None:
    z, flags = scaled(rng, 150, 2.0)
    found = cal.Calibration((1.5, 1.25, 1.0), (True,) * 3, *[(cal.reliability([], []),) * 3] * 2)
    monitor = Monitor(3, found, min_rounds=200)
    monitor.record("token@1", z, flags, due=3)
    assert monitor.refit()["token@1"].tolist() == [1.5, 1.25, 1.0]
    assert monitor.fitted == {}, "nothing new: the scheduler keeps its own array"


def test_only_the_latest_rounds_count(rng: np.random.Generator) -> None:
    monitor = Monitor(3, window=500, min_rounds=100)
    old, new = scaled(rng, 900, 4.0), scaled(rng, 1200, 1.0)
    monitor.record("token@1", *old, due=3)
    monitor.record("token@1", *new, due=3)
    alone = Monitor(3, window=500, min_rounds=100)
    alone.record("token@1", new[0][-500:], new[1][-500:], due=3)
    assert monitor.report() == alone.report()


def test_stops_take_both_outcomes_away() -> None:
    drafts, stops = np.array([[5, 9, 1], [9, 5, 5], [1, 2, 3]]), np.array([[9, -1]] * 3)
    flags = np.array([[1, 1, -2], [0, -1, -1], [1, 0, -1]])
    assert known_flags(flags, drafts, stops).tolist() == [[1, 1, -2], [0, -2, -2], [1, 0, -1]]


def test_buckets() -> None:
    names = [bucket_of("token", t) for t in (0.0, 0.1, 0.3, 0.6, 0.7, 1.0)]
    assert names == ["greedy", "token@0.25", "token@0.25", "token@0.5", "token@0.75", "token@1"]
    assert bucket_of(3, 1.0) == "match@1"


# ---- in the engine ------------------------------------------------------------------------------


def flat_models(said: float, gamma: int = 3) -> tuple[ToyTarget, ToyDrafter]:
    """p = (.7, .3) and q = (.5, .5) everywhere: c is .8, and the head says ``said``."""
    target, drafter = ToyTarget(2), ToyDrafter(2, gamma)
    target.table[...], drafter.base[...] = np.log(P[0]), 0.0
    drafter.head = dx.DraftHead(
        w1=np.zeros((2, 1), np.float32), w2=np.zeros((2, 1), np.float32),
        confidence_weight=np.zeros(4, np.float32), confidence_bias=float(logit(said)),
    )  # fmt: skip
    return target, drafter


def sampled(count: int, tokens: int = 40, **more: Any) -> list[dx.SamplingParams]:
    return [dx.SamplingParams(1.0, seed=i, max_new_tokens=tokens, **more) for i in range(count)]


COST = dx.CostTable.from_points([1, 8, 32], [1.0, 1.3, 4.0])


def serve(monitor: Monitor, scheduler: dx.Scheduler, said: float, requests: int = 48) -> Engine:
    target, drafter = flat_models(said)
    engine = Engine(target, drafter, scheduler=scheduler, max_requests=4, max_len=64,
                    framework="numpy", monitor=monitor)  # fmt: skip
    engine.complete([[0]] * requests, sampled(requests))
    return engine


def test_an_overconfident_head_is_found_and_corrected() -> None:
    monitor = Monitor(3, min_rounds=150, refit_every=0)
    scheduler = dx.Scheduler("causal", cost=COST, skip=False)
    engine = serve(monitor, scheduler, said=0.96)
    found = engine.metrics.to_dict()["calibration"]
    assert found["drifting"] == ["token@1"] and not found["buckets"]["token@1"]["refitted"]
    first = monitor.report()["token@1"][0]
    assert first.conditional.prediction == pytest.approx(0.96, abs=1e-6)
    assert abs(first.conditional.label - 0.8) < 5 * np.sqrt(0.16 / first.conditional.count)
    monitor.refit()
    state = engine.state
    slot = state.add([0], sampled(1)[0])
    greedy = state.add([0], dx.SamplingParams(max_new_tokens=4))
    dx.prefill(engine.target, state)
    tau = scheduler.temperatures(state)
    assert tau[slot, 0] == pytest.approx(float(logit(0.96) / logit(0.8)), abs=0.35)
    assert tau[greedy].tolist() == [1, 1, 1], "another bucket"
    got = dx.decode_round(engine.target, engine.drafter, state, scheduler)
    c = got.confidence.conditional
    assert abs(float(c[slot, 0]) - 0.8) < 0.04 and float(c[greedy, 0]) == pytest.approx(0.96)


def test_exploration_reaches_positions_that_are_never_scheduled() -> None:
    scheduler = dx.Scheduler("causal", cost=dx.CostTable.from_points([1, 40], [1.0, 30.0]))
    scheduler.skip = False
    silent = Monitor(3, min_rounds=20)
    serve(silent, scheduler, said=0.8, requests=4)
    assert all(row.scheduled == 0 for row in silent.report()["token@1"])
    scheduler.monitor = None
    monitor = Monitor(3, min_rounds=10, explore_every=3)
    engine = serve(monitor, scheduler, said=0.8, requests=12)
    rows = monitor.report()["token@1"]
    assert all(10 <= row.survival.count < 20 for row in rows), "and stops when there are enough"
    assert monitor.explored == rows[0].survival.count
    json.dumps(engine.metrics.to_dict(), allow_nan=False)


def test_who_is_explored_depends_on_counts_alone() -> None:
    target, drafter = flat_models(0.8)
    monitor = Monitor(3, explore_every=2)
    state = dx.RoundState.create(3, 3, page_size=4, max_len=64)
    for p in sampled(3):
        state.add([0], p)
    dx.prefill(target, state)
    scheduler = dx.Scheduler("threshold", threshold=1.0, monitor=monitor)
    turns = []
    for _ in range(12):
        got = dx.decode_round(target, drafter, state, scheduler)
        turns.append(np.flatnonzero(got.length).tolist())
        assert np.array_equal(state.host.due > 0, got.length > 0)
    assert turns[::2] == [[]] * 6 and turns[1::2] == [[1], [2], [0], [1], [2], [0]]


def test_budgets_by_request_show_starvation() -> None:
    """Ageing lifts the request that never gets a draft; the metrics show both."""
    target, drafter = flat_models(0.8)
    cost = dx.CostTable.from_points([2, 3, 4, 8], [1.0, 1.2, 1.75, 6.0])
    budgets = {}
    for name, ageing in (("without", None), ("with", dx.Ageing(rounds=4))):
        scheduler = dx.Scheduler("causal", cost=cost, skip=False, ageing=ageing)
        engine = Engine(target, drafter, scheduler=scheduler, max_requests=2, max_len=64,
                        framework="numpy")  # fmt: skip
        strong, weak = sampled(2, max_draft=1)
        weak = dx.SamplingParams(1.0, seed=9, max_new_tokens=30, max_draft=1, weight=0.9)
        engine.complete([[0], [0]], [strong, weak])
        budgets[name] = engine.metrics.to_dict()["budget_per_request"]
    assert budgets["without"]["requests"] == budgets["with"]["requests"] == 2
    assert budgets["without"]["min"] < budgets["with"]["min"]
    assert budgets["without"]["longest_drought"] > budgets["with"]["longest_drought"] == 4


def test_a_request_that_sits_out_is_not_explored() -> None:
    class Second(dx.Gate):
        def drafting(self, state: Any, cost_of: Any) -> Any:
            del cost_of
            return np.arange(state.max_requests) == 1

    target, drafter = flat_models(0.8)
    monitor = Monitor(3, explore_every=1)
    state = dx.RoundState.create(3, 3, page_size=4, max_len=64)
    for p in sampled(3):
        state.add([0], p)
    dx.prefill(target, state)
    scheduler = dx.Scheduler("threshold", threshold=1.0, cost=COST, gate=Second(), monitor=monitor)
    for _ in range(4):
        got = dx.decode_round(target, drafter, state, scheduler)
        assert got.length.tolist() == [0, 3, 0]
    assert monitor.explored == monitor.report()["token@1"][0].survival.count == 4


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"gamma": 0}, "gamma"), ({"min_rounds": 0}, "min_rounds"), ({"drift": 2}, "drift"),
     ({"explore_every": -1}, "explore_every"), ({"window": 10}, "min_rounds")],
)  # fmt: skip
def test_arguments(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(dx.ArgumentError, match=name):
        Monitor(**{"gamma": 2, **wrong})
