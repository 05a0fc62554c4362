# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request may send (paper section 3.2.2, Algorithm 1; section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.reference._arguments import active_mask, legal, per_request
from dspark_ext.results import Plan
from dspark_ext.status import Status

__all__ = ["MODES", "cost_table_ms", "prefix_schedule"]

MODES = ("causal", "two_phase", "threshold", "fixed", "off")
_GRID = 2.0**40

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


def cost_table_ms(
    tokens: Sequence[int], ms: Sequence[float], plateaus: Sequence[int] = ()
) -> NDArray[np.float64]:
    """Milliseconds of a step of B = 0 .. tokens[-1] tokens from measured points.

    The running maximum of the points, linear between them, the first value below the first point;
    then B in (g_{i-1}, g_i] of the graph sizes ``plateaus`` costs what g_i costs.

    Parameters
    ----------
    tokens, ms : sequence
        Points, ``tokens`` strictly increasing.
    plateaus : sequence of int
        Graph sizes, increasing, none beyond the last point.

    Examples
    --------
    >>> cost_table_ms([1, 2, 4], [3.0, 2.0, 5.0])[1:].tolist()
    [3.0, 3.0, 4.0, 5.0]
    """
    batch = np.arange(tokens[-1] + 1)
    table = np.interp(batch, tokens, np.maximum.accumulate(np.asarray(ms, dtype=np.float64)))
    below = 0
    for size in plateaus:
        table[below : size + 1] = table[size]
        below = size + 1
    return table


def _probabilities(x: ArrayLike, on: NDArray[np.bool_], status: NDArray[np.int32]) -> F32:
    """float32 in [0, 1]; a NaN of an active request counts as 0 and sets NAN_CONFIDENCE."""
    values = np.array(x, dtype=np.float32)
    nan = np.isnan(values)
    status[on & nan.any(axis=1)] |= int(Status.NAN_CONFIDENCE)
    return np.clip(np.where(nan, np.float32(0), values), np.float32(0), np.float32(1))


def _grid(x: float | np.floating) -> int:
    """A float32 value on the grid 2^-40, to nearest: sums of these integers are exact."""
    return int(np.floor(np.float64(x) * _GRID + 0.5))


@dataclass(frozen=True)
class _Problem:
    """The scheduling problem of the active requests; keys[r, j - 1] = weight_r a_{r,j}."""

    requests: list[int]
    floor: I64  # [R] floors that fit
    cap: I64  # [R]
    weight: F32  # [R]
    cost: NDArray[np.float64] | None
    fixed_ms: float
    kv_ms: float
    room: int  # drafts that fit, floors included

    def keys(self, survival: F32) -> F32:
        """Rank of every candidate: float32(weight * survival)."""
        return self.weight[:, None] * np.minimum.accumulate(survival, axis=1)

    def candidates(self, survival: F32) -> list[tuple[int, int]]:
        """(r, j) with a > 0 beyond the floors: key descending, position, request ascending."""
        key = self.keys(survival)
        least = np.minimum.accumulate(survival, axis=1)
        found = [
            (-float(key[r, j - 1]), j, r)
            for r in self.requests
            for j in range(int(self.floor[r]) + 1, int(self.cap[r]) + 1)
            if least[r, j - 1] > 0
        ]
        return [(r, j) for _, j, r in sorted(found)]

    def expected(self, survival: F32, length: I64) -> int:
        """tau = sum w_r (1 + sum_{j <= l_r} a_{r,j}) on the grid."""
        key = self.keys(survival)
        return sum(
            _grid(self.weight[r]) + sum(_grid(x) for x in key[r, : length[r]])
            for r in self.requests
        )

    def priced(self, batch: int) -> bool:
        """Whether the cost table reaches this batch and has a usable entry."""
        if self.cost is None or not 0 <= batch < len(self.cost):
            return False
        return bool(np.isfinite(self.cost[batch]) and self.cost[batch] > 0)

    def theta(self, tau: int, batch: int) -> float:
        """Expected tokens per second, tau * SPS(B)."""
        assert self.cost is not None
        ms = np.float64(self.cost[batch]) + self.fixed_ms + self.kv_ms
        return float(np.float64(tau) / _GRID * (1000.0 / ms))


