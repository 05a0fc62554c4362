# SPDX-License-Identifier: Apache-2.0
"""Text as it comes, with the tokens that were drafted and accepted marked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TextIO

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"


def wants_color(stream: TextIO, forbidden: bool = False) -> bool:
    """Colour for terminals, unless forbidden by the user or by ``NO_COLOR``."""
    return not forbidden and not os.environ.get("NO_COLOR") and stream.isatty()


class MarkedText:
    """Turns tokens into marked text: accepted drafts in green, or in brackets without colour.

    Bytes of an unfinished character are held back until the character is whole.

    Parameters
    ----------
    decode : callable
        Token ids to text.
    color : bool
        Colour instead of brackets.

    Examples
    --------
    >>> text = MarkedText(lambda ids: "".join(chr(i) for i in ids), color=False)
    >>> text.push([97, 98, 99], 2) + text.push([100], 0) + text.finish()
    '[ab]cd'
    """

    def __init__(self, decode: Any, color: bool) -> None:
        self._decode = decode
        self._marks = (_GREEN, _RESET) if color else ("[", "]")
        self._ids: list[int] = []
        self._shown = ""

    def push(self, tokens: Sequence[int], num_accepted: int) -> str:
        """Return the marked text of these tokens, the first ``num_accepted`` of them accepted."""
        accepted = self._advance(tokens[:num_accepted])
        own = self._advance(tokens[num_accepted:])
        if not accepted:
            return own
        return f"{self._marks[0]}{accepted}{self._marks[1]}{own}"

    def finish(self) -> str:
        """Return what was held back."""
        rest = self._decode(self._ids)[len(self._shown) :]
        self._shown += rest
        return str(rest)

    def _advance(self, tokens: Sequence[int]) -> str:
        self._ids += tokens
        whole = self._decode(self._ids).rstrip("\ufffd")
        new = whole[len(self._shown) :]
        self._shown = whole if len(whole) > len(self._shown) else self._shown
        return str(new)
