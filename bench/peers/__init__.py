# SPDX-License-Identifier: Apache-2.0
"""Other implementations behind one call each, found when a bench runs; none is a requirement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Call", "Peers", "Problem", "find_each"]

Call = Callable[[], object]
Problem = dict[str, Any]
#: By name: what makes the calls of a problem, and says its version.
Peers = dict[str, Callable[[Problem], tuple[str, dict[str, Call]]]]


def find_each(peers: Peers, p: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls of the peers that are there, tried once, and what became of every peer.

    The second result maps a peer's name to its version, or to ``not installed: ...`` or
    ``not usable: ...`` with the reason.
    """
    calls: dict[str, Call] = {}
    states: dict[str, str] = {}
    for name, make in peers.items():
        try:
            version, made = make(p)
            for call in made.values():
                call()
        except ImportError as error:
            states[name] = f"not installed: {error}"
        except Exception as error:  # another version's signature, another mask, no kernel, ...
            text = " ".join(str(error).split())
            states[name] = f"not usable: {type(error).__name__}: {text}"[:300]
        else:
            calls |= made
            states[name] = version
    return calls, states
