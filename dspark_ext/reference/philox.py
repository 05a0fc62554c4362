# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 and the counter layout of the random-number contract (contract, section 5).

Every draw is a pure function of (seed, decided position, anchor position, kind): no state, no
batch slot, no grid. The key is the request's 64-bit seed; the counter is

    (index, position low, position high, kind << 8 | (position - anchor position))

where ``position`` is the absolute position that the draw decides.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Kind", "counter", "philox4x32", "segment_gumbel", "uniform53"]

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


class Kind(enum.IntEnum):
    """What a random number decides. Two kinds never share a Philox call."""

    DRAFT_SEGMENT = 0
    DRAFT_INNER = 1
    ACCEPT = 2
    RESIDUAL_SEGMENT = 3
    RESIDUAL_INNER = 4
    BONUS_SEGMENT = 5
    BONUS_INNER = 6
    TARGET_SEGMENT = 7  # rule `match`: position - anchor position counts as 0
    TARGET_INNER = 8
    SYNTHETIC = 9


def philox4x32(counters: ArrayLike, keys: ArrayLike) -> NDArray[np.uint32]:
    """Ten rounds of Philox4x32 on every counter.

    Parameters
    ----------
    counters : array_like, shape (..., 4), uint32
    keys : array_like, shape (..., 2), uint32
        Broadcast against ``counters`` over the leading axes.

    Returns
    -------
    ndarray, shape (..., 4), uint32

    Examples
    --------
    >>> [f"{int(w):08x}" for w in philox4x32([0, 0, 0, 0], [0, 0])]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c = [np.asarray(counters, dtype=np.uint64)[..., i] for i in range(4)]
    k = [np.asarray(keys, dtype=np.uint64)[..., i] for i in range(2)]
    return np.stack(np.broadcast_arrays(*_rounds(c, k)), axis=-1).astype(np.uint32)


def _rounds(c: Any, k: Any) -> list[Any]:
    """Ten rounds on four counter words and two key words: Python integers or uint64 arrays."""
    for _ in range(_ROUNDS):
        product0 = c[0] * _MULTIPLIER[0]
        product1 = c[2] * _MULTIPLIER[1]
        c = [
            (product1 >> 32) ^ c[1] ^ k[0],
            product1 & _LOW,
            (product0 >> 32) ^ c[3] ^ k[1],
            product0 & _LOW,
        ]
        k = [(k[0] + _WEYL[0]) & _LOW, (k[1] + _WEYL[1]) & _LOW]
    return list(c)


def counter(index: ArrayLike, position: int, kind: int, delta: int) -> NDArray[np.uint64]:
    """Counter words of the contract.

    Parameters
    ----------
    index : array_like of int
        Call number inside the draw: 0 for uniforms, segment >> 2 for segment noise.
    position : int
        Absolute position that is decided, below 2^64.
    kind : int
        A :class:`Kind`.
    delta : int
        position - anchor position, 0..255 (0 for the rule ``match``).

    Returns
    -------
    ndarray, shape (..., 4), uint64 holding 32-bit values

    Examples
    --------
    >>> counter(3, 2**32 + 5, Kind.ACCEPT, 7).tolist()
    [3, 5, 1, 519]
    """
    first = np.asarray(index, dtype=np.uint64)
    words = np.empty((*first.shape, 4), dtype=np.uint64)
    words[..., 0] = first
    words[..., 1:] = _fixed_words(position, kind, delta)
    return words


def _fixed_words(position: int, kind: int, delta: int) -> tuple[int, int, int]:
    if not 0 <= delta <= 255:
        raise ValueError(f"delta: got {delta}, expected 0..255")
    return int(position) & _LOW, int(position) >> 32, int(kind) << 8 | delta


def _key(seed: int) -> tuple[int, int]:
    seed = int(seed) & 0xFFFFFFFFFFFFFFFF
    return seed & 0xFFFFFFFF, seed >> 32


def segment_gumbel(
    seed: int, position: int, kind: int, delta: int, num_segments: int
) -> NDArray[np.float64]:
    """Gumbel noise of segments 0 .. num_segments - 1.

    Segment s takes word ``s & 3`` of the Philox call with index ``s >> 2``:
    ``v = (word + 1/2) 2^-32``, ``E = -log1p(-v)``, ``G = -log E``.

    Examples
    --------
    >>> segment_gumbel(1, 10, Kind.DRAFT_SEGMENT, 1, 6).shape
    (6,)
    """
    calls = np.arange((num_segments + 3) // 4)
    words = philox4x32(counter(calls, position, kind, delta), _key(seed)).reshape(-1)
    v = (words[:num_segments].astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-v))


def uniform53(seed: int, position: int, kind: int, delta: int) -> int:
    """53-bit integer u53 of an inner or accept draw; the uniform is ``u53 * 2**-53`` in [0, 1).

    Examples
    --------
    >>> 0 <= uniform53(1, 10, Kind.ACCEPT, 1) < 2**53
    True
    """
    words = _rounds((0, *_fixed_words(position, kind, delta)), _key(seed))
    return int(words[0] << 21 | words[1] >> 11)
