# SPDX-License-Identifier: Apache-2.0
"""Verification: target logits and drafts in, tokens out, the target's law unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.reference._arguments import active_mask, legal, legal_temperature, per_request
from dspark_ext.reference.block_rule import verify_block
from dspark_ext.reference.draft_law import FullLaw, StoredLaw, SupportLaw
from dspark_ext.reference.draws import Draws, draws_of
from dspark_ext.reference.rounding import DType
from dspark_ext.reference.target_law import Processors, unpack_mask
from dspark_ext.reference.verification_request import History, Request, TargetRows
from dspark_ext.reference.verification_rules import RULES, verify_rows
from dspark_ext.results import Verification
from dspark_ext.status import Status

__all__ = ["RULES", "rejection_sample"]

_UNLIMITED = 1 << 30
_COUNTED = ("anchor", "output_counts", "prompt_mask")  # read by penalties, nothing by themselves


def _stored_law(
    logit: Any, lse: Any, logits: Any, support: tuple[Any, Any], to_target: Any, vocab: int,
    dtype: DType,
) -> StoredLaw | None:  # fmt: skip
    top_m = any(x is not None for x in support)
    given = [x is not None for x in (logit, lse, *(support if top_m else (logits,)))]
    if not any(given):
        return None
    if not all(given) or (top_m and logits is not None):
        raise ValueError(
            "draft_logit, draft_lse and one of draft_logits or (support_ids, support_logits): "
            "expected all three or none"
        )
    if top_m:
        ids, values = np.asarray(support[0], dtype=np.int64), np.asarray(support[1])
        return SupportLaw(np.asarray(logit), np.asarray(lse), ids, values, dtype)
    columns = np.arange(vocab) if to_target is None else np.asarray(to_target, dtype=np.int64)
    return FullLaw(np.asarray(logit), np.asarray(lse), np.asarray(logits), columns, dtype)


def _stop_sets(stop_ids: ArrayLike | None, requests: int) -> list[frozenset[int]]:
    """One list for all (1-D) or one row per request (2-D); -1 is no id."""
    if stop_ids is None:
        return [frozenset()] * requests
    ids = np.atleast_1d(np.asarray(stop_ids, dtype=np.int64))
    rows = np.broadcast_to(ids, (requests, ids.shape[-1]))
    return [frozenset(int(x) for x in row if x >= 0) for row in rows]


def _rule_codes(rule: Any, requests: int) -> NDArray[np.int64]:
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule: got {rule!r}, expected one of {sorted(RULES)}")
        rule = RULES[rule]
    return per_request(rule, requests, RULES["token"], np.int64)


def _processors(
    t: NDArray[np.float64],
    min_p: ArrayLike | None,
    top_k: ArrayLike | None,
    top_p: ArrayLike | None,
    logit_bias: ArrayLike | None,
    vocab: int,
    status: NDArray[np.int32],
) -> list[Processors]:
    """Sampling parameters per request; an illegal one is off and sets BAD_PARAM."""
    requests = len(status)
    keep = per_request(top_k, requests, 0, np.int64)
    mass = per_request(top_p, requests, 1.0, np.float32).astype(np.float64)
    mass = legal(mass, (mass > 0) & (mass <= 1), 1.0, status)
    least = per_request(min_p, requests, 0.0, np.float32).astype(np.float64)
    least = legal(least, (least >= 0) & (least <= 1), 0.0, status)
    bias = None if logit_bias is None else np.asarray(logit_bias, dtype=np.float32)[:, :vocab]
    return [
        Processors(
            float(t[r]),
            float(least[r]),
            int(keep[r]),
            float(mass[r]),
            None if bias is None else bias[r],
        )
        for r in range(requests)
    ]


def _histories(
    given: dict[str, Any], requests: int, vocab: int, status: NDArray[np.int32]
) -> list[History | None]:
    """What penalties and min-tokens know; illegal values are off and set BAD_PARAM."""
    if all(value is None for name, value in given.items() if name not in _COUNTED):
        return [None] * requests
    factor = per_request(given["repetition_penalty"], requests, 1.0, np.float32)
    factor = legal(factor, np.isfinite(factor) & (factor > 0), np.float32(1), status)
    presence, frequency = (
        per_request(given[name], requests, 0.0, np.float32)
        for name in ("presence_penalty", "frequency_penalty")
    )
    presence = legal(presence, np.isfinite(presence), np.float32(0), status)
    frequency = legal(frequency, np.isfinite(frequency), np.float32(0), status)
    least = per_request(given["min_tokens_left"], requests, 0, np.int64)
    least = legal(least, least >= 0, 0, status)
    counts = np.zeros((requests, vocab), np.int64)
    if given["output_counts"] is not None:
        counts += np.maximum(np.asarray(given["output_counts"], np.int64)[:, :vocab], 0)
    anchor = per_request(given["anchor"], requests, -1, np.int64)
    on = (factor != 1) | (presence != 0) | (frequency != 0)
    status[on & (anchor >= vocab)] |= int(Status.BAD_DRAFT_ID)
    for slot in np.flatnonzero((anchor >= 0) & (anchor < vocab)):
        counts[slot, anchor[slot]] += 1
    prompt = np.zeros((requests, vocab), bool)
    if given["prompt_mask"] is not None:
        for r, row in enumerate(np.asarray(given["prompt_mask"])):
            prompt[r] = unpack_mask(row, vocab)
    return [
        History(factor[r], presence[r], frequency[r], counts[r], prompt[r], int(least[r]))
        for r in range(requests)
    ]


def _rows(
    cu_seqlens: ArrayLike, draft_len: ArrayLike, requests: int, gamma: int, available: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """First row, scheduled drafts (-1: there is no row), and whether draft_len had to shrink."""
    offsets = np.asarray(cu_seqlens, dtype=np.int64)
    first, last = offsets[:-1], offsets[1:]
    rows = np.where((first >= 0) & (last <= available), last - first, 0)
    wanted = per_request(draft_len, requests, 0, np.int64)
    length = np.maximum(np.minimum(np.clip(wanted, 0, gamma), rows - 1), -1)
    return first, length, length != wanted


def _mask_rows(token_mask: ArrayLike | None, request: int, begin: int) -> NDArray[Any] | None:
    """Mask rows of a request: ragged [B, words] or padded [R, gamma + 1, words]."""
    if token_mask is None:
        return None
    mask = np.asarray(token_mask)
    return mask[begin:] if mask.ndim == 2 else mask[request]


def _empty(requests: int, gamma: int, top: int) -> Verification:
    """Results of requests that emit nothing."""
    listed = (requests, gamma + 1, top)
    return Verification(
        num_accepted=np.zeros(requests, np.int32),
        num_emitted=np.zeros(requests, np.int32),
        tokens=np.full((requests, gamma + 1), -1, np.int32),
        next_anchor=np.full(requests, -1, np.int32),
        logprob=np.zeros((requests, gamma + 1), np.float32),
        logprob_raw=np.zeros((requests, gamma + 1), np.float32),
        accepted=np.full((requests, gamma), -2, np.int8),
        finish=np.zeros(requests, np.int32),
        status=np.zeros(requests, np.int32),
        top_ids=np.full(listed, -1, np.int32) if top else None,
        top_logprob=np.zeros(listed, np.float32) if top else None,
        top_ids_raw=np.full(listed, -1, np.int32) if top else None,
        top_logprob_raw=np.zeros(listed, np.float32) if top else None,
    )


def _write_lists(result: Verification, request: Request) -> None:
    """The likeliest ids of every emitted token, in the total order."""
    for i, row in enumerate(request.lists):
        processed = np.where(row.law.support, row.z, -np.inf)
        for suffix, z, log_p in (
            ("", processed, row.law.log_prob()),
            ("_raw", row.logits, row.raw),
        ):
            best = np.lexsort((np.arange(len(z)), -z))[: request.top]
            best = best[z[best] > -np.inf]
            getattr(result, f"top_ids{suffix}")[request.index, i, : len(best)] = best
            values = getattr(result, f"top_logprob{suffix}")[request.index, i]
            values[:] = -np.inf
            values[: len(best)] = log_p[best]


def _write(result: Verification, request: Request) -> None:
    r, n = request.index, len(request.tokens)
    result.num_accepted[r] = sum(flag == 1 for flag in request.flags.values())
    result.num_emitted[r] = n
    result.tokens[r, :n] = request.tokens
    result.next_anchor[r] = request.tokens[-1]
    result.logprob[r, :n] = request.logprob
    result.logprob_raw[r, :n] = request.logprob_raw
    for i, flag in request.flags.items():
        result.accepted[r, i] = flag
    result.finish[r] = request.finish
    result.status[r] |= request.status
    _write_lists(result, request)


def rejection_sample(
    target_logits: ArrayLike,
    draft_tokens: ArrayLike,
    *,
    draft_len: ArrayLike,
    cu_seqlens: ArrayLike,
    seed: ArrayLike,
    position: ArrayLike,
    target_logit: ArrayLike | None = None,
    target_lse: ArrayLike | None = None,
    target_lse_raw: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    logit_bias: ArrayLike | None = None,
    token_mask: ArrayLike | None = None,
    repetition_penalty: ArrayLike | None = None,
    presence_penalty: ArrayLike | None = None,
    frequency_penalty: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    prompt_mask: ArrayLike | None = None,
    min_tokens_left: ArrayLike | None = None,
    draft_logit: ArrayLike | None = None,
    draft_lse: ArrayLike | None = None,
    draft_logits: ArrayLike | None = None,
    support_ids: ArrayLike | None = None,
    support_logits: ArrayLike | None = None,
    draft_temperature: ArrayLike | None = None,
    rule: Any = "token",
    synthetic_acceptance: ArrayLike | None = None,
    anchor: ArrayLike | None = None,
    draft_to_target: ArrayLike | None = None,
    stop_ids: ArrayLike | None = None,
    max_new_tokens: ArrayLike | None = None,
    active: ArrayLike | None = None,
    vocab_size: int | None = None,
    top_logprobs: int = 0,
    debug_uniform: ArrayLike | None = None,
    dtype: DType = "f32",
    draft_dtype: DType = "f32",
    margin: NDArray[np.float64] | None = None,
    draws: Sequence[Draws] | None = None,
) -> Verification:
    """Verify the drafts of every request and emit its tokens (contract, sections 3 and 4).

    Parameters
    ----------
    target_logits : array_like, shape (B, >= V)
        Row i of request r is ``cu_seqlens[r] + i``; it decides position n + i + 1.
    draft_tokens : array_like, shape (R, gamma)
        Target ids.
    draft_len, cu_seqlens, seed, position : array_like, (R,), (R + 1,), (R,), (R,)
        Scheduled drafts, first rows, seeds, positions of the anchors.
    target_logit, target_lse, target_lse_raw : array_like (B,), optional
        z of the draft of every row, its lse at T and at T = 1, from an LM head: they replace the
        row in the coin of the rule ``token`` where its law is a softmax at T > 0 and nothing else.
    temperature, top_k, top_p, min_p : array_like (R,) or scalar
        T = 0 or None is greedy; the others are off at <= 0, 1 and 0.
    logit_bias : array_like, shape (R, V), optional
        Added in float32.
    token_mask : array_like of int32, (B, words) or (R, gamma + 1, words), optional
        Packed bits, 1 = allowed.
    draft_logit, draft_lse, draft_logits : array_like, (R, gamma), (R, gamma), (R, gamma, V_d)
        The stored law: all three, or none for one-hot.
    support_ids, support_logits : array_like (R, gamma, M), optional
        In place of draft_logits: ascending target ids, negative behind the last, and their logits.
    draft_temperature : array_like (R,) or scalar, optional
        T of the draft, by default ``temperature``; 0 means one-hot.
    rule : str or array_like of codes (R,)
        "greedy", "token", "block", "match" or "synthetic" (:data:`RULES`).
    synthetic_acceptance : array_like (R,) or scalar, optional
        Tokens that a round under the rule synthetic shall emit on average, 1..gamma + 1.
    draft_to_target : array_like (V_d,), optional
        Target ids of the columns of ``draft_logits``.
    stop_ids : array_like (S,) or (R, S), optional
        -1 is no id.
    max_new_tokens : array_like (R,), optional
        Tokens this round may emit; 0 makes the request inactive.
    repetition_penalty, presence_penalty, frequency_penalty : array_like (R,) or scalar, optional
        Off at 1, 0, 0; in float32.
    output_counts : array_like (R, V), optional
        How often each id is in the output; prompt_mask (R, words): packed ids of the prompt.
    anchor : array_like (R,), optional
        Counted as output on top of output_counts where it is not negative.
    min_tokens_left : array_like (R,) or scalar, optional
        Rows below it cannot emit a stop id.
    top_logprobs : int
        Likeliest ids to list for every emitted token.
    debug_uniform : array_like (R, gamma + 1), optional
        53-bit integers that replace the accept and inner draws of a row and make segment noise
        equal. Tests only.
    dtype, draft_dtype : {"f32", "bf16", "f16"}
        Element types of ``target_logits`` and of ``draft_logits`` or ``support_logits``.
    margin : ndarray, float64 (R, gamma + 1), optional
        Filled with the deciding margin of every emitted token.
    draws : sequence of Draws (R,), optional
        Replaces the random numbers of every request; used to enumerate the exact law.

    Returns
    -------
    Verification
        Requests that emit nothing hold tokens -1, next_anchor -1, accepted -2 and zeros.

    Raises
    ------
    ValueError
        An unknown rule name; a law given in part.

    Notes
    -----
    Readings of the contract where it leaves a choice, always the one that cannot leak:

    * A draft id outside [0, V) or with q = 0 ends the prefix: its flag and those behind are -2, the
      token is the bonus draw of that row (kinds 5, 6 for ``token``). q is looked at by ``token``
      only.
    * A NaN in draft_logit, draft_lse or anywhere in the row of draft_logits refuses the draft
      before the coin (flag 0, NAN_DRAFT and FORCED_REJECT); the token is from p with the
      residual's kinds. An infinite lse is treated alike, and so is a list of ids that does not
      ascend or leaves [0, V) (BAD_DRAFT_ID and FORCED_REJECT).
    * p(draft) = 0 is FORCED_REJECT with the residual. Both bits belong to ``token`` and ``block``.
    * A row without mass refuses its draft under every rule and emits the lowest allowed id.
    * ``block`` looks at every row until a draft that cannot be accepted. A draft without a valid
      law, or a row without mass, ends its prefix there like a placeholder, but is refused (flag 0).
      Under the other rules only rows that emit a token are looked at. What is looked at sets bits;
      NAN_TARGET looks at all V columns, allowed or not: the raw log-probability needs them.
    * When a stop id is the last token that the cap allows, the finish reason is stop.
    * A rejected draft's followers keep -1 when the emitted token is a stop id.
    * log p is at the request's T over the truncated support; the raw one at T = 1, unmasked.
    * Illegal values set BAD_PARAM and count as off: T, draft T and the rule as greedy, top_p 1,
      min_p 0, a negative cap as inactive; draft_len is clamped to [0, gamma] and to the rows there
      are, and a request without a row emits nothing.

    Examples
    --------
    >>> import numpy as np
    >>> out = rejection_sample(np.log([[0.1, 0.9], [0.9, 0.1]]), [[1]], draft_len=[1],
    ...                        cu_seqlens=[0, 2], seed=[0], position=[5])
    >>> out.tokens.tolist(), out.num_accepted.tolist(), out.accepted.tolist()
    ([[1, 0]], [1], [[1]])
    """
    counted = {
        "anchor": anchor,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "output_counts": output_counts,
        "prompt_mask": prompt_mask,
        "min_tokens_left": min_tokens_left,
    }
    logits = np.asarray(target_logits)
    drafts = np.asarray(draft_tokens, dtype=np.int64)
    requests, gamma = drafts.shape
    vocab = logits.shape[1] if vocab_size is None else int(vocab_size)
    rules = _rule_codes(rule, requests)
    support = (support_ids, support_logits)
    law = _stored_law(
        draft_logit, draft_lse, draft_logits, support, draft_to_target, vocab, draft_dtype
    )
    result = _empty(requests, gamma, top_logprobs)
    status = result.status
    rules = legal(rules, np.isin(rules, list(RULES.values())), RULES["greedy"], status)
    synthetic = rules == RULES["synthetic"]
    mean = per_request(synthetic_acceptance, requests, 0.0, np.float32).astype(np.float64)
    mean = legal(mean, ~synthetic | ((mean >= 1) & (mean <= gamma + 1)), 1.0, status)
    t = np.where(rules == RULES["greedy"], 0.0, legal_temperature(temperature, status))
    t_draft = t if draft_temperature is None else legal_temperature(draft_temperature, status)
    processors = _processors(t, min_p, top_k, top_p, logit_bias, vocab, status)
    cap = per_request(max_new_tokens, requests, _UNLIMITED, np.int64)
    cap = legal(cap, cap >= 0, 0, status)
    first, length, short = _rows(cu_seqlens, draft_len, requests, gamma, len(logits))
    status[short & (cap > 0)] |= int(Status.BAD_PARAM)
    histories = _histories(counted, requests, vocab, status)
    on = active_mask(active, requests)
    status[~on] = 0
    stops = _stop_sets(stop_ids, requests)
    told = (target_logit, target_lse, target_lse_raw)
    for r in np.flatnonzero(on & (cap > 0) & (length >= 0)):
        begin, n = int(first[r]), int(length[r])
        request = Request(
            index=int(r),
            rule=int(rules[r]) if t[r] or synthetic[r] else RULES["greedy"],
            wanted=float(mean[r]) - 1,
            status=int(Status.SYNTHETIC) if synthetic[r] else 0,
            processors=processors[r],
            draft_temperature=float(t_draft[r]),
            drafts=drafts[r, :n],
            rows=TargetRows(
                logits[begin : begin + n + 1, :vocab],
                _mask_rows(token_mask, int(r), begin),
                dtype,
                *(None if x is None else np.asarray(x)[begin : begin + n + 1] for x in told),
            ),
            draws=draws_of(draws, int(r), seed, position, debug_uniform),
            stop_ids=stops[r],
            cap=int(cap[r]),
            vocab=vocab,
            law=law,
            history=histories[r],
            top=top_logprobs,
        )
        if request.rule == RULES["block"]:
            verify_block(request)
        else:
            verify_rows(request)
        _write(result, request)
        if margin is not None:
            margin[r, : len(request.margins)] = request.margins
    return result
