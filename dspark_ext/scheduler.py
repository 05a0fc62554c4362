# SPDX-License-Identifier: Apache-2.0
"""How a round chooses its draft lengths, and whether it drafts at all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from dspark_ext._arrays import ArgumentError, Checker, to_numpy
from dspark_ext.ops.prefix_scheduler import prefix_schedule
from dspark_ext.scheduling import CostTable, LaggedSurvival

if TYPE_CHECKING:
    from dspark_ext.decode_round import Round
    from dspark_ext.fairness import Ageing
    from dspark_ext.gate import Gate
    from dspark_ext.interfaces import CalibrationMonitor, ConfidenceProvider
    from dspark_ext.results import Confidence, Draft, Plan
    from dspark_ext.state import RoundState

__all__ = ["History", "Scheduler"]

MODES = ("off", "fixed", "threshold", "causal", "two_phase")
_TOLD = "True or False: whether it knows c_k before x_k is drawn"
#: part of a scheduler -> what it is asked for, and what it is called
_PARTS = {
    "confidence": (("conditional", "observe"), "a ConfidenceProvider"),
    "gate": (("drafting", "observe"), "a Gate"),
    "ageing": (("apply",), "an Ageing"),
    "monitor": (("temperatures", "floors", "observe"), "a CalibrationMonitor"),
}
LAG = 2  # rounds before a survival may decide whether, or how much, a later round drafts


class History:
    """Survivals of past rounds, per slot; nothing younger than two rounds can be read.

    Parameters
    ----------
    max_requests, gamma : int
        Sizes of the state.
    prior : float
        Conditional acceptance assumed for a slot without history: a_j = prior ** j.
    smoothing : float
        Weight of a round in the running mean.

    Examples
    --------
    >>> history = History(1, 2, prior=0.5)
    >>> for a in (0.9, 0.8, 0.7):
    ...     history.push(np.float32([[a, a]]), [0])
    >>> history.expected()[0].round(3).tolist()    # only the 0.9 is two rounds old
    [0.9, 0.9]
    """

    def __init__(
        self, max_requests: int, gamma: int, prior: float = 0.6, smoothing: float = 0.2
    ) -> None:
        self.lagged = LaggedSurvival(rounds=LAG, prior=prior)
        self._prior = np.float64(prior) ** np.arange(1, gamma + 1)
        self._smoothing = smoothing
        self._mean: NDArray[np.float64] = np.zeros((max_requests, gamma))
        self._known: NDArray[np.bool_] = np.zeros(max_requests, dtype=bool)
        self._recent: list[tuple[NDArray[np.float64], set[int]]] = []

    def push(self, survival: NDArray[np.float32], slots: Sequence[int]) -> None:
        """Record the survivals [R, gamma] of a committed round for the slots that took part."""
        if len(self._recent) == LAG:
            self._absorb(*self._recent.pop(0))
        self._recent.append((survival.astype(np.float64), set(slots)))
        index = np.asarray(slots, dtype=np.int32)
        self.lagged.push(np.ascontiguousarray(survival[index]), index)

    def _absorb(self, survival: NDArray[np.float64], slots: set[int]) -> None:
        for r in slots:
            weight = self._smoothing if self._known[r] else 1.0
            self._mean[r] += weight * (survival[r] - self._mean[r])
            self._known[r] = True

    def reset(self, slot: int) -> None:
        """Forget a slot: it holds another request from now on."""
        self._known[slot] = False
        self._mean[slot] = 0.0
        for _, slots in self._recent:
            slots.discard(slot)
        self.lagged.reset([slot])

    def expected(self) -> NDArray[np.float64]:
        """Mean survivals [R, gamma] of the rounds at least two old; the prior without any."""
        return np.where(self._known[:, None], self._mean, self._prior)


def _check_cost(check: Checker, cost: Any) -> None:
    if not isinstance(cost, Mapping):
        expected = "a CostTable, or a mapping of numbers of requests to them"
        check.require(isinstance(cost, CostTable), "cost", cost, expected)
        return
    check.require(len(cost) > 0, "cost", "an empty mapping", "a CostTable for a number of requests")
    for requests, table in cost.items():
        check.whole("cost: a key", requests, 1)
        check.require(isinstance(table, CostTable), f"cost[{requests!r}]", table, "a CostTable")


def _temperatures(check: Checker, given: Any) -> NDArray[np.float32] | None:
    if given is None:
        return None
    expected = "[gamma] finite numbers > 0, one a draft"
    try:
        values = np.array(to_numpy(given), dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        check.require(False, "temperature", given, expected)
        return None
    good = values.ndim == 1 and 1 <= len(values) <= 16
    good = good and bool(np.all(np.isfinite(values) & (values > 0)))
    check.require(good, "temperature", str(values.tolist())[:80], expected)
    return values


class Scheduler:
    """Policy of :func:`dspark_ext.decode_round`.

    Parameters
    ----------
    mode : {"off", "fixed", "threshold", "causal", "two_phase"}
        ``off`` verifies all drafts, ``fixed`` the first ``fixed_len``, ``threshold`` stops at the
        first confidence below ``threshold``, ``causal`` is Algorithm 1 of the paper on live
        survivals, ``two_phase`` takes the budget from survivals two rounds old (section 5.2).
    cost : CostTable or mapping of int to CostTable, optional
        Measured cost of a target step; needed by ``causal`` and ``two_phase``. A mapping holds
        tables by number of active requests (the drafter's cost depends on it); the smallest key
        that is not below the number serves, or else the largest key.
    temperature : sequence of float, optional
        Sequential temperature scaling of the confidences, one per position. Kept as a float32
        array: writing into ``scheduler.temperature`` between rounds is legal.
    confidence : ConfidenceProvider, optional
        Confidences from elsewhere than the drafter's head, see
        :class:`dspark_ext.interfaces.ConfidenceProvider`. One that is not safe with sampled drafts
        is refused in a round that has any.
    gate : Gate, optional
        Leaves single requests out of the draft; needs ``cost``.
    ageing : Ageing, optional
        Helps requests whose budget was 0 for many rounds.
    monitor : CalibrationMonitor, optional
        Watches the confidences, corrects their temperatures, explores.
    fixed_len, threshold : int, float, optional
        Of the modes of these names.
    capacity : int, optional
        Upper bound on the rows of a target forward, anchors included.
    skip : bool
        With a cost table: leave the drafter out of rounds that are expected to lose against plain
        decoding, including the drafter's own time.
    probe_every : int
        Draft anyway after this many skipped rounds, so that the estimate can recover; the number
        doubles with every probe that changes nothing.

    Raises
    ------
    ArgumentError
        Listing every illegal or missing argument.

    Notes
    -----
    The decision to skip reads the cost table and survivals that are at least two rounds old, never
    live ones: whether a token is verified must not depend on what that token is. Lengths are also
    clipped by the request's ``max_draft`` and by the tokens it may still emit, both known before
    drafting.

    Examples
    --------
    >>> Scheduler("fixed", fixed_len=3).mode
    'fixed'
    >>> Scheduler("causal")
    Traceback (most recent call last):
        ...
    dspark_ext._arrays.ArgumentError: Scheduler: 1 problem
      cost: got None, expected a CostTable for mode 'causal'
    """

    def __init__(
        self,
        mode: str = "off",
        *,
        cost: CostTable | Mapping[int, CostTable] | None = None,
        temperature: Sequence[float] | Any = None,
        fixed_len: int | None = None,
        threshold: float | None = None,
        capacity: int | None = None,
        skip: bool = True,
        probe_every: int = 16,
        confidence: ConfidenceProvider | None = None,
        gate: Gate | None = None,
        ageing: Ageing | None = None,
        monitor: CalibrationMonitor | None = None,
    ) -> None:
        check = Checker("Scheduler")
        known = mode if check.choice("mode", mode, MODES) else None
        if cost is not None:
            _check_cost(check, cost)
        elif known in ("causal", "two_phase"):
            check.fail("cost", "None", f"a CostTable for mode {mode!r}")
        if known == "fixed":
            check.whole("fixed_len", fixed_len, 0, 16)
        if known == "threshold":
            check.number("threshold", threshold, lambda x: 0 <= x <= 1, "in 0..1")
        if capacity is not None:
            check.whole("capacity", capacity, 1)
        check.whole("probe_every", probe_every, 1)
        check.require(isinstance(skip, (bool, np.bool_)), "skip", skip, "True or False")
        if gate is not None:
            check.require(cost is not None, "gate", "one without cost", "a CostTable beside it")
        parts = {"confidence": confidence, "gate": gate, "ageing": ageing, "monitor": monitor}
        for name, (methods, kind) in _PARTS.items():
            whole = parts[name] is None or all(hasattr(parts[name], m) for m in methods)
            fits = whole and not isinstance(parts[name], type)  # the class is no instance
            check.require(fits, name, parts[name], f"{kind}, or None")
        if confidence is not None:
            safe = getattr(confidence, "safe_with_sampled_drafts", None)
            told = isinstance(safe, bool)
            check.require(told, "confidence", f"safe_with_sampled_drafts = {safe!r}", _TOLD)
        scaling = _temperatures(check, temperature)
        check.done()
        self.confidence, self.gate, self.ageing, self.monitor = confidence, gate, ageing, monitor
        self.mode, self.fixed_len, self.threshold = mode, fixed_len, threshold
        self.capacity, self.skip, self.probe_every = capacity, skip, probe_every
        self.temperature = scaling
        self._cost = cost
        self._counts: list[int] = []  # keys of a mapping, rising
        self._skipped, self._patience = 0, probe_every

    @property
    def needs_confidence(self) -> bool:
        """Whether the mode reads the confidence head."""
        return self.mode in ("threshold", "causal", "two_phase")

    def cost(self, requests: int) -> CostTable | None:
        """Return the cost table for this many active requests."""
        if not isinstance(self._cost, Mapping):
            return self._cost
        if len(self._counts) != len(self._cost):
            self._counts = sorted(self._cost)
        fitting = min(bisect_left(self._counts, requests), len(self._counts) - 1)
        return self._cost[self._counts[fitting]]

    def max_len(self, state: RoundState) -> NDArray[np.int32]:
        """Cap on the drafts of each slot [R]: one emitted token is the target's own."""
        most = np.minimum(state.host.max_draft, state.host.left - 1)
        return np.maximum(most, 0).astype(np.int32)

    def check_safe(self, state: RoundState) -> None:
        """Refuse what does not fit the state, before anything happens.

        That is temperatures or a monitor for another gamma, and an unsafe confidence beside
        sampled drafts that are verified by their law.

        Raises
        ------
        ArgumentError
            Listing what does not fit, or naming the slots.
        """
        check, expected = Checker("decode_round"), f"{state.gamma}, the state's gamma"
        if self.temperature is not None:
            known = len(self.temperature)
            got = f"temperatures of {known} positions"
            check.require(known == state.gamma, "scheduler", got, expected)
        watched = getattr(self.monitor, "gamma", state.gamma)
        got = f"a monitor of {watched} positions"
        check.require(watched == state.gamma, "scheduler", got, expected)
        check.done()
        unsafe = self.confidence is not None and not self.confidence.safe_with_sampled_drafts
        if not unsafe or not self.needs_confidence:
            return
        found = np.flatnonzero(state.sampled_drafts())
        if found.size:
            raise ArgumentError(
                f"decode_round: 1 problem\n  scheduler: got mode {self.mode!r} with "
                f"{type(self.confidence).__name__}, which looks at the draft it rates, and sampled "
                f"drafts in slots {found.tolist()}, expected greedy drafts (draft_temperature 0), "
                "the rule 'match', or a confidence that is safe with sampled drafts"
            )

    def temperatures(self, state: RoundState) -> NDArray[np.float32] | None:
        """STS temperatures of the next round: (gamma,), or (R, gamma) from a monitor."""
        found = None if self.monitor is None else self.monitor.temperatures(state)
        return self.temperature if found is None else np.asarray(found, dtype=np.float32)

    def drafting(self, state: RoundState) -> NDArray[np.uint8]:
        """Slots (R,) that draft in the next round; counts the skipped rounds."""
        slots = np.zeros(state.max_requests, dtype=np.uint8)
        if self.wants_draft(state):
            slots[...] = state.host.active
            if self.gate is not None:
                slots &= np.asarray(self.gate.drafting(state, self._table), dtype=bool)
        return slots

    def observe(self, state: RoundState, result: Round) -> None:
        """Hand a committed round to the gate, the confidence provider and the monitor."""
        for part in (self.gate, self.confidence, self.monitor):
            if part is not None:
                part.observe(state, result)

    def _table(self, requests: int) -> CostTable:
        table = self.cost(requests)
        assert table is not None
        return table

    def wants_draft(self, state: RoundState) -> bool:
        """Decide whether the next round drafts; counts the skipped rounds."""
        most = int(self.max_len(state)[state.host.active != 0].max(initial=0))
        if most == 0 or (self.mode == "fixed" and self.fixed_len == 0):
            return False
        pays = self._pays(state)
        if pays is None:
            return False
        if pays or self._skipped >= self._patience:
            # Probes that change nothing become rarer: each of them costs a draft.
            self._patience = self.probe_every if pays else min(2 * self._patience, 1024)
            self._skipped = 0
            return True
        self._skipped += 1
        return False

    def _pays(self, state: RoundState) -> bool | None:
        """True: drafting is expected to win; None: it cannot, whatever is accepted."""
        active = state.host.active != 0
        requests = int(active.sum())
        cost = self.cost(requests)
        if not self.skip or not self.needs_confidence or cost is None:
            return True
        room = cost.max_tokens - requests
        if room <= 0:
            return None  # nothing is known, hence nothing admitted, beyond the table
        kv = float(state.host.kv_len[active].sum()) * cost.ms_per_kv_token
        allowed = np.arange(1, state.gamma + 1) <= self.max_len(state)[active][:, None]
        gains = np.sort(state.history.expected()[active][allowed])[::-1]
        if self.capacity is not None:
            room = min(room, max(0, self.capacity - requests))
        gains = np.concatenate(([0.0], gains[:room]))
        ms = cost.array[requests : requests + len(gains)] + kv + cost.draft_ms
        plain = requests / (cost.array[requests] + kv)
        if self._best(requests + np.arange(len(gains)), ms) <= plain:
            return None
        return bool(self._best(requests + np.cumsum(gains), ms) > plain)

    def _best(self, tokens: NDArray[Any], ms: NDArray[np.float64]) -> float:
        """Throughput that the mode would settle at, given expected tokens by admitted drafts."""
        theta = tokens / ms
        if self.mode == "causal":  # Algorithm 1 stops where Theta first fails to rise
            falls = np.flatnonzero(np.diff(theta) <= 0)
            return float(theta[falls[0]] if falls.size else theta[-1])
        return float(theta.max())

    def plan(
        self, state: RoundState, draft: Draft | None, confidence: Confidence | None,
        backend: str | None = None,
    ) -> Plan:  # fmt: skip
        """Choose the lengths and lay out the target's batch; without a draft, all lengths are 0."""
        host = state.host
        common: dict[str, Any] = {
            "active": host.active,
            "anchor": state.anchor,
            "position": state.position,
            "padded_tokens": state.max_requests * (1 + state.gamma),
            "backend": backend,
        }
        if draft is None:
            return prefix_schedule(
                state.no_survival, mode="fixed", fixed_len=0, draft_tokens=state.no_drafts, **common
            )
        requests = int(np.count_nonzero(host.active))
        capacity = None if self.capacity is None else max(self.capacity, requests)
        max_len = np.where(host.drafting != 0, self.max_len(state), 0).astype(np.int32)
        floor, weight = self._help(state)
        host.due[...] = np.minimum(self._due(state), max_len)
        survival = state.no_survival if confidence is None else confidence.survival
        if self.mode in ("causal", "two_phase"):
            common |= {"cost": self.cost(requests), "kv_len": host.kv_len, "weight": weight}
        if self.mode == "two_phase":
            slots = np.arange(state.max_requests, dtype=np.int32)
            common |= {"lagged": state.history.lagged, "request_slots": slots}
        if self.mode == "threshold":
            assert confidence is not None
            common |= {"conditional": confidence.conditional, "threshold": self.threshold}
        if self.mode == "fixed":
            common |= {"fixed_len": min(int(self.fixed_len or 0), state.gamma)}
        return prefix_schedule(
            survival,
            mode=cast(Any, self.mode),
            draft_tokens=draft.tokens,
            min_len=np.minimum(floor, max_len),
            max_len=max_len,
            capacity=capacity,
            **common,
        )

    def _help(self, state: RoundState) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Floors and weights of the slots, with what ageing and exploration add."""
        floor, weight = state.host.min_draft, state.host.weight
        if self.ageing is not None:
            floor, weight = self.ageing.apply(state.host.starved, floor, weight)
        explored = None if self.monitor is None else self.monitor.floors(state)
        state.host.explored[...] = 0
        if explored is not None:
            state.host.explored[...] = np.asarray(explored) > 0
            floor = np.maximum(floor, np.asarray(explored, dtype=np.int32))
        return floor, weight

    def _due(self, state: RoundState) -> NDArray[Any]:
        """Drafts [R] that the mode or an exploration sends whatever they promise.

        Floors of requests and of ageing are none of them: they belong to requests that were chosen.
        """
        if self.mode in ("off", "fixed"):
            return np.full(state.max_requests, self.fixed_len if self.mode == "fixed" else 16)
        return np.where(state.host.explored != 0, 16, 0)
