# SPDX-License-Identifier: Apache-2.0
"""Confidences for the scheduler that do not come from a confidence head.

Each says whether it is safe with sampled drafts: whether c_k is known before x_k is drawn. Pass one
as ``Scheduler(confidence=...)``; :func:`dspark_ext.decode_round` and the engine refuse an unsafe
one beside sampled drafts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dspark_ext as dx
from dspark_ext._arrays import Checker, to_numpy

__all__ = ["PROVIDERS", "ConstantPrior", "DraftProbability", "OnlineAcceptance"]

F64 = NDArray[np.float64]


class ConstantPrior:
    """The same conditional acceptance for every draft.

    Parameters
    ----------
    acceptance : float
        In [0, 1].

    Examples
    --------
    >>> state = dx.RoundState.create(2, gamma=3)
    >>> ConstantPrior(0.5).conditional(state, None).tolist()
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    safe_with_sampled_drafts = True

    def __init__(self, acceptance: float = 0.6) -> None:
        check = Checker("ConstantPrior")
        check.number("acceptance", acceptance, lambda x: 0 <= x <= 1, "in 0..1")
        check.done()
        self.acceptance = acceptance

    def conditional(self, state: dx.RoundState, draft: Any) -> NDArray[np.float32]:
        """The constant, (R, gamma)."""
        del draft
        return np.full((state.max_requests, state.gamma), self.acceptance, dtype=np.float32)

    def observe(self, state: dx.RoundState, result: dx.Round) -> None:
        """Nothing to learn."""


class OnlineAcceptance:
    """Acceptance by position, over all requests, times what is special about the request.

    The rate g_k of position k counts the drafts whose flag is 1 or 0 (all drafts before them were
    accepted), over past rounds of all requests. A request whose own past drafts were accepted A
    times out of n, where the rates promised E, gets the odds of g_k times

        (A + m) / (n - A + m)  :  (E + m) / (n - E + m)

    with m = ``strength``: nothing without a past, its own odds with a long one.

    Parameters
    ----------
    prior : float
        Rate of a position without observations, in (0, 1).
    strength : float
        Observations that the prior counts for, > 0.
    memory : float
        Factor of a request's old counts per round, in (0, 1]; .95 remembers twenty rounds.
    population_memory : float
        The same for the counts by position.

    Raises
    ------
    ArgumentError
        Lists every argument that is out of its range.

    Notes
    -----
    Safe with sampled drafts: it knows committed rounds only. The lengths it leads to depend on the
    past alone, so among the drafts that it sees at a position none was chosen for its value, and
    the rates are not censored. Beside another confidence that chooses by value they describe what
    that one lets through.

    Examples
    --------
    >>> online = OnlineAcceptance(prior=0.5, strength=1.0)
    >>> state = dx.RoundState.create(2, gamma=2)
    >>> online.learn(state, [0, 1], np.array([[1, 1], [0, -1]]))
    >>> online.estimate(state).round(2).tolist()    # slot 0 does better than slot 1
    [[0.75, 0.9], [0.33, 0.6]]
    """

    safe_with_sampled_drafts = True

    def __init__(
        self,
        prior: float = 0.6,
        strength: float = 4.0,
        memory: float = 0.95,
        population_memory: float = 0.999,
    ) -> None:
        check = Checker("OnlineAcceptance")
        check.number("prior", prior, lambda x: 0 < x < 1, "in (0, 1)")
        check.number("strength", strength, lambda x: 0 < x < math.inf, "> 0, finite")
        for name, value in (("memory", memory), ("population_memory", population_memory)):
            check.number(name, value, lambda x: 0 < x <= 1, "in (0, 1]")
        check.done()
        self.prior, self.strength = prior, strength
        self.memory, self.population_memory = memory, population_memory
        self._serial: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._seen: F64 = np.zeros(0)  # [gamma] observations by position
        self._taken: F64 = np.zeros(0)  # [gamma] accepted ones
        self._own: F64 = np.zeros((0, 3))  # [R] observed, accepted, promised

    def rates(self) -> F64:
        """Acceptance by position over all requests, (gamma,)."""
        m = self.strength
        rates: F64 = (self._taken + m * self.prior) / (self._seen + m)
        return rates

    def conditional(self, state: dx.RoundState, draft: Any) -> NDArray[np.float32]:
        """Estimates of every slot, (R, gamma); the draft is not looked at."""
        del draft
        return self.estimate(state).astype(np.float32)

    def estimate(self, state: dx.RoundState) -> F64:
        """Estimates of every slot as known now, (R, gamma) float64."""
        self._fit_to(state)
        g, m = self.rates(), self.strength
        observed, accepted, promised = self._own.T
        better = (accepted + m) / (observed - accepted + m)
        better *= (observed - promised + m) / (promised + m)
        odds = g / (1 - g) * better[:, None]
        estimate: F64 = odds / (1 + odds)
        return estimate

    def observe(self, state: dx.RoundState, result: dx.Round) -> None:
        """Learn from the flags of a committed round."""
        slots = [r for r in result.slots if result.proposed[r]]
        self.learn(state, slots, result.accepted[slots])

    def learn(self, state: dx.RoundState, slots: list[int], accepted: NDArray[Any]) -> None:
        """Learn from acceptance flags (len(slots), gamma): 1, 0, -1, -2."""
        self._fit_to(state)
        known, taken = accepted >= 0, accepted == 1
        promised = (known * self.rates()).sum(axis=1)
        new = np.stack([known.sum(axis=1), taken.sum(axis=1), promised], axis=1)
        self._own[slots] = self.memory * self._own[slots] + new
        self._seen = self.population_memory * self._seen + known.sum(axis=0)
        self._taken = self.population_memory * self._taken + taken.sum(axis=0)

    def _fit_to(self, state: dx.RoundState) -> None:
        """Size the counts, and forget the requests that have left their slots."""
        if len(self._serial) != state.max_requests:
            self._serial = state.serial.copy()
            self._own = np.zeros((state.max_requests, 3))
        if len(self._seen) != state.gamma:
            self._seen, self._taken = np.zeros(state.gamma), np.zeros(state.gamma)
        self._own[self._serial != state.serial] = 0
        self._serial[...] = state.serial


