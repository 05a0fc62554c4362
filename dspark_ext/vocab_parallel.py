# SPDX-License-Identifier: Apache-2.0
"""Verification when the vocabulary is split over the ranks of a tensor-parallel group.

Each rank holds the target logits of its own ids. Two exchanges are enough, both of a few numbers a
row, and no rank ever sees another one's logits:

1. per row the largest logit, the mass relative to it, the logit of the draft and the argmax, so
   that every rank knows the lse and throws the same coins (rules ``match`` and ``greedy`` end
   here: their candidates need no lse);
2. per request the packed key of the shard's best segment in the last row, with the id drawn inside.

Log-masses plus Gumbel noise are compared, which is associative: the winner does not depend on who
holds what. To normalise on each rank and to draw there would give every rank the same share.

Every rank computes the same results, bit for bit, from the same exchanged numbers. The law is the
target's for any split. When every shard but the last is a multiple of 128 ids the segments are
those of the unsplit row, and so are the tokens.

``backend="cpu"`` is the compiled form, the C functions of dspark/vocab_parallel.h; ``"reference"``
is the float64 definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext._arrays import dtype_name, to_numpy
from dspark_ext._compiled_shard import CompiledShard
from dspark_ext._shard_arguments import check_call, orderly
from dspark_ext._shards import Shard, ShardDraw, ShardScan
from dspark_ext.reference._arguments import active_mask, legal_temperature, per_request
from dspark_ext.reference.draws import BONUS, RESIDUAL, TARGET
from dspark_ext.reference.philox import Kind, uniform53
from dspark_ext.reference.rounding import DType, clean
from dspark_ext.reference.sampler import Noise, candidate, make_law
from dspark_ext.reference.target_law import Processors, TargetRow, unpack_mask
from dspark_ext.results import Verification
from dspark_ext.status import Status

__all__ = ["Shard", "ShardDraw", "ShardScan", "ShardedVerification"]

F64 = NDArray[np.float64]
_DTYPES: dict[str, DType] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_RULES = {"greedy": 0, "token": 1, "match": 3}


@dataclass
class _Row:
    """A row as all ranks know it after the first exchange; pairs are (id, unprocessed logit)."""

    top: float
    log_mass: float  # log of the sum of exp((z - top) / T); apart from top, which may be huge
    raw_top: float
    raw_log_mass: float
    best: tuple[int, float]
    lowest: tuple[int, float]

    @property
    def empty(self) -> bool:
        return self.top == -np.inf

    def log_prob(self, z: Any, temperature: float) -> Any:
        """Log p of processed logits."""
        return (z - self.top) / (temperature or 1.0) - self.log_mass

    def raw_log_prob(self, x: float) -> float:
        """Log-probability of an unprocessed logit at T = 1."""
        return -np.inf if x == -np.inf else (x - self.raw_top) - self.raw_log_mass

    def fallback(self) -> tuple[int, tuple[float, float]]:
        """Token of a row without mass, and its log-probabilities."""
        token, raw = self.lowest
        return token, (-np.inf, self.raw_log_prob(raw))


@dataclass
class _Walk:
    """Where a request stands after the coins; ``last`` is the row a token is still drawn from."""

    tokens: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    logprob_raw: list[float] = field(default_factory=list)
    flags: dict[int, int] = field(default_factory=dict)
    status: int = 0
    finish: int = 0
    last: int = -1
    kinds: tuple[Kind, Kind] = BONUS
    rejected: int = -1  # the draft whose law the residual of row `last` is taken from


class ShardedVerification:
    """One rank's side of a verification: `scan`, exchange, `draw`, exchange, `finish`.

    The arguments are those of :func:`dspark_ext.rejection_sample`, with the shard's own columns.
    All ranks get the same per-request ones, so all of them refuse the same call.

    Parameters
    ----------
    shard : Shard
    target_logits : array, shape (B, size)
        This rank's columns.
    draft_tokens, draft_len, cu_seqlens, seed, position, temperature, rule, stop_ids, \
