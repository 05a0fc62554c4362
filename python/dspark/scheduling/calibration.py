# SPDX-License-Identifier: Apache-2.0
"""Sequential temperature scaling (STS) of the confidence head, and how to tell whether it helped.

The scheduler multiplies confidences, so their scale decides how much it admits. STS (DSpark section
3.2.1) gives every draft position one temperature, ``c_k = sigmoid(z_k / tau_k)``, from left to
right: with the earlier ones frozen, a grid search takes the tau_k whose cumulative product
``a_k = c_1 ... c_k`` has the least expected calibration error.

What the paper leaves open is settled here as follows. ECE uses 20 equal bins of a_k weighted by
their counts, over all proposals (not only those that survived to k). The grid is 0.5 to 4 in steps
of 0.05; on ties the temperature nearest to 1 wins, then the larger. A position with fewer than
``min_rounds`` observations keeps 1. One set of temperatures is fitted to all rounds given.

Collect the rounds with the scheduler off: a scheduler sends what it trusts, so its rounds show the
calibration of a selection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext import ArgumentError, FingerprintError
from dspark_ext._arrays import Checker, to_numpy
from dspark_ext.scheduling import json_object

__all__ = [
    "GRID",
    "Calibration",
    "Reliability",
    "evaluate",
    "evaluate_conditional",
    "fit",
    "reliability",
    "summary",
    "survival_labels",
    "survivals",
]

F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

BINS = 20
AUC_BINS = 1000
#: Temperatures that :func:`fit` tries by default.
GRID: tuple[float, ...] = tuple(round(0.5 + 0.05 * i, 2) for i in range(71))

_FORMAT = "dspark-calibration"
_VERSION = 1


@dataclass(frozen=True)
class Reliability:
    """How well predicted probabilities match outcomes."""

    count: int
    ece: float  # expected calibration error
    auc: float  # area under the ROC curve; NaN when only one class occurs
    brier: float  # mean squared error
    prediction_mean: float
    label_mean: float


def _bin(p: F64, bins: int) -> NDArray[np.int64]:
    return np.minimum(bins - 1, np.floor(p * bins)).astype(np.int64)


def _ece(p: F64, y: F64, bins: int) -> float:
    if p.size == 0:
        return math.nan
    gap = np.bincount(_bin(p, bins), weights=p - y, minlength=bins)
    return float(np.abs(gap).sum() / p.size)


def _auc(p: F64, y: F64, bins: int) -> float:
    index = _bin(p, bins)
    positive = np.bincount(index, weights=y, minlength=bins)
    negative = np.bincount(index, weights=1 - y, minlength=bins)
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return math.nan
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / pairs)


def reliability(
    prediction: ArrayLike, label: ArrayLike, bins: int = BINS, auc_bins: int = AUC_BINS
) -> Reliability:
    """Measure predictions of one kind against 0/1 outcomes.

    Parameters
    ----------
    prediction : array_like, shape (N,)
        Probabilities.
    label : array_like, shape (N,)
        1 where the event happened, else 0.
    bins : int
        Equal bins of the ECE, ``sum_b n_b |mean prediction - mean label| / N``.
    auc_bins : int
        Bins of the histogram behind the AUC; pairs inside a bin count one half.

    Raises
    ------
    ArgumentError
        For predictions outside [0, 1], labels that are not 0 or 1, or unequal lengths.

    Examples
    --------
    >>> r = reliability([0.9, 0.8, 0.3], [1, 1, 0])
    >>> round(r.ece, 6), r.auc, round(r.brier, 6)
    (0.2, 1.0, 0.046667)
    """
    p = _array("reliability: prediction", prediction).astype(np.float64)
    y = _array("reliability: label", label, "biuf").astype(np.float64)
    if p.ndim != 1 or p.shape != y.shape:
        raise ArgumentError(
            f"reliability: got shapes {list(p.shape)} and {list(y.shape)}, expected [N] twice"
        )
    if not np.all((p >= 0) & (p <= 1)):
        raise ArgumentError("reliability: prediction: got values outside [0, 1] or NaN")
    if not np.all((y == 0) | (y == 1)):
        raise ArgumentError("reliability: label: got values other than 0 and 1")
    if p.size == 0:
        return Reliability(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    return Reliability(
        count=int(p.size),
        ece=_ece(p, y, bins),
        auc=_auc(p, y, auc_bins),
        brier=float(np.mean((p - y) ** 2)),
        prediction_mean=float(p.mean()),
        label_mean=float(y.mean()),
    )


def survival_labels(accepted: ArrayLike) -> tuple[F64, Bools]:
    """Turn the sampler's acceptance flags into outcomes of the survival of every position.

    Parameters
    ----------
    accepted : array_like, shape (N, gamma), int
        Flags of :func:`dspark_ext.rejection_sample`: 1 accepted, 0 rejected, -1 behind a
        rejection, -2 not scheduled or behind a stop.

    Returns
    -------
    label : ndarray, shape (N, gamma), float64
        1 where drafts 1..k were all accepted. Behind a rejection that is 0, and known.
    known : ndarray of bool, shape (N, gamma)
        False where the flag is -2.

    Raises
    ------
    ArgumentError
        For another shape or other values.

    Examples
    --------
    >>> label, known = survival_labels([[1, 0, -1], [1, 1, -2]])
    >>> label.tolist(), known.tolist()
    ([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [[True, True, True], [True, True, False]])
    """
    flags = _array("accepted", accepted, "biuf")
    if flags.ndim != 2 or not np.all(np.isin(flags, (1, 0, -1, -2))):
        raise ArgumentError(
            f"accepted: got {flags.dtype} {list(flags.shape)}, expected [N, gamma] of 1, 0, -1, -2"
        )
    return np.cumprod(flags == 1, axis=1).astype(np.float64), flags != -2


def _conditional(logit: F64, temperature: float) -> F64:
    with np.errstate(over="ignore"):
        c = 1.0 / (1.0 + np.exp(-logit / temperature))
    return np.where(np.isnan(c), 0.0, c)


def _array(name: str, x: ArrayLike, kinds: str = "iuf") -> NDArray[Any]:
    """Numbers of any shape, or an error that names the argument."""
    try:
        found = to_numpy(x)
    except ValueError as error:
        raise ArgumentError(f"{name}: got lists of different lengths, expected numbers") from error
    if found.dtype.kind not in kinds and found.size:
        raise ArgumentError(f"{name}: got {found.dtype} {list(found.shape)}, expected numbers")
    return found


def _logits(logit: ArrayLike) -> F64:
    z = _array("logit", logit).astype(np.float64)
    if z.ndim != 2:
        raise ArgumentError(f"logit: got shape {list(z.shape)}, expected [N, gamma]")
    return z


def _scaling(temperature: ArrayLike | None, gamma: int) -> F64:
    if temperature is None:
        return np.ones(gamma)
    tau = _array("temperature", temperature).astype(np.float64)
    if tau.shape != (gamma,) or not np.all(np.isfinite(tau) & (tau > 0)):
        got = str(tau.tolist())[:80]
        raise ArgumentError(f"temperature: got {got}, expected [{gamma}] finite values > 0")
    return tau


def survivals(logit: ArrayLike, temperature: ArrayLike | None = None) -> F64:
    """Cumulative products of ``sigmoid(logit_k / tau_k)`` (DSpark section 3.2.1).

    Parameters
    ----------
    logit : array_like, shape (N, gamma)
        Raw confidence logits; a NaN counts as confidence 0.
    temperature : array_like, shape (gamma,), optional
        ``tau``; 1 when absent.

    Returns
    -------
    ndarray, shape (N, gamma), float64

    Raises
    ------
    ArgumentError
        For logits that are not [N, gamma], or temperatures that are not gamma values > 0.

    Examples
    --------
    >>> survivals([[0.0, 0.0]]).tolist()
    [[0.5, 0.25]]
    """
    z = _logits(logit)
    tau = _scaling(temperature, z.shape[1])
    out = np.ones(z.shape)
    running = np.ones(len(z))
    for k in range(z.shape[1]):
        running = running * _conditional(z[:, k], float(tau[k]))
        out[:, k] = running
    return out


def evaluate(
    survival: ArrayLike, accepted: ArrayLike, bins: int = BINS, auc_bins: int = AUC_BINS
) -> tuple[Reliability, ...]:
    """Measure the survivals of every position against what was accepted.

    Parameters
    ----------
    survival : array_like, shape (N, gamma)
        Predicted ``a_k``.
    accepted : array_like, shape (N, gamma), int
        Acceptance flags, see :func:`survival_labels`.

    Returns
    -------
    tuple of Reliability
        One a position; :func:`summary` joins them.

    Raises
    ------
    ArgumentError
        For shapes that differ, or values that are no flags.

    Examples
    --------
    >>> first, second = evaluate([[1.0, 0.5]] * 2, [[1, 1], [1, 0]])
    >>> first.ece, second.label_mean
    (0.0, 0.5)
    """
    a = _array("survival", survival).astype(np.float64)
    label, known = survival_labels(accepted)
    if a.shape != label.shape:
        raise ArgumentError(
            f"survival: got shape {list(a.shape)}, expected {list(label.shape)} like accepted"
        )
    return tuple(
        reliability(a[known[:, k], k], label[known[:, k], k], bins, auc_bins)
        for k in range(a.shape[1])
    )


def evaluate_conditional(
    logit: ArrayLike, accepted: ArrayLike, temperature: ArrayLike | None = None, bins: int = BINS
) -> tuple[Reliability, ...]:
    """Measure c_k against the flags 1 and 0: drafts all of whose predecessors were accepted.

    Parameters
    ----------
    logit : array_like, shape (N, gamma)
        Raw logits.
    accepted : array_like, shape (N, gamma), int
        Flags of the sampler.
    temperature : array_like, shape (gamma,), optional
        1 when absent.

    Raises
    ------
    ArgumentError
        For shapes that differ, values that are no flags, or illegal temperatures.

    Examples
    --------
    >>> evaluate_conditional([[0.0, 0.0]] * 2, [[1, 1], [0, -1]])[1].count
    1
    """
    z, flags = _logits(logit), _array("accepted", accepted, "biuf")
    survival_labels(flags)
    tau = _scaling(temperature, z.shape[1])
    if z.shape != flags.shape:
        raise ArgumentError(
            f"logit: got shape {list(z.shape)}, expected {list(flags.shape)} like accepted"
        )
    seen = flags >= 0
    return tuple(
        reliability(_conditional(z[seen[:, k], k], float(tau[k])), flags[seen[:, k], k], bins)
        for k in range(z.shape[1])
    )


def summary(positions: Sequence[Reliability]) -> Reliability:
    """Join positions by their counts; a position whose AUC is NaN does not enter the AUC."""

    def mean(name: str) -> float:
        pairs = [(r.count, getattr(r, name)) for r in positions if r.count]
        pairs = [(n, x) for n, x in pairs if not math.isnan(x)]
        total = sum(n for n, _ in pairs)
        return sum(n * x for n, x in pairs) / total if total else math.nan

    return Reliability(
        count=sum(r.count for r in positions),
        ece=mean("ece"),
        auc=mean("auc"),
        brier=mean("brier"),
        prediction_mean=mean("prediction_mean"),
        label_mean=mean("label_mean"),
    )


@dataclass(frozen=True)
class Calibration:
    """Fitted STS temperatures, with the evidence for them.

    ``temperature`` goes to :func:`dspark_ext.confidence` as it is.
    """

    temperature: tuple[float, ...]
    fitted: tuple[bool, ...]  # False: too few rounds, the temperature is 1
    before: tuple[Reliability, ...]  # of each position at temperature 1
    after: tuple[Reliability, ...]
    fingerprint: dict[str, Any] = field(default_factory=dict)
    conditional: tuple[Reliability, ...] = ()  # c_k after calibration, given the drafts before

    @property
    def max_ece(self) -> float:
        """Largest ECE of a fitted position after calibration; NaN when none was fitted."""
        errors = [r.ece for r, ok in zip(self.after, self.fitted, strict=True) if ok]
        return max(errors, default=math.nan)

    def apply(self, logit: ArrayLike) -> F64:
        """Return calibrated survivals [N, gamma] of raw logits [N, gamma]."""
        return survivals(logit, self.temperature)

    def save(self, path: str | Path) -> None:
        """Write temperatures and evidence as JSON."""
        body = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        text = json.dumps(_without_nan(body), indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, expect: Mapping[str, Any] | None = None) -> Calibration:
        """Read a file of :meth:`save`; with ``expect``, refuse one of another drafter or target.

        Raises
        ------
        FingerprintError
            Lists the fields that differ.
        ArgumentError
            When the file is no calibration of this version.
        """
        try:
            body = json.loads(Path(path).read_text(encoding="utf-8"))
            if (body.pop("format"), body.pop("version")) != (_FORMAT, _VERSION):
                raise KeyError("format, version")
            made = cls(
                temperature=tuple(float(t) for t in body["temperature"]),
                fitted=tuple(bool(f) for f in body["fitted"]),
                before=tuple(_read(r) for r in body["before"]),
                after=tuple(_read(r) for r in body["after"]),
                fingerprint=dict(body["fingerprint"]),
                conditional=tuple(_read(r) for r in body.get("conditional", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(
                f"Calibration.load: {path}: not a calibration of version {_VERSION} ({error})"
            ) from error
        if not all(math.isfinite(t) and t > 0 for t in made.temperature):
            raise ArgumentError(f"Calibration.load: {path}: temperature: expected values > 0")
        counts = {k: len(getattr(made, k)) for k in ("temperature", "fitted", "before", "after")}
        if len(set(counts.values())) > 1 or not 1 <= counts["temperature"] <= 16:
            raise ArgumentError(
                f"Calibration.load: {path}: got {counts}, expected as many of each, one a draft"
            )
        if expect is not None and json.loads(json.dumps(dict(expect))) != made.fingerprint:
            raise FingerprintError(made.fingerprint, expect, str(path), "calibration")
        return made


def _without_nan(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _without_nan(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_without_nan(v) for v in x]
    return None if isinstance(x, float) and math.isnan(x) else x


def _read(fields: dict[str, Any]) -> Reliability:
    known: dict[str, Any] = {k: math.nan if v is None else v for k, v in fields.items()}
    return Reliability(**known)


def _ordered(grid: Sequence[float]) -> list[float]:
    """Nearest to 1 first, then the larger: min() keeps the first of equals."""
    return sorted(grid, key=lambda t: (round(abs(math.log(t)), 9), -t))


def fit(
    logit: ArrayLike,
    accepted: ArrayLike,
    grid: Sequence[float] = GRID,
    min_rounds: int = 200,
    bins: int = BINS,
    fingerprint: Mapping[str, Any] | None = None,
) -> Calibration:
    """Fit one temperature per position, left to right (STS).

    Parameters
    ----------
    logit : array_like, shape (N, gamma)
        Raw confidence logits of N rounds, held out from training.
    accepted : array_like, shape (N, gamma), int
        Acceptance flags of the same rounds, see :func:`survival_labels`.
    grid : sequence of float
        Temperatures to try, finite and > 0.
    min_rounds : int
        Positions with fewer known outcomes keep temperature 1.
    bins : int
        Bins of the ECE.
    fingerprint : mapping, optional
        JSON values that say which drafter and target the rounds come from.

    Returns
    -------
    Calibration

    Raises
    ------
    ArgumentError
        For wrong shapes, flags, grid values, or NaN logits.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(0, 3, (20_000, 1))
    >>> flags = (rng.random((20_000, 1)) < 1 / (1 + np.exp(-z / 2))).astype(int)
    >>> abs(fit(z, flags).temperature[0] - 2) < 0.11
    True
    """
    z = _logits(logit)
    label, known = survival_labels(accepted)
    if z.shape != label.shape:
        raise ArgumentError(
            f"fit: logit: got shape {list(z.shape)}, expected {list(label.shape)} like accepted"
        )
    if np.isnan(z[known]).any():
        raise ArgumentError("fit: logit: got NaN, expected numbers where the outcome is known")
    tried = _array("fit: grid", grid).astype(np.float64)
    if tried.ndim != 1 or not tried.size or not np.all(np.isfinite(tried) & (tried > 0)):
        raise ArgumentError(f"fit: grid: got {str(grid)[:40]}..., expected finite values > 0")
    check = Checker("fit")
    check.whole("min_rounds", min_rounds, 1)
    check.whole("bins", bins, 1)
    notes = json_object(check, "fingerprint", {} if fingerprint is None else fingerprint)
    check.done()
    candidates = _ordered(tried.tolist())
    temperature, fitted = [], []
    prefix = np.ones(len(z))
    for k in range(z.shape[1]):
        rows = known[:, k]
        fitted.append(int(rows.sum()) >= min_rounds)
        best = 1.0
        if fitted[-1]:
            head, zk, y = prefix[rows], z[rows, k], label[rows, k]
            best = min(candidates, key=lambda t: _ece(head * _conditional(zk, t), y, bins))
        temperature.append(float(best))
        prefix = prefix * _conditional(z[:, k], best)
    return Calibration(
        temperature=tuple(temperature),
        fitted=tuple(fitted),
        before=evaluate(survivals(z), accepted, bins),
        after=evaluate(survivals(z, temperature), accepted, bins),
        fingerprint=notes,
        conditional=evaluate_conditional(z, accepted, temperature, bins),
    )
