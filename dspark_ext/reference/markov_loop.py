# SPDX-License-Identifier: Apache-2.0
"""The sequential stage: gamma dependent draft tokens per request (paper eq. 4, 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.reference._arguments import active_mask, legal, legal_temperature, per_request
from dspark_ext.reference.draws import DRAFT, Draws, draws_of
from dspark_ext.reference.rounding import DType, clean, round_to
from dspark_ext.reference.sampler import Draw, argmax, make_law
from dspark_ext.results import Draft
from dspark_ext.status import Status

__all__ = ["markov_loop"]

F64 = NDArray[np.float64]


def _sigmoid(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def quantised(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], np.float32]:
    """Put the vector that an int8 W2 multiplies on a grid of 16-bit integers.

    Parameters
    ----------
    x : ndarray, float32 (r,)

    Returns
    -------
    q : ndarray, int64 (r,)
        ``rint(x / s)``, ties to even; |q| <= 32512 = 127 * 256.
    s : float32
        The smallest power of two >= 2^-100 with ``max|x| <= 32512 s``; NaN (and q = 0) when an
        element is not finite.

    Examples
    --------
    >>> q, s = quantised(np.float32([32512, -0.5, 1.5]))
    >>> q.tolist(), float(s)
    ([32512, 0, 2], 1.0)
    """
    if not np.isfinite(x).all():
        return np.zeros(len(x), np.int64), np.float32(np.nan)
    largest = float(np.abs(x).max(initial=0))
    s = 2.0**-100
    while largest > 32512 * s:
        s *= 2
    return np.rint(x.astype(np.float64) / s).astype(np.int64), np.float32(s)


@dataclass
class _Head:
    """The transition bias B_k; ``state`` is the recurrent state s of the rnn head."""

    kind: str
    w2: NDArray[Any]  # [V_d, r] float64, or integers with a scale
    scale: NDArray[np.float32] | None  # [V_d] row scales of an int8 W2
    weight: F64 | None  # gated [r, d + r], rnn [3r, 2r + d]
    bias: F64 | None  # gated [r], rnn [3r]
    state: F64 = field(default_factory=lambda: np.zeros(0))

    def restart(self) -> None:
        """s_0 = 0, before the first slot of every request."""
        self.state = np.zeros(self.w2.shape[1])

    def logits(self, u: NDArray[Any], e: F64, h: F64) -> F64:
        """U_k + B_k before the rounding to the dtype of U.

        An int8 W2 has an exact definition in float32 (contract, int8): the sum is rounded to it.
        """
        bias = self.bias_of(e, h)
        width = np.float64 if self.scale is None else np.float32
        z: F64 = (u.astype(width) + bias.astype(width)).astype(np.float64)
        return z

    def bias_of(self, e: F64, h: F64) -> F64:
        """B_k for the previous token's embedding e [r] and the slot's hidden state h [d]."""
        if self.kind == "vanilla":
            inner = e
        elif self.kind == "gated":
            inner = _sigmoid(self.weight @ np.concatenate([h, e]) + self.bias) * e
        else:
            joint = self.weight @ np.concatenate([self.state, e, h]) + self.bias
            gate, candidate, output = np.split(joint, 3)
            gate = _sigmoid(gate)
            self.state = gate * self.state + (1.0 - gate) * np.tanh(candidate)
            inner = np.tanh(output)  # from the joint vector, so from s_{k-1}, not from the new s_k
        if self.scale is None:
            out: F64 = self.w2 @ inner
            return out
        q, s = quantised(inner.astype(np.float32))
        bias = (self.w2 @ q).astype(np.float32) * (s * self.scale)
        return np.asarray(bias, dtype=np.float64)


@dataclass
class _Slot:
    """What one slot of one request produced."""

    column: int
    z: F64  # [V_d], -inf outside the law's support
    lse: float
    margin: float
    status: int


@dataclass(frozen=True)
class _Sampling:
    """Temperature and truncation of one request's draft law, and its draws."""

    temperature: float
    top_k: int
    top_p: float
    draws: Draws


def support_of(u: NDArray[Any], m: int) -> NDArray[np.int64]:
    """Columns of the m largest base logits of one row, ascending; all of them when there are fewer.

    The order is total: logit descending with NaN as -inf, then column ascending.

    Examples
    --------
    >>> support_of(np.array([1.0, 3.0, np.nan, 3.0, 3.0]), 2).tolist()
    [1, 3]
    """
    values = np.where(np.isnan(u), -np.inf, u)
    order = np.lexsort((np.arange(len(values)), -values))
    return np.sort(order[:m])


