# SPDX-License-Identifier: Apache-2.0
"""Exact laws by enumeration: run a round once for every way its decisions can fall.

The functions of this package ask a :class:`.draws.Draws` for coins and ids. Here it answers with
each possible outcome in turn and keeps the probability, so the law of whatever a round returns
is a finite sum, right to rounding. Losslessness is then an equation to check, not a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.philox import Kind
from dspark_ext.reference.sampler import Draw, Law

__all__ = ["Branches", "exact_law"]

Outcome = TypeVar("Outcome", bound=Hashable)


class Branches:
    """Decisions that follow a given path and take the first branch behind it.

    ``path`` holds the branches taken, ``sizes`` how many there were at each fork, ``probability``
    the product of their probabilities. One object may serve several independent requests.
    """

    def __init__(self, path: tuple[int, ...] = ()) -> None:
        self.path = list(path)
        self.sizes: list[int] = []
        self.probability = 1.0

    def choose(self, probabilities: list[float]) -> int:
        """Take the branch that the path prescribes at this fork."""
        depth = len(self.sizes)
        self.sizes.append(len(probabilities))
        if depth == len(self.path):
            self.path.append(0)
        branch = self.path[depth]
        self.probability *= probabilities[branch]
        return branch

    def coin(self, i: int, ratio: float, kind: Kind = Kind.ACCEPT) -> tuple[bool, float]:
        """Accept with probability min(1, ratio)."""
        del i, kind
        if ratio <= 0 or ratio >= 1:
            return ratio >= 1, np.inf
        return self.choose([1.0 - ratio, ratio]) == 1, np.inf

    def categorical(
        self, i: int, kinds: tuple[Kind, Kind], law: Law, factor: NDArray[np.float64] | None = None
    ) -> Draw | None:
        """Take one of the ids that have mass."""
        del i, kinds
        weights = np.exp(law.log_prob())
        if factor is not None:
            weights = weights * factor
        ids = np.flatnonzero(weights > 0)
        if not len(ids):
            return None
        share = weights[ids] / weights[ids].sum()
        return Draw(int(ids[self.choose(share.tolist())]), np.inf)


def exact_law(run: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Law of ``run(draws)`` over all decisions.

    Parameters
    ----------
    run : callable
        Takes the :class:`Branches` to hand to the operators, returns a hashable outcome. It must be
        a function of its decisions alone.

    Returns
    -------
    dict
        Outcome to probability; the values sum to 1.

    Examples
    --------
    >>> exact_law(lambda draws: draws.coin(0, 0.25)[0])
    {False: 0.75, True: 0.25}
    """
    law: dict[Outcome, float] = {}
    pending: list[tuple[int, ...]] = [()]
    while pending:
        path = pending.pop()
        draws = Branches(path)
        outcome = run(draws)
        law[outcome] = law.get(outcome, 0.0) + draws.probability
        for depth in range(len(path), len(draws.sizes)):
            taken = tuple(draws.path[:depth])
            pending.extend((*taken, branch) for branch in range(1, draws.sizes[depth]))
    return law
