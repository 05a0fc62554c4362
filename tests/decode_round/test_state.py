# SPDX-License-Identifier: Apache-2.0
"""RoundState, SamplingParams, Scheduler: slots, pages, seeds, and one error for everything."""

from __future__ import annotations

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.toy import ToyTarget


def test_parameters_list_everything_that_is_wrong() -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.SamplingParams(
            temperature=1e-4, top_k=-1, top_p=float("nan"), min_p=2, seed=-1, max_new_tokens=0,
            stop_ids=(-5,), rule="best", draft_temperature=-1, weight=float("inf"), min_draft=-1,
        )  # fmt: skip
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop_ids", "rule",
             "draft_temperature", "weight", "min_draft")  # fmt: skip
    assert str(error.value).startswith(f"SamplingParams: {len(names)} problems")
    for name in names:
        assert f"  {name}: got" in str(error.value)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), 1e-4, float("inf")])
def test_bad_temperatures(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        dx.SamplingParams(temperature)


def test_rules_and_what_they_need() -> None:
    with pytest.raises(dx.ArgumentError, match="synthetic_acceptance: got None, expected a number"):
        dx.SamplingParams(1.0, rule="synthetic")
    with pytest.raises(dx.ArgumentError, match="synthetic_acceptance: got 2"):
        dx.SamplingParams(1.0, synthetic_acceptance=2)
    state = dx.RoundState.create(1, gamma=2)
    with pytest.raises(dx.ArgumentError, match=r"synthetic_acceptance: got 3\.5, expected at most"):
        state.add([1], dx.SamplingParams(rule="synthetic", synthetic_acceptance=3.5))
    with pytest.raises(dx.ArgumentError, match="expected temperature 0"):
        dx.SamplingParams(1.0, rule="greedy")


def test_create_lists_everything_that_is_wrong() -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.RoundState.create(0, 0, page_size=0, max_len=0, num_pages=0, framework="jax")
    for name in ("gamma", "max_requests", "page_size", "max_len", "num_pages", "framework"):
        assert f"  {name}: got" in str(error.value)
    with pytest.raises(NotImplementedError, match="device='cuda'"):
        dx.RoundState.create(1, 1, device="cuda")


def test_add_checks_before_it_changes() -> None:
    state = dx.RoundState.create(1, gamma=2, max_len=8, max_stop_ids=1, page_size=4)
    for prompt in ([], [[1]], [0.5], [-1]):
        with pytest.raises(dx.ArgumentError, match="prompt"):
            state.add(prompt)
    with pytest.raises(dx.ArgumentError) as error:
        state.add([1, 2], dx.SamplingParams(max_new_tokens=7, stop_ids=(1, 2), max_draft=3))
    for text in ("2 + 7 tokens, expected at most max_len = 8", "stop_ids", "max_draft"):
        assert text in str(error.value)
    assert state.pages.num_free == state.num_pages and state.free_slots() == [0]
    state.add([1, 2], dx.SamplingParams(max_new_tokens=6))
    with pytest.raises(dx.CapacityError, match="slots"):
        state.add([1], dx.SamplingParams(max_new_tokens=1))


@pytest.mark.parametrize("slot", [-1, 1, 5])
def test_remove_of_nothing_is_an_error(slot: int) -> None:
    with pytest.raises(dx.ArgumentError, match="slot"):
        dx.RoundState.create(2, gamma=1).remove(slot)


def test_pages_are_reserved_before_the_round_and_given_back() -> None:
    target = ToyTarget(5)
    state = dx.RoundState.create(2, gamma=3, page_size=4, max_len=12, num_pages=6)
    a = state.add([1, 2, 3], dx.SamplingParams(max_new_tokens=9))
    assert state.pages.owned.tolist() == [1, 0]
    dx.prefill(target, state)
    dx.decode_round(target, None, state)
    assert state.pages.owned[a] == 2, "3 in the cache, 1 + 3 beyond"
    b = state.add([1] * 10, dx.SamplingParams(max_new_tokens=2))
    assert state.pages.num_free == 1
    dx.prefill(target, state)
    before = state.host.kv_len.copy(), state.pages.table.copy()
    state.host.kv_len[a] = 8  # a now needs a third page, b a fourth: one is left
    with pytest.raises(dx.CapacityError, match="2 more KV pages"):
        dx.decode_round(target, None, state)
    state.host.kv_len[a] = before[0][a]
    np.testing.assert_array_equal(before[1], state.pages.table)
    state.remove(b)
    state.remove(a)
    assert state.pages.num_free == 6 and np.all(state.pages.table == -1)


def test_no_page_has_two_owners(rng: np.random.Generator) -> None:
    state = dx.RoundState.create(5, gamma=2, page_size=2, max_len=20)
    live: list[int] = []
    for _ in range(200):
        if live and (len(live) == 5 or rng.random() < 0.5):
            state.remove(live.pop(int(rng.integers(len(live)))))
        else:
            length = int(rng.integers(1, 15))
            live.append(state.add([1] * length, dx.SamplingParams(max_new_tokens=5)))
        used = state.pages.table[state.pages.table >= 0]
        assert len(np.unique(used)) == len(used) == state.num_pages - state.pages.num_free


def test_seeds_that_live_together_are_distinct() -> None:
    """L2: with equal seeds another request's tokens would be one's own."""
    state = dx.RoundState.create(4, gamma=1, max_len=8)
    params = dx.SamplingParams(1.0, seed=7, max_new_tokens=2)
    slots = [state.add([1], params) for _ in range(3)]
    assert [int(s) for s in state.host.seed[slots]] == [7, dx.mix_seed(7, 1), dx.mix_seed(7, 2)]
    state.remove(slots[1])
    assert state.add([1], params) == slots[1]
    assert int(state.host.seed[slots[1]]) == dx.mix_seed(7, 1), "the ordinal that is free"
    free = dx.SamplingParams(1.0, max_new_tokens=2)
    seen = {int(state.host.seed[state.add([1], free)])}
    for _ in range(20):
        state.remove(3)
        seen.add(int(state.host.seed[state.add([1], free)]))
    assert len(seen) == 21 and max(seen) > 2**32


def test_prefill_refuses_slots_that_do_not_wait() -> None:
    target = ToyTarget(5)
    state = dx.RoundState.create(2, gamma=1, max_len=8)
    slot = state.add([1], dx.SamplingParams(max_new_tokens=4))
    dx.prefill(target, state, [slot])
    for bad in ([slot], [1], [0, 0]):
        with pytest.raises(dx.ArgumentError, match="slots"):
            dx.prefill(target, state, bad)
    assert dx.prefill(target, state).slots == ()


def test_scheduler_lists_everything_that_is_wrong() -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.Scheduler("two_phase", capacity=0, probe_every=0)
    for name in ("cost", "capacity", "probe_every"):
        assert f"  {name}: got" in str(error.value)
    for mode, name in (("fixed", "fixed_len"), ("threshold", "threshold"), ("best", "mode")):
        with pytest.raises(dx.ArgumentError, match=name):
            dx.Scheduler(mode)


def test_cost_tables_by_number_of_requests() -> None:
    tables = {n: dx.CostTable.from_points([1, 99], [float(n), 99.0]) for n in (1, 4, 8)}
    scheduler = dx.Scheduler("causal", cost=tables)
    chosen = [scheduler.cost(n) for n in (1, 2, 4, 5, 8, 30)]
    assert chosen == [tables[n] for n in (1, 4, 4, 8, 8, 8)]