def _causal(problem: _Problem, live: F32) -> I64:
    """Algorithm 1 from the floors up: stop at the first Theta that does not rise."""
    length: I64 = problem.floor.copy()
    batch = len(problem.requests) + int(length.sum())
    if not problem.priced(batch):
        return length
    key, tau = problem.keys(live), problem.expected(live, length)
    best = problem.theta(tau, batch)
    for r, j in problem.candidates(live):
        batch += 1
        tau += _grid(key[r, j - 1])
        if length.sum() >= problem.room or not problem.priced(batch):
            break
        theta = problem.theta(tau, batch)
        if not theta > best:
            break
        best = theta
        length[r] = j
    return length


def _full_search(problem: _Problem, lagged: F32) -> int:
    """Drafts, floors included, with the largest Theta; the smallest batch on ties.

    Only ever called on survivals that are at least two rounds old: on live ones the budget would
    depend on the drafts it admits (paper, appendix A).
    """
    drafts = int(problem.floor.sum())
    anchors = len(problem.requests)
    if not problem.priced(anchors + drafts):
        return drafts
    key, tau = problem.keys(lagged), problem.expected(lagged, problem.floor)
    best, budget = problem.theta(tau, anchors + drafts), drafts
    for r, j in problem.candidates(lagged):
        drafts += 1
        tau += _grid(key[r, j - 1])
        if drafts > problem.room or not problem.priced(anchors + drafts):
            break
        theta = problem.theta(tau, anchors + drafts)
        if theta > best:
            best, budget = theta, drafts
    return budget


def _top(problem: _Problem, live: F32, budget: int) -> I64:
    """The floors, then the best live candidates until ``budget`` drafts are admitted."""
    length: I64 = problem.floor.copy()
    left = min(budget, problem.room) - int(length.sum())
    for r, j in problem.candidates(live)[: max(left, 0)]:
        length[r] = j
    return length


def _position_major(start: I64, wanted: I64, requests: list[int], room: int) -> I64:
    """Raise ``start`` towards ``wanted``: one more position for every request before the next."""
    length: I64 = start.copy()
    for j in range(1, int(wanted.max(initial=0)) + 1):
        for r in requests:
            if length[r] == j - 1 and wanted[r] >= j and length.sum() < room:
                length[r] = j
    return length


