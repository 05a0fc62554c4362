# SPDX-License-Identifier: Apache-2.0
"""The rules of verification for one request; the rule block has a module of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dspark_ext.reference.draft_law import DraftLaw, NoLaw, ZeroMass
from dspark_ext.reference.draws import BONUS, RESIDUAL, TARGET
from dspark_ext.reference.philox import Kind
from dspark_ext.reference.sampler import Draw, argmax
from dspark_ext.reference.target_law import TargetRow
from dspark_ext.reference.verification_request import Request
from dspark_ext.status import Status

__all__ = ["RULES", "bonus", "kept_share", "residual", "verify_rows"]

RULES = {"greedy": 0, "token": 1, "block": 2, "match": 3, "synthetic": 4}


def target_choice(request: Request, row: TargetRow, i: int) -> Draw:
    """y_i of the rules greedy and match: the token that plain decoding would emit."""
    if request.processors.temperature == 0:
        if row.law.empty:
            request.status |= int(Status.EMPTY_SUPPORT)
            return Draw(row.fallback, np.inf)
        return argmax(row.z)
    return request.from_target(row, i, TARGET)


def bonus(request: Request, row: TargetRow, i: int) -> Draw:
    """The token behind the last draft, from p: no draft is left to verify at this row."""
    if request.processors.temperature == 0 or request.rule == RULES["match"]:
        return target_choice(request, row, i)
    return request.from_target(row, i, BONUS)


def kept_share(row: TargetRow, law: DraftLaw, log_reach: float = 0.0) -> NDArray[np.float64]:
    """Factor max(0, P p - q) / (P p) of every id: -expm1(min(0, log q - log p - log P))."""
    support = row.law.support
    log_p = np.where(support, row.law.log_prob(), 0.0)
    smaller = np.minimum(0.0, np.where(support, law.log_q - log_p - log_reach, 0.0))
    factor: NDArray[np.float64] = -np.expm1(smaller)
    return factor


def residual(
    request: Request, row: TargetRow, law: DraftLaw, i: int, log_reach: float = 0.0
) -> Draw:
    """Draw from max(0, P p - q) in log space; P is 1 but for the rule block."""
    factor = kept_share(row, law, log_reach)
    draw = request.draws.categorical(i, RESIDUAL, row.law, factor)
    if draw is not None:
        return draw
    request.status |= 0 if row.law.empty else int(Status.ZERO_RESIDUAL)
    return request.from_target(row, i, RESIDUAL)


def _verify_token(
    request: Request, row: TargetRow, i: int, draft: int, told: float | None = None
) -> tuple[bool, Draw]:
    """Rule `token` at row i: (accepted, draw); raises ZeroMass when q(draft) = 0.

    ``told`` is log p of the draft from elsewhere.
    """
    try:
        law = request.draft_law(i, draft)
    except NoLaw:
        request.status |= int(Status.FORCED_REJECT)
        return False, request.from_target(row, i, RESIDUAL)
    log_p = float(row.law.log_prob()[draft]) if told is None else told
    if log_p == -np.inf:
        request.status |= int(Status.FORCED_REJECT)
        return False, residual(request, row, law, i)
    ratio = float(np.exp(min(0.0, log_p - law.log_q_draft)))
    accepted, margin = request.draws.coin(i, ratio)
    margin = min(margin, row.law.margin)
    if accepted:
        return True, Draw(draft, margin)
    draw = residual(request, row, law, i)
    return False, Draw(draw.token, min(margin, draw.margin))


def _verify_synthetic(request: Request, row: TargetRow, i: int, draft: int) -> tuple[bool, Draw]:
    """Rule `synthetic`: floor(wanted) drafts always, the next one with what is left."""
    accepted, margin = request.draws.coin(i, request.wanted - i, Kind.SYNTHETIC)
    if accepted:
        return True, Draw(draft, margin)
    draw = bonus(request, row, i)
    return False, Draw(draw.token, min(margin, draw.margin))


def verify_rows(request: Request) -> None:
    """Emit the tokens of one request, row by row, until a rejection, a stop or the bonus."""
    scheduled = len(request.drafts)
    for i in range(scheduled + 1):
        draft = request.draft_at(i)
        told = request.told(i) if draft >= 0 and request.rule == RULES["token"] else None
        before = request.status
        row = request.row(i)
        if draft < 0:
            draw = bonus(request, row, i)
            request.emit(row, draw.token, draw.margin)
            return
        if request.rule == RULES["token"]:
            try:
                log_p = None if told is None else told[0]
                accepted, draw = _verify_token(request, row, i, draft, log_p)
            except ZeroMass:
                draw = bonus(request, row, i)
                request.emit(row, draw.token, draw.margin)
                return
        elif request.rule == RULES["synthetic"]:
            accepted, draw = _verify_synthetic(request, row, i, draft)
        else:
            draw = target_choice(request, row, i)
            accepted = draw.token == draft and not row.law.empty
        request.flag(i, accepted)
        if told is not None and accepted:  # a row that a backend would not have read
            request.status = before
            ended = request.emit_told(draft, told, draw.margin)
        else:
            ended = request.emit(row, draw.token, draw.margin)
        if ended or not accepted:
            return
