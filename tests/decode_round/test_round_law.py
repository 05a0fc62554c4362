# SPDX-License-Identifier: Apache-2.0
"""The heart of it: whatever is drafted and scheduled, the emitted tokens follow the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx
from dspark.scheduling import Monitor, OnlineAcceptance
from dspark_ext.toy import ToyDrafter, ToyTarget

V, GAMMA = 4, 4
PROMPT = [1, 3]
COST = dx.CostTable.from_points([1, 40, 400], [1.0, 1.5, 6.0], draft_ms=0.1)
STEEP = dx.CostTable.from_points([1, 2, 3, 64], [1.0, 1.3, 1.4, 40.0])
SCHEDULES: dict[str, Any] = {
    "off": lambda: dx.Scheduler(),
    "fixed-2": lambda: dx.Scheduler("fixed", fixed_len=2),
    "threshold": lambda: dx.Scheduler("threshold", threshold=0.55),
    "causal": lambda: dx.Scheduler("causal", cost=COST),
    "causal-steep": lambda: dx.Scheduler("causal", cost=STEEP),
    "two_phase": lambda: dx.Scheduler("two_phase", cost=COST),
    "helped": lambda: dx.Scheduler(
        "causal",
        cost=STEEP,
        skip=False,
        gate=dx.Gate(warmup=1, probe_every=2),
        ageing=dx.Ageing(rounds=1, weight=1.0),
        monitor=Monitor(GAMMA, explore_every=2, refit_every=3, min_rounds=50),
    ),
    "estimated": lambda: dx.Scheduler("two_phase", cost=COST, confidence=OnlineAcceptance()),
    "two_phase-capacity": lambda: dx.Scheduler("two_phase", cost=COST, capacity=100),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def generate(
    target: Any,
    drafter: Any,
    prompts: list[list[int]],
    params: list[dx.SamplingParams],
    scheduler: dx.Scheduler | None = None,
    backend: str = "cpu",
    gamma: int = GAMMA,
    page_size: int = 2,
) -> list[list[int]]:
    """All requests at once, to their end; pages are tiny so that every round crosses one."""
    state = dx.RoundState.create(len(prompts), gamma, page_size=page_size, max_len=64)
    slots = [state.add(p, q) for p, q in zip(prompts, params, strict=True)]
    answers: dict[int, list[int]] = {r: [] for r in slots}
    result = dx.prefill(target, state, backend=backend)
    while True:
        for r in slots:
            count = result.num_emitted[r]
            answers[r] += result.tokens[r, :count].tolist()
            assert np.all(result.tokens[r, count:] == -1)
        if not state.active_slots():
            return [answers[r] for r in slots]
        result = dx.decode_round(target, drafter, state, scheduler, backend=backend)
        assert not np.any(result.status & ~int(dx.Status.STOPPED | dx.Status.FORCED_REJECT))
        live = state.host.active != 0
        np.testing.assert_array_equal(state.host.kv_len[live], state.host.position[live])


def goodness(samples: list[list[int]], joint: np.ndarray) -> float:
    """p value of the samples' first tokens under a joint law; small cells are pooled."""
    length = joint.ndim
    index = np.ravel_multi_index(np.array(samples)[:, :length].T, joint.shape)
    seen = np.bincount(index, minlength=joint.size).astype(float)
    expected = joint.reshape(-1) * len(samples)
    order = np.argsort(expected)
    pooled = order[np.cumsum(expected[order]) < 8]
    keep = np.setdiff1d(order, pooled)
    observed = np.append(seen[keep], seen[pooled].sum())
    wanted = np.append(expected[keep], expected[pooled].sum())
    if wanted[-1] == 0:
        assert observed[-1] == 0
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted).pvalue)


def law_of(schedule: str, backend: str, count: int, seed: int, **params: Any) -> float:
    target = ToyTarget(V, seed=seed, spread=1.0)
    drafter = ToyDrafter(
        V, GAMMA, seed=seed, like=target, topk_support=params.pop("topk_support", 0)
    )
    scheduler = SCHEDULES[schedule]()
    batch, samples = min(count, 250), []
    for first in range(0, count, batch):
        each = [
            dx.SamplingParams(seed=1000 * seed + first + i, max_new_tokens=3, **params)
            for i in range(batch)
        ]
        samples += generate(target, drafter, [PROMPT] * batch, each, scheduler, backend)
    return goodness(samples, target.joint(PROMPT, 3, params["temperature"]))


@schedules
def test_joint_law_of_three_tokens(schedule: str, rng: np.random.Generator) -> None:
    """4^3 outcomes, 6,000 requests: one in a million of correct samplers would fail."""
    assert law_of(schedule, "cpu", 6_000, int(rng.integers(1000)), temperature=1.0) > 1e-6