def prefix_schedule(
    survival: ArrayLike | None,
    cost: ArrayLike | None = None,
    mode: str = "causal",
    lagged: ArrayLike | None = None,
    budget: int | None = None,
    conditional: ArrayLike | None = None,
    threshold: float | None = None,
    fixed_len: int | None = None,
    min_len: ArrayLike | None = None,
    max_len: ArrayLike | None = None,
    weight: ArrayLike | None = None,
    active: ArrayLike | None = None,
    kv_len: ArrayLike | None = None,
    capacity: int | None = None,
    anchor: ArrayLike | None = None,
    draft_tokens: ArrayLike | None = None,
    position: ArrayLike | None = None,
    padded_tokens: int | None = None,
    draft_ms: float = 0.0,
    ms_per_kv_token: float = 0.0,
) -> Plan:
    """Choose the lengths and lay out the target's batch (contract, section 5).

    Parameters
    ----------
    survival : array_like, shape (R, gamma)
        Live a. None is allowed in the modes threshold, fixed and off; then ``theta`` is NaN.
    cost : array_like, shape (B_max + 1,), optional
        Milliseconds of a step of B tokens, used as it is.
    mode : {"causal", "two_phase", "threshold", "fixed", "off"}
    lagged : array_like, shape (R, gamma), optional
        two_phase: survivals at least two rounds old, for the budget.
    budget : int, optional
        two_phase: drafts to admit, decided elsewhere.
    conditional, threshold, fixed_len
        Live c (R, gamma) and t; the length of mode ``fixed``.
    min_len, max_len, weight, active, kv_len : array_like (R,) or scalar, optional
        Floors, caps, objective weights, activity, KV lengths.
    capacity : int, optional
        Upper bound on B, anchors included.
    anchor, draft_tokens, position : array_like (R,), (R, gamma), (R,), optional
        All three give token_ids and positions.
    padded_tokens : int, optional
        Length of the flattened arrays; by default R (1 + gamma), or what ``capacity`` leaves of it.
    draft_ms, ms_per_kv_token : float
        SPS = 1000 / (ms(B) + draft_ms + ms_per_kv_token * sum of kv_len).

    Returns
    -------
    Plan
        ``work`` is empty here: the reference attention needs no plan.

    Raises
    ------
    ValueError
        An unknown mode, or an array that the mode needs is missing.

    Notes
    -----
    Readings of the contract where it leaves a choice:

    * Floors do not need a > 0 (they may not look at this round's drafts). Like threshold, fixed and
      off they are cut by capacity position-major; they may exceed a budget and a fixed length.
    * A table that decides (causal, two_phase with ``lagged``) also cuts the floors at its last
      point. A batch without a usable price has Theta NaN, and nothing is admitted beyond it.
    * Theta is that of the chosen lengths on live survivals, also in two_phase.
    * A weight that is not in [0, 128], a negative floor or cap, a negative kv_len, and a
      capacity below the number of active requests set BAD_PARAM and count as 0 (the anchors stay).
      Caps above gamma mean gamma; a floor above its cap means the cap.
    * A capacity, a budget or a table never moves the order of the candidates.

    Examples
    --------
    >>> import numpy as np
    >>> sps = np.array([np.inf, 1000, 520, 400, 340, 280])
    >>> a = np.cumprod([[0.95, 0.92, 0.85, 0.30]], axis=1)
    >>> plan = prefix_schedule(a, 1000 / sps)
    >>> plan.length.tolist(), round(float(plan.theta), 2)
    ([3], 1212.75)
    """
    shape = _shape(survival, conditional, draft_tokens, mode)
    requests, gamma = shape
    status = np.zeros(requests, dtype=np.int32)
    on = active_mask(active, requests)
    decides = mode == "causal" or (mode == "two_phase" and budget is None)
    _need(mode, cost if decides else 0, lagged if decides and mode == "two_phase" else 0)
    live = None if survival is None else _probabilities(survival, on, status)
    problem = _problem(
        on,
        gamma,
        status,
        min_len=min_len,
        max_len=max_len,
        weight=weight,
        cost=cost,
        kv_len=kv_len,
        capacity=capacity,
        decides=decides,
        draft_ms=draft_ms,
        ms_per_kv_token=ms_per_kv_token,
    )
    if mode in ("causal", "two_phase"):
        if live is None:
            raise ValueError(f"survival: got None, expected an array for mode {mode!r}")
        if mode == "causal":
            length = _causal(problem, live)
        else:
            if budget is None:
                assert lagged is not None
                budget = _full_search(problem, _probabilities(lagged, on, status))
            length = _top(problem, live, int(budget))
    else:
        wanted = _wanted(mode, conditional, threshold, fixed_len, on, shape, status)
        wanted = np.minimum(np.maximum(wanted, problem.floor), problem.cap)
        length = _position_major(problem.floor, wanted, problem.requests, problem.room)
    status[~on] = 0
    theta = _theta(problem, live, length)
    size = _padding(padded_tokens, requests, gamma, capacity)
    return _layout(length, on, theta, size, anchor, draft_tokens, position, status)


def _shape(
    survival: ArrayLike | None,
    conditional: ArrayLike | None,
    draft_tokens: ArrayLike | None,
    mode: str,
) -> tuple[int, int]:
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {MODES}")
    for given in (survival, conditional, draft_tokens):
        if given is not None:
            requests, gamma = np.asarray(given).shape
            return requests, gamma
    raise ValueError("survival, conditional, draft_tokens: expected at least one of them")


def _need(mode: str, cost: object, lagged: object) -> None:
    if cost is None:
        raise ValueError(f"cost: got None, expected a table for mode {mode!r}")
    if lagged is None:
        raise ValueError("lagged, budget: got neither, expected one of them for mode 'two_phase'")


