# SPDX-License-Identifier: Apache-2.0
"""Block verification (Sun et al., arXiv 2403.10444): one decision over all drafts of a round.

The accepted prefix x_1..x_i has, given these tokens, the probability

    P_0 = 1,  P_i = min(1, P_{i-1} p(x_i) / q(x_i)).

With S_i = sum max(P_i p_i - q_{i+1}, 0) and h_i = S_i / (S_i + 1 - P_i) for i < l, h_l = P_l, the
number accepted is the largest i with u_i < h_i; then one token of max(P_i p_i - q_{i+1}, 0)
follows, or of p_l (contract, section 3). Since the mean of P_{i+1} over x_{i+1} is P_i - S_i, going
from the last i to the first gives Pr(at least i accepted | x_1..x_i) = P_i, never less than what
deciding draft by draft reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dspark_ext.reference.draft_law import DraftLaw, NoLaw, ZeroMass
from dspark_ext.reference.draws import RESIDUAL
from dspark_ext.reference.sampler import Draw
from dspark_ext.reference.target_law import TargetRow
from dspark_ext.reference.verification_request import Request
from dspark_ext.reference.verification_rules import bonus, kept_share, residual
from dspark_ext.status import Status

__all__ = ["verify_block"]


@dataclass
class _Walk:
    """Rows seen, with log P_i and h_i; ``laws[i]`` is None where the walk ended at a token of p."""

    rows: list[TargetRow] = field(default_factory=list)
    laws: list[DraftLaw | None] = field(default_factory=list)
    log_reach: list[float] = field(default_factory=lambda: [0.0])
    chance: list[float] = field(default_factory=list)
    refused: bool = False


def _chance(row: TargetRow, law: DraftLaw, log_reach: float) -> float:
    share = np.exp(row.law.log_prob()) * kept_share(row, law, log_reach)
    left = float(np.exp(log_reach) * share.sum())
    lost = float(-np.expm1(log_reach))
    return left / (left + lost) if left + lost > 0 else 1.0


def _walk(request: Request) -> _Walk:
    """Visit the rows until no draft is left or none behind can be accepted."""
    walk = _Walk()
    for i in range(len(request.drafts) + 1):
        row = request.row(i)
        walk.rows.append(row)
        walk.laws.append(None)
        walk.chance.append(float(np.exp(walk.log_reach[i])))
        draft = request.draft_at(i)
        if draft < 0:
            return walk
        try:
            law = request.draft_law(i, draft)
        except ZeroMass:
            return walk
        except NoLaw:
            walk.refused = True
        if walk.refused or row.law.empty:
            request.status |= int(Status.FORCED_REJECT)
            walk.refused = True
            return walk
        walk.laws[i] = law
        walk.chance[i] = _chance(row, law, walk.log_reach[i])
        log_p = float(row.law.log_prob()[draft])
        if log_p == -np.inf:
            request.status |= int(Status.FORCED_REJECT)
            return walk
        walk.log_reach.append(min(0.0, walk.log_reach[i] + log_p - law.log_q_draft))
        if np.exp(walk.log_reach[-1]) == 0:
            return walk
    return walk


def _last(request: Request, walk: _Walk, i: int) -> Draw:
    """The token behind i accepted drafts."""
    law = walk.laws[i]
    if law is not None:
        return residual(request, walk.rows[i], law, i, walk.log_reach[i])
    if walk.refused:
        return request.from_target(walk.rows[i], i, RESIDUAL)
    return bonus(request, walk.rows[i], i)


def verify_block(request: Request) -> None:
    """Emit the tokens of one request under the rule ``block``.

    The coin of "at least i accepted" is the accept draw of row i - 1, which decides the position of
    draft i. Coins are thrown from the last row down, as many as it takes.
    """
    walk = _walk(request)
    accepted, margin = len(walk.rows) - 1, np.inf
    while accepted > 0:
        taken, distance = request.draws.coin(accepted - 1, walk.chance[accepted])
        margin = min(margin, distance)
        if taken:
            break
        accepted -= 1
    margin = min([margin, *(row.law.margin for row in walk.rows)])
    for i in range(accepted):
        request.flag(i, True)
        if request.emit(walk.rows[i], int(request.drafts[i]), margin):
            return
    if walk.laws[accepted] is not None or walk.refused or accepted < len(walk.rows) - 1:
        request.flag(accepted, False)
    draw = _last(request, walk, accepted)
    request.emit(walk.rows[accepted], draw.token, min(margin, draw.margin))
