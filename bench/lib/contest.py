# SPDX-License-Identifier: Apache-2.0
"""What benches with goals share: options, a limit of time, contenders that fail, the verdict."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .report import arguments, publish

__all__ = ["capture_each", "finish", "goal", "options", "until"]

Rows = list[dict[str, Any]]
Shape = TypeVar("Shape")


def options(description: str, *, full: bool = False) -> argparse.Namespace:
    """Parse the command line; ``full``: the bench has more shapes for ``--full``."""
    import torch

    parser = arguments(description)
    if full:
        parser.add_argument("--full", action="store_true", help="on a CPU: more shapes")
    parser.add_argument("--save", nargs="?", const="", help="keep the JSON, see above")
    parser.add_argument("--limit", type=float, default=1e9, help="begin no row after these seconds")
    parser.add_argument("--check", action="store_true", help="fail when a goal is missed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    given = parser.parse_args()
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return given


def goal(
    name: str, got: float, *, least: float | None = None, most: float | None = None
) -> dict[str, Any]:
    """One line of the verdict: at least ``least``, or at most ``most``.

    Examples
    --------
    >>> goal("op us", 4.1, most=4.0)
    {'goal': 'op us', 'wanted': '<= 4', 'got': 4.1, 'met': False}
    """
    met = got >= least if least is not None else most is not None and got <= most
    wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
    return {"goal": name, "wanted": wanted, "got": got, "met": bool(met)}


def until(
    limit: float,
    shapes: Iterable[Shape],
    measure: Callable[[Shape], Rows],
    head: Callable[[Shape], dict[str, Any]],
    problems: list[str],
) -> Rows:
    """Rows of all shapes that begin within ``limit`` seconds; the others are named in problems."""
    rows: Rows = []
    end = time.monotonic() + limit
    for shape in shapes:
        if time.monotonic() > end:
            problems.append(f"{head(shape)}: out of time")
        else:
            rows += measure(shape)
    return rows


def capture_each(
    calls: dict[str, Callable[[], object]], where: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """CUDA graphs of the calls; one that fails is named in problems, with its row."""
    import torch

    from .graphs import capture

    replays = {}
    for name, call in calls.items():
        try:
            replays[name] = capture(call)
        except Exception as error:  # the others still have something to say
            problems.append(f"{where} {name}: {type(error).__name__}: {error}"[:400])
            torch.cuda.synchronize()
    return replays


def finish(
    rows: Rows,
    goals: Rows,
    given: argparse.Namespace,
    *,
    name: str,
    note: str,
    problems: list[str],
    states: dict[str, str] | None = None,
) -> None:
    """Publish; with ``--check`` exit with a message where a goal is missed or not measured."""
    more: dict[str, Rows] = {"goals": goals}
    if states is not None:
        more["peers"] = [{"peer": peer, "state": text} for peer, text in states.items()]
    if problems:
        more["failed"] = [{"what": text} for text in problems]
    save = f"{name}_{given.device}" if given.save == "" else given.save
    publish(rows, as_json=given.json, note=note, more=more, save=save)
    missed = [line["goal"] for line in goals if not line["met"]]
    if given.check and (missed or problems or not goals):
        sys.exit(f"missed: {', '.join(missed) or 'nothing measured'} {'; '.join(problems)}")
