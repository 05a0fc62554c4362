# SPDX-License-Identifier: Apache-2.0
"""From a row of target logits to the law p of verification: the processors, in their order.

Token mask, logit bias; then for a greedy request the argmax, else temperature, min-p, top-k and
top-p (contract, section 3). The same steps on every row, the bonus row included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.rounding import DType, clean
from dspark_ext.reference.sampler import Law, make_law

__all__ = ["Processors", "TargetRow", "unpack_mask"]

F64 = NDArray[np.float64]


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
    raw : float64 [V]
        Log-softmax of the unprocessed row.
    fallback : int
        The token when no id has mass: the lowest allowed id, else 0.
    found_nan : bool
        Whether a logit, or a bias that was added to one, is NaN.
    """

    z: F64
    law: Law
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
    ) -> TargetRow:
        """Apply the processors of a request to one row of logits, float64 [V].

        Examples
        --------
        >>> import numpy as np
        >>> row = TargetRow.process(np.log([0.5, 0.25, 0.25]), np.array([False, True, True]),
        ...                         Processors(1.0, 0.0, 0, 1.0, None), "f32")
        >>> np.exp(row.law.log_prob()).tolist(), row.fallback
        ([0.0, 0.5, 0.5], 1)
        """
        z, found_nan = clean(logits, dtype)
        raw = make_law(z, 1.0).log_prob()
        if processors.bias is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                biased = z.astype(np.float32) + processors.bias  # the sum is a float32
            if allowed is not None:
                biased = np.where(allowed, biased, -np.inf)
            z, nan_bias = clean(biased, "f32")
            found_nan = found_nan or nan_bias
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
        return cls(z, law, raw, fallback, found_nan)


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
