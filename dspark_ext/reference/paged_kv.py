# SPDX-License-Identifier: Apache-2.0
"""The paged cache: append new keys and values, commit a round (contract, section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.reference._arguments import active_mask
from dspark_ext.reference.rounding import DType, round_to
from dspark_ext.status import Status

__all__ = [
    "head_scales",
    "locate",
    "paged_kv_append",
    "paged_kv_commit",
    "rotate",
    "rotate_half_split",
]


def locate(
    page_table: NDArray[np.generic], request: int, position: int, page_size: int, pages: int
) -> tuple[int, int, int]:
    """Page and row of a logical position: (status bit or 0, page, row).

    Examples
    --------
    >>> import numpy as np
    >>> locate(np.array([[4, -1]]), 0, 3, 16, 8), locate(np.array([[4, -1]]), 0, 16, 16, 8)[0]
    ((0, 4, 3), 1024)
    """
    column = position // page_size
    if column >= page_table.shape[1]:
        return int(Status.KV_OVERFLOW), -1, -1
    page = int(page_table[request, column])
    if not 0 <= page < pages:
        return int(Status.BAD_PAGE), -1, -1
    return 0, page, position % page_size


def head_scales(scale: ArrayLike | None, heads: int) -> tuple[NDArray[np.float64], bool]:
    """One factor a KV head of a cache with scales, and whether all are positive and finite.

    Examples
    --------
    >>> head_scales(0.5, 2)[0].tolist(), head_scales([1.0, -1.0], 2)[1]
    ([0.5, 0.5], False)
    """
    values = np.broadcast_to(np.asarray(1.0 if scale is None else scale, np.float64), (heads,))
    return values, bool(np.all(np.isfinite(values) & (values > 0)))


def rotate_half_split(
    x: NDArray[np.float64], position: int, inv_freq: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rotate the pairs (x_i, x_{i + D/2}) by position * inv_freq_i; x has shape (..., D).

    Examples
    --------
    >>> import numpy as np
    >>> rotate_half_split(np.array([1.0, 0.0]), 1, np.array([np.pi / 2])).round(12).tolist()
    [0.0, 1.0]
    """
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(position * inv_freq), np.sin(position * inv_freq)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def rotate(
    x: NDArray[np.float64],
    position: int,
    inv_freq: NDArray[np.float64],
    interleaved: bool = False,
    amplitude: float = 1.0,
) -> NDArray[np.float64]:
    """Rotate the first 2 len(inv_freq) elements of heads (..., D); the others stay.

    Examples
    --------
    >>> import numpy as np
    >>> rotate(np.array([1.0, 0.0, 5.0]), 1, np.array([np.pi / 2])).round(12).tolist()
    [0.0, 1.0, 5.0]
    """
    turn = 2 * len(inv_freq)
    order = np.arange(turn)
    if interleaved:  # bring the pairs apart, and back
        order = np.concatenate([order[0::2], order[1::2]])
    out: NDArray[np.float64] = x.copy()
    out[..., order] = amplitude * rotate_half_split(x[..., order], position, inv_freq)
    return out


