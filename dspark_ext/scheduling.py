# SPDX-License-Identifier: Apache-2.0
"""What the prefix scheduler needs beside live survivals: the cost of a step, and old survivals.

:class:`CostTable` holds milliseconds of a target step over the number of its tokens, measured on
the machine that uses it. :class:`LaggedSurvival` keeps survivals until they are old enough for a
full search to read them (DSpark section 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_ext._arrays import ArgumentError, Checker, to_numpy

if TYPE_CHECKING:  # json and pathlib cost a tenth of the package's import time
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

__all__ = ["CostTable", "FingerprintError", "LaggedSurvival"]

_FORMAT = "dspark-cost-table"
_VERSION = 1
_MOST_TOKENS = 1 << 22  # of a table, which has an entry per token
_MOST_SLOTS = 1 << 20


class FingerprintError(ValueError):
    """A cost table, or ``what``, was made for something else; ``differing`` names the fields."""

    def __init__(
        self,
        found: Mapping[str, Any],
        expected: Mapping[str, Any],
        path: str,
        what: str = "cost table",
    ) -> None:
        keys = sorted({*found, *expected})
        self.differing = [k for k in keys if found.get(k, _MISSING) != expected.get(k, _MISSING)]
        has = f"the {what.split()[-1]} has"
        lines = [
            f"{k}: {has} {found.get(k, _MISSING)!r}, expected {expected.get(k, _MISSING)!r}"
            for k in self.differing
        ]
        text = "\n  ".join([f"{path}: {what} of another set-up, make a new one", *lines])
        super().__init__(text)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


def _points(check: Checker, name: str, x: Any, empty: Any = np.float64) -> NDArray[Any]:
    """An array of numbers; a problem and an empty one where there are none."""
    try:
        values = to_numpy(x)
        values = values if values.size else values.astype(empty)
        if values.dtype.kind in "iuf":
            return values
    except (TypeError, ValueError):  # ragged lists
        pass
    check.fail(name, str(x)[:60], "[n] numbers")
    return np.zeros(0, dtype=np.int64)


def json_object(check: Checker, name: str, x: Any) -> dict[str, Any]:
    """A mapping as JSON gives it back."""
    import json

    try:
        if isinstance(x, Mapping):
            return dict(json.loads(json.dumps(dict(x))))
    except (TypeError, ValueError):  # values that JSON does not know, and circles
        pass
    check.fail(name, str(x)[:60], "a mapping of JSON values")
    return {}


class CostTable:
    """Milliseconds of a target step of B tokens, for B = 1 .. ``max_tokens``.

    Measured points are repaired by a running maximum (a larger batch never costs less), joined by
    straight lines, and constant below the first point. With ``plateaus`` (the batch sizes of
    captured graphs) a batch is padded up to the next one: B in (g_{i-1}, g_i] costs ms(g_i).
    Nothing is known beyond the last point, and the scheduler admits nothing there.

    Build one with :meth:`from_points`.

    Attributes
    ----------
    array : ndarray, shape (max_tokens + 1,), float64
        ``array[B]`` in milliseconds; ``array[0]`` equals ``array[1]`` and is never used.
    max_tokens : int
        Largest B with a known cost.
    draft_ms : float
        Fixed milliseconds of a round beside the target step (drafting, sampling, launch).
    ms_per_kv_token : float
        Slope in the total KV length of the active requests.
    fingerprint : dict
        What the numbers hold for (device, driver, dtype, model, parallelism, graph sizes).
    repaired : int
        Measured points that the running maximum raised.

    Examples
    --------
    >>> table = CostTable.from_points([1, 2, 4], [3.0, 2.0, 5.0])
    >>> [table.ms(b) for b in (1, 2, 3, 4)], table.repaired
    ([3.0, 3.0, 4.0, 5.0], 1)
    >>> CostTable.from_points([1, 8, 16], [1.0, 2.0, 4.0], plateaus=[4, 8]).ms([1, 4, 5, 8, 12])
    array([1.42857143, 1.42857143, 2.        , 2.        , 3.        ])
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        ms: NDArray[np.float64],
        plateaus: tuple[int, ...],
        draft_ms: float,
        ms_per_kv_token: float,
        fingerprint: dict[str, Any],
    ) -> None:
        self.tokens = tokens
        self.points_ms = ms
        self.plateaus = plateaus
        self.draft_ms = draft_ms
        self.ms_per_kv_token = ms_per_kv_token
        self.fingerprint = fingerprint
        rising = np.maximum.accumulate(ms)
        self.repaired = int(np.count_nonzero(rising != ms))
        self.max_tokens = int(tokens[-1])
        batch = np.arange(self.max_tokens + 1, dtype=np.int64)
        if plateaus:
            stairs = np.asarray(plateaus, dtype=np.int64)
            step = np.minimum(np.searchsorted(stairs, batch), len(stairs) - 1)
            batch = np.where(batch <= stairs[-1], stairs[step], batch)
        self.array: NDArray[np.float64] = np.interp(batch, tokens, rising)
        self.array[0] = self.array[1]

    @classmethod
    def from_points(
        cls,
        tokens: ArrayLike,
        ms: ArrayLike,
        plateaus: Sequence[int] = (),
        draft_ms: float = 0.0,
        ms_per_kv_token: float = 0.0,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> CostTable:
        """Build a table from measured points.

        Parameters
        ----------
        tokens : array_like of int, shape (n,)
            Batch sizes in tokens, strictly increasing, at least 1.
        ms : array_like of float, shape (n,)
            Milliseconds of a target step, finite and > 0.
        plateaus : sequence of int
            Graph batch sizes, strictly increasing, none above the last point.
        draft_ms, ms_per_kv_token : float
            Finite, >= 0.
        fingerprint : mapping, optional
            JSON values that say what was measured.

        Raises
        ------
        ArgumentError
            Lists everything that is wrong.
        """
        check = Checker("CostTable.from_points")
        t, y = _points(check, "tokens", tokens), _points(check, "ms", ms).astype(np.float64)
        if check.require(t.ndim == 1 and t.size > 0, "tokens", str(tokens)[:60], "[n] with n >= 1"):
            whole = t.dtype.kind in "iu" and t[0] >= 1 and bool(np.all(np.diff(t) > 0))
            check.require(whole, "tokens", str(t.tolist())[:60], "rising integers >= 1")
            small = t[-1] <= _MOST_TOKENS
            check.require(bool(small), "tokens", str(t[-1]), f"at most {_MOST_TOKENS}")
            check.require(y.shape == t.shape, "ms", f"shape {list(y.shape)}", f"[{t.size}]")
        good = bool(np.all(np.isfinite(y) & (y > 0)))
        check.require(good, "ms", str(y.tolist())[:60], "finite values > 0")
        steps = _points(check, "plateaus", plateaus, np.int64)
        rising = steps.ndim == 1 and steps.dtype.kind in "iu"
        rising = rising and bool(np.all(np.diff(steps, prepend=0) > 0))
        check.require(rising, "plateaus", str(steps.tolist())[:60], "rising integers >= 1")
        stairs = tuple(steps.tolist()) if rising else ()
        if stairs and t.ndim == 1 and t.size and t.dtype.kind in "iu":
            inside = stairs[-1] <= t[-1]
            expected = f"none above the last point, {t[-1]}"
            check.require(bool(inside), "plateaus", str(list(stairs))[:60], expected)
        for name, x in (("draft_ms", draft_ms), ("ms_per_kv_token", ms_per_kv_token)):
            check.number(name, x, lambda x: 0 <= x < math.inf, ">= 0, finite")
        notes = json_object(check, "fingerprint", {} if fingerprint is None else fingerprint)
        check.done()
        return cls(
            t.astype(np.int64), y.copy(), stairs, float(draft_ms), float(ms_per_kv_token), notes
        )

    def ms(self, tokens: int | ArrayLike) -> Any:
        """Return the milliseconds of a step of ``tokens`` tokens; NaN beyond the last point.

        Raises
        ------
        ArgumentError
            For a batch below 1.
        """
        b = np.asarray(tokens)
        if b.dtype.kind not in "iu" or np.any(b < 1):
            raise ArgumentError(f"CostTable.ms: tokens: got {tokens!r}, expected integers >= 1")
        known = b <= self.max_tokens
        out = np.where(known, self.array[np.where(known, b, 0)], np.nan)
        return out if b.ndim else float(out)

    def with_draft_ms(self, draft_ms: float) -> CostTable:
        """Return the same table with another fixed cost of a round, in milliseconds.

        Examples
        --------
        >>> CostTable.from_points([1, 8], [1.0, 2.0]).with_draft_ms(0.5).draft_ms
        0.5
        """
        return CostTable.from_points(
            self.tokens,
            self.points_ms,
            self.plateaus,
            draft_ms,
            self.ms_per_kv_token,
            self.fingerprint,
        )

    def save(self, path: str | Path) -> None:
        """Write the measured points as JSON; :meth:`load` gives an equal table."""
        import json
        from pathlib import Path

        body = {
            "format": _FORMAT,
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "tokens": self.tokens.tolist(),
            "ms": self.points_ms.tolist(),
            "plateaus": list(self.plateaus),
            "draft_ms": self.draft_ms,
            "ms_per_kv_token": self.ms_per_kv_token,
        }
        Path(path).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, expect: Mapping[str, Any] | None = None) -> CostTable:
        """Read a table, and refuse one that was measured for another set-up.

        Parameters
        ----------
        path : path
            A file of :meth:`save`.
        expect : mapping, optional
            Fingerprint of the set-up in use; every field must agree. ``None`` reads the table
            without asking what it was measured on.

        Raises
        ------
        FingerprintError
            Lists the fields that differ.
        ArgumentError
            When the file is not a cost table of this version, or its numbers are wrong.
        """
        import json
        from pathlib import Path

        try:
            body = json.loads(Path(path).read_text(encoding="utf-8"))
            found = (body.get("format"), body.get("version"))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise ArgumentError(f"CostTable.load: {path}: not a cost table ({error})") from error
        if found != (_FORMAT, _VERSION):
            raise ArgumentError(
                f"CostTable.load: {path}: got format {found[0]!r} version {found[1]!r}, expected "
                f"{_FORMAT!r} version {_VERSION}"
            )
        names = ("tokens", "ms", "plateaus", "draft_ms", "ms_per_kv_token", "fingerprint")
        missing = [n for n in names if n not in body]
        if missing:
            raise ArgumentError(f"CostTable.load: {path}: missing {', '.join(missing)}")
        try:
            table = cls.from_points(**{n: body[n] for n in names})
        except ArgumentError as error:
            raise ArgumentError(f"CostTable.load: {path}: {error}") from error
        if expect is not None:
            check = Checker("CostTable.load")
            wanted = json_object(check, "expect", expect)
            check.done()
            if wanted != table.fingerprint:
                raise FingerprintError(table.fingerprint, wanted, str(path))
        return table

    def __repr__(self) -> str:
        flat = " flat," if self.array[1] == self.array[-1] else ""
        return (
            f"CostTable({len(self.tokens)} points,{flat} 1..{self.max_tokens} tokens, "
            f"{self.array[1]:.4g}..{self.array[-1]:.4g} ms)"
        )


