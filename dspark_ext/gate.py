# SPDX-License-Identifier: Apache-2.0
"""Which requests draft at all: those whose past rounds earned more than drafting costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspark_ext._arrays import Checker

if TYPE_CHECKING:
    from dspark_ext.decode_round import Round
    from dspark_ext.scheduling import CostTable
    from dspark_ext.state import RoundState

__all__ = ["Gate", "GateRecord", "worth_drafting"]

F64 = NDArray[np.float64]
_MOST_PATIENCE = 1024


def worth_drafting(
    earned: F64,
    sent: F64,
    cost_of: Callable[[int], CostTable],
    kv_tokens: float = 0.0,
    surely: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Choose the requests whose drafting pays, by what they earned before.

    With n requests drafting, a round is expected to emit ``R + sum earned`` tokens and to take
    ``ms(R + sum sent) + draft_ms(n)``, where ``cost_of(n).draft_ms`` is the time of a draft for n
    requests. The best n of them draft: requests enter by ``earned`` minus the price of their rows,
    and the n with the largest rate is taken, the smallest one on ties.

    Parameters
    ----------
    earned, sent : ndarray, shape (R,), float64
        Accepted and verified drafts per drafted round of every active request.
    cost_of : callable
        Cost table for a number of requests, as :meth:`dspark_ext.Scheduler.cost`.
    kv_tokens : float
        KV length of all requests together.
    surely : ndarray of bool, shape (R,), optional
        Requests that draft whatever they earned.

    Returns
    -------
    ndarray of bool, shape (R,)
        Where not even the anchors fit the table nobody drafts, whatever ``surely`` says.

    Examples
    --------
    A row costs 0.1 ms and a draft 0.5 ms per request; plain decoding emits two tokens in 10.2 ms.
    The break-even lies at ``0.2 tokens/ms x (0.5 ms + 3 rows x 0.1 ms) = 0.16`` accepted drafts.

    >>> from dspark_ext import CostTable
    >>> def cost_of(n):
    ...     return CostTable.from_points([1, 11], [10.1, 11.1], draft_ms=0.5 * n)
    >>> worth_drafting(np.array([0.1, 0.3]), np.array([3.0, 3.0]), cost_of).tolist()
    [False, True]
    """
    requests = len(earned)
    forced = np.zeros(requests, dtype=bool) if surely is None else surely
    table = cost_of(requests)
    if requests == 0 or requests > table.max_tokens:
        return forced & (requests <= table.max_tokens)
    rows_known = np.arange(len(table.array))
    kv = kv_tokens * table.ms_per_kv_token
    plain = table.array[requests] + kv
    total = max(float(sent.sum()), 1e-9)
    slope = (np.interp(requests + total, rows_known, table.array) - table.array[requests]) / total
    # Requests that draft anyway come first: the others are judged with their time already spent.
    order = np.lexsort((-(earned - requests / plain * slope * sent), ~forced))
    tokens = requests + np.concatenate(([0.0], np.cumsum(earned[order])))
    rows = requests + np.concatenate(([0.0], np.cumsum(sent[order])))
    draft = np.array([0.0] + [cost_of(n).draft_ms for n in range(1, requests + 1)])
    rate = tokens / (np.interp(rows, rows_known, table.array) + kv + draft)
    least = int(forced.sum())
    chosen = np.zeros(requests, dtype=bool)
    chosen[order[: least + int(np.argmax(rate[least:]))]] = True
    return chosen


@dataclass
class GateRecord:
    """What a gate remembers of each request: arrays of shape (R,).

    Examples
    --------
    >>> GateRecord.empty(2, patience=16).patience.tolist()
    [16, 16]
    """

    count: NDArray[np.int64]  # drafted rounds
    earned: F64  # accepted drafts per drafted round, smoothed
    sent: F64  # verified drafts per drafted round, smoothed
    waited: NDArray[np.int64]  # rounds since the last draft
    patience: NDArray[np.int64]  # rounds to wait before the next probe

    @classmethod
    def empty(cls, requests: int, patience: int) -> GateRecord:
        """Records of requests that have done nothing yet."""
        return cls(
            np.zeros(requests, np.int64),
            np.zeros(requests),
            np.zeros(requests),
            np.zeros(requests, np.int64),
            np.full(requests, patience, np.int64),
        )