def _frequencies(rope: Any, head_dim: int) -> NDArray[np.float64]:
    """theta^(-2i / D) of a plain base, or what a rope object says."""
    if hasattr(rope, "inv_freq"):
        return np.asarray(rope.inv_freq(head_dim), dtype=np.float64)
    return float(rope) ** (-2.0 * np.arange(head_dim // 2) / head_dim)


def _store(cache: NDArray[Any], page: int, row: int, x: Any, dtype: DType | None) -> None:
    cache[page, row] = x if dtype is None else round_to(x, dtype)


def paged_kv_append(
    k: ArrayLike,
    v: ArrayLike,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    *,
    page_table: ArrayLike,
    kv_len: ArrayLike,
    cu_seqlens: ArrayLike,
    rope: Any = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    num_new: ArrayLike | None = None,
    dtype: DType | None = None,
) -> NDArray[np.int32]:
    """Write new keys and values behind what the cache holds.

    Parameters
    ----------
    k, v : array_like, shape (B, Hkv, D)
        Row ``cu_seqlens[r] + i`` goes to logical position ``kv_len[r] + i`` of request r.
    k_cache, v_cache : ndarray, shape (pages, page_size, Hkv, D)
        Written in place.
    page_table : array_like, shape (R, max_pages)
        Page ids; -1 = none.
    kv_len, cu_seqlens : array_like, (R,) and (R + 1,)
        Lengths before the append; first rows.
    rope : object with ``inv_freq(head_dim)``, or a float base, optional
        Rotation of k at its position, in float64; ``interleaved`` and ``amplitude`` of the object
        are followed.
    k_scale, v_scale : array_like, () or (Hkv,), optional
        A row is divided by its head's scale before it is stored.
    num_new : array_like, (R,), optional
        Only the first rows of each request are appended.
    dtype : {"f32", "bf16", "f16", "f8_e4m3"}, optional
        Element type of the caches, rounded to once; by default the arrays' own.

    Returns
    -------
    ndarray, int32 (R,)
        KV_OVERFLOW or BAD_PAGE: that token is not written, the others are. BAD_PARAM (negative
        kv_len, offsets that decrease or leave [0, B], num_new outside 0..rows, any scale that is
        not a positive finite number): nothing of the request is written.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((2, 2, 2, 1, 1))
    >>> paged_kv_append(np.ones((3, 1, 1)), np.ones((3, 1, 1)), *cache, page_table=[[1, 0]],
    ...                 kv_len=[1], cu_seqlens=[0, 3]).tolist()
    [0]
    >>> cache[0, :, :, 0, 0].tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    new_k, new_v = np.asarray(k), np.asarray(v)
    table, offsets = np.asarray(page_table), np.asarray(cu_seqlens)
    lengths = np.asarray(kv_len)
    pages, page_size = k_cache.shape[:2]
    (k_factor, k_good), (v_factor, v_good) = (
        head_scales(scale, k_cache.shape[2]) for scale in (k_scale, v_scale)
    )
    status = np.zeros(len(lengths), dtype=np.int32)
    for r in range(len(lengths)):
        begin, end, length = int(offsets[r]), int(offsets[r + 1]), int(lengths[r])
        good = k_good and v_good and 0 <= begin <= end <= len(new_k) and length >= 0
        rows = end - begin if num_new is None else int(np.asarray(num_new)[r])
        if not (good and 0 <= rows <= end - begin):
            status[r] |= int(Status.BAD_PARAM)
            continue
        for i in range(rows):
            bit, page, row = locate(table, r, length + i, page_size, pages)
            status[r] |= bit
            if bit:
                continue
            key = np.asarray(new_k[begin + i])
            if rope is not None:
                inv_freq = _frequencies(rope, key.shape[-1])
                key = rotate(
                    key.astype(np.float64),
                    length + i,
                    inv_freq,
                    getattr(rope, "interleaved", False),
                    getattr(rope, "amplitude", 1.0),
                )
            _store(k_cache, page, row, key / k_factor[:, None], dtype)
            _store(v_cache, page, row, new_v[begin + i] / v_factor[:, None], dtype)
    return status


def paged_kv_commit(
    kv_len: NDArray[Any],
    position: NDArray[Any],
    num_emitted: ArrayLike,
    active: ArrayLike | None = None,
) -> None:
    """After a round: ``kv_len`` and ``position`` grow by ``num_emitted``, in place.

    Inactive requests, and those that emitted nothing, are left alone.

    Examples
    --------
    >>> import numpy as np
    >>> kv_len, position = np.array([7, 9]), np.array([7, 9])
    >>> paged_kv_commit(kv_len, position, [3, 1], active=[1, 0])
    >>> kv_len.tolist(), position.tolist()
    ([10, 9], [10, 9])
    """
    grow = np.where(active_mask(active, len(kv_len)), np.maximum(np.asarray(num_emitted), 0), 0)
    kv_len += grow.astype(kv_len.dtype)
    position += grow.astype(position.dtype)