class LaggedSurvival:
    """Survivals of earlier rounds, released when they are ``rounds`` rounds old.

    In each round call :func:`dspark_ext.prefix_schedule` with this object first, and
    :meth:`push` the live survivals of the same round after it. The schedule of round t then reads
    what round t - ``rounds`` produced. Ages are counted per slot, so a request that sat out a
    round only gets older values.

    Parameters
    ----------
    rounds : int
        Age at which survivals are released, at least 2: younger ones depend on tokens that are
        still being verified, and a budget that reads those is not lossless.
    prior : float
        Conditional acceptance assumed for a slot without history: position j counts ``prior ** j``.

    Examples
    --------
    >>> lagged = LaggedSurvival(rounds=2, prior=0.5)
    >>> for a in (0.9, 0.8, 0.7):
    ...     lagged.push(np.array([[a, a * a]], dtype=np.float32), [3])
    >>> lagged.survival([3, 4], gamma=2).round(2).tolist()
    [[0.800000011920929, 0.6399999856948853], [0.5, 0.25]]
    """

    def __init__(self, rounds: int = 2, prior: float = 0.6) -> None:
        check = Checker("LaggedSurvival")
        check.whole("rounds", rounds, 2)
        check.number("prior", prior, lambda x: 0 <= x <= 1, "in 0..1")
        check.done()
        self.rounds = rounds
        self.prior = float(prior)
        # One place more than the age: an aborted round overwrites nothing that is still needed.
        self._depth = rounds + 1
        self._ring = np.zeros((self._depth, 0, 0), dtype=np.float32)
        self._head = np.zeros(0, dtype=np.int64)  # where the next round of the slot goes
        self._held = np.zeros(0, dtype=np.int64)  # rounds kept for the slot

    def push(self, survival: Any, request_slots: ArrayLike | None = None) -> None:
        """Append the live survivals of the round that was just scheduled.

        Parameters
        ----------
        survival : array, shape (R, gamma)
        request_slots : array_like of int, shape (R,), optional
            Slot of each row, distinct; 0 .. R - 1 when absent. A negative slot is a padded row
            and is skipped.

        Raises
        ------
        ArgumentError
            For wrong shapes, repeated slots, or another gamma than before.
        """
        values = np.asarray(to_numpy(survival), dtype=np.float32)
        if values.ndim != 2 or values.shape[1] < 1:
            got = f"shape {list(values.shape)}"
            raise ArgumentError(f"LaggedSurvival.push: survival: got {got}, expected [R, gamma]")
        slots = self._slots("push", request_slots, len(values))
        rows = np.flatnonzero(slots >= 0)
        self._reserve(int(slots.max(initial=-1)) + 1, values.shape[1])
        at = slots[rows]
        self._ring[self._head[at], at] = values[rows]
        self._head[at] = (self._head[at] + 1) % self._depth
        self._held[at] = np.minimum(self._held[at] + 1, self._depth)

    def abort(self, slots: ArrayLike | None = None) -> None:
        """Forget the newest round of these slots (all when absent): it was aborted.

        Aborting more rounds in a row than can be forgotten leaves the slot without history.
        """
        at = self._known(slots)
        at = at[self._held[at] > 0]
        self._head[at] = (self._head[at] - 1) % self._depth
        self._held[at] -= 1

    def reset(self, slots: ArrayLike | None = None) -> None:
        """Forget everything about these slots (all when absent): reused, or resumed."""
        self._held[self._known(slots)] = 0

    def survival(
        self, request_slots: ArrayLike | None, gamma: int, num_requests: int | None = None
    ) -> NDArray[np.float32]:
        """Return survivals ``rounds`` rounds old of each slot, float32 [R, gamma].

        ``request_slots=None`` means 0 .. ``num_requests`` - 1. Slots without history, and negative
        ones, get the prior.
        """
        slots = self._slots("survival", request_slots, num_requests)
        if self._ring.shape[2] not in (0, gamma):
            raise ArgumentError(
                f"LaggedSurvival: gamma: got {gamma}, expected {self._ring.shape[2]} as pushed"
            )
        known = len(slots) and slots.min() >= 0 and slots.max() < len(self._held)
        if known and self._held[slots].min() >= self.rounds:  # usually everybody has a history
            return self._ring[(self._head[slots] - self.rounds) % self._depth, slots]
        powers = np.power(self.prior, np.arange(1, gamma + 1)).astype(np.float32)
        out: NDArray[np.float32] = np.tile(powers, (len(slots), 1))
        inside = (slots >= 0) & (slots < len(self._held))
        rows = np.flatnonzero(inside)
        rows = rows[self._held[slots[rows]] >= self.rounds]
        at = slots[rows]
        if len(rows):
            out[rows] = self._ring[(self._head[at] - self.rounds) % self._depth, at]
        return out

    def _slots(self, method: str, slots: Any, count: int | None) -> NDArray[np.int64]:
        if slots is None:
            return np.arange(count or 0, dtype=np.int64)
        found = np.atleast_1d(np.asarray(to_numpy(slots)))
        used = found[found >= 0] if found.dtype.kind in "iu" else found
        if found.ndim != 1 or found.dtype.kind not in "iu" or len(np.unique(used)) != len(used):
            raise ArgumentError(
                f"LaggedSurvival.{method}: request_slots: got {str(found.tolist())[:60]}, expected "
                "[R] distinct integers (negative ones mark padded rows)"
            )
        if found.max(initial=-1) >= _MOST_SLOTS:
            raise ArgumentError(
                f"LaggedSurvival.{method}: request_slots: got {found.max()}, expected less than "
                f"{_MOST_SLOTS}"
            )
        if count is not None and len(found) != count:
            raise ArgumentError(
                f"LaggedSurvival.{method}: request_slots: got {len(found)} slots, expected {count}"
            )
        return found.astype(np.int64)

    def _known(self, slots: ArrayLike | None) -> NDArray[np.int64]:
        found = self._slots("reset", slots, len(self._held) if slots is None else None)
        return found[(found >= 0) & (found < len(self._held))]

    def _reserve(self, slots: int, gamma: int) -> None:
        _, have, width = self._ring.shape
        if width not in (0, gamma):
            raise ArgumentError(f"LaggedSurvival.push: gamma: got {gamma}, expected {width}")
        if slots <= have and width == gamma:
            return
        room = max(slots, 2 * have, 8)
        ring = np.zeros((self._depth, room, gamma), dtype=np.float32)
        if have:
            ring[:, :have] = self._ring
        self._ring = ring
        self._head = np.pad(self._head, (0, room - have))
        self._held = np.pad(self._held, (0, room - have))
