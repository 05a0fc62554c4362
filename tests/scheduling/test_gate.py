# SPDX-License-Identifier: Apache-2.0
"""The gate in front of the draft: break-even, probes, and what decode_round makes of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.gate import Gate, GateRecord, worth_drafting
from dspark_ext.toy import ToyDrafter, ToyTarget


def tables(rows: float = 0.1, draft: float = 0.5, fixed: float = 0.0, top: int = 64) -> Any:
    """10 ms a step, ``rows`` ms a row, ``fixed`` + ``draft`` ms a drafting request."""

    def cost_of(n: int) -> dx.CostTable:
        ends = [10.0 + rows, 10.0 + rows * top]
        return dx.CostTable.from_points([1, top], ends, draft_ms=fixed + draft * n)

    return cost_of


def test_the_break_even_is_the_price_at_the_plain_rate() -> None:
    """One request: (1 + e) / (T + price) > 1 / T, so e > price / T."""
    cost_of = tables(rows=0.1, draft=0.5)
    price = 0.5 + 3 * 0.1
    edge = price / 10.1
    for earned, want in ((edge * 0.99, False), (edge * 1.01, True)):
        got = worth_drafting(np.array([earned]), np.array([3.0]), cost_of)
        assert got.tolist() == [want]


def test_kv_time_counts_on_both_sides() -> None:
    table = dx.CostTable.from_points([1, 9], [1.0, 1.8], draft_ms=1.0, ms_per_kv_token=0.01)
    earned, sent = np.array([0.9]), np.array([2.0])
    assert not worth_drafting(earned, sent, lambda _: table)[0], "1.9 / 2.2 < 1 / 1"
    assert worth_drafting(earned, sent, lambda _: table, kv_tokens=400)[0], "1.9 / 6.2 > 1 / 5"


@pytest.mark.parametrize("fixed", [0.0, 2.0])
def test_no_set_of_requests_is_faster(fixed: float, rng: np.random.Generator) -> None:
    """Against every subset, where all send as many rows (the order by earnings is then right)."""
    for _ in range(40):
        count = int(rng.integers(1, 7))
        earned, sent = rng.uniform(0, 1.5, count), np.full(count, 3.0)
        cost_of = tables(draft=rng.uniform(0, 1), fixed=fixed)
        got = worth_drafting(earned, sent, cost_of)

        def rate(
            chosen: Any, earned: Any = earned, cost_of: Any = cost_of, n: int = count
        ) -> float:
            k = int(np.sum(chosen))
            step = np.interp(n + 3.0 * k, np.arange(65), cost_of(n).array)
            ms = step + (cost_of(k).draft_ms if k else 0.0)
            return float((n + earned[np.array(chosen, bool)].sum()) / ms)

        best = max(rate(c) for c in itertools.product([0, 1], repeat=count))
        assert rate(got) == pytest.approx(best, rel=1e-12)


def test_ties_leave_the_draft_out_and_no_table_entry_means_no() -> None:
    free = tables(rows=0.0, draft=0.0)
    assert worth_drafting(np.zeros(2), np.ones(2), free).tolist() == [False, False]
    small = dx.CostTable.from_points([1, 2], [1.0, 1.0])
    assert worth_drafting(np.ones(3), np.ones(3), lambda _: small).tolist() == [False] * 3
    assert worth_drafting(np.zeros(0), np.zeros(0), free).shape == (0,)


def test_a_loser_waits_longer_with_every_probe() -> None:
    gate, cost_of = Gate(warmup=2, probe_every=3), tables()
    record, drafted = GateRecord.empty(1, 3), []
    for _ in range(30):
        chosen = gate.choose(record, cost_of)
        drafted.append(bool(chosen[0]))
        gate.learn(record, chosen, np.array([0]), np.array([3]))
    assert [i for i, d in enumerate(drafted) if d] == [0, 1, 5, 12, 25]


def test_a_request_that_recovers_drafts_again() -> None:
    gate, cost_of = Gate(warmup=1, probe_every=2, smoothing=0.5), tables()
    record, drafted = GateRecord.empty(1, 2), []
    for i in range(8):
        chosen = gate.choose(record, cost_of)
        drafted.append(bool(chosen[0]))
        gate.learn(record, chosen, np.array([0 if i < 3 else 3]), np.array([3]))
    assert drafted == [True, False, False, True, True, True, True, True]
    assert record.patience.tolist() == [2]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"warmup": 0}, "warmup"), ({"probe_every": 0}, "probe_every"), ({"smoothing": 0}, "smooth")],
)
def test_arguments(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(dx.ArgumentError, match=name):
        Gate(**wrong)
    with pytest.raises(dx.ArgumentError, match="gate: got one without cost"):
        dx.Scheduler("off", gate=Gate())


V, GAMMA = 9, 3


def models(like: bool = True) -> tuple[ToyTarget, ToyDrafter]:
    target = ToyTarget(V, seed=2)
    return target, ToyDrafter(V, GAMMA, seed=2, like=target if like else None)


def run(scheduler: dx.Scheduler, params: list[Any], like: bool = True) -> tuple[list[Any], Any]:
    """All rounds of requests [1], [2], ...; answers and results."""
    target, drafter = models(like)
    state = dx.RoundState.create(len(params), GAMMA, page_size=4, max_len=64)
    slots = [state.add([r + 1], p) for r, p in enumerate(params)]
    first = dx.prefill(target, state)
    answers = {r: first.tokens[r, :1].tolist() for r in slots}
    rounds = []
    while state.active_slots():
        got = dx.decode_round(target, drafter, state, scheduler)
        for r in got.slots:
            answers[r] += got.tokens[r, : got.num_emitted[r]].tolist()
        rounds.append(got)
    return [answers[r] for r in slots], rounds


class Closed(Gate):
    """Opens for each slot in its own rounds, so that features wait and drafts mix."""

    def drafting(self, state: Any, cost_of: Any) -> Any:
        del cost_of
        return (state.rounds + np.arange(state.max_requests)) % 3 != 0


@pytest.mark.parametrize("mode", ["off", "causal", "two_phase"])
def test_requests_that_sit_out_keep_their_text_and_their_drafter(mode: str) -> None:
    """The toy drafter checks that no feature is missing or given twice."""
    cost = {n: tables()(n) for n in range(1, 4)}
    scheduler = dx.Scheduler(mode, cost=cost, gate=Closed(), skip=False)
    params = [dx.SamplingParams(max_new_tokens=n) for n in (20, 14, 17)]
    answers, rounds = run(scheduler, params)
    target, _ = models()
    assert answers == [target.greedy([r + 1], p.max_new_tokens) for r, p in enumerate(params)]
    for i, got in enumerate(rounds, start=1):
        out = [r for r in got.slots if (i + r) % 3 == 0]
        assert not got.proposed[out].any() and not got.length[out].any()
        assert np.all(got.accepted[out] == -2)
        assert all(got.proposed[r] == GAMMA for r in got.slots if r not in out)
    assert not any(int(s) for got in rounds for s in got.status & ~int(dx.Status.STOPPED))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_greedy_request_drafts_beside_sampled_ones_that_sit_out(rule: Any) -> None:
    """No law of the draft is kept in such a round, and none is asked for."""
    params = [
        dx.SamplingParams(max_new_tokens=12),
        dx.SamplingParams(1.0, seed=1, max_new_tokens=12, rule=rule),
    ]
    cost = {n: tables()(n) for n in (1, 2)}
    answers, rounds = run(dx.Scheduler("off", cost=cost, gate=Closed(), skip=False), params)
    assert any(got.proposed[0] and not got.proposed[1] for got in rounds if 1 in got.slots)
    assert answers[0] == models()[0].greedy([1], 12) and len(answers[1]) == 12


def test_sampled_text_follows_the_same_rule() -> None:
    """With the rule match the output is plain seeded decoding, whoever drafts."""
    params = [dx.SamplingParams(0.8, seed=i, max_new_tokens=15, rule="match") for i in range(3)]
    cost = {n: tables()(n) for n in range(1, 4)}
    gated, _ = run(dx.Scheduler("causal", cost=cost, gate=Closed(), skip=False), params)
    plain, _ = run(dx.Scheduler("fixed", fixed_len=0), params)
    assert gated == plain


def test_the_hopeless_request_stops_drafting_and_the_good_one_does_not() -> None:
    """One drafter for both: the second request samples so hot that nothing is accepted."""
    cost = {n: tables(rows=0.2, draft=1.5)(n) for n in (1, 2)}
    gate = Gate(warmup=3, probe_every=8)
    scheduler = dx.Scheduler("off", cost=cost, gate=gate, skip=False)
    hot = dx.SamplingParams(50.0, seed=1, max_new_tokens=40, rule="match", draft_temperature=0)
    _, rounds = run(scheduler, [dx.SamplingParams(max_new_tokens=40), hot])
    share = [np.mean([got.proposed[r] > 0 for got in rounds if r in got.slots]) for r in (0, 1)]
    assert share[0] > 0.9 and share[1] < 0.5


def test_a_slot_with_another_request_starts_anew() -> None:
    target, drafter = models()
    gate = Gate(warmup=1, probe_every=50)
    scheduler = dx.Scheduler("off", cost={1: tables(draft=90.0)(1)}, gate=gate, skip=False)
    state = dx.RoundState.create(1, GAMMA, page_size=4, max_len=32)
    for _ in range(2):
        slot = state.add([1], dx.SamplingParams(max_new_tokens=8))
        dx.prefill(target, state)
        proposed = []
        while state.active_slots():
            proposed.append(int(dx.decode_round(target, drafter, state, scheduler).proposed[slot]))
        assert proposed[0] == GAMMA and not any(proposed[1:])
        state.remove(slot)


def test_the_drafts_time_is_part_of_the_price() -> None:
    """Eight requests: 1.6 drafts accepted of 7 pay for the rows, not for the drafter's 16 ms."""
    steps = dx.CostTable.from_points([1, 8, 64], [20.0, 24.0, 60.0])
    state = dx.RoundState.create(8, 7, max_len=64)
    for _ in range(8):
        state.add([0], dx.SamplingParams(max_new_tokens=40))
    state.host.active[:] = 1
    for _ in range(3):
        state.history.push(np.tile(np.cumprod(np.full(7, 0.62, np.float32)), (8, 1)), range(8))
    verdicts = {
        ms: dx.Scheduler("causal", cost=steps.with_draft_ms(ms)).wants_draft(state)
        for ms in (0.0, 16.0)
    }
    assert verdicts == {0.0: True, 16.0: False}
    gain = 8 * (1 + float(np.cumprod(np.full(7, 0.62)).sum()))
    plain = 8 / 24.0
    assert gain / 60.0 > plain, "what a table without the draft's time promises"
    assert max(
        (8 + np.cumsum(np.repeat(0.62 ** np.arange(1, 8), 8))[k - 1]) / (steps.ms(8 + k) + 16.0)
        for k in range(1, 57)
    ) < plain, "what a round with it reaches at best"  # fmt: skip


def test_draft_time_lowers_the_throughput_that_the_operator_reports(backend: str) -> None:
    a = np.array([[0.9, 0.8]], np.float32)
    table = dx.CostTable.from_points([1, 3], [2.0, 2.5], draft_ms=1.5)
    plan = dx.prefix_schedule(a, table, backend=backend)
    total = 1 + float(a[0].astype(np.float64).sum())
    assert plan.length.tolist() == [2]
    assert float(plan.theta) == pytest.approx(1000 * total / (2.5 + 1.5), rel=1e-9)
