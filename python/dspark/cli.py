# SPDX-License-Identifier: Apache-2.0
"""The ``dspark`` command: one sub-command per job, each in its own module."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from dspark_ext import __version__

#: sub-command -> module with ``add_arguments(parser)`` and ``main(args) -> int``, and its help.
COMMANDS = {
    "generate": ("dspark.engine.generate_cli", "stream answers, accepted drafts marked; --demo"),
    "bench": ("dspark.engine.bench_cli", "plain decoding against speculation, on this machine"),
    "eval": ("dspark.evaluation.cli", "accepted length on prompt files; the lossless check"),
    "profile": ("dspark.scheduling.cli", "measure the cost table of a target"),
    "calibrate": ("dspark.scheduling.calibrate_cli", "fit, apply and check confidences"),
    "train": ("dspark.training.cli", "make data, train a drafter, export it"),
    "simulate": ("dspark.scheduling.simulate_cli", "what schedulers are worth, without a model"),
}


INTERRUPTED = 130  # as shells report SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 failed, 2 illegal arguments, 130 interrupted.

    Examples
    --------
    >>> main(["simulate", "--loads", "1", "--policies", "none", "--tokens", "100", "--quiet"])
    policy                          load  throughput    user_p50     user_p1      budget  acceptance
    none                               1      248.9...
    0
    """
    # Spinning threads of OpenMP make two processes on two cores ten times slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="dspark", description="Speculative decoding after DSpark."
    )
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the module of the command that is asked for is imported: the help stays quick.
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if args and args[0] == name:
            importlib.import_module(module).add_arguments(sub)
    parsed = parser.parse_args(args)
    threads = getattr(parsed, "threads", None)
    if threads is not None:
        if threads < 1:
            parser.error(f"--threads: got {threads}, expected an integer >= 1")
        import torch

        torch.set_num_threads(threads)
    try:
        code: int = importlib.import_module(COMMANDS[parsed.command][0]).main(parsed)
    except KeyboardInterrupt:
        print(f"dspark {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