@pytest.mark.parametrize("schedule", ["off", "two_phase"])
def test_joint_law_on_the_reference(schedule: str, rng: np.random.Generator) -> None:
    assert law_of(schedule, "reference", 300, int(rng.integers(1000)), temperature=1.0) > 1e-6


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6},
        {"temperature": 1.5, "draft_temperature": 0.5},
        {"temperature": 1.0, "draft_temperature": 0.0},
        {"temperature": 1.0, "rule": "match"},
        {"temperature": 1.0, "rule": "block"},
        {"temperature": 1.0, "topk_support": 2},
        {"temperature": 0.8, "topk_support": 3, "rule": "match"},
    ],
    ids=lambda p: "-".join(f"{k}={v}" for k, v in p.items()),
)
def test_joint_law_of_other_parameters(params: dict[str, Any], rng: np.random.Generator) -> None:
    assert law_of("causal", "cpu", 3_000, int(rng.integers(1000)), **params) > 1e-6


def test_the_law_test_can_fail() -> None:
    """Samples of a slightly different target must be caught by the same statistic."""
    target = ToyTarget(V, seed=3, spread=1.0)
    wrong = ToyTarget(V, seed=3, spread=1.0)
    wrong.table = wrong.table * 1.2
    samples = []
    for first in range(0, 4000, 250):
        each = [dx.SamplingParams(1.0, seed=first + i, max_new_tokens=3) for i in range(250)]
        samples += generate(wrong, ToyDrafter(V, GAMMA), [PROMPT] * 250, each)
    assert goodness(samples, target.joint(PROMPT, 3)) < 1e-6


@schedules
@pytest.mark.parametrize("head", ["good", "random", "reduced"])
def test_greedy_equals_plain_decoding(backend: str, schedule: str, head: str) -> None:
    target = ToyTarget(9, seed=5)
    ids = np.array([0, 2, 3, 7], dtype=np.int32) if head == "reduced" else None
    like = target if head == "good" else None
    drafter = ToyDrafter(9, GAMMA, seed=1, like=like, draft_to_target=ids)
    prompts = [[1], [2, 8, 4], [5] * 7, [3, 3]]
    params = [dx.SamplingParams(max_new_tokens=n) for n in (13, 1, 8, 20)]
    answers = generate(target, drafter, prompts, params, SCHEDULES[schedule](), backend)
    assert answers == [
        target.greedy(p, q.max_new_tokens) for p, q in zip(prompts, params, strict=True)
    ]


@schedules
def test_match_equals_plain_seeded_decoding(backend: str, schedule: str) -> None:
    target = ToyTarget(9, seed=6)
    drafter = ToyDrafter(9, GAMMA, seed=1, like=target)
    prompts = [[1], [2, 8, 4], [5] * 7]
    params = [
        dx.SamplingParams(0.8, seed=i, max_new_tokens=12, rule="match", top_k=5) for i in range(3)
    ]
    plain = [
        generate(target, None, [p], [q], None, backend)[0]
        for p, q in zip(prompts, params, strict=True)
    ]
    assert generate(target, drafter, prompts, params, SCHEDULES[schedule](), backend) == plain
    assert len(set(map(tuple, plain))) == 3


def test_plain_decoding_is_the_same_path_without_drafts(backend: str) -> None:
    """A scheduler that never admits a draft and no drafter at all: the same tokens, sampled too."""
    target = ToyTarget(9, seed=7)
    drafter = ToyDrafter(9, GAMMA, seed=1)
    params = [dx.SamplingParams(1.0, seed=4, max_new_tokens=10)]
    zero = dx.Scheduler("fixed", fixed_len=0)
    with_drafter = generate(target, drafter, [[1]], params, zero, backend)
    assert with_drafter == generate(target, None, [[1]], params, None, backend)


@pytest.mark.parametrize("schedule", ["off", "fixed-2"])
def test_seeded_requests_do_not_depend_on_their_batch(backend: str, schedule: str) -> None:
    """V22: alone, in another slot, beside others, in a larger state: the same tokens."""
    target = ToyTarget(9, seed=8)
    drafter = ToyDrafter(9, GAMMA, seed=2, like=target)
    mine = dx.SamplingParams(0.9, seed=77, max_new_tokens=12)
    others = [dx.SamplingParams(t, seed=i, max_new_tokens=9) for i, t in enumerate((0.0, 1.3))]
    make = SCHEDULES[schedule]
    alone = generate(target, drafter, [[4, 2]], [mine], make(), backend)[0]
    prompts = [[6, 6, 6], [1], [4, 2]]
    mixed = generate(target, drafter, prompts, [*others, mine], make(), backend)
    assert mixed[2] == alone
    reverse = generate(
        target, drafter, prompts[::-1], [mine, *others[::-1]], make(), backend, page_size=5
    )
    assert reverse == mixed[::-1]
    assert mixed[0] == target.greedy([6, 6, 6], 9)
