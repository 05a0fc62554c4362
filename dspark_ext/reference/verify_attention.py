# SPDX-License-Identifier: Apache-2.0
"""Attention of ragged query rows over the paged cache, one row and one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.reference.paged_kv import head_scales, locate
from dspark_ext.reference.rounding import DType, round_to
from dspark_ext.status import Status

__all__ = ["verify_attention", "visible_keys"]

F64 = NDArray[np.float64]


def visible_keys(position: int, kv_len: int, causal: bool, window: int) -> tuple[int, int]:
    """First and one-past-last key position that a query at ``position`` may see.

    A window bounds the past only: keys at positions > position - window.

    Examples
    --------
    >>> visible_keys(2, 3, True, 0), visible_keys(9, 12, False, 4), visible_keys(-1, 2, True, 0)
    ((0, 3), (6, 12), (0, 0))
    """
    end = min(position + 1, kv_len) if causal else kv_len
    first = max(0, position - window + 1) if window > 0 else 0
    return min(first, max(end, 0)), max(end, 0)


def _attend(q: F64, keys: F64, values: F64, scale: float, soft_cap: float) -> tuple[F64, float]:
    """One head: softmax(scale q . k) v and the log of the sum; 0 and -inf without keys."""
    if not len(keys):
        return np.zeros(values.shape[-1]), -np.inf
    score = keys @ q * scale
    if soft_cap > 0:
        score = soft_cap * np.tanh(score / soft_cap)
    largest = score.max()
    if largest == -np.inf:
        return np.zeros(values.shape[-1]), -np.inf
    weight = np.exp(score - largest)
    return weight @ values / weight.sum(), float(largest + np.log(weight.sum()))


def verify_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    page_table: ArrayLike,
    kv_len: ArrayLike,
    cu_seqlens: ArrayLike,
    max_q_len: int | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    batch_invariant: bool = False,
    plan: Any = None,
    return_lse: bool = False,
    dtype: DType | None = None,
    status: NDArray[np.int32] | None = None,
) -> Any:
    """softmax(q k / sqrt(D)) v over the keys each row may see (contract, section 2).

    Query row i of a request with q_len rows sits at position ``kv_len - q_len + i``. Query head h
    reads key head ``h // (Hq / Hkv)``.

    Parameters
    ----------
    q : array_like, shape (B, Hq, D)
    k_cache, v_cache : array_like, shape (pages, page_size, Hkv, D)
    page_table, kv_len, cu_seqlens : array_like, (R, max_pages), (R,), (R + 1,)
        ``kv_len`` includes the new tokens.
    max_q_len : int, optional
        Upper bound on the rows of a request.
    causal, window, soft_cap, scale
        Bottom-right causal or bidirectional; window > 0 bounds the past; soft_cap > 0 replaces a
        scaled score x by s tanh(x / s); scale is 1 / sqrt(D) by default.
    k_scale, v_scale : array_like, () or (Hkv,), optional
        Factors of the cached keys and values.
    batch_invariant, plan
        Without effect: every row is computed alone here.
    return_lse : bool
    dtype : {"f32", "bf16", "f16"}, optional
        Element type of the result; by default that of ``q``.
    status : ndarray, int32 (R,), optional
        Bits are set in place.

    Returns
    -------
    out, or (out, lse)
        (B, Hq, D), and float32 (B, Hq) natural log. Rows of no request are 0 and -inf.

    Notes
    -----
    Readings of the contract where it leaves a choice: only pages that hold a key some row of the
    request may see are looked at, so a page behind the window may be gone. A request that needs a
    missing page (BAD_PAGE, KV_OVERFLOW), whose kv_len is negative, that has more rows than
    ``max_q_len`` or a scale that is not a positive finite number (BAD_PARAM) gives NaN in its rows:
    nothing can take them for a result. Offsets that decrease or leave [0, B] set BAD_PARAM and
    claim no rows.

    Examples
    --------
    >>> import numpy as np
    >>> v = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> verify_attention(np.zeros((2, 1, 1)), np.zeros((1, 4, 1, 1)), v, page_table=[[0]],
    ...                  kv_len=[3], cu_seqlens=[0, 2])[:, 0, 0].tolist()  # positions 1 and 2
    [0.5, 1.0]
    """
    del batch_invariant, plan
    queries, keys, values = np.asarray(q), np.asarray(k_cache), np.asarray(v_cache)
    table, lengths, offsets = (np.asarray(x) for x in (page_table, kv_len, cu_seqlens))
    tokens, heads, head_dim = queries.shape
    group = heads // keys.shape[2]
    factor = 1.0 / np.sqrt(head_dim) if scale is None else float(scale)
    (k_factor, k_good), (v_factor, v_good) = (
        head_scales(given, keys.shape[2]) for given in (k_scale, v_scale)
    )
    out, lse = np.zeros(queries.shape), np.full((tokens, heads), -np.inf)
    bits = np.zeros(len(lengths), np.int32) if status is None else status
    for r in range(len(lengths)):
        begin, end, length = int(offsets[r]), int(offsets[r + 1]), int(lengths[r])
        refused = max_q_len is not None and end - begin > max_q_len
        refused |= end > begin and not (k_good and v_good)
        if not 0 <= begin <= end <= tokens or length < 0 or refused:
            bits[r] |= int(Status.BAD_PARAM)
            if 0 <= begin <= end <= tokens:
                out[begin:end], lse[begin:end] = np.nan, np.nan
            continue
        trouble = 0
        for i in range(end - begin):
            position = length - (end - begin) + i
            seen = range(*visible_keys(position, length, causal, window))
            where = [locate(table, r, p, keys.shape[1], keys.shape[0]) for p in seen]
            for bit, _, _ in where:
                trouble |= bit
            found = [(page, row) for bit, page, row in where if not bit]
            pages, rows = np.array(found, dtype=np.int64).reshape(-1, 2).T
            k_seen = keys[pages, rows].astype(np.float64) * k_factor[:, None]  # [keys, Hkv, D]
            v_seen = values[pages, rows].astype(np.float64) * v_factor[:, None]
            for h in range(heads):
                out[begin + i, h], lse[begin + i, h] = _attend(
                    queries[begin + i, h].astype(np.float64),
                    k_seen[:, h // group],
                    v_seen[:, h // group],
                    factor,
                    soft_cap,
                )
        bits[r] |= trouble
        if trouble:
            out[begin:end], lse[begin:end] = np.nan, np.nan
    result = (out if dtype is None else round_to(out, dtype)).astype(queries.dtype)
    return (result, lse.astype(np.float32)) if return_lse else result
