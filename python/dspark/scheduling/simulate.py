# SPDX-License-Identifier: Apache-2.0
"""Closed-loop simulation of a serving load: what a policy is worth before a model has run it.

``load`` requests are always in flight; one that ends is replaced at once. Every round drafts for
all of them, lets the scheduler choose lengths, accepts what the trace says the target would accept,
and takes the milliseconds of the cost curve: target step, drafter, KV. Prefill, network and host
time are not simulated. All policies meet the same requests and the same random numbers at a load.

The scheduler sees predicted survivals and the curve it believes in; outcomes and time come from the
true ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.scheduling.simulate_costs import Curve
from dspark.scheduling.simulate_limits import check_fields
from dspark.scheduling.simulate_policies import Decider, Policy
from dspark.scheduling.simulate_traces import Trace
from dspark_ext import ArgumentError, CostTable
from dspark_ext._arrays import Checker

__all__ = ["Point", "Workload", "run", "sweep"]

_BATCHES = 20  # of the standard error


@dataclass(frozen=True)
class Workload:
    """What is served, and how long each point is simulated.

    Attributes
    ----------
    output_tokens, prompt_tokens : int
        Mean lengths of a request; log-normal with a coefficient of variation of one half.
    tokens : int
        Emitted tokens of a point, at least; and at least one and a half requests a slot.
    seed : int
    mtp_draft_share : float
        Time of the one-token drafter of ``mtp1`` as a share of the block drafter's.
    draft_in_theta : bool
        Whether the scheduler counts the drafter's time. It is spent either way.
    prior : float
        See :class:`dspark_ext.LaggedSurvival`.
    """

    output_tokens: int = 192
    prompt_tokens: int = 512
    tokens: int = 12_000
    seed: int = 0
    mtp_draft_share: float = 0.4
    draft_in_theta: bool = True
    prior: float = 0.6

    def __post_init__(self) -> None:
        check = Checker("Workload")
        check_fields(check, vars(self))
        check.done()

    def total(self, load: int) -> int:
        """Tokens to emit at a load."""
        return max(self.tokens, load * self.output_tokens * 3 // 2)


@dataclass(frozen=True)
class Point:
    """One policy at one load."""

    curve: str
    policy: str
    load: int
    throughput: float  # emitted tokens per second of all requests together
    throughput_se: float  # its standard error, from 20 parts of the run
    user_p50: float  # tokens per second of a finished request, median
    user_p1: float  # and the slowest in a hundred
    budget: float  # rows sent to the target per request and round: 1 + mean length
    request_budget_p1: float  # the same of a request over its life, the least in a hundred
    drought: int  # most rounds in a row in which a request could have verified a draft, and did not
    acceptance: float  # emitted tokens per round
    batch: float  # rows of a target step
    step_ms: float
    rounds: int
    finished: int  # requests


class _Requests:
    """Requests in flight, one a slot; new ones are drawn in the order of their joining."""

    def __init__(self, load: int, workload: Workload, rng: np.random.Generator) -> None:
        self._workload, self._rng = workload, rng
        self.left, self.kv = np.zeros(load, np.int64), np.zeros(load, np.int32)
        self._start, self._tokens = np.zeros(load), np.zeros(load, np.int64)
        self._rows, self._rounds = np.zeros(load, np.int64), np.zeros(load, np.int64)
        self._drought, self.drought = np.zeros(load, np.int64), 0
        self.speed: list[NDArray[np.float64]] = []
        self.budget: list[NDArray[np.float64]] = []
        everyone = np.arange(load)
        self._draw(everyone, 0.0)
        # The run starts in the middle of a service: requests are somewhere in their answers.
        done = (rng.random(load) * self.left).astype(np.int64)
        self.left -= done
        self.kv += done.astype(np.int32)

    def _lengths(self, mean: int, n: int) -> NDArray[np.int64]:
        sigma = np.sqrt(np.log(1.25))
        drawn = mean * np.exp(sigma * self._rng.standard_normal(n) - sigma**2 / 2)
        return np.asarray(np.maximum(1, np.rint(drawn)), dtype=np.int64)

    def _draw(self, slots: NDArray[np.int64], now: float) -> None:
        self.left[slots] = self._lengths(self._workload.output_tokens, len(slots))
        self.kv[slots] = self._lengths(self._workload.prompt_tokens, len(slots))
        self._start[slots] = now
        for counter in (self._tokens, self._rows, self._rounds, self._drought):
            counter[slots] = 0

    def advance(
        self, could: Any, length: NDArray[Any], emitted: NDArray[np.int64], now: float
    ) -> Any:
        """Commit a round; returns the slots whose request ended and was replaced."""
        self.left -= emitted
        self.kv += emitted.astype(np.int32)
        self._tokens += emitted
        self._rows += 1 + length
        self._rounds += 1
        self._drought += could
        self._drought[length > 0] = 0
        self.drought = max(self.drought, int(self._drought.max()))
        ended = np.flatnonzero(self.left <= 0)
        if len(ended):
            self.speed.append(1e3 * self._tokens[ended] / (now - self._start[ended]))
            self.budget.append(self._rows[ended] / self._rounds[ended])
            self._draw(ended, now)
        return ended


def run(
    policy: Policy,
    trace: Trace,
    curve: Curve,
    load: int,
    workload: Workload | None = None,
    believed: Curve | None = None,
) -> Point:
    """Simulate one policy at one load.

    Parameters
    ----------
    policy : Policy
    trace : Trace
        Confidences and outcomes.
    curve : Curve
        What steps cost.
    load : int
        Concurrent requests, at least 1.
    workload : Workload, optional
    believed : Curve, optional
        What the scheduler believes that they cost; the truth when absent.

    Raises
    ------
    ArgumentError
        When the curve does not reach what the policy may send at this load.

    Examples
    --------
    >>> from dspark.scheduling.simulate_traces import Synthetic
    >>> work = Workload(tokens=2000)
    >>> curve = Curve.named("smooth", 64)
    >>> point = run(Policy.parse("none"), Synthetic(), curve, 4, work)
    >>> point.acceptance, point.budget
    (1.0, 1.0)
    """
    work = Workload() if workload is None else workload
    share = (work.mtp_draft_share if policy.mode == "mtp1" else 1.0) * policy.drafts
    table = curve.at(load, share)
    _check(policy, trace, table, load)
    belief = functools.cache(
        lambda n: (believed or curve).at(n, share if work.draft_in_theta else 0.0)
    )
    requests = _Requests(load, work, np.random.default_rng([work.seed, load, 1]))
    batch = trace.batch(load, np.random.default_rng([work.seed, load, 2]))
    decide = Decider(policy, load, trace.gamma, belief, work.prior)
    goal, emitted_in_all, now = work.total(load), 0, 0.0
    steps: list[tuple[int, int, float]] = []  # rows, tokens, ms
    length, emitted = np.zeros(load, np.int32), np.ones(load, np.int64)
    drafted: NDArray[np.bool_] = np.full(load, policy.drafts)
    could: NDArray[np.bool_] = np.zeros(load, dtype=bool)  # verify a draft
    while emitted_in_all < goal:
        kv_ms = table.ms_per_kv_token and table.ms_per_kv_token * float(requests.kv.sum())
        draft_ms = table.draft_ms
        if policy.drafts:
            conditional, accepted = batch.round(emitted_in_all / goal)
            max_len = np.minimum(requests.left - 1, trace.gamma).astype(np.int32)
            slots = None
            if policy.gate:
                drafted = decide.drafting(float(requests.kv.sum()))
                max_len[~drafted] = 0
                slots = np.where(drafted, np.arange(load), -1)
                draft_ms = share * curve.draft(int(drafted.sum())) if drafted.any() else 0.0
            length = decide.lengths(conditional, accepted, max_len, requests.kv, slots)
            emitted = 1 + np.minimum(length, accepted)
            could = drafted & (max_len > 0)
            decide.learn(could, length, emitted - 1)
        rows, tokens = load + int(length.sum()), int(emitted.sum())
        ms = float(table.array[rows]) + draft_ms + kv_ms
        now += ms
        emitted_in_all += tokens
        steps.append((rows, tokens, ms))
        ended = requests.advance(could, length, emitted, now)
        if len(ended) and policy.drafts:
            batch.join(ended)
            decide.join(ended)
    return _point(curve.name, policy, load, np.array(steps), requests)


def _check(policy: Policy, trace: Trace, table: CostTable, load: int) -> None:
    if load < 1:
        raise ArgumentError(f"load: got {load}, expected at least 1")
    most = load
    if policy.mode in ("static", "mtp1"):
        most = load * (1 + min(int(policy.number), trace.gamma))
    elif policy.mode == "threshold":
        most = load * (1 + trace.gamma)
    most = max(most, load * (1 + policy.min_len))
    if table.max_tokens < most:
        raise ArgumentError(
            f"load: {policy.name} may send {most} rows for {load} requests, and the cost curve "
            f"ends at {table.max_tokens}"
        )


def _point(
    curve: str, policy: Policy, load: int, steps: NDArray[np.float64], requests: _Requests
) -> Point:
    rows, tokens, ms = steps.T
    speed = np.concatenate(requests.speed) if requests.speed else np.full(1, np.nan)
    budget = np.concatenate(requests.budget) if requests.budget else np.full(1, np.nan)
    parts = [x for x in np.array_split(steps, min(_BATCHES, len(steps))) if len(x)]
    rates = np.array([1e3 * x[:, 1].sum() / x[:, 2].sum() for x in parts])
    return Point(
        curve=curve,
        policy=policy.name,
        load=load,
        throughput=float(1e3 * tokens.sum() / ms.sum()),
        throughput_se=float(rates.std(ddof=1) / np.sqrt(len(rates))) if len(rates) > 1 else np.nan,
        user_p50=float(np.median(speed)),
        user_p1=float(np.quantile(speed, 0.01)),
        budget=float(rows.mean() / load),
        request_budget_p1=float(np.quantile(budget, 0.01)),
        drought=requests.drought,
        acceptance=float(tokens.mean() / load),
        batch=float(rows.mean()),
        step_ms=float(ms.mean()),
        rounds=len(steps),
        finished=sum(len(x) for x in requests.speed),
    )


def sweep(
    policies: Sequence[Policy],
    trace: Trace,
    curve: Curve,
    loads: Sequence[int],
    workload: Workload | None = None,
    believed: Curve | None = None,
    tick: Callable[[], object] = lambda: None,
) -> list[Point]:
    """Simulate every policy at every load; a policy that the curve is too short for is left out.

    ``tick`` is called after every point.

    Examples
    --------
    >>> from dspark.scheduling.simulate_traces import Synthetic
    >>> points = sweep([Policy.parse("none")], Synthetic(), Curve.named("smooth", 64), [1, 2],
    ...                Workload(tokens=500))
    >>> [p.load for p in points]
    [1, 2]
    """
    points = []
    for load in loads:
        for policy in policies:
            try:
                _check(policy, trace, curve.target, load)
            except ArgumentError:
                if policy.mode in ("none", "causal", "two_phase", "oracle"):
                    raise
            else:
                points.append(run(policy, trace, curve, load, workload, believed))
            tick()
    return points
