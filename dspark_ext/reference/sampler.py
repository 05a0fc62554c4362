# SPDX-License-Identifier: Apache-2.0
"""The one categorical sampler, in float64: draft, residual, bonus and target rows use it.

The ids are cut into segments of 128 (``id >> 7``). One segment is chosen exactly, by the largest
of log-mass plus Gumbel noise; the token inside it by the inverse of its integer CDF. Padding,
grids and vocabulary shards (multiples of 128) therefore do not change a draw, and no uniform has to
resolve the whole vocabulary.

Every draw also reports its *margin*: how far the deciding numbers were from another outcome
(nats between the two best segments, share of the segment's mass to the nearest cell boundary).
A backend that computes in float32 may differ from this reference only where the margin is tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.philox import Kind, segment_gumbel, uniform53

__all__ = ["SEGMENT", "Draw", "Law", "Noise", "argmax", "candidate", "make_law", "sample"]

SEGMENT = 128
_WEIGHT_BITS = 55
# the low bits of a key leave room for a segment number, so that backends can compare one word
_KEY_MASK = np.uint64(0xFFFFFFFFFFFFFFFF ^ ((1 << 19) - 1))
_SIGN = np.uint64(1 << 63)

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """A drawn id and how close the draw was to another outcome."""

    token: int
    margin: float


@dataclass(frozen=True)
class Noise:
    """Where the random numbers of one draw come from.

    ``forced`` (tests only) replaces the 53-bit integer and makes all segment noise equal.
    ``first_segment`` is the number of the first segment, for a shard of the vocabulary.
    """

    seed: int
    position: int
    segment_kind: Kind
    inner_kind: Kind
    delta: int
    forced: int | None = None
    first_segment: int = 0

    def gumbel(self, num_segments: int) -> F64:
        """Gumbel noise per segment, float64 [num_segments]."""
        if self.forced is not None:
            return np.zeros(num_segments)
        behind = self.first_segment + num_segments
        noise = segment_gumbel(self.seed, self.position, self.segment_kind, self.delta, behind)
        return noise[self.first_segment :]

    def inner(self) -> int:
        """53-bit integer of the draw inside the segment."""
        if self.forced is not None:
            return int(self.forced)
        return uniform53(self.seed, self.position, self.inner_kind, self.delta)


@dataclass(frozen=True)
class Law:
    """softmax(z / T) over ``support``.

    Attributes
    ----------
    z : ndarray, float64 [V]
        Logits, free of NaN and +inf.
    temperature : float
        T > 0.
    support : ndarray, bool [V]
        Ids with positive mass; no id whose logit is -inf.
    log_mass : float
        log sum over the support of exp((z - peak) / T), ``peak`` being the largest logit; -inf when
        the support is empty. Kept apart from the peak, so that logits near the largest finite value
        (a clamped +inf) keep their shares: log 2 would vanish beside 3e38.
    margin : float
        How close a truncation came to another support (see :func:`make_law`).
    """

    z: F64
    temperature: float
    support: NDArray[np.bool_]
    log_mass: float
    margin: float = np.inf

    @property
    def empty(self) -> bool:
        """Whether no id has mass."""
        return not bool(self.support.any())

    @property
    def lse(self) -> float:
        """Log sum over the support of exp(z / T); -inf when the support is empty."""
        return -np.inf if self.empty else float(self.z.max() / self.temperature + self.log_mass)

    def log_prob(self) -> F64:
        """Log-probability of every id, float64 [V]; -inf outside the support."""
        if self.empty:
            return np.full(len(self.z), -np.inf)
        relative = (self.z - self.z.max()) / self.temperature
        return np.where(self.support, relative - self.log_mass, -np.inf)


def make_law(
    z: F64, temperature: float, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> Law:
    """Temperature, min-p, top-k and top-p, in this order (contract, section 3).

    The total order is probability descending, id ascending. min-p keeps p(x) >= min_p max p; top-k
    keeps the first k in the order; top-p keeps, on the renormalised mass of what is left, every id
    whose predecessors hold less than top_p, so the crossing id stays.

    Parameters
    ----------
    z : ndarray, float64 [V]
        Logits without NaN and +inf; -inf means no mass.
    temperature : float
        T > 0.
    min_p, top_k, top_p
        0, <= 0 and 1 switch the step off.

    Examples
    --------
    >>> import numpy as np
    >>> law = make_law(np.log([0.4, 0.3, 0.3]), 1.0, top_k=2)
    >>> np.exp(law.log_prob()).round(4).tolist()
    [0.5714, 0.4286, 0.0]
    """
    support = z > -np.inf
    margin = np.inf
    if not support.any():
        return Law(z, temperature, support, -np.inf)
    with np.errstate(over="ignore", under="ignore"):
        relative = np.where(support, np.exp((z - z.max()) / temperature), 0.0)
    if min_p > 0:
        margin = min(margin, float(np.min(np.abs(relative[support] - min_p))))
        support = support & (relative >= min_p)
        support[np.argmax(z)] = True  # the largest stays, whatever rounding does to min_p = 1
    order = np.lexsort((np.arange(len(z)), -z))  # z descending, id ascending
    order = order[support[order]]
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        mass = relative[order] / relative[order].sum()
        before = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
        margin = min(margin, float(np.min(np.abs(before - top_p))))
        order = order[before < top_p]
    support = np.zeros(len(z), dtype=bool)
    support[order] = True
    return Law(z, temperature, support, float(np.log(relative[support].sum())), margin)


def argmax(z: F64) -> Draw:
    """Largest logit, lowest id on ties; the margin is the distance to the second best logit.

    Examples
    --------
    >>> import numpy as np
    >>> argmax(np.array([1.0, 3.0, 3.0]))
    Draw(token=1, margin=0.0)
    """
    token = int(np.argmax(z))
    others = np.delete(z, token)
    margin = float(z[token] - others.max()) if len(others) and z[token] > -np.inf else np.inf
    return Draw(token, margin)


def _ordered(keys: F64) -> NDArray[np.uint64]:
    """Integers in the order of the float64 keys, with their low 19 bits cleared."""
    bits = keys.view(np.uint64)
    ordered: NDArray[np.uint64] = np.where(bits & _SIGN, ~bits, bits | _SIGN) & _KEY_MASK
    return ordered


def _segments(x: Any, fill: float) -> F64:
    """[V] -> [segments, 128], padded with ``fill``."""
    size = -(-len(x) // SEGMENT) * SEGMENT
    padded = np.full(size, fill, dtype=np.float64)
    padded[: len(x)] = x
    return padded.reshape(-1, SEGMENT)


def sample(law: Law, noise: Noise, factor: F64 | None = None) -> Draw | None:
    """Draw an id with probability proportional to exp(z / T) * factor over the support.

    Parameters
    ----------
    law : Law
    noise : Noise
    factor : ndarray, float64 [V], optional
        Multiplies the weights, in [0, 1]; the residual of a rejection.

    Returns
    -------
    Draw or None
        None when no id has mass.

    Notes
    -----
    Weights are relative to the largest logit of their segment among the support. Inside the
    winning segment they become integers ``floor(w 2^55)``, and the token is the first id whose
    inclusive cumulative sum exceeds ``floor(u53 W / 2^53)``. When all of these integers are 0 (a
    residual below 2^-55 of the segment), the last id with positive weight is taken.

    Examples
    --------
    >>> import numpy as np
    >>> law = make_law(np.array([0.0, -np.inf]), 1.0)
    >>> sample(law, Noise(7, 11, Kind.DRAFT_SEGMENT, Kind.DRAFT_INNER, 1)).token
    0
    """
    weight, keys = _keys(law, noise, factor)
    if not np.any(keys > -np.inf):
        return None
    segment = int(np.argmax(_ordered(keys)))  # first of equals = lowest segment
    others = np.delete(keys, segment)
    margin = float(keys[segment] - others.max()) if len(others) else np.inf
    inside = _inside(weight[segment], noise.inner())
    return Draw(segment * SEGMENT + inside.token, min(margin, inside.margin, law.margin))


def candidate(law: Law, noise: Noise, factor: F64 | None = None) -> tuple[int, int]:
    """What a shard of the vocabulary sends to the other ranks: the packed key of its best segment.

    Returns
    -------
    key, offset
        The larger key wins among all shards, whatever the order they are compared in: the ordered
        float64 without its low 19 bits, filled with ``~segment``. ``offset`` is the id drawn inside
        the shard's winner, counted from the shard's first id. ``(0, -1)`` when no id has mass.

    Examples
    --------
    >>> import numpy as np
    >>> law = make_law(np.array([-np.inf, 0.0]), 1.0)
    >>> candidate(law, Noise(7, 11, Kind.DRAFT_SEGMENT, Kind.DRAFT_INNER, 1))[1]
    1
    """
    weight, keys = _keys(law, noise, factor)
    if not np.any(keys > -np.inf):
        return 0, -1
    segment = int(np.argmax(_ordered(keys)))
    number = ~(noise.first_segment + segment) & ((1 << 19) - 1)
    inside = _inside(weight[segment], noise.inner())
    return int(_ordered(keys)[segment]) | number, segment * SEGMENT + inside.token


def _keys(law: Law, noise: Noise, factor: F64 | None) -> tuple[F64, F64]:
    """Weights [segments, 128] and keys [segments]; -inf where a segment has no mass."""
    z = _segments(np.where(law.support, law.z, -np.inf), -np.inf)
    largest = z.max(axis=1)
    occupied = largest > -np.inf
    with np.errstate(invalid="ignore", under="ignore", divide="ignore"):
        weight = np.exp((z - np.where(occupied, largest, 0.0)[:, None]) / law.temperature)
        if factor is not None:
            weight = weight * _segments(factor, 0.0)
        log_mass = np.where(occupied, largest, 0.0) / law.temperature + np.log(weight.sum(axis=1))
    occupied = occupied & (weight.sum(axis=1) > 0)
    return weight, np.where(occupied, log_mass + noise.gumbel(len(largest)), -np.inf)


def _inside(weight: F64, u53: int) -> Draw:
    """Inverse CDF over the integer weights of one segment."""
    integers = (weight * 2.0**_WEIGHT_BITS).astype(np.uint64)  # 128 of them stay below 2^63
    inclusive = np.cumsum(integers)
    total = int(inclusive[-1])
    if total == 0:
        return Draw(int(np.flatnonzero(weight > 0)[-1]), 0.0)
    target = (u53 * total) >> 53
    token = int(np.searchsorted(inclusive, np.uint64(target), side="right"))
    end, size = int(inclusive[token]), int(integers[token])
    if size == total:
        return Draw(token, np.inf)
    return Draw(token, min(target - (end - size), end - target) / total)
