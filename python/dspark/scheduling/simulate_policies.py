# SPDX-License-Identifier: Apache-2.0
"""Policies of the simulator. What is admitted is always decided by the operator itself.

======================== ==========================================================================
``none``                 plain decoding, no drafter
``mtp1``                 one draft a request, by a drafter that costs a share of the block drafter
``staticN``              the first N drafts of every request (``static0``: drafted, none verified)
``thresholdX``           up to the first confidence below X
``causal``               Algorithm 1 on live survivals
``two_phase``            budget from survivals two rounds old (``two_phase:lag3``: three)
``two_phase:unsafe_lagN`` N = 0 or 1: not lossless, here to show what the age costs
``oracle``               knows which drafts will be accepted: the best Theta of every single round
======================== ==========================================================================

Behind a ``+``, joined to ``causal``, ``two_phase`` or ``oracle``:

=========== =======================================================================================
``minN``    floors: N drafts of every request, whatever they promise
``weightX`` every second request counts X times
``ageN``    :class:`dspark_ext.Ageing`: a floor of one draft after N rounds without any
``gate``    :class:`dspark_ext.Gate`: requests whose past rounds earned too little do not draft
=========== =======================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dspark_ext as dx
from dspark_ext import ArgumentError
from dspark_ext.gate import GateRecord

__all__ = ["Decider", "Policy", "default_policies"]

_PATTERN = re.compile(
    r"(?P<mode>none|mtp1|static|threshold|causal|two_phase|oracle)(?P<number>[0-9.]*)"
    r"(?::(?P<kind>lag|unsafe_lag)(?P<lag>[0-9]))?"
    r"(?P<extra>(?:\+(?:(?:min|weight|age)[0-9.]+|gate))*)"
)
_SEARCHES = ("causal", "two_phase", "oracle")


@dataclass(frozen=True)
class Policy:
    """One way to choose lengths.

    Examples
    --------
    >>> Policy.parse("two_phase:lag3+min1")
    Policy(name='two_phase:lag3+min1', mode='two_phase', number=0.0, lag=3, min_len=1, weight=1.0,
           age=0, gate=False)
    >>> Policy.parse("two_phase:lag1")
    Traceback (most recent call last):
        ...
    dspark_ext._arrays.ArgumentError: policy: got 'two_phase:lag1', expected a lag of at least 2:
    younger survivals are not lossless; the simulator calls them unsafe_lag1
    """

    name: str
    mode: str
    number: float = 0.0  # drafts of static, threshold
    lag: int = 2
    min_len: int = 0
    weight: float = 1.0  # of every second request
    age: int = 0  # rounds without a verified draft before a floor helps; 0: never
    gate: bool = False

    @classmethod
    def parse(cls, name: str) -> Policy:
        """Read a policy's name; see the table at the head of this module."""
        found = _PATTERN.fullmatch(name)
        if found is None:
            raise ArgumentError(f"policy: got {name!r}, expected one of the names in --help")
        mode, number = found["mode"], found["number"]
        extra = dict(re.findall(r"\+(min|weight|age|gate)([0-9.]*)", found["extra"]))
        numbered = mode in ("static", "threshold")
        wrong = numbered != bool(number) or (bool(extra) and mode not in _SEARCHES)
        if wrong or (found["kind"] and mode != "two_phase"):
            raise ArgumentError(f"policy: got {name!r}, expected one of the names in --help")
        lag = int(found["lag"] or 2)
        if found["kind"] == "lag" and lag < 2:
            raise ArgumentError(
                f"policy: got {name!r}, expected a lag of at least 2: younger survivals are not "
                f"lossless; the simulator calls them unsafe_lag{lag}"
            )
        if found["kind"] == "unsafe_lag" and lag > 1:
            raise ArgumentError(f"policy: got {name!r}, expected unsafe_lag0 or unsafe_lag1")
        try:
            value = float(number or (1 if mode == "mtp1" else 0))
            made = cls(name, mode, value, lag, int(extra.get("min", 0)),
                       float(extra.get("weight", 1)), int(extra.get("age", 0)),
                       "gate" in extra)  # fmt: skip
        except ValueError as error:
            raise ArgumentError(f"policy: got {name!r}: {error}") from error
        if mode == "static" and value != int(value):
            raise ArgumentError(f"policy: got {name!r}, expected a whole number of drafts")
        if mode == "threshold" and value > 1:
            raise ArgumentError(f"policy: got {name!r}, expected a threshold in 0..1")
        return made

    @property
    def drafts(self) -> bool:
        """Whether the drafter runs."""
        return self.mode != "none"

    @property
    def safe(self) -> bool:
        """Whether the policy is lossless, and possible outside a simulator."""
        return self.mode != "oracle" and self.lag >= 2


def default_policies(gamma: int) -> list[Policy]:
    """Return everything worth comparing: none, MTP-1, all lengths, thresholds, searches, oracle.

    Examples
    --------
    >>> [p.name for p in default_policies(2)][:5]
    ['none', 'mtp1', 'static1', 'static2', 'threshold0.3']
    """
    names = ["none", "mtp1", *(f"static{n}" for n in range(1, gamma + 1))]
    names += ["threshold0.3", "threshold0.5", "threshold0.7", "causal", "two_phase:unsafe_lag0",
              "two_phase:unsafe_lag1", "two_phase", "two_phase:lag3", "two_phase:lag4",
              "oracle"]  # fmt: skip
    return [Policy.parse(name) for name in names]


