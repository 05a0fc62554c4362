# SPDX-License-Identifier: Apache-2.0
"""The law q that a draft token was drawn from, as verification sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.rounding import DType, clean

__all__ = [
    "Disorder",
    "DraftLaw",
    "FullLaw",
    "NoLaw",
    "StoredLaw",
    "SupportLaw",
    "ZeroMass",
    "read_law",
]

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class DraftLaw:
    """A usable law: log q of the drafted id and of every target id, float64 [V]."""

    log_q_draft: float
    log_q: F64


class NoLaw(Exception):
    """The stored law is not a law: a NaN, or an lse that is infinite."""


class Disorder(NoLaw):
    """The list of ids of a law does not ascend, or leaves the vocabulary."""


class ZeroMass(Exception):
    """The drafted id has q = 0."""


@dataclass(frozen=True)
class FullLaw:
    """Stored corrected logits of a round, with the logit and lse of every draft."""

    logit: NDArray[np.generic]  # [R, gamma]
    lse: NDArray[np.generic]  # [R, gamma]
    logits: NDArray[np.generic]  # [R, gamma, >= V_d]
    to_target: NDArray[np.int64]  # [V_d] target id of each column
    dtype: DType

    def row(self, request: int, slot: int, vocab: int) -> tuple[NDArray[np.int64], F64]:
        """Target ids and logits of one slot."""
        del vocab
        logits = self.logits[request, slot, : len(self.to_target)]
        return self.to_target, np.asarray(logits, dtype=np.float64)


@dataclass(frozen=True)
class SupportLaw:
    """Lists of M ids and their logits, with the logit and lse of every draft."""

    logit: NDArray[np.generic]  # [R, gamma]
    lse: NDArray[np.generic]  # [R, gamma]
    ids: NDArray[np.int64]  # [R, gamma, M] ascending, negative behind the last
    logits: NDArray[np.generic]  # [R, gamma, M]
    dtype: DType

    def row(self, request: int, slot: int, vocab: int) -> tuple[NDArray[np.int64], F64]:
        """Target ids and logits of one slot; raises Disorder."""
        ids = self.ids[request, slot]
        count = int(np.argmax(ids < 0)) if np.any(ids < 0) else len(ids)
        used = ids[:count]
        if np.any(ids[count:] >= 0) or np.any(used >= vocab) or np.any(used[1:] <= used[:-1]):
            raise Disorder
        return used, np.asarray(self.logits[request, slot, :count], dtype=np.float64)


StoredLaw = FullLaw | SupportLaw


def read_law(
    stored: StoredLaw | None, temperature: float, request: int, slot: int, draft: int, vocab: int
) -> DraftLaw:
    """Law of draft ``slot`` (0-based) of a request.

    Parameters
    ----------
    stored : FullLaw, SupportLaw or None
    temperature : float
        T of the draft. 0, or nothing stored, means one-hot: q(draft) = 1, and no stored number is
        looked at.
    draft : int
        The drafted target id, in [0, vocab).

    Raises
    ------
    NoLaw
        A NaN in the logit, the lse or anywhere in the row. The whole row is looked at before the
        coin is thrown: to accept first and find the NaN only in the residual would make the
        emission depend on the draft.
    Disorder
        A list of ids that does not ascend or leaves [0, vocab).
    ZeroMass
        The id is no draft column, or its logit is -inf.

    Examples
    --------
    >>> read_law(None, 1.0, 0, 0, 2, 4).log_q.tolist()
    [-inf, -inf, 0.0, -inf]
    """
    log_q = np.full(vocab, -np.inf)
    if stored is None or temperature == 0:
        log_q[draft] = 0.0
        return DraftLaw(0.0, log_q)
    columns, row = stored.row(request, slot, vocab)
    logit = float(stored.logit[request, slot])
    lse = float(stored.lse[request, slot])
    z, found_nan = clean(row, stored.dtype)
    if found_nan or np.isnan(logit) or np.isnan(lse):
        raise NoLaw
    if logit == -np.inf or not np.any(columns == draft):
        raise ZeroMass
    if np.isinf(lse):
        raise NoLaw
    logit = float(clean(logit, "f32")[0])
    log_q[columns] = z / temperature - lse
    return DraftLaw(logit / temperature - lse, log_q)
