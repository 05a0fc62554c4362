# SPDX-License-Identifier: Apache-2.0
"""``dspark profile``: measure the cost table of a target, with its drafter, on this machine.

dspark profile --requests 8 --output cost.json
dspark generate --mode causal --requests 8 --cost cost.json ...
dspark profile --no-drafter --kv --model FOLDER --dtype float32 --output cost.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.engine.options import FAILED, OK, USAGE, add_common, add_models

if TYPE_CHECKING:
    from dspark.engine.loading import Models
    from dspark_ext import CostTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dspark profile`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["--requests", "4"]).requests
    4
    """
    add_models(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--requests", type=int, default=8, help="requests in the batch (default 8)")
    group.add_argument("--context", type=int, default=160, help="KV tokens of each (default 160)")
    group.add_argument("--repeats", type=int, default=9, help="timings of a point (default 9)")
    group.add_argument("--output", type=Path, help="file of the table")
    group.add_argument("--no-drafter", action="store_true", help="the target alone, from B = 1 on")
    group.add_argument("--gamma", type=int, help="with --no-drafter: drafts a request (7)")
    group.add_argument("--kv", action="store_true", help="measure the slope in KV tokens, too")
    group.add_argument("--graph-sizes", type=int, nargs="+", default=[], metavar="B",
                       help="batch sizes that the target pads to: steps of the table")  # fmt: skip
    add_common(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, save and print; returns the exit code.

    0 = done, 1 = a model cannot be loaded or the file not written, 2 = illegal arguments.
    """
    from dspark.engine.loading import load
    from dspark.targets.smollm2 import TargetNotInstalledError

    try:
        _check(args)
        models = load(
            args.dtype,
            args.model,
            args.drafter,
            with_drafter=not args.no_drafter,
            progress=not args.quiet,
        )
        table = _target_alone(args, models) if args.no_drafter else _with_drafter(args, models)
        if args.output is not None:
            table.save(args.output)
    except (OSError, TargetNotInstalledError) as error:
        print(f"dspark profile: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, NotImplementedError) as error:
        print(f"dspark profile: {error}", file=sys.stderr)
        return USAGE
    summary = _summary(table, args.output)
    print(json.dumps(summary, indent=1) if args.json else _text(summary))
    return OK


def _check(args: argparse.Namespace) -> None:
    problems = []
    for name, low, high in (
        ("requests", 1, 512),
        ("context", 16, 1 << 17),
        ("repeats", 1, 10_000),
        ("gamma", 1, 16),
    ):
        value = getattr(args, name)
        if value is None:
            continue
        if not low <= value <= high:
            problems.append(f"--{name}: got {value}, expected {low}..{high}")
    if args.no_drafter and args.drafter is not None:
        problems.append("--drafter: got a folder with --no-drafter, expected one of them")
    if args.gamma is not None and not args.no_drafter:
        problems.append("--gamma: got a number without --no-drafter, expected the drafter's own")
    if problems:
        raise ValueError("\n  ".join([f"{len(problems)} wrong", *problems]))
    if args.output is not None and not args.output.parent.is_dir():
        raise FileNotFoundError(f"--output: {args.output.parent}: no such folder")


def _with_drafter(args: argparse.Namespace, models: Models) -> CostTable:
    """The engine's own table, so that ``--cost`` of the other commands takes it."""
    from dspark.engine.costs import table

    return table(
        models,
        args.requests,
        args.context,
        args.repeats,
        progress=not args.quiet,
        seed=args.seed,
        kv=args.kv,
        graph_sizes=args.graph_sizes,
    )


def _target_alone(args: argparse.Namespace, models: Models) -> CostTable:
    from dspark.scheduling.profile import (
        default_tokens,
        fingerprint,
        measure,
        target_step,
        with_sizes,
    )

    rows = (7 if args.gamma is None else args.gamma) + 1
    most = args.requests * rows
    step, step_at = target_step(
        models.target, most_tokens=most, context=args.context, rows=rows, seed=args.seed
    )
    lengths = sorted({max(1, args.context // 8), args.context // 2, args.context})
    return measure(
        step,
        with_sizes(default_tokens(most), args.graph_sizes),
        plateaus=args.graph_sizes,
        kv_step=(lambda n: step_at(most, n // args.requests)) if args.kv else None,
        kv_tokens=[args.requests * n for n in lengths] if args.kv else (),
        kv_of=(lambda b: -(-b // rows) * args.context) if args.kv else None,
        fingerprint=fingerprint(
            models.name,
            models.dtype,
            graph_sizes=args.graph_sizes,
            context=args.context,
            drafter=None,
        ),
        repeats=args.repeats,
        seed=args.seed,
        progress=not args.quiet,
    )


def _summary(table: CostTable, output: Path | None) -> dict[str, Any]:
    return {
        "fingerprint": table.fingerprint,
        "tokens": table.tokens.tolist(),
        "ms": [round(float(table.ms(int(b))), 4) for b in table.tokens],
        "draft_ms": round(table.draft_ms, 4),
        "ms_per_kv_token": table.ms_per_kv_token,
        "repaired": table.repaired,
        "output": None if output is None else str(output),
    }


def _text(summary: dict[str, Any]) -> str:
    lines = [f"{name}: {value}" for name, value in summary["fingerprint"].items()]
    lines += [f"{'tokens':>8} {'ms':>10} {'ms/token':>10}"]
    lines += [
        f"{b:>8} {t:>10.3f} {t / b:>10.3f}"
        for b, t in zip(summary["tokens"], summary["ms"], strict=True)
    ]
    lines += [f"draft: {summary['draft_ms']} ms; KV: {summary['ms_per_kv_token']:.3g} ms a token"]
    if summary["repaired"]:
        lines += [f"{summary['repaired']} points were faster than smaller ones and were raised"]
    if summary["output"] is not None:
        lines += [f"saved: {summary['output']}"]
    return "\n".join(lines)