class DraftProbability:
    """The draft law's own probability q(x_k) of the drafted token.

    Cheap, and often used. It looks at x_k, so it is not safe with sampled drafts: a likely draft
    would be verified and an unlikely one replaced by a sample of the target, which favours what the
    drafter likes. Greedy drafts may use it.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> state = dx.RoundState.create(1, gamma=2)
    >>> state.host.drafting[0] = 1
    >>> draft = SimpleNamespace(logit=np.log([[0.5, 0.2]]), lse=np.zeros((1, 2)))
    >>> DraftProbability().conditional(state, draft).round(2).tolist()
    [[0.5, 0.20000000298023224]]
    """

    safe_with_sampled_drafts = False

    def conditional(self, state: dx.RoundState, draft: dx.Draft) -> NDArray[np.float32]:
        """exp(logit / T - lse) of the drafts, (R, gamma); T = 1 on greedy rows."""
        t = state.host.draft_temperature[:, None]
        log_q = to_numpy(draft.logit) / np.where(t > 0, t, 1) - to_numpy(draft.lse)
        rows = state.host.drafting[:, None] != 0
        return np.exp(np.minimum(np.where(rows, log_q, 0), 0)).astype(np.float32)

    def observe(self, state: dx.RoundState, result: dx.Round) -> None:
        """Nothing to learn."""


#: name on the command line -> class
PROVIDERS: dict[str, Any] = {
    "online": OnlineAcceptance,
    "constant": ConstantPrior,
    "draft-probability": DraftProbability,
}