def _problem(
    on: NDArray[np.bool_],
    gamma: int,
    status: NDArray[np.int32],
    *,
    min_len: ArrayLike | None,
    max_len: ArrayLike | None,
    weight: ArrayLike | None,
    cost: ArrayLike | None,
    kv_len: ArrayLike | None,
    capacity: int | None,
    decides: bool,
    draft_ms: float,
    ms_per_kv_token: float,
) -> _Problem:
    requests = len(on)
    cap = per_request(max_len, requests, gamma, np.int64)
    cap = np.minimum(legal(cap, cap >= 0, 0, status), gamma)
    floor = per_request(min_len, requests, 0, np.int64)
    floor = np.minimum(legal(floor, floor >= 0, 0, status), cap)
    w = per_request(weight, requests, 1.0, np.float32)
    w = legal(w, (w >= 0) & (w <= 128), np.float32(0), status).astype(np.float32)
    kv = per_request(kv_len, requests, 0, np.int64)
    kv = legal(kv, kv >= 0, 0, status)
    running = [int(r) for r in np.flatnonzero(on)]
    room = len(running) * gamma
    if capacity is not None:
        room = min(room, capacity - len(running))
        if room < 0:
            status |= int(Status.BAD_PARAM)
    table = None if cost is None else np.asarray(cost, dtype=np.float64)
    if decides and table is not None:
        room = min(room, len(table) - 1 - len(running))
    room = max(room, 0)
    return _Problem(
        requests=running,
        floor=_position_major(np.zeros(requests, np.int64), floor, running, room),
        cap=cap,
        weight=w,
        cost=table,
        fixed_ms=float(draft_ms),
        kv_ms=float(ms_per_kv_token) * float(kv[on].sum()),
        room=room,
    )


def _wanted(
    mode: str,
    conditional: ArrayLike | None,
    threshold: float | None,
    fixed_len: int | None,
    on: NDArray[np.bool_],
    shape: tuple[int, int],
    status: NDArray[np.int32],
) -> I64:
    """Length that threshold, fixed or off asks for, before floors, caps and capacity."""
    requests, gamma = shape
    if mode == "off":
        return np.full(requests, gamma)
    if mode == "fixed":
        if fixed_len is None:
            raise ValueError("fixed_len: got None, expected a length for mode 'fixed'")
        return np.full(requests, int(fixed_len))
    if conditional is None or threshold is None:
        raise ValueError("conditional, threshold: expected both for mode 'threshold'")
    passed = _probabilities(conditional, on, status) >= np.float32(threshold)
    prefix: I64 = np.cumprod(passed, axis=1).sum(axis=1).astype(np.int64)
    return prefix


def _theta(problem: _Problem, live: F32 | None, length: I64) -> float:
    batch = len(problem.requests) + int(length.sum())
    if not problem.requests:
        return np.nan if problem.cost is None else 0.0
    if live is None or not problem.priced(batch):
        return np.nan
    return problem.theta(problem.expected(live, length), batch)


def _padding(padded: int | None, requests: int, gamma: int, capacity: int | None) -> int:
    largest = requests * (1 + gamma)
    if capacity is not None:
        largest = min(largest, max(capacity, requests))
    return largest if padded is None else int(padded)


def _layout(
    length: I64,
    on: NDArray[np.bool_],
    theta: float,
    size: int,
    anchor: ArrayLike | None,
    draft_tokens: ArrayLike | None,
    position: ArrayLike | None,
    status: NDArray[np.int32],
) -> Plan:
    """Flatten the batch: for each active request its anchor, then its scheduled drafts."""
    rows = [(r, j) for r in np.flatnonzero(on) for j in range(int(length[r]) + 1)]
    if len(rows) > size:
        raise ValueError(f"padded_tokens: got {size}, expected at least {len(rows)}")
    request = np.full(size, -1, np.int32)
    offset = np.full(size, -1, np.int32)
    with_ids = anchor is not None and draft_tokens is not None and position is not None
    ids = np.zeros(size, np.int32) if with_ids else None
    where = np.zeros(size, np.int64) if with_ids else None
    for i, (r, j) in enumerate(rows):
        request[i], offset[i] = r, j
        if ids is not None and where is not None:
            ids[i] = np.asarray(anchor)[r] if j == 0 else np.asarray(draft_tokens)[r, j - 1]
            where[i] = np.asarray(position)[r] + j
    counts = np.where(on, 1 + length, 0)
    return Plan(
        length=np.where(on, length, 0).astype(np.int32),
        cu_seqlens=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        total_tokens=np.asarray(len(rows), np.int32),
        theta=np.asarray(theta, np.float64),
        row_to_request=request,
        row_offset=offset,
        token_ids=ids,
        positions=where,
        work=np.zeros(0, np.int32),
        status=status,
    )
