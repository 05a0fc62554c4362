# SPDX-License-Identifier: Apache-2.0
"""Calibration of the confidences in service: drift, exploration, new temperatures.

A scheduler sends what it trusts, and drafts behind a rejection are never judged. What comes back is
therefore a selection, and three obvious averages of it are wrong even for a perfect head:

* counting an unscheduled draft as a rejected one;
* counting survivals that are known to be 0 (a rejection further ahead) although the draft at hand
  was not scheduled: the zeros are kept and the ones are lost;
* comparing a_k with the outcome of drafts 1..k where the schedule chose them by their values: the
  draft that makes c_2 high may be one that is accepted more often than c_1 says.

Two labels are right, and each serves where it is.

*Conditional*, at every scheduled draft: the flag 1 or 0 is a sample of c_k given the drafts before
it, whatever made the schedule send it, because the schedule has not seen x_k. (Where the caller
knows min(1, p/q), that is a label of smaller variance, and it exists behind rejections too.)

*Cumulative*, of a_k, where the draft was due whatever it promised: the modes ``off`` and ``fixed``,
and the rounds that this monitor explores. Both outcomes count: 1 when drafts 1..k were accepted, 0
when one of them was not. These are the proposals that the offline fit sees.

The two do not agree in general. The drafts that were accepted have another law than the drafts, so
the product of perfect c_k is not the mean of what survives; STS absorbs the difference into the
temperatures, and c_k is then off by as much. Drift is therefore measured from what was left over
when the temperatures in use were fitted.

A drafted stop id ends what can be known of a round if it is accepted, so nothing behind one counts,
in either outcome.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import dspark_ext as dx
from dspark.scheduling.calibration import (
    BINS,
    GRID,
    Calibration,
    _conditional,
    _ece,
    _ordered,
)
from dspark.scheduling.gaps import PositionReport, Usual, gap_of, known_flags
from dspark_ext._arrays import Checker, is_integer, to_numpy
from dspark_ext.sampling import RULES

__all__ = ["Monitor", "bucket_of"]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_MOST_ROUNDS = 1 << 24  # of a window, which keeps 13 bytes a draft of each
_NAMES = {code: name for name, code in RULES.items()}


def bucket_of(rule: int | str, temperature: float) -> str:
    """Name of the bucket of a request: its rule, and its temperature to the nearest quarter.

    Examples
    --------
    >>> bucket_of("block", 0.7), bucket_of("token", 0.0)
    ('block@0.75', 'greedy')
    """
    check = Checker("bucket_of")
    known = rule in RULES if isinstance(rule, str) else is_integer(rule) and rule in _NAMES
    check.require(known, "rule", repr(rule)[:80], " | ".join(RULES))
    check.number("temperature", temperature, lambda x: 0 <= x < math.inf, ">= 0, finite")
    check.done()
    if temperature == 0:
        return "greedy"
    name = rule if isinstance(rule, str) else _NAMES[int(rule)]
    return f"{name}@{max(0.25, round(4 * float(temperature)) / 4):g}"


class _Window:
    """The latest rounds of a bucket."""

    def __init__(self, rounds: int, gamma: int) -> None:
        self.size = rounds
        self.added = 0
        self.logit: F32 = np.zeros((rounds, gamma), dtype=np.float32)
        self.label: F32 = np.full((rounds, gamma), np.nan, dtype=np.float32)  # conditional
        self.alive: F32 = np.full((rounds, gamma), np.nan, dtype=np.float32)  # cumulative
        self.sent: NDArray[np.bool_] = np.zeros((rounds, gamma), dtype=bool)

    def add(self, logit: F32, label: F32, alive: F32, sent: NDArray[np.bool_]) -> None:
        at = (self.added + np.arange(len(logit))) % self.size
        self.logit[at], self.label[at], self.alive[at], self.sent[at] = logit, label, alive, sent
        self.added += len(logit)

    @property
    def rounds(self) -> slice:
        return slice(0, min(self.added, self.size))


class Monitor:
    """Watch calibration round by round; pass it as ``Scheduler(monitor=...)``.

    Parameters
    ----------
    gamma : int
        Draft length.
    calibration : Calibration, optional
        In use (its temperatures in ``Scheduler(temperature=...)``); drift is measured against it.
        Without one the raw head is.
    window : int
        Latest rounds kept of each rule and temperature.
    min_rounds : int
        Labels without which a position is neither judged nor fitted.
    explore_every : int
        One request verifies its whole block in every so-many-th round, as long as some position of
        its bucket has fewer than ``min_rounds`` cumulative labels in the window; 0 = never. The
        requests take turns: nothing of the drafts decides.
    drift : float
        Drift is a difference between mean prediction and mean label, or an ECE beyond the noise
        of one, that is larger than this ...
    sigmas : float
        ... and than this many standard errors.
    refit_every : int
        Rounds between refits; 0 = only when :meth:`refit` is called.

    Raises
    ------
    ArgumentError
        Lists every argument that is out of its range, or a calibration of another length.

    Notes
    -----
    Floors and temperatures of a round come from rounds that are over: lossless.

    Examples
    --------
    >>> monitor = Monitor(gamma=1, min_rounds=100)
    >>> rng = np.random.default_rng(0)
    >>> z = np.full((4000, 1), 3.0)                     # the head says .95, the truth is .82
    >>> flags = (rng.random((4000, 1)) < 1 / (1 + np.exp(-1.5))).astype(int)
    >>> monitor.record("token@1", z, flags, due=1)
    >>> monitor.report()["token@1"][0].drift
    True
    >>> abs(float(monitor.refit()["token@1"][0]) - 2.0) <= 0.1
    True
    """

    def __init__(
        self,
        gamma: int,
        calibration: Calibration | None = None,
        *,
        window: int = 4096,
        min_rounds: int = 200,
        explore_every: int = 0,
        drift: float = 0.05,
        sigmas: float = 4.0,
        refit_every: int = 0,
    ) -> None:
        check = Checker("Monitor")
        check.whole("gamma", gamma, 1, 16)
        sized = check.whole("window", window, 1, _MOST_ROUNDS)
        check.whole("min_rounds", min_rounds, 1, window if sized else None)
        check.whole("explore_every", explore_every, 0)
        check.whole("refit_every", refit_every, 0)
        check.number("drift", drift, lambda x: 0 <= x <= 1, "in 0..1")
        check.number("sigmas", sigmas, lambda x: 0 <= x < math.inf, ">= 0, finite")
        if isinstance(calibration, Calibration):
            found = len(calibration.temperature)
            got, wanted = f"{found} temperatures", f"{gamma}, one a draft"
            check.require(found == gamma, "calibration", got, wanted)
        else:
            none = calibration is None
            check.require(none, "calibration", calibration, "a Calibration or None")
        check.done()
        self.gamma, self.calibration, self.window = gamma, calibration, window
        self.min_rounds, self.refit_every = min_rounds, refit_every
        self.explore_every = explore_every
        self.drift, self.sigmas = drift, sigmas
        given = np.ones(gamma) if calibration is None else np.array(calibration.temperature)
        self.base: F32 = given.astype(np.float32)
        #: bucket -> temperatures (gamma,) fitted by this monitor, written in place
        self.fitted: dict[str, F32] = {}
        self.rounds = 0
        self.explored = 0
        self._windows: dict[str, _Window] = {}
        self._usual: dict[str, list[tuple[Usual | None, Usual | None]]] = {}  # since the refit
        self._table: F32 = np.zeros((0, gamma), dtype=np.float32)

    # ---- the scheduler's questions -------------------------------------------------------------

    def temperatures(self, state: dx.RoundState) -> F32 | None:
        """Temperatures of every slot (R, gamma), by its bucket; ``None`` before the first refit."""
        if not self.fitted:
            return None
        if len(self._table) != state.max_requests:
            self._table = np.ones((state.max_requests, self.gamma), dtype=np.float32)
        for r in state.active_slots():
            self._table[r] = self.fitted.get(self._bucket(state, r), self.base)
        return self._table

    def floors(self, state: dx.RoundState) -> NDArray[np.int32] | None:
        """The floor of the request whose turn it is to be explored (R,), or ``None``."""
        if not self.explore_every or (self.rounds + 1) % self.explore_every:
            return None
        slots = np.flatnonzero(state.host.drafting)
        if not slots.size:
            return None
        slot = int(slots[((self.rounds + 1) // self.explore_every) % len(slots)])
        if not self._lacks(self._bucket(state, slot)):
            return None
        floors = np.zeros(state.max_requests, dtype=np.int32)
        floors[slot] = self.gamma
        return floors

    def observe(self, state: dx.RoundState, result: dx.Round) -> None:
        """Take a committed round in; called by :func:`dspark_ext.decode_round`."""
        self.rounds += 1
        slots = [r for r in result.slots if result.proposed[r]]
        if not slots or result.draft is None or result.draft.confidence_logit is None:
            return
        self.explored += int(np.any(state.host.explored))
        logit = to_numpy(result.draft.confidence_logit)
        flags = known_flags(result.accepted, to_numpy(result.draft.tokens), state.host.stop_ids)
        members: dict[str, list[int]] = {}
        for r in slots:
            members.setdefault(self._bucket(state, r), []).append(r)
        for bucket, rows in members.items():
            self.record(bucket, logit[rows], flags[rows], state.host.due[rows])
        if self.refit_every and self.rounds % self.refit_every == 0:
            self.refit()

    # ---- what it knows -------------------------------------------------------------------------

    def record(
        self, bucket: str, logit: ArrayLike, accepted: ArrayLike, due: ArrayLike,
        ratio: ArrayLike | None = None,
    ) -> None:  # fmt: skip
        """Take rounds of one bucket in.

        Parameters
        ----------
        bucket : str
            See :func:`bucket_of`.
        logit : array_like, shape (N, gamma)
            Raw confidence logits.
        accepted : array_like, shape (N, gamma), int
            Flags of the sampler: 1, 0, -1 (unobserved), -2 (not scheduled or behind a stop).
        due : int or array_like, shape (N,)
            Drafts that were scheduled whatever they promised.
        ratio : array_like, shape (N, gamma), optional
            min(1, p/q) of every scheduled draft, where the caller has it; elsewhere anything.

        Raises
        ------
        ArgumentError
            Listing every array of a wrong shape or with other values than these.
        """
        check = Checker("Monitor.record")
        check.require(isinstance(bucket, str), "bucket", bucket, "a name, see bucket_of")
        flags = self._read(check, "accepted", accepted)
        z = self._read(check, "logit", logit).astype(np.float32)
        rows = len(flags)
        check.require(len(z) == rows, "logit", f"{len(z)} rounds", f"{rows}, as accepted has")
        told = bool(np.all(np.isin(flags, (1, 0, -1, -2))))
        check.require(told, "accepted", "other values", "flags 1, 0, -1, -2")
        fixed = np.asarray(due)
        whole = fixed.dtype.kind in "iu" and fixed.shape in ((), (rows,))
        check.require(whole, "due", due, f"an integer, or [{rows}] of them")
        sent = flags != -2
        label = np.where(flags >= 0, flags, np.nan)
        if ratio is not None:
            label = self._read(check, "ratio", ratio)
            if check.require(label.shape == flags.shape, "ratio", label, f"[{rows}, {self.gamma}]"):
                inside = bool(np.all((label[sent] >= 0) & (label[sent] <= 1)))
                check.require(inside, "ratio", "others where a draft was sent", "values in 0..1")
        check.done()
        free = np.arange(1, self.gamma + 1) <= np.broadcast_to(due, len(flags))[:, None]
        alive = np.where(sent & free, np.cumprod(flags == 1, axis=1), np.nan)
        window = self._windows.setdefault(bucket, _Window(self.window, self.gamma))
        keep = slice(-self.window, None)  # more rounds at once than the window holds
        label = np.where(sent, label, np.nan).astype(np.float32)
        window.add(z[keep], label[keep], alive.astype(np.float32)[keep], sent[keep])

    def _read(self, check: Checker, name: str, x: ArrayLike) -> NDArray[Any]:
        """Numbers (N, gamma); none, and a problem, when they are no such array."""
        expected = f"[N, {self.gamma}] numbers"
        try:
            values = np.asarray(to_numpy(x))
        except ValueError:  # ragged lists
            check.fail(name, "lists of different lengths", expected)
            return np.zeros((0, self.gamma))
        good = values.dtype.kind in "biuf" and values.ndim == 2 and values.shape[1] == self.gamma
        return values if check.require(good, name, x, expected) else np.zeros((0, self.gamma))

    def report(self) -> dict[str, list[PositionReport]]:
        """Every position of every bucket: counts, mean predictions and labels, ECE, drift."""
        found = {}
        for bucket, window in sorted(self._windows.items()):
            tau = self.fitted.get(bucket, self.base)
            c, alive, label = self._predictions(window, tau)
            a, sent = np.cumprod(c, axis=1), window.sent[window.rounds]
            rows = []
            for k in range(self.gamma):
                known, due = ~np.isnan(label[:, k]), ~np.isnan(alive[:, k])
                conditional = gap_of(c[known, k], label[known, k])
                survival = gap_of(a[due, k], alive[due, k])
                usual = self._usual_of(bucket, k)
                drift = any(
                    g.count >= self.min_rounds and g.exceeds(self.drift, self.sigmas, u)
                    for g, u in zip((conditional, survival), usual, strict=True)
                )
                ece = None if usual[1] is None else usual[1].ece
                count = int(sent[:, k].sum())
                rows.append(PositionReport(k + 1, count, conditional, survival, ece, drift))
            found[bucket] = rows
        return found

    def refit(self) -> dict[str, F32]:
        """Fit the temperatures of every bucket anew, left to right, and put them into use.

        A position with ``min_rounds`` cumulative labels takes the temperature with the least ECE of
        a_k, as :func:`dspark.scheduling.fit` does; with conditional labels only, that of c_k; with
        neither it keeps its temperature. Arrays in :attr:`fitted` are written in place.

        Returns
        -------
        dict
            Bucket to temperatures (gamma,).
        """
        for bucket, window in self._windows.items():
            old = self.fitted.get(bucket, self.base)
            tau = self._fit(window, old)
            if bucket in self.fitted:
                self.fitted[bucket][...] = tau
            elif not np.array_equal(tau, old):
                self.fitted[bucket] = tau
            if bucket in self.fitted:
                self._usual[bucket] = self._left_over(window, tau)
        return {b: self.fitted.get(b, self.base).copy() for b in self._windows}

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types; NaN becomes ``None``."""
        buckets: dict[str, dict[str, Any]] = {
            bucket: {
                "temperature": [round(float(t), 4) for t in self.fitted.get(bucket, self.base)],
                "refitted": bucket in self.fitted,
                "positions": [_plain(asdict(row)) for row in rows],
            }
            for bucket, rows in self.report().items()
        }
        drifting = sorted(b for b, x in buckets.items() if any(p["drift"] for p in x["positions"]))
        return {
            "rounds": self.rounds,
            "rounds_explored": self.explored,
            "drifting": drifting,
            "buckets": buckets,
        }

    # ---- inside --------------------------------------------------------------------------------

    def _bucket(self, state: dx.RoundState, slot: int) -> str:
        return bucket_of(int(state.host.rule[slot]), float(state.host.temperature[slot]))

    def _lacks(self, bucket: str) -> bool:
        window = self._windows.get(bucket)
        if window is None:
            return True
        labels = np.count_nonzero(~np.isnan(window.alive[window.rounds]), axis=0)
        return bool(np.any(labels < self.min_rounds))

    def _predictions(self, window: _Window, tau: F32) -> tuple[F64, F64, F64]:
        rows = window.rounds
        z = window.logit[rows].astype(np.float64)
        c = np.stack([_conditional(z[:, k], float(tau[k])) for k in range(self.gamma)], axis=1)
        return c, window.alive[rows].astype(np.float64), window.label[rows].astype(np.float64)

    def _fit(self, window: _Window, old: F32) -> F32:
        z = window.logit[window.rounds].astype(np.float64)
        _, alive, label = self._predictions(window, old)
        tau: F32 = old.copy()
        prefix = np.ones(len(z))
        for k in range(self.gamma):
            due, known = ~np.isnan(alive[:, k]), ~np.isnan(label[:, k])
            if due.sum() >= self.min_rounds:
                head, zk, y = prefix[due], z[due, k], alive[due, k]
                tau[k] = _least(head, zk, y)
            elif known.sum() >= self.min_rounds:
                tau[k] = _least(np.ones(int(known.sum())), z[known, k], label[known, k])
            prefix = prefix * _conditional(z[:, k], float(tau[k]))
        return tau

    def _left_over(self, window: _Window, tau: F32) -> list[tuple[Usual | None, Usual | None]]:
        """Gaps that remain with temperatures just fitted: of c_k and of a_k."""
        c, alive, label = self._predictions(window, tau)
        pairs = []
        for k in range(self.gamma):
            found: list[Usual | None] = []
            for x, y in ((c[:, k], label[:, k]), (np.prod(c[:, : k + 1], axis=1), alive[:, k])):
                gap = gap_of(x[~np.isnan(y)], y[~np.isnan(y)])
                enough = gap.count >= self.min_rounds
                left = max(0.0, gap.ece - gap.ece_noise)
                found.append(Usual(gap.label - gap.prediction, left) if enough else None)
            pairs.append((found[0], found[1]))
        return pairs

    def _usual_of(self, bucket: str, k: int) -> tuple[Usual | None, Usual | None]:
        if bucket in self._usual:
            return self._usual[bucket][k]
        if self.calibration is None:
            return None, None
        return Usual.of(self.calibration.conditional, k), Usual.of(self.calibration.after, k)


def _least(head: F64, z: F64, label: F64) -> float:
    """The temperature of the grid with the least ECE of ``head * sigmoid(z / t)``."""
    return min(_ordered(GRID), key=lambda t: _ece(head * _conditional(z, t), label, BINS))


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    return None if isinstance(x, float) and math.isnan(x) else x
