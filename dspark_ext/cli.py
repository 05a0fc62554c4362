# SPDX-License-Identifier: Apache-2.0
"""Command line of the operators: ``python -m dspark_ext info | selftest | bench``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

__all__ = ["main"]


def _info(options: argparse.Namespace) -> int:
    from dspark_ext.info import format_info, info

    answer = info()
    print(json.dumps(answer, indent=2) if options.json else format_info(answer))
    return 0


def _selftest(options: argparse.Namespace) -> int:
    from dspark_ext import selftest

    results = []
    for name in options.family or selftest.FAMILIES:
        results.append(selftest.run_family(name, seed=options.seed))
        if not options.json:
            print(results[-1].line(), flush=True)
    probe = selftest.probe_devices()
    ok = all(result.ok for result in results) and all(line.ok for line in probe)
    if options.json:
        everything = {
            "ok": ok,
            "seed": options.seed,
            "families": [result.as_dict() for result in results],
            "devices": [line.as_dict() for line in probe],
        }
        print(json.dumps(everything, indent=2))
    else:
        for line in probe:
            print(line.line())
        print("selftest passed" if ok else "selftest FAILED")
    return 0 if ok else 1


def _bench(options: argparse.Namespace) -> int:
    from dspark_ext import bench

    return bench.main(json_output=options.json, seed=options.seed, families=options.family)


def _parser() -> argparse.ArgumentParser:
    from dspark_ext.selftest import FAMILIES

    parser = argparse.ArgumentParser(
        prog="python -m dspark_ext", description="The operators of DSpark speculative decoding."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("info", help="what this build and this machine can do")
    command.set_defaults(run=_info)
    command.add_argument("--json", action="store_true", help="machine-readable output")
    for name, run, text in (
        ("selftest", _selftest, "compare the cpu backend with the float64 reference"),
        ("bench", _bench, "time the operators on this machine"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="machine-readable output")
        command.add_argument("--seed", type=int, default=0, help="seed of the random problems")
        command.add_argument(
            "--family", action="append", choices=list(FAMILIES), help="only this one (repeatable)"
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code, 1 when a check failed.

    Parameters
    ----------
    arguments : sequence of str, optional
        Words of the command line; those of the process when absent.

    Returns
    -------
    int
        0 on success.

    Examples
    --------
    >>> main(["info"])  # doctest: +ELLIPSIS
    dspark ...
    0
    """
    options = _parser().parse_args(arguments)
    return int(options.run(options))
