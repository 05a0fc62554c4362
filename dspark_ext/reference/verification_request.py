# SPDX-License-Identifier: Apache-2.0
"""One request inside rejection_sample: its rows, its random numbers, and what it has emitted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.draft_law import Disorder, DraftLaw, NoLaw, StoredLaw, ZeroMass, read_law
from dspark_ext.reference.draws import Draws
from dspark_ext.reference.philox import Kind
from dspark_ext.reference.rounding import DType
from dspark_ext.reference.sampler import Draw
from dspark_ext.reference.target_law import Penalties, Processors, TargetRow, unpack_mask
from dspark_ext.status import Status

__all__ = ["FINISH_LENGTH", "FINISH_STOP", "History", "Request", "TargetRows"]

F64 = NDArray[np.float64]

FINISH_STOP = 1
FINISH_LENGTH = 2


@dataclass(frozen=True)
class History:
    """What penalties and min-tokens know of a request before this round."""

    repetition: np.float32
    presence: np.float32
    frequency: np.float32
    counts: NDArray[np.int64]  # [V] ids of the output, the anchor included if it counts
    prompt: NDArray[np.bool_]  # [V]
    min_tokens: int  # rows below this emit no stop id

    def penalties(self, drafts: NDArray[np.int64]) -> Penalties:
        """Penalties of the row behind ``drafts``, which are target ids."""
        counts = self.counts + np.bincount(drafts, minlength=len(self.counts))
        return Penalties(self.repetition, self.presence, self.frequency, counts, self.prompt)


@dataclass(frozen=True)
class TargetRows:
    """The target rows of one request."""

    logits: NDArray[np.generic]  # [1 + l, V]
    mask: NDArray[np.generic] | None  # [>= 1 + l, words]
    dtype: DType
    logit: NDArray[np.generic] | None = None  # [1 + l] z of the draft of each row
    lse: NDArray[np.generic] | None = None  # [1 + l] at the request's T
    lse_raw: NDArray[np.generic] | None = None  # [1 + l] at T = 1

    def told(self, i: int, temperature: float) -> tuple[float, float] | None:
        """Log p of the draft of row i as the engine says it, processed and raw; None: unknown."""
        if self.logit is None or self.lse is None:
            return None
        z, lse = float(self.logit[i]), float(self.lse[i])
        if not (np.isfinite(z) and np.isfinite(lse)):
            return None
        log_p = z / temperature - lse
        if temperature == 1:
            return log_p, log_p
        raw = np.nan if self.lse_raw is None else float(np.float32(z) - np.float32(self.lse_raw[i]))
        return log_p, raw

    def allowed(self, i: int) -> NDArray[np.bool_] | None:
        """Ids that the token mask allows at row i; None: all."""
        return None if self.mask is None else unpack_mask(self.mask[i], self.logits.shape[1])


@dataclass
class Request:
    """One request of the batch: what its rows need, and what it has emitted so far."""

    index: int
    rule: int
    processors: Processors
    draft_temperature: float
    drafts: NDArray[np.int64]  # [l] scheduled draft ids
    rows: TargetRows
    draws: Draws
    stop_ids: frozenset[int]
    cap: int
    vocab: int
    law: StoredLaw | None
    history: History | None = None
    wanted: float = 0.0  # drafts that the rule synthetic accepts on average
    top: int = 0  # ids to list for every emitted token
    status: int = 0
    finish: int = 0
    tokens: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    logprob_raw: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    lists: list[TargetRow] = field(default_factory=list)  # rows whose likeliest ids are listed
    flags: dict[int, int] = field(default_factory=dict)

    def row(self, i: int) -> TargetRow:
        """Row i after the processors."""
        allowed, penalties = self.rows.allowed(i), None
        logits = np.asarray(self.rows.logits[i], dtype=np.float64)
        if self.history is not None:
            penalties = self.history.penalties(self.drafts[:i])
            if i < self.history.min_tokens and self.stop_ids:
                allowed = np.ones(self.vocab, bool) if allowed is None else allowed.copy()
                allowed[[t for t in self.stop_ids if t < self.vocab]] = False
        row = TargetRow.process(logits, allowed, self.processors, self.rows.dtype, penalties)
        self.status |= int(Status.NAN_TARGET) if row.found_nan else 0
        return row

    def draft_at(self, i: int) -> int:
        """The draft of row i; -1: none is left, or its id is no target id (BAD_DRAFT_ID)."""
        if i == len(self.drafts):
            return -1
        if 0 <= self.drafts[i] < self.vocab:
            return int(self.drafts[i])
        self.status |= int(Status.BAD_DRAFT_ID)
        return -1

    def draft_law(self, i: int, draft: int) -> DraftLaw:
        """The law of draft i; sets the bits of what :func:`read_law` raises."""
        try:
            return read_law(self.law, self.draft_temperature, self.index, i, draft, self.vocab)
        except NoLaw as reason:
            bad = Status.BAD_DRAFT_ID if isinstance(reason, Disorder) else Status.NAN_DRAFT
            self.status |= int(bad)
            raise
        except ZeroMass:
            self.status |= int(Status.BAD_DRAFT_ID)
            raise

    def flag(self, i: int, accepted: bool) -> None:
        """Accept flag of draft i; the drafts behind a rejected one are unobserved."""
        self.flags[i] = int(accepted)
        if not accepted:
            self.flags.update(dict.fromkeys(range(i + 1, len(self.drafts)), -1))

    def told(self, i: int) -> tuple[float, float] | None:
        """What the engine says of row i, where its law is a softmax at T and nothing else."""
        p, h = self.processors, self.history
        truncated = p.min_p > 0 or p.top_k > 0 or p.top_p < 1 or p.bias is not None
        counted = h is not None and not h.penalties(self.drafts[:i]).off
        floor = h is not None and i < h.min_tokens and bool(self.stop_ids)
        if truncated or counted or floor or self.rows.mask is not None or self.top:
            return None
        return None if p.temperature == 0 else self.rows.told(i, p.temperature)

    def emit(self, row: TargetRow, token: int, margin: float) -> bool:
        """Emit a token; True when the round ends behind it (a stop id goes before the cap)."""
        if self.top:
            self.lists.append(row)
        log_p = float(row.law.log_prob()[token]), float(row.raw[token])
        return self.emit_told(token, log_p, margin)

    def emit_told(self, token: int, log_p: tuple[float, float], margin: float) -> bool:
        """Emit a token whose log-probabilities, processed and raw, are known."""
        self.tokens.append(token)
        self.logprob.append(log_p[0])
        self.logprob_raw.append(log_p[1])
        self.margins.append(margin)
        if token in self.stop_ids:
            self.finish = FINISH_STOP
        elif len(self.tokens) == self.cap:
            self.finish = FINISH_LENGTH
        if self.finish:
            self.status |= int(Status.STOPPED)
        return self.finish != 0

    def from_target(self, row: TargetRow, i: int, kinds: tuple[Kind, Kind]) -> Draw:
        """Draw from p itself, or fall back when p has no mass."""
        draw = self.draws.categorical(i, kinds, row.law)
        if draw is None:
            self.status |= int(Status.EMPTY_SUPPORT)
            return Draw(row.fallback, np.inf)
        return draw