class Decider:
    """Calls :func:`dspark_ext.prefix_schedule` for one policy and a fixed number of requests.

    Parameters
    ----------
    policy : Policy
    requests, gamma : int
    cost_of : callable
        Cost table that the scheduler believes in when so many requests draft.
    prior : float
        Conditional acceptance assumed of a request without history.
    """

    def __init__(
        self,
        policy: Policy,
        requests: int,
        gamma: int,
        cost_of: Callable[[int], dx.CostTable],
        prior: float = 0.6,
    ) -> None:
        self.policy, self._gamma, self._prior = policy, gamma, prior
        self._cost_of, cost = cost_of, cost_of(requests)
        self._priced = cost.ms_per_kv_token > 0
        self._k: dict[str, Any] = {"cost": cost} if policy.mode in _SEARCHES else {}
        if policy.mode in ("static", "mtp1"):
            self._k = {"mode": "fixed", "fixed_len": min(int(policy.number), gamma)}
        elif policy.mode == "threshold":
            self._k = {"mode": "threshold", "threshold": policy.number}
        elif policy.mode != "causal":
            self._k["mode"] = "two_phase"
        if policy.weight != 1:
            every_second = np.ones(requests, dtype=np.float32)
            every_second[::2] = policy.weight
            self._k["weight"] = every_second
        self._ageing = dx.Ageing(rounds=policy.age) if policy.age else None
        self._starved = np.zeros(requests, dtype=np.int32)
        self._gate = dx.Gate() if policy.gate else None
        self._record = GateRecord.empty(requests, dx.Gate().probe_every)
        self._everyone = np.ones(requests, dtype=bool)
        self._lagged = dx.LaggedSurvival(rounds=max(policy.lag, 2), prior=prior)
        self._last = self._unknown(np.empty((requests, gamma), np.float32), slice(None))
        self._out: dx.Plan | None = None

    def _unknown(self, survival: NDArray[np.float32], slots: Any) -> NDArray[np.float32]:
        survival[slots] = np.float32(self._prior) ** np.arange(1, self._gamma + 1)
        return survival

    def join(self, slots: NDArray[np.int64]) -> None:
        """New requests take these slots."""
        if self.policy.mode == "two_phase":
            self._lagged.reset(slots)
            self._unknown(self._last, slots)
        self._starved[slots] = 0
        fresh = GateRecord.empty(len(slots), dx.Gate().probe_every)
        for name, values in vars(fresh).items():
            getattr(self._record, name)[slots] = values

    def drafting(self, kv_tokens: float) -> NDArray[np.bool_]:
        """Return which requests draft in the next round, by what their past rounds earned."""
        if self._gate is None:
            return self._everyone
        return self._gate.choose(self._record, self._cost_of, kv_tokens)

    def learn(
        self, drafted: NDArray[np.bool_], length: NDArray[Any], accepted: NDArray[Any]
    ) -> None:
        """Take a round that is over: who drafted, drafts verified and accepted."""
        self._starved[drafted] += 1
        self._starved[length > 0] = 0
        if self._gate is not None:
            self._gate.learn(self._record, drafted, accepted, length)

    def lengths(
        self,
        conditional: NDArray[np.float32],
        run: NDArray[np.int64],
        max_len: NDArray[np.int32],
        kv_len: NDArray[np.int32],
        slots: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int32]:
        """Return the lengths of a round.

        Parameters
        ----------
        conditional : ndarray, shape (R, gamma), float32
            What the head says.
        run : ndarray of int, shape (R,)
            Drafts that would be accepted; read by the oracle alone.
        max_len, kv_len : ndarray, shape (R,), int32
        slots : ndarray of int, optional
            Slot of each request, -1 where it did not draft; 0 to R - 1 when absent.
        """
        k, mode = dict(self._k), self.policy.mode
        survival: NDArray[np.float32] = np.cumprod(conditional, axis=1)
        if mode == "oracle":
            survival = (np.arange(self._gamma) < run[:, None]).astype(np.float32)
        if mode == "threshold":
            k["conditional"] = conditional
        if mode in ("two_phase", "oracle"):
            k["lagged"] = self._history(survival)
        if self._priced and mode in _SEARCHES:
            k["kv_len"] = kv_len
        floor = np.full(len(run), self.policy.min_len, np.int32)
        if self._ageing is not None:
            floor, _ = self._ageing.apply(self._starved, floor, np.ones(len(run), np.float32))
        if self.policy.min_len or self._ageing is not None:
            k["min_len"] = np.minimum(max_len, floor)
        plan = dx.prefix_schedule(survival, max_len=max_len, out=self._out, backend="cpu", **k)
        self._out = plan
        if mode == "two_phase":
            self._lagged.push(survival, slots)
            self._last = survival
        return np.asarray(plan.length)

    def _history(self, survival: NDArray[np.float32]) -> dx.LaggedSurvival:
        """Survivals that the budget is decided by; too young ones in a history made for that."""
        if self.policy.safe:
            return self._lagged
        young = dx.LaggedSurvival(rounds=2, prior=self._prior)
        wanted = survival if self.policy.mode == "oracle" or self.policy.lag == 0 else self._last
        for _ in range(2):
            young.push(wanted)
        return young
