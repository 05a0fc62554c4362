# SPDX-License-Identifier: Apache-2.0
"""Help for requests that the schedule passes over, decided by past rounds alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ext._arrays import Checker

__all__ = ["Ageing"]

_MOST_WEIGHT = 128.0  # of the operator


@dataclass(frozen=True)
class Ageing:
    """Floors or weights that grow with the rounds in a row in which a budget was 0.

    A schedule for throughput gives its rows to the requests that promise most, and a request with
    low confidences may verify nothing for as long as it runs. After ``rounds`` such rounds (and
    again after each ``rounds`` more) its floor rises by ``floor`` drafts and its weight by the
    factor ``1 + weight`` more; the first draft that it verifies sets both back.

    Parameters
    ----------
    rounds : int
        Budgets of 0 in a row before it helps, at least 1.
    floor : int
        Drafts added to ``min_draft`` per step; they are sent whatever they cost. 0..16.
    weight : float
        Added to the factor of the request's weight per step; the schedule still decides. 0..128.

    Raises
    ------
    ArgumentError
        Lists every argument that is out of its range.

    Notes
    -----
    Lossless: the count is made of rounds that are over, so it cannot know this round's drafts.
    Rounds in which a request did not draft do not count.

    Examples
    --------
    >>> floors, weights = Ageing(rounds=4).apply([0, 3, 4, 9], np.zeros(4), np.ones(4))
    >>> floors.tolist(), weights.tolist()
    ([0, 0, 1, 2], [1.0, 1.0, 1.0, 1.0])
    >>> Ageing(rounds=4, floor=0, weight=0.5).apply([9], np.zeros(1), np.ones(1))[1].tolist()
    [2.0]
    """

    rounds: int = 16
    floor: int = 1
    weight: float = 0.0

    def __post_init__(self) -> None:
        check = Checker("Ageing")
        check.whole("rounds", self.rounds, 1)
        check.whole("floor", self.floor, 0, 16)
        reach = f"in 0..{_MOST_WEIGHT:g}"
        check.number("weight", self.weight, lambda x: 0 <= x <= _MOST_WEIGHT, reach)
        check.done()

    def apply(
        self, starved: NDArray[np.int32], floor: NDArray[np.int32], weight: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Floors and weights of the next round.

        Parameters
        ----------
        starved : array, shape (R,), int
            Rounds in a row in which the request drafted and nothing was verified.
        floor, weight : array, shape (R,)
            The requests' own.

        Returns
        -------
        tuple
            ``(floor, weight)``, int32 and float32; weights end at 128, the operator's bound.
        """
        steps = np.asarray(starved) // self.rounds
        floors = np.asarray(floor) + self.floor * np.minimum(steps, 16)
        weights = np.asarray(weight, dtype=np.float64) * (1.0 + self.weight * steps)
        return floors.astype(np.int32), np.minimum(weights, _MOST_WEIGHT).astype(np.float32)