def _draw_slot(z: F64, k: int, how: _Sampling) -> _Slot:
    """Pick a column from z, greedy (T = 0) or sampled from the truncated law."""
    if how.temperature == 0:
        law = make_law(z, 1.0)  # for the lse only: the law of a greedy slot is one-hot
        pick: Draw | None = None if law.empty else argmax(z)
    else:
        law = make_law(z, how.temperature, top_k=how.top_k, top_p=how.top_p)
        pick = how.draws.categorical(k, DRAFT, law)
    if pick is None:
        return _Slot(0, z, -np.inf, np.inf, int(Status.EMPTY_SUPPORT))
    return _Slot(pick.token, np.where(law.support, z, -np.inf), law.lse, pick.margin, 0)


def _confidence(weight: F64 | None, bias: float, h: F64, e: F64) -> float:
    """Raw logit w . [h_k; W1[x_{k-1}]] + b; a weight of length d looks at h_k alone."""
    if weight is None:
        return 0.0
    seen = h if len(weight) == len(h) else np.concatenate([h, e])
    return float(weight @ seen + bias)


def _optional(value: ArrayLike | None) -> F64 | None:
    return None if value is None else np.asarray(value, dtype=np.float64)


def markov_loop(
    base_logits: ArrayLike,
    w1: ArrayLike,
    w2: ArrayLike,
    *,
    anchor: ArrayLike,
    seed: ArrayLike,
    position: ArrayLike,
    temperature: ArrayLike | None = None,
    head: str = "vanilla",
    head_weight: ArrayLike | None = None,
    head_bias: ArrayLike | None = None,
    hidden: ArrayLike | None = None,
    confidence_weight: ArrayLike | None = None,
    confidence_bias: float | None = None,
    w2_scale: ArrayLike | None = None,
    w2_screen: ArrayLike | None = None,
    screen_scale: ArrayLike | None = None,
    topk_support: int = 0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    draft_to_target: ArrayLike | None = None,
    vocab_size: int | None = None,
    active: ArrayLike | None = None,
    store_logits: bool = False,
    debug_uniform: ArrayLike | None = None,
    dtype: DType = "f32",
    margin: NDArray[np.float64] | None = None,
    draws: Sequence[Draws] | None = None,
) -> Draft:
    """Draw x_k from softmax((U_k + B_k) / T) for k = 1..gamma, per request.

    Parameters
    ----------
    base_logits : array_like, shape (R, gamma, >= V_d)
        U. Columns from V_d on are padding.
    w1, w2 : array_like, shapes (V, r) and (V_d, r)
        Markov embedding (target ids) and projection (draft columns).
    anchor, seed, position : array_like, shape (R,)
        x_0 (target id), 64-bit seed, absolute position of the anchor.
    temperature, top_k, top_p : array_like, shape (R,), or scalar
        T (0 or None: greedy) and the truncation of the draft law.
    head : {"vanilla", "gated", "rnn"}
    head_weight, head_bias : array_like
        gated (r, d + r) over [h; e] and (r,); rnn (3r, 2r + d) over [s; e; h] and (3r,).
    hidden : array_like, shape (R, gamma, d)
        h_k; for the gated and rnn heads and the confidence logit.
    confidence_weight, confidence_bias
        (d + r,) over [h; e] or (d,) over h, and a scalar.
    w2_scale : array_like, shape (V_d,), optional
        Row scales of an int8 ``w2``, float32. The r-vector is then rounded to 16-bit integers
        (:func:`quantised`); ``B = float32(q . w2[v]) * (s * w2_scale[v])`` in float32.
    w2_screen, screen_scale : optional
        Bytes that let a backend leave out rows of ``w2``; not read here. There is no lse with them.
    topk_support : int
        M > 0: the law runs over the M largest base logits of every slot (:func:`support_of`).
    draft_to_target : array_like, shape (V_d,), optional
        Strictly increasing target ids of the draft columns.
    store_logits : bool
        Return z, with -inf outside the support of the law it was drawn from.
    debug_uniform : array_like, shape (R, gamma), optional
        53-bit integers that replace the inner draw; segment noise is then equal. Tests only.
    dtype : {"f32", "bf16", "f16"}
        Element type of ``base_logits``: z is rounded to it, once.
    margin : ndarray, float64 (R, gamma), optional
        Filled with the deciding margin of every token (see :mod:`dspark_ext.reference.sampler`).
    draws : sequence of Draws (R,), optional
        Replaces the random numbers of every request; used to enumerate the exact law.

    Returns
    -------
    Draft
        Padded requests hold token 0 and zeros.

    Notes
    -----
    Readings of the contract where it leaves a choice:

    * Segments are cut over draft columns (rows of W2), also with ``draft_to_target``.
    * A greedy slot ignores top_k and top_p: its law is one-hot, its lse runs over all columns.
    * A NaN in z counts as -inf, is stored as -inf and sets NAN_DRAFT. With ``topk_support`` a NaN
      anywhere in U sets it, and a NaN in z does at members of the support.
    * ``topk_support`` acts before top_k and top_p, which cut among its members. Greedy slots take
      the argmax over the members, and their lse runs over these.
    * An anchor outside [0, V) sets BAD_DRAFT_ID and has the embedding 0; nothing is indexed.
    * A slot without any finite logit drafts column 0 with logit and lse -inf (EMPTY_SUPPORT); its
      q is 0, so verification ends the prefix there.
    * A NaN confidence logit passes through; :func:`confidence` counts it as 0 and sets the bit.

    Examples
    --------
    >>> import numpy as np
    >>> u = np.array([[[0.25, -1.0, 2.0]]])
    >>> w2 = [[1, 0.5], [-2, 1], [0.25, -0.75]]
    >>> draft = markov_loop(u, [[2, -1]] * 3, w2, anchor=[0], seed=[0], position=[4],
    ...                     store_logits=True)
    >>> draft.tokens.tolist(), draft.logits.tolist()
    ([[2]], [[[1.75, -6.0, 3.25]]])
    """
    del screen_scale  # with w2_screen a shortcut to the same tokens
    u = np.asarray(base_logits)
    requests, gamma = u.shape[:2]
    e1 = np.asarray(w1)
    vocab = e1.shape[0] if vocab_size is None else int(vocab_size)
    bias = _Head(
        head,
        np.asarray(w2, dtype=np.float64 if w2_scale is None else np.int64),
        None if w2_scale is None else np.asarray(w2_scale, dtype=np.float32),
        _optional(head_weight),
        _optional(head_bias),
    )
    columns = bias.w2.shape[0]
    to_target = np.arange(columns) if draft_to_target is None else np.asarray(draft_to_target)
    cw, cb = _optional(confidence_weight), 0.0 if confidence_bias is None else confidence_bias
    h = np.zeros((requests, gamma, 0)) if hidden is None else np.asarray(hidden, np.float64)
    status = np.zeros(requests, dtype=np.int32)
    t = legal_temperature(temperature, status)
    k_of = per_request(top_k, requests, 0, np.int64)
    p_of = per_request(top_p, requests, 1.0, np.float32).astype(np.float64)
    p_of = legal(p_of, (p_of > 0) & (p_of <= 1), 1.0, status)
    on = active_mask(active, requests)
    status[~on] = 0
    result = _empty((requests, gamma), columns, u.dtype, store_logits, cw is not None, topk_support)
    if w2_screen is not None:
        result = replace(result, lse=None)
    for r in np.flatnonzero(on):
        own = draws_of(draws, int(r), seed, position, debug_uniform)
        how = _Sampling(float(t[r]), int(k_of[r]), float(p_of[r]), own)
        bias.restart()
        previous = int(np.asarray(anchor)[r])
        for k in range(gamma):
            known = 0 <= previous < vocab
            e = e1[previous].astype(np.float64) if known else np.zeros(e1.shape[1])
            status[r] |= 0 if known else int(Status.BAD_DRAFT_ID)
            with np.errstate(invalid="ignore", over="ignore"):
                raw = bias.logits(u[r, k, :columns], e, h[r, k])
            members = support_of(u[r, k, :columns], topk_support or columns)
            found_nan = bool(np.isnan(u[r, k, :columns]).any() or np.isnan(raw[members]).any())
            z = np.full(columns, -np.inf)
            z[members] = clean(round_to(raw[members], dtype), dtype)[0]
            slot = _draw_slot(z, k, how)
            status[r] |= slot.status | (int(Status.NAN_DRAFT) if found_nan else 0)
            previous = int(to_target[slot.column])
            result.tokens[r, k] = previous
            result.logit[r, k] = z[slot.column]
            if result.lse is not None:
                result.lse[r, k] = slot.lse
            if result.confidence_logit is not None:
                result.confidence_logit[r, k] = _confidence(cw, cb, h[r, k], e)
            if result.logits is not None:
                result.logits[r, k] = slot.z
            if result.support_ids is not None and result.support_logits is not None:
                result.support_ids[r, k, : len(members)] = to_target[members]
                result.support_logits[r, k, : len(members)] = slot.z[members]
            if margin is not None:
                margin[r, k] = slot.margin
    result.status[:] = status
    return result


def _empty(
    shape: tuple[int, int], columns: int, logits_dtype: Any, store: bool, confident: bool, m: int
) -> Draft:
    ids = np.full((*shape, m), -1, np.int32) if m else None
    return Draft(
        tokens=np.zeros(shape, np.int32),
        logit=np.zeros(shape, np.float32),
        lse=np.zeros(shape, np.float32),
        confidence_logit=np.zeros(shape, np.float32) if confident else None,
        logits=np.zeros((*shape, columns), logits_dtype) if store else None,
        support_ids=ids,
        support_logits=None if ids is None else np.full(ids.shape, -np.inf, logits_dtype),
        status=np.zeros(shape[0], np.int32),
    )
