# SPDX-License-Identifier: Apache-2.0
"""Where simulated confidences and outcomes come from: a generator, or rounds that were recorded.

The generator. Draft k (from 0) of request r in round t survives, given the drafts before it, with
probability sigmoid(z), ::

    z = base - decay k^power + request_spread m_r + round_spread g_rt + position_spread v_rtk

with m, g, v standard normal; g is autoregressive over the rounds of a request (``persistence``).
A request is therefore easy or hard, drifts while it runs, and every draft has a difficulty of its
own. The defaults reproduce the reliability figure of the paper (figure 6, Alpaca: survival .769,
.418, .221, .116 and AUC .818, .812, .864, .907 at positions 1, 3, 5, 7).

The head sees z. Three knobs make it worse, and outcomes never hear of them:

* ``sight`` < 1: it sees ``sight`` of every deviation and noise for the rest, and shrinks what it
  sees as a calibrated head would (``auroc`` in :meth:`Synthetic.tuned` finds the value).
* ``shift``: added to its logits; > 0 is overconfident (``ece`` in :meth:`Synthetic.tuned`).
* ``drift``: the world becomes harder by so many logits, evenly over the run, and the head does not
  notice.

The confidence of draft k never depends on what draft k turns out to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.scheduling.calibration import (
    BINS,
    Reliability,
    _auc,
    _ece,
    _logits,
    _scaling,
    evaluate,
    survival_labels,
)
from dspark.scheduling.rounds import read_rounds
from dspark.scheduling.simulate_limits import check_fields
from dspark_ext import ArgumentError
from dspark_ext._arrays import Checker

__all__ = ["Batch", "Recorded", "Synthetic", "Trace", "quality"]

F64 = NDArray[np.float64]
_BLOCK = 1 << 16  # random numbers drawn at a time


class Batch(Protocol):
    """The requests of one run, one a slot."""

    def join(self, slots: NDArray[np.int64]) -> None:
        """New requests take these slots."""

    def round(self, progress: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Draft once for every slot.

        Returns
        -------
        conditional : ndarray, shape (slots, gamma), float32
            What the head says.
        run : ndarray of int, shape (slots,)
            Drafts that the target would accept if it saw all.
        """


class Trace(Protocol):
    """A source of rounds."""

    @property
    def gamma(self) -> int:
        """Drafts a round."""

    def batch(self, slots: int, rng: np.random.Generator) -> Batch:
        """Start a run."""


def _sigmoid(z: F64) -> F64:
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-z)))


def _products(c: F64) -> F64:
    return np.asarray(np.cumprod(c, axis=1), dtype=np.float64)


