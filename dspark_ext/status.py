# SPDX-License-Identifier: Apache-2.0
"""Per-request status bits: what the data showed while an operator ran (contract, section 4)."""

from __future__ import annotations

import enum

__all__ = ["Status"]

_TEXT = {
    "NAN_TARGET": "a target logit that was needed is NaN (counts as -inf)",
    "NAN_DRAFT": "a draft logit, logit value or lse that was needed is NaN",
    "NAN_CONFIDENCE": "a confidence input is NaN (counts as probability 0)",
    "EMPTY_SUPPORT": "no id has positive mass: lowest allowed id emitted, else 0",
    "BAD_DRAFT_ID": "a draft or anchor id is out of range or has q = 0",
    "BAD_PARAM": "a per-request parameter is out of its range",
    "ZERO_RESIDUAL": "the residual has no mass: the token comes from p itself",
    "FORCED_REJECT": "a draft was refused without a coin (p = 0 or no valid law)",
    "STOPPED": "the round ended at a stop id or at max_new_tokens",
    "KV_OVERFLOW": "a position lies beyond the request's page table",
    "BAD_PAGE": "a page id in use is negative or >= num_pages",
    "SYNTHETIC": "acceptance was made up for a benchmark: not the target's law",
}


class Status(enum.IntFlag):
    """Bits of the ``status`` word that every operator returns per request.

    Zero means nothing happened. The values equal the ``DSPARK_*`` bits of ``dspark/types.h``.

    Examples
    --------
    >>> Status.describe(Status.NAN_TARGET | Status.STOPPED).splitlines()[0]
    'NAN_TARGET: a target logit that was needed is NaN (counts as -inf)'
    >>> Status.describe(0)
    'ok'
    """

    NAN_TARGET = 1 << 0
    NAN_DRAFT = 1 << 1
    NAN_CONFIDENCE = 1 << 2
    EMPTY_SUPPORT = 1 << 3
    BAD_DRAFT_ID = 1 << 4
    BAD_PARAM = 1 << 5
    ZERO_RESIDUAL = 1 << 6
    FORCED_REJECT = 1 << 7
    STOPPED = 1 << 8
    KV_OVERFLOW = 1 << 9
    BAD_PAGE = 1 << 10
    SYNTHETIC = 1 << 11

    @staticmethod
    def describe(bits: int) -> str:
        """Return one line per set bit, or ``"ok"`` for none; unknown bits are named as such."""
        bits = int(bits)
        lines = [f"{flag.name}: {_TEXT[str(flag.name)]}" for flag in Status if bits & flag]
        unknown = bits & ~int(sum(int(flag) for flag in Status))
        if unknown:
            lines.append(f"unknown bits: {unknown:#x}")
        return "\n".join(lines) if lines else "ok"


#: Bits that mean the caller should look; ``strict=True`` raises on these.
TROUBLE = (
    Status.NAN_TARGET
    | Status.NAN_DRAFT
    | Status.NAN_CONFIDENCE
    | Status.EMPTY_SUPPORT
    | Status.BAD_DRAFT_ID
    | Status.BAD_PARAM
    | Status.KV_OVERFLOW
    | Status.BAD_PAGE
)