class Gate:
    """Leave single requests out of the draft while their recent acceptance makes it a loss.

    The whole-batch decision of :class:`dspark_ext.Scheduler` (``skip``) saves the draft when nobody
    gains. This one saves a request's share of it, which exists where the cost tables by number of
    requests say that drafting for fewer requests is faster.

    Parameters
    ----------
    warmup : int
        A new request drafts this many rounds before it is judged.
    probe_every : int
        A request that was left out drafts again after so many rounds; the number doubles, up to
        1024, with every probe that changes nothing.
    smoothing : float
        Weight of a round in the running means, in (0, 1].

    Raises
    ------
    ArgumentError
        Lists every argument that is out of its range.

    Notes
    -----
    Lossless: it reads counts of committed rounds, the cost tables, and its own clock, never a
    draft or a confidence of the round it decides about.

    Examples
    --------
    >>> gate = Gate(warmup=1)
    >>> record = GateRecord.empty(2, gate.probe_every)
    >>> gate.learn(record, np.array([True, True]), np.array([0, 3]), np.array([3, 3]))
    >>> record.earned.tolist()
    [0.0, 3.0]
    """

    def __init__(self, warmup: int = 4, probe_every: int = 16, smoothing: float = 0.2) -> None:
        check = Checker("Gate")
        check.whole("warmup", warmup, 1)
        check.whole("probe_every", probe_every, 1, _MOST_PATIENCE)
        check.number("smoothing", smoothing, lambda x: 0 < x <= 1, "in (0, 1]")
        check.done()
        self.warmup, self.probe_every, self.smoothing = warmup, probe_every, smoothing
        self._record = GateRecord.empty(0, probe_every)
        self._serial: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def choose(
        self, record: GateRecord, cost_of: Callable[[int], CostTable], kv_tokens: float = 0.0
    ) -> NDArray[np.bool_]:
        """Say which of the active requests of a record draft in the next round: bool (R,).

        ``cost_of`` and ``kv_tokens`` are those of :func:`worth_drafting`.
        """
        due = (record.count < self.warmup) | (record.waited >= record.patience)
        return worth_drafting(record.earned, record.sent, cost_of, kv_tokens, due)

    def learn(
        self,
        record: GateRecord,
        drafted: NDArray[np.bool_],
        accepted: NDArray[Any],
        length: NDArray[Any],
    ) -> None:
        """Take a committed round into the record: drafted, accepted and verified drafts (R,)."""
        weight = np.where(record.count == 0, 1.0, self.smoothing) * drafted
        probe = drafted & (record.waited >= record.patience)
        record.earned += weight * (accepted - record.earned)
        record.sent += weight * (length - record.sent)
        record.count += drafted
        record.waited[...] = np.where(drafted, 0, record.waited + 1)
        # A probe that is followed by another wait doubles it; a round that pays sets it back.
        longer = np.minimum(2 * record.patience, _MOST_PATIENCE)
        again = np.where(drafted, self.probe_every, record.patience)
        record.patience[...] = np.where(probe, longer, again)

    def drafting(self, state: RoundState, cost_of: Callable[[int], CostTable]) -> NDArray[np.bool_]:
        """Slots (R,) of the state that draft in the next round."""
        record, active = self._of(state), state.host.active != 0
        mine = GateRecord(**{name: x[active] for name, x in vars(record).items()})
        out = np.zeros(state.max_requests, dtype=bool)
        out[active] = self.choose(mine, cost_of, float(state.host.kv_len[active].sum()))
        return out

    def observe(self, state: RoundState, result: Round) -> None:
        """Learn from a committed round."""
        record, slots = self._of(state), np.asarray(result.slots, dtype=np.int64)
        mine = GateRecord(**{name: x[slots] for name, x in vars(record).items()})
        drafted = result.proposed[slots] > 0
        self.learn(mine, drafted, result.num_accepted[slots], result.length[slots])
        for name, x in vars(mine).items():
            getattr(record, name)[slots] = x

    def expected(self, state: RoundState) -> tuple[F64, F64]:
        """Accepted and verified drafts per drafted round of every slot, as known now."""
        record = self._of(state)
        return record.earned.copy(), record.sent.copy()

    def _of(self, state: RoundState) -> GateRecord:
        """The record of a state's slots; a slot with another request starts anew."""
        if len(self._serial) != state.max_requests:
            self._record = GateRecord.empty(state.max_requests, self.probe_every)
            self._serial = state.serial.copy()
        fresh = self._serial != state.serial
        if fresh.any():
            empty = GateRecord.empty(int(fresh.sum()), self.probe_every)
            for name, x in vars(empty).items():
                getattr(self._record, name)[fresh] = x
            self._serial[...] = state.serial
        return self._record