def _leading(accepted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Accepted drafts in front of the first that is not."""
    ended = np.concatenate([~accepted, np.ones((len(accepted), 1), dtype=bool)], axis=1)
    return np.asarray(ended.argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True)
class Synthetic:
    """The generator; see the head of this module.

    Examples
    --------
    >>> trace = Synthetic(gamma=3)
    >>> conditional, run = trace.batch(4, np.random.default_rng(0)).round(0.0)
    >>> conditional.shape, run.shape
    ((4, 3), (4,))
    """

    gamma: int = 7
    base: float = 1.64
    decay: float = 0.46
    power: float = 0.72
    request_spread: float = 0.9
    round_spread: float = 0.73
    position_spread: float = 0.88
    persistence: float = 0.9
    sight: float = 1.0
    shift: float = 0.0
    drift: float = 0.0
    intercept: tuple[float, ...] = ()  # of a head with sight < 1, by position

    def __post_init__(self) -> None:
        check = Checker("Synthetic")
        check_fields(check, vars(self))
        check.done()

    @property
    def mean(self) -> F64:
        """Logits of an average draft, by position."""
        k: F64 = np.arange(self.gamma, dtype=np.float64)
        return np.asarray(self.base - self.decay * k**self.power, dtype=np.float64)

    @property
    def spread(self) -> float:
        """Standard deviation of a logit around its mean."""
        return float(np.hypot(np.hypot(self.request_spread, self.round_spread),
                              self.position_spread))  # fmt: skip

    def head(self, deviation: F64, noise: F64 | None) -> F64:
        """Return what the head says (logits) of drafts that deviate so much from the mean."""
        logit = self.mean + deviation
        if self.sight < 1 and noise is not None:
            blind = float(np.sqrt(1 - self.sight**2))
            seen = self.sight * deviation + blind * self.spread * noise
            # A logistic averaged over a normal, by its usual approximation.
            shrink = float(np.sqrt(1 + np.pi / 8 * (blind * self.spread) ** 2))
            logit = (self.mean + self.sight * seen) / shrink
        if self.intercept:
            logit = logit + np.asarray(self.intercept)
        return logit + self.shift

    def batch(self, slots: int, rng: np.random.Generator) -> Batch:
        """Start a run of ``slots`` concurrent requests."""
        return _SyntheticBatch(self, slots, rng)

    def tuned(
        self, ece: float | None = None, auroc: float | None = None, seed: int = 0
    ) -> Synthetic:
        """Return the same world with a head of this quality.

        Parameters
        ----------
        ece : float, optional
            Largest expected calibration error of a position (20 bins, cumulative survivals), by
            overconfidence; negative: by too little confidence.
        auroc : float, optional
            Area under the ROC curve of the first draft's confidence.

        Raises
        ------
        ArgumentError
            When no head is that good, or that bad.

        Examples
        --------
        >>> worse = Synthetic().tuned(ece=0.08)
        >>> worse.shift > 0
        True
        """
        made = self
        if auroc is not None:
            made = _with_auroc(made, auroc, seed)
        if ece is not None:
            made = _with_ece(made, ece, seed)
        return made


class _SyntheticBatch:
    def __init__(self, trace: Synthetic, slots: int, rng: np.random.Generator) -> None:
        self._trace, self._rng, self._at = trace, rng, 0
        self._blur = rng.spawn(1)[0]  # apart: a worse head must not change what happens
        shape = (slots, trace.gamma)
        self._rounds = max(1, _BLOCK // (slots * trace.gamma))
        self._shape = (self._rounds, *shape)
        self._request = np.zeros(slots)
        self._state = np.zeros(slots)
        self._fill()
        self.join(np.arange(slots))

    def _fill(self) -> None:
        slots = self._shape[1]
        # Always the same draws, so that runs of different policies meet the same luck.
        self._common = self._rng.standard_normal((self._rounds, slots))
        self._position = self._rng.standard_normal(self._shape)
        self._uniform = self._rng.random(self._shape)
        self._noise = self._blur.standard_normal(self._shape) if self._trace.sight < 1 else None
        self._at = 0

    def join(self, slots: NDArray[np.int64]) -> None:
        self._request[slots] = self._rng.standard_normal(len(slots))
        self._state[slots] = self._rng.standard_normal(len(slots))

    def round(self, progress: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        t, i = self._trace, self._at
        deviation = (
            t.position_spread * self._position[i]
            + (t.request_spread * self._request + t.round_spread * self._state)[:, None]
        )
        head = t.head(deviation, None if self._noise is None else self._noise[i])
        true = t.mean + deviation - t.drift * progress
        accepted = self._uniform[i] < _sigmoid(true)
        self._state *= t.persistence
        self._state += np.sqrt(1 - t.persistence**2) * self._common[i]
        self._at += 1
        if self._at == self._rounds:
            self._fill()
        return _sigmoid(head).astype(np.float32), _leading(accepted)


class _Sample:
    """Rounds of a synthetic world, to measure a head on: expectations instead of outcomes."""

    def __init__(self, trace: Synthetic, rounds: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 0x5A])
        shared = np.hypot(trace.request_spread, trace.round_spread)
        self.deviation = shared * rng.standard_normal((rounds, 1))
        self.deviation = self.deviation + trace.position_spread * rng.standard_normal(
            (rounds, trace.gamma)
        )
        self.noise = rng.standard_normal(self.deviation.shape)
        self.true = _products(_sigmoid(trace.mean + self.deviation))

    def predicted(self, trace: Synthetic) -> F64:
        return _products(_sigmoid(trace.head(self.deviation, self.noise)))

    def ece(self, trace: Synthetic) -> float:
        a = self.predicted(trace)
        return max(_ece(a[:, k], self.true[:, k], BINS) for k in range(trace.gamma))

    def auroc(self, trace: Synthetic) -> float:
        return _auc(self.predicted(trace)[:, 0], self.true[:, 0], 1000)

    def centred(self, trace: Synthetic) -> Synthetic:
        """The head whose mean survivals are the true ones: intercepts from left to right."""
        found: list[float] = []
        for k in range(trace.gamma):
            rest = (0.0,) * (trace.gamma - k - 1)

            def gap(x: float, k: int = k, rest: tuple[float, ...] = rest) -> float:
                tried = replace(trace, intercept=(*found, x, *rest))
                return float(self.predicted(tried)[:, k].mean() - self.true[:, k].mean())

            found.append(_bisect(gap, -6.0, 6.0))
        return replace(trace, intercept=tuple(found))


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return 0.5 * (low + high)


def _with_auroc(trace: Synthetic, auroc: float, seed: int) -> Synthetic:
    sample = _Sample(trace, 20_000, seed)
    best = sample.auroc(replace(trace, sight=1.0))
    if not 0.51 <= auroc <= best:
        raise ArgumentError(
            f"auroc: got {auroc}, expected 0.51..{best:.3f}: a head that sees all of this world "
            "reaches the latter"
        )
    sight = _bisect(lambda s: sample.auroc(replace(trace, sight=s)) - auroc, 0.0, 1.0)
    return sample.centred(replace(trace, sight=sight))


def _with_ece(trace: Synthetic, ece: float, seed: int) -> Synthetic:
    sample = _Sample(trace, 20_000, seed)
    least, sign = sample.ece(trace), -1.0 if ece < 0 else 1.0
    if not least <= abs(ece) <= 0.4:
        raise ArgumentError(
            f"ece: got {ece}, expected {least:.4f}..0.4 (or its negative): the first is what this "
            "head has without a shift"
        )
    shift = _bisect(lambda s: sample.ece(replace(trace, shift=sign * s)) - abs(ece), 0.0, 8.0)
    return replace(trace, shift=sign * shift)


@dataclass(frozen=True)
class Recorded:
    """Rounds of ``dspark calibrate collect``, played again.

    A simulated request starts at a random round of the file and goes on in its order; with
    ``request`` it stays inside one recorded request. Rounds with an outcome that nobody knows (a
    stop or the length limit cut them) are left out: keeping those that happened to be rejected
    before the cut would make drafts look worse than they are. Outcomes are the recorded ones.

    Attributes
    ----------
    conditional : ndarray, shape (N, gamma), float32
    run : ndarray of int, shape (N,)
        Drafts accepted.
    request : ndarray of int, shape (N,)
        Which request a round belongs to; rounds of one are adjacent.

    Examples
    --------
    >>> made = Recorded.of(np.zeros((3, 2)), np.array([[1, 0], [1, 1], [1, -2]]))
    >>> made.run.tolist(), made.conditional[0].tolist()
    ([1, 2], [0.5, 0.5])
    """

    conditional: NDArray[np.float32]
    run: NDArray[np.int64]
    request: NDArray[np.int64]

    @property
    def gamma(self) -> int:
        """Drafts a round."""
        return int(self.conditional.shape[1])

    @classmethod
    def of(
        cls,
        logit: ArrayLike,
        accepted: ArrayLike,
        request: ArrayLike | None = None,
        temperature: ArrayLike | None = None,
    ) -> Recorded:
        """Build a trace from arrays: ``logit`` and ``accepted`` [N, gamma], ``request`` [N].

        ``temperature`` [gamma] divides the logits, as in :func:`dspark_ext.confidence`.
        """
        z, flags = _logits(logit), np.asarray(accepted)
        survival_labels(flags)  # refuses other flags
        if z.shape != flags.shape:
            raise ArgumentError(
                f"Recorded: got logit {list(z.shape)} and accepted {list(flags.shape)}, expected "
                "[N, gamma] twice"
            )
        names = np.zeros(len(z), np.int64) if request is None else np.asarray(request)
        if names.shape != (len(z),) or names.dtype.kind not in "iu":
            raise ArgumentError(
                f"request: got {names.dtype} {list(names.shape)}, expected [{len(z)}] integers"
            )
        tau = _scaling(temperature, z.shape[1])
        known = ~np.any(flags == -2, axis=1)
        if not known.any():
            raise ArgumentError("Recorded: no round with known outcomes")
        order = np.argsort(names[known], kind="stable")
        return cls(
            np.nan_to_num(_sigmoid(z[known] / tau))[order].astype(np.float32),
            _leading(flags[known] == 1)[order],
            names[known][order].astype(np.int64),
        )

    @classmethod
    def load(cls, path: Path, temperature: ArrayLike | None = None) -> Recorded:
        """Read an ``.npz`` of ``dspark calibrate collect``; errors name it."""
        arrays, _ = read_rounds(path)
        return cls.read(path, arrays, temperature)

    @classmethod
    def read(
        cls, path: Path, arrays: Mapping[str, Any], temperature: ArrayLike | None = None
    ) -> Recorded:
        """Build a trace from what :func:`read_rounds` found in a file; errors name it."""
        try:
            return cls.of(**arrays, temperature=temperature)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from error

    def batch(self, slots: int, rng: np.random.Generator) -> Batch:
        """Start a run of ``slots`` concurrent requests."""
        return _RecordedBatch(self, slots, rng)


class _RecordedBatch:
    def __init__(self, trace: Recorded, slots: int, rng: np.random.Generator) -> None:
        self._trace, self._rng = trace, rng
        _, self._first, count = np.unique(trace.request, return_index=True, return_counts=True)
        self._count = count
        self._of = np.repeat(np.arange(len(count)), count)
        self._row = np.zeros(slots, dtype=np.int64)
        self.join(np.arange(slots))

    def join(self, slots: NDArray[np.int64]) -> None:
        self._row[slots] = self._rng.integers(0, len(self._trace.run), len(slots))

    def round(self, progress: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:  # noqa: ARG002
        row = self._row
        answer = self._trace.conditional[row], self._trace.run[row]
        of = self._of[row]
        self._row = self._first[of] + (row + 1 - self._first[of]) % self._count[of]
        return answer


def quality(trace: Any, rounds: int = 50_000, seed: int = 0) -> tuple[Reliability, ...]:
    """Measure a trace's head: one :class:`Reliability` a position, over all proposals.

    Outcomes are drawn as a run draws them, half way through it.

    Examples
    --------
    >>> first = quality(Synthetic(), rounds=20_000)[0]
    >>> abs(first.label_mean - 0.769) < 0.02, abs(first.auc - 0.818) < 0.02
    (True, True)
    """
    slots = min(rounds, 1000)
    batch = trace.batch(slots, np.random.default_rng([seed, 0x51]))
    survival, run = [], []
    for _ in range(-(-rounds // slots)):
        conditional, accepted = batch.round(0.5)
        survival.append(np.cumprod(conditional.astype(np.float64), axis=1))
        run.append(accepted)
        batch.join(np.arange(slots))
    k, n = np.arange(trace.gamma), np.concatenate(run)[:, None]
    flags = np.where(k < n, 1, np.where(k == n, 0, -1))
    return evaluate(np.minimum(np.concatenate(survival), 1.0), flags)
