# SPDX-License-Identifier: Apache-2.0
"""From a row of target logits to the law p of verification: the processors, in their order.

Token mask, logit bias, min-tokens, penalties; then for a greedy request the argmax, else
temperature, min-p, top-k and top-p (contract, section 3). The same steps on every row, the bonus
row included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.rounding import DType, clean
from dspark_ext.reference.sampler import Law, make_law

__all__ = ["Penalties", "Processors", "TargetRow", "unpack_mask"]

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Penalties:
    """Penalties of one row, and what they count; off at 1, 0 and 0."""

    repetition: np.float32
    presence: np.float32
    frequency: np.float32
    counts: NDArray[np.int64]  # [V] how often an id is in the output before this row
    prompt: NDArray[np.bool_]  # [V]

    @property
    def off(self) -> bool:
        """Whether nothing would change."""
        return bool(self.repetition == 1 and self.presence == 0 and self.frequency == 0)

    def apply(self, z: NDArray[np.float32]) -> NDArray[np.float32]:
        """Penalise logits, in float32 like every backend."""
        repeated = np.where(z > 0, z / self.repetition, z * self.repetition)
        once = np.where((self.counts > 0) | self.prompt, repeated, z)
        counted = once - self.frequency * self.counts.astype(np.float32)
        return np.where(self.counts > 0, counted - self.presence, once)


@dataclass(frozen=True)
class Processors:
    """Sampling parameters of one request; temperature 0 is greedy."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    bias: NDArray[np.float32] | None  # [V]


@dataclass(frozen=True)
class TargetRow:
    """A processed row.

    Attributes
    ----------
    z : float64 [V]
        Masked and biased logits; -inf is no mass.
    law : Law
        p: at T = 1 and untruncated for a greedy request, whose law is the argmax itself.
    logits, raw : float64 [V]
        The unprocessed row without NaN and +inf, and its log-softmax.
    fallback : int
        The token when no id has mass: the lowest allowed id, else 0.
    found_nan : bool
        Whether a logit, or a bias that was added to one, is NaN.
    """

    z: F64
    law: Law
    logits: F64
    raw: F64
    fallback: int
    found_nan: bool

    @classmethod
    def process(
        cls,
        logits: F64,
        allowed: NDArray[np.bool_] | None,
        processors: Processors,
        dtype: DType,
        penalties: Penalties | None = None,
    ) -> TargetRow:
        """Apply the processors of a request to one row of logits, float64 [V].

        ``allowed`` is the token mask without the stop ids that min-tokens forbids.

        Examples
        --------
        >>> import numpy as np
        >>> row = TargetRow.process(np.log([0.5, 0.25, 0.25]), np.array([False, True, True]),
        ...                         Processors(1.0, 0.0, 0, 1.0, None), "f32")
        >>> np.exp(row.law.log_prob()).tolist(), row.fallback
        ([0.0, 0.5, 0.5], 1)
        """
        cleaned, found_nan = clean(logits, dtype)
        z = cleaned
        raw = make_law(z, 1.0).log_prob()
        with np.errstate(invalid="ignore", over="ignore"):
            x = z.astype(np.float32)
            if processors.bias is not None:
                x = x + processors.bias  # the sum is a float32
            if allowed is not None:
                x = np.where(allowed, x, np.float32(-np.inf))
            if penalties is not None and not penalties.off:
                x = penalties.apply(x)
        if processors.bias is not None or penalties is not None:
            z, made_nan = clean(x, "f32")
            found_nan = found_nan or made_nan
        if allowed is not None:
            z = np.where(allowed, z, -np.inf)
        if processors.temperature == 0:
            law = make_law(z, 1.0)
        else:
            law = make_law(
                z,
                processors.temperature,
                processors.min_p,
                processors.top_k,
                processors.top_p,
            )
        fallback = int(np.argmax(allowed)) if allowed is not None and allowed.any() else 0
        return cls(z, law, cleaned, raw, fallback, found_nan)


def unpack_mask(words: NDArray[np.generic], vocab: int) -> NDArray[np.bool_]:
    """Bits of a packed mask row: id i is bit ``i & 31`` of word ``i >> 5``.

    Examples
    --------
    >>> import numpy as np
    >>> unpack_mask(np.array([5, 1], dtype=np.int32), 34).nonzero()[0].tolist()
    [0, 2, 32]
    """
    ids = np.arange(vocab)
    words = np.ascontiguousarray(words).view(np.uint32)
    bits: NDArray[np.bool_] = (words[ids >> 5] >> (ids & 31).astype(np.uint32)) & np.uint32(1) != 0
    return bits
