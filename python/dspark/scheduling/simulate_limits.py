# SPDX-License-Identifier: Apache-2.0
"""What numbers of a simulation may be: the same for its classes and for the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dspark_ext._arrays import Checker

__all__ = ["check_fields", "option"]

_Rule = tuple[Callable[[float], bool], str]
_FINITE: _Rule = (lambda _: True, "that is finite")
_NOT_NEGATIVE: _Rule = (lambda x: x >= 0, ">= 0, finite")
_SHARE: _Rule = (lambda x: 0 <= x <= 1, "in 0..1")

_WHOLE: dict[str, tuple[int, int | None]] = {
    "gamma": (1, 16),
    "output_tokens": (1, None),
    "prompt_tokens": (1, None),
    "tokens": (1, None),
    "seed": (0, None),
}
_NUMBERS: dict[str, _Rule] = {
    **dict.fromkeys(("base", "decay", "power", "shift", "drift"), _FINITE),
    **dict.fromkeys(("request_spread", "round_spread", "position_spread"), _NOT_NEGATIVE),
    **dict.fromkeys(("persistence", "sight", "prior", "auroc"), _SHARE),
    **dict.fromkeys(("draft_ms", "draft_ms_per_request", "ms_per_kv_token"), _NOT_NEGATIVE),
    **dict.fromkeys(("mtp_draft_share", "min_gain"), _NOT_NEGATIVE),
    "ece": (lambda x: -0.4 <= x <= 0.4, "in -0.4..0.4"),
}


def option(name: str) -> str:
    """Return a field's name as an option of the command.

    Examples
    --------
    >>> option("draft_ms")
    '--draft-ms'
    """
    return "--" + name.replace("_", "-")


def check_fields(
    check: Checker, values: Mapping[str, Any], named: Callable[[str], str] = str
) -> None:
    """Record what is wrong with numbers of a simulation; other fields are passed over.

    Parameters
    ----------
    check : Checker
    values : mapping
        Field to value.
    named : callable
        Field to the name that a message calls it.

    Examples
    --------
    >>> check = Checker("demo")
    >>> check_fields(check, {"seed": 0, "name": "x", "draft_ms": -0.5}, option)
    >>> check.problems
    ['--draft-ms: got -0.5, expected a number >= 0, finite']
    """
    for name, x in values.items():
        if name in _WHOLE:
            check.whole(named(name), x, *_WHOLE[name])
        elif name in _NUMBERS:
            check.number(named(name), x, *_NUMBERS[name])
