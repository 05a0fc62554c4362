# SPDX-License-Identifier: Apache-2.0
"""Where the decisions of a round come from: Philox, forced numbers, or an enumeration.

The families ask for a coin or for an id at a row; they never see a random number. So the exact
law of a round can be computed by replacing this one object (see :mod:`.enumeration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_ext.reference.philox import Kind, uniform53
from dspark_ext.reference.sampler import Draw, Law, Noise, sample

__all__ = ["BONUS", "DRAFT", "RESIDUAL", "TARGET", "Draws", "PhiloxDraws", "draws_of"]

#: Segment and inner kind of the four categorical draws.
DRAFT = (Kind.DRAFT_SEGMENT, Kind.DRAFT_INNER)
RESIDUAL = (Kind.RESIDUAL_SEGMENT, Kind.RESIDUAL_INNER)
BONUS = (Kind.BONUS_SEGMENT, Kind.BONUS_INNER)
TARGET = (Kind.TARGET_SEGMENT, Kind.TARGET_INNER)


class Draws(Protocol):
    """Decisions of one request in one round; row or slot i (from 0) decides position n + i + 1."""

    def coin(self, i: int, ratio: float, kind: Kind = Kind.ACCEPT) -> tuple[bool, float]:
        """Accept with probability min(1, ratio): (accepted, margin)."""

    def categorical(
        self, i: int, kinds: tuple[Kind, Kind], law: Law, factor: NDArray[np.float64] | None = None
    ) -> Draw | None:
        """Draw from law * factor; None when it has no mass."""


@dataclass(frozen=True)
class PhiloxDraws:
    """The random-number contract.

    Attributes
    ----------
    seed : int
        64 bits.
    position : int
        Absolute position n of the anchor.
    forced : ndarray of uint64, optional
        One 53-bit integer per row instead of the accept and inner draws, with equal segment noise.

    Examples
    --------
    >>> PhiloxDraws(1, 7, np.array([0])).coin(0, 0.0)  # u = 0 does not pass a ratio of 0
    (False, 0.0)
    """

    seed: int
    position: int
    forced: NDArray[np.generic] | None = None

    def coin(self, i: int, ratio: float, kind: Kind = Kind.ACCEPT) -> tuple[bool, float]:
        """Accept iff u < ratio, strictly."""
        if self.forced is None:
            u53 = uniform53(self.seed, self.position + i + 1, kind, i + 1)
        else:
            u53 = int(self.forced[i])
        u = u53 * 2.0**-53
        return u < ratio, abs(u - ratio)

    def categorical(
        self, i: int, kinds: tuple[Kind, Kind], law: Law, factor: NDArray[np.float64] | None = None
    ) -> Draw | None:
        """Draw with the segment sampler; the rule `match` is keyed by the position alone."""
        delta = 0 if kinds == TARGET else i + 1
        forced = None if self.forced is None else int(self.forced[i])
        return sample(law, Noise(self.seed, self.position + i + 1, *kinds, delta, forced), factor)


def draws_of(
    given: Sequence[Draws] | None,
    request: int,
    seed: ArrayLike,
    position: ArrayLike,
    debug_uniform: ArrayLike | None,
) -> Draws:
    """Decisions of one request of a batch: ``given``, or Philox under its seed and position."""
    if given is not None:
        return given[request]
    forced = None if debug_uniform is None else np.asarray(debug_uniform, np.uint64)[request]
    return PhiloxDraws(int(np.asarray(seed)[request]), int(np.asarray(position)[request]), forced)