max_new_tokens, active
        As in ``rejection_sample``, equal on all ranks; target ids. Rules ``greedy``, ``token``,
        ``match``.
    logit_bias : array, shape (R, size), optional
        This rank's columns.
    token_mask : array, shape (B, ceil(size / 32)), optional
        Packed bits of this rank's columns.
    draft_logit, draft_lse : array, shape (R, gamma), optional
        Equal on all ranks. With them the law: either
    draft_logits : array, shape (R, gamma, size), optional
        this rank's columns, or
    support_ids, support_logits : array, shape (R, gamma, M), optional
        the whole list, equal on all ranks. Without a law it is one-hot.
    backend : {None, "cpu", "reference", "simt"}
        None is ``"cpu"``; ``"simt"`` is the CUDA form as tests run it. All ranks must use the same
        one: the reference exchanges other things. The others exchange structured arrays, one
        element a row or request, to be sent as bytes.

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype or value is wrong: also a request whose rows do not
        hold its drafts, which ``rejection_sample`` reports as a status bit.
    NotImplementedError
        For another rule. Truncations need a third exchange and are not arguments here.

    Examples
    --------
    >>> rows = np.log(np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]], np.float32))
    >>> ranks = [
    ...     ShardedVerification(Shard((2, 2), k), rows[:, 2 * k : 2 * k + 2], [[3]], draft_len=[1],
    ...                         cu_seqlens=[0, 2], seed=[1], position=[5])
    ...     for k in range(2)
    ... ]
    >>> scans = [rank.scan() for rank in ranks]
    >>> draws = [rank.draw(scans) for rank in ranks]
    >>> [rank.finish(draws).tokens.tolist() for rank in ranks]
    [[[3, 0]], [[3, 0]]]
    """

    def __init__(
        self, shard: Shard, target_logits: Any, draft_tokens: ArrayLike, *, draft_len: ArrayLike,
        cu_seqlens: ArrayLike, seed: ArrayLike, position: ArrayLike,
        temperature: ArrayLike | None = None, rule: str = "token", logit_bias: Any = None,
        token_mask: Any = None, draft_logit: Any = None, draft_lse: Any = None,
        draft_logits: Any = None, support_ids: Any = None, support_logits: Any = None,
        stop_ids: Sequence[int] = (), max_new_tokens: ArrayLike | None = None,
        active: ArrayLike | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        given = {k: v for k, v in locals().items() if k not in ("self", "shard", "rule", "backend")}
        if not isinstance(rule, str) or rule not in _RULES:
            raise NotImplementedError(
                f"ShardedVerification: rule={rule!r}: a split vocabulary serves {sorted(_RULES)}"
            )
        check_call(given, shard.size, backend)
        self.shard, self.rule = shard, rule
        self._compiled: CompiledShard | None = None
        if backend != "reference":
            self._compiled = CompiledShard(shard, _RULES[rule], given, backend or "cpu")
            return
        self.dtype = _DTYPES[dtype_name(target_logits)]
        self.logits = to_numpy(target_logits)
        self.drafts = np.asarray(draft_tokens, dtype=np.int64)
        self.requests, self.gamma = self.drafts.shape
        self.length = per_request(draft_len, self.requests, 0, np.int64)
        self.first = np.asarray(cu_seqlens, dtype=np.int64)
        self.seed = per_request(seed, self.requests, 0, np.uint64)
        self.position = per_request(position, self.requests, 0, np.int64)
        self.status = np.zeros(self.requests, np.int32)
        self.temperature = legal_temperature(temperature, self.status)
        if rule == "greedy":
            self.temperature[:] = 0
        self.bias = None if logit_bias is None else to_numpy(logit_bias).astype(np.float32)
        self.mask = None if token_mask is None else to_numpy(token_mask)
        self.law = (draft_logit, draft_lse)
        self.law_dtype: DType = "f32"
        self.columns: Any = None
        self.listed: Any = None
        self.orderly: Any = None
        self._read_law(draft_logits, support_ids, support_logits)
        self.stops = frozenset(stop_ids)
        self.cap = per_request(max_new_tokens, self.requests, 1 << 30, np.int64)
        self.on = active_mask(active, self.requests) & (self.cap > 0)
        self._walks: list[_Walk] = []
        self._rows: dict[int, _Row] = {}

    def _read_law(self, full: Any, ids: Any, values: Any) -> None:
        """Bring the law to this rank's columns: [R, gamma, size], -inf where q = 0."""
        given = full if full is not None else values
        if given is None:
            return
        self.law_dtype = _DTYPES[dtype_name(given)]
        if full is not None:
            self.columns = to_numpy(full)
            return
        listed, logits = to_numpy(ids), to_numpy(values)
        self.listed, self.orderly = listed, orderly(listed, self.shard.vocab)
        self.columns = np.full((self.requests, self.gamma, self.shard.size), -np.inf)
        place = listed - self.shard.first_id
        mine = (listed >= 0) & (place >= 0) & (place < self.shard.size)
        r, k, _ = np.nonzero(mine)
        self.columns[r, k, place[mine]] = logits[mine]

    def _row(self, r: int, i: int) -> TargetRow:
        """Row i on the ids of this rank, processed."""
        row = int(self.first[r]) + i
        bias = None if self.bias is None else self.bias[r]
        allowed = None if self.mask is None else unpack_mask(self.mask[row], self.shard.size)
        processors = Processors(float(self.temperature[r]), 0.0, 0, 1.0, bias)
        logits = np.asarray(self.logits[row], dtype=np.float64)
        return TargetRow.process(logits, allowed, processors, self.dtype)

    def _noise(self, r: int, i: int, kinds: tuple[Kind, Kind]) -> Noise:
        delta = 0 if kinds == TARGET else i + 1
        position = int(self.position[r]) + i + 1
        seed, first = int(self.seed[r]), self.shard.first_segment
        return Noise(seed, position, *kinds, delta, first_segment=first)

    def scan(self) -> Any:
        """Numbers of the first exchange, for every row: ShardScan or a structured array."""
        if self._compiled is not None:
            return self._compiled.scan()
        count = len(self.logits)

        def fill(value: float, dtype: Any = np.float64) -> Any:
            return np.full(count, value, dtype)

        out = ShardScan(
            top=fill(-np.inf),
            mass=fill(0),
            best=fill(-1, np.int64),
            raw_best=fill(-np.inf),
            raw_top=fill(-np.inf),
            raw_mass=fill(0),
            draft=fill(-np.inf),
            raw_draft=fill(-np.inf),
            lowest=fill(-1, np.int64),
            raw_lowest=fill(-np.inf),
            key=fill(0, np.uint64),
            token=fill(-1, np.int64),
            logit=fill(-np.inf),
            raw_logit=fill(-np.inf),
            nan=fill(0, bool),
            law_nan=fill(0, bool),
        )
        for r in np.flatnonzero(self.on):
            for i in range(int(self.length[r]) + 1):
                self._scan_row(out, int(r), i)
        return out

    def _scan_row(self, out: ShardScan, r: int, i: int) -> None:
        at, row = int(self.first[r]) + i, self._row(r, i)
        raw = make_law(row.logits, 1.0)
        out.nan[at] = row.found_nan
        if not raw.empty:
            out.raw_top[at], out.raw_mass[at] = row.logits.max(), np.exp(raw.log_mass)
        if not row.law.empty:
            out.top[at], out.mass[at] = row.z.max(), np.exp(row.law.log_mass)
            best = int(np.argmax(row.z))
            out.best[at], out.raw_best[at] = self.shard.first_id + best, row.logits[best]
        allowed = None if self.mask is None else unpack_mask(self.mask[at], self.shard.size)
        out.raw_lowest[at] = row.logits[0]
        if allowed is None or allowed.any():
            lowest = 0 if allowed is None else int(np.argmax(allowed))
            out.lowest[at] = self.shard.first_id + lowest
            out.raw_lowest[at] = row.logits[lowest]
        if self.rule == "match" and self.temperature[r] > 0:
            key, offset = candidate(row.law, self._noise(r, i, TARGET))
            self._candidate(out, at, key, offset, row)
        if i == self.length[r]:
            return
        column = self.shard.local(int(self.drafts[r, i]))
        if column >= 0:
            out.draft[at], out.raw_draft[at] = row.z[column], row.logits[column]
        if self.columns is not None:
            out.law_nan[at] = bool(np.isnan(self.columns[r, i]).any())

    def _candidate(self, out: Any, at: Any, key: int, offset: int, row: TargetRow) -> None:
        if offset < 0:
            return
        out.key[at], out.token[at] = key, self.shard.first_id + offset
        out.logit[at], out.raw_logit[at] = row.z[offset], row.logits[offset]

    def draw(self, scans: Sequence[Any]) -> Any:
        """Throw the coins (every rank the same) and draw this rank's candidates.

        Parameters
        ----------
        scans : sequence
            What :meth:`scan` returned on every rank, in the order of the ranks.
        """
        if self._compiled is not None:
            return self._compiled.draw(scans)
        out = ShardDraw(
            np.zeros((self.requests, 2), np.uint64), np.full((self.requests, 2), -1),
            np.full((self.requests, 2), -np.inf), np.full((self.requests, 2), -np.inf),
        )  # fmt: skip
        self._walks = []
        for r in range(self.requests):
            walk = _Walk(status=int(self.status[r]))
            self._walks.append(walk)
            if not self.on[r]:
                continue
            self._walk(r, walk, scans)
            if walk.last < 0:
                continue
            row, i = self._row(r, walk.last), walk.last
            noise = self._noise(r, i, walk.kinds)
            if walk.rejected >= 0:
                factor = self._kept(r, walk, row)
                self._candidate(out, (r, 0), *candidate(row.law, noise, factor), row)
            self._candidate(out, (r, 1), *candidate(row.law, noise), row)
        return out

    def _kept(self, r: int, walk: _Walk, row: TargetRow) -> F64:
        """Factor of the residual on this rank's ids: -expm1(min(0, log q - log p))."""
        i, t = walk.last, float(self.temperature[r])
        support = row.law.support
        known = self._rows[int(self.first[r]) + i]
        log_p = np.where(support, known.log_prob(np.where(support, row.z, known.top), t), 0.0)
        factor: F64 = -np.expm1(np.minimum(0.0, np.where(support, self._log_q(r, i) - log_p, 0)))
        return factor

    def _log_q(self, r: int, i: int) -> F64:
        if self.columns is None:
            column = self.shard.local(int(self.drafts[r, i]))
            return np.where(np.arange(self.shard.size) == column, 0.0, -np.inf)
        z, _ = clean(self.columns[r, i], self.law_dtype)
        log_q: F64 = z / self.temperature[r] - float(self.law[1][r, i])
        return log_q

    def _combine(self, at: int, t: float, scans: Sequence[ShardScan]) -> _Row:
        """A row's numbers from every rank's, summed in the order of the ranks."""

        def log_mass(tops: list[float], masses: list[float], t: float) -> float:
            top = max(tops)
            if top == -np.inf:
                return -np.inf
            shares = (m * np.exp((x - top) / t) for x, m in zip(tops, masses, strict=True))
            return float(np.log(sum(shares)))

        tops = [float(s.top[at]) for s in scans]
        raw_tops = [float(s.raw_top[at]) for s in scans]
        lowest = [s for s in scans if s.lowest[at] >= 0]
        if lowest:
            fallback = int(lowest[0].lowest[at]), float(lowest[0].raw_lowest[at])
        else:  # no id is allowed anywhere: id 0, which the first rank holds
            fallback = 0, float(scans[0].raw_lowest[at])
        winner = int(np.argmax(tops))  # the first of equals holds the lowest id
        row = _Row(
            max(tops),
            log_mass(tops, [float(s.mass[at]) for s in scans], t or 1.0),
            max(raw_tops),
            log_mass(raw_tops, [float(s.raw_mass[at]) for s in scans], 1.0),
            (int(scans[winner].best[at]), float(scans[winner].raw_best[at])),
            fallback,
        )
        self._rows[at] = row
        return row

    def _emit(self, r: int, walk: _Walk, token: int, log_p: tuple[float, float]) -> bool:
        walk.tokens.append(token)
        walk.logprob.append(log_p[0])
        walk.logprob_raw.append(log_p[1])
        if token in self.stops:
            walk.finish = 1
        elif len(walk.tokens) == self.cap[r]:
            walk.finish = 2
        walk.status |= int(Status.STOPPED) if walk.finish else 0
        return walk.finish != 0

    def _walk(self, r: int, walk: _Walk, scans: Sequence[ShardScan]) -> None:
        """Rows from the first to a rejection, a stop or the bonus; the same on every rank."""
        t, n = float(self.temperature[r]), int(self.length[r])
        for i in range(n + 1):
            at = int(self.first[r]) + i
            row = self._combine(at, t, scans)
            walk.status |= int(Status.NAN_TARGET) if any(s.nan[at] for s in scans) else 0
            draft = int(self.drafts[r, i]) if i < n else -1
            if i < n and not 0 <= draft < self.shard.vocab:
                walk.status |= int(Status.BAD_DRAFT_ID)
                draft = -1
            if t == 0 or self.rule == "match":
                token, log_p = self._choice(at, row, t, scans)
                accepted = token == draft and not row.empty
                walk.status |= int(Status.EMPTY_SUPPORT) if row.empty else 0
            else:
                logits = self._coin(r, i, draft, row, walk, scans)
                if logits is None:
                    return
                token, accepted = draft, True
                log_p = row.log_prob(logits[0], t), row.raw_log_prob(logits[1])
            if draft >= 0:
                self._flag(r, walk, i, accepted)
            if self._emit(r, walk, token, log_p) or not accepted:
                return

    def _flag(self, r: int, walk: _Walk, i: int, accepted: bool) -> None:
        walk.flags[i] = int(accepted)
        if not accepted:
            walk.flags.update(dict.fromkeys(range(i + 1, int(self.length[r])), -1))

    def _choice(
        self, at: int, row: _Row, t: float, scans: Sequence[ShardScan]
    ) -> tuple[int, tuple[float, float]]:
        """Token of greedy and match with its log-probabilities, processed and raw."""
        if row.empty:
            return row.fallback()
        if t == 0:
            return row.best[0], (row.log_prob(row.top, t), row.raw_log_prob(row.best[1]))
        s = scans[int(np.argmax([int(s.key[at]) for s in scans]))]
        return int(s.token[at]), (
            row.log_prob(float(s.logit[at]), t),
            row.raw_log_prob(float(s.raw_logit[at])),
        )

    def _coin(
        self, r: int, i: int, draft: int, row: _Row, walk: _Walk, scans: Sequence[ShardScan]
    ) -> tuple[float, float] | None:
        """Rule token: the draft's logits if it is accepted; None: `walk.last` says what to draw."""
        at, t = int(self.first[r]) + i, float(self.temperature[r])
        if draft < 0:
            walk.last, walk.kinds = i, BONUS
            return None
        z = max(float(s.draft[at]) for s in scans)
        raw = max(float(s.raw_draft[at]) for s in scans)
        log_q = 0.0
        walk.last, walk.kinds = i, RESIDUAL
        if self.law[0] is not None and self.columns is not None:
            logit, lse = float(self.law[0][r, i]), float(self.law[1][r, i])
            if self.listed is not None and not self.orderly[r, i]:
                walk.status |= int(Status.BAD_DRAFT_ID | Status.FORCED_REJECT)
                self._flag(r, walk, i, False)
                return None
            nan = np.isnan(logit) or np.isnan(lse) or any(s.law_nan[at] for s in scans)
            if not nan and (logit == -np.inf or self._unlisted(r, i, draft)):
                walk.status |= int(Status.BAD_DRAFT_ID)
                walk.kinds = BONUS
                return None
            if nan or np.isinf(lse):
                walk.status |= int(Status.NAN_DRAFT | Status.FORCED_REJECT)
                self._flag(r, walk, i, False)
                return None
            log_q = logit / t - lse
        if row.empty or z == -np.inf:
            walk.status |= int(Status.FORCED_REJECT)
            walk.rejected = draft
            self._flag(r, walk, i, False)
            return None
        u = uniform53(int(self.seed[r]), int(self.position[r]) + i + 1, Kind.ACCEPT, i + 1)
        if u * 2.0**-53 < np.exp(min(0.0, row.log_prob(z, t) - log_q)):
            walk.last = -1
            return z, raw
        walk.rejected = draft
        self._flag(r, walk, i, False)
        return None

    def _unlisted(self, r: int, i: int, draft: int) -> bool:
        return self.listed is not None and draft not in self.listed[r, i]

    def finish(self, draws: Sequence[Any]) -> Verification:
        """Let the largest key win and write the results: the same on every rank.

        Parameters
        ----------
        draws : sequence
            What :meth:`draw` returned on every rank, in the order of the ranks.
        """
        if self._compiled is not None:
            return self._compiled.finish(draws)
        tokens = (self.requests, self.gamma + 1)
        out = Verification(
            np.zeros(self.requests, np.int32), np.zeros(self.requests, np.int32),
            np.full(tokens, -1, np.int32), np.full(self.requests, -1, np.int32),
            np.zeros(tokens, np.float32), np.zeros(tokens, np.float32),
            np.full((self.requests, self.gamma), -2, np.int8), np.zeros(self.requests, np.int32),
            np.zeros(self.requests, np.int32),
        )  # fmt: skip
        for r in np.flatnonzero(self.on):
            walk = self._walks[r]
            if walk.last >= 0:
                self._last(int(r), walk, draws)
            n = len(walk.tokens)
            out.num_emitted[r] = n
            out.num_accepted[r] = sum(flag == 1 for flag in walk.flags.values())
            out.tokens[r, :n], out.next_anchor[r] = walk.tokens, walk.tokens[-1]
            out.logprob[r, :n], out.logprob_raw[r, :n] = walk.logprob, walk.logprob_raw
            for i, flag in walk.flags.items():
                out.accepted[r, i] = flag
            out.finish[r], out.status[r] = walk.finish, walk.status
        return out

    def _last(self, r: int, walk: _Walk, draws: Sequence[ShardDraw]) -> None:
        """Emit the token behind the accepted drafts."""
        row, t = self._rows[int(self.first[r]) + walk.last], float(self.temperature[r])
        column = 0 if any(d.key[r, 0] > 0 for d in draws) else 1
        walk.last = -1
        if column == 1 and walk.rejected >= 0 and not row.empty:
            walk.status |= int(Status.ZERO_RESIDUAL)
        winner = int(np.argmax([int(d.key[r, column]) for d in draws]))
        if row.empty or draws[winner].key[r, column] == 0:
            walk.status |= int(Status.EMPTY_SUPPORT)
            self._emit(r, walk, *row.fallback())
            return
        d = draws[winner]
        log_p = row.log_prob(float(d.logit[r, column]), t)
        raw = row.raw_log_prob(float(d.raw_logit[r, column]))
        self._emit(r, walk, int(d.token[r, column]), (log_p, raw))
