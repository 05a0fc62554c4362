# SPDX-License-Identifier: Apache-2.0
"""``dspark simulate``: what policies are worth on a cost curve, without running a model.

dspark simulate --cost staircase --output results/staircase
dspark simulate --cost cost.json --rounds ROUNDS.npz --calibration sts.json --loads 1 2 4 8
dspark simulate --cost smooth --ece 0.08 --policies none static3 causal two_phase oracle --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.engine.options import FAILED, OK, USAGE, add_common

if TYPE_CHECKING:
    from dspark.scheduling.simulate import Point

LOADS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dspark simulate`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["--cost", "staircase"]).loads[-1]
    512
    """
    group = parser.add_argument_group("what is simulated")
    group.add_argument("--loads", type=int, nargs="+", default=list(LOADS),
                       help="concurrent requests (default: 1 to 512)")  # fmt: skip
    group.add_argument("--policies", nargs="+", metavar="NAME",
                       help="none mtp1 staticN thresholdX causal two_phase two_phase:lagN "
                       "two_phase:unsafe_lagN oracle; behind a search +minN, +weightX, +ageN, "
                       "+gate (default: all without those)")  # fmt: skip
    group.add_argument("--tokens", type=int, default=12_000, help="emitted tokens of a point")
    group.add_argument("--output-tokens", type=int, default=192, help="mean of a request")
    group.add_argument("--prompt-tokens", type=int, default=512, help="mean of a request")
    _add_cost(parser.add_argument_group("cost"))
    _add_trace(parser.add_argument_group("trace"))
    group = parser.add_argument_group("result")
    group.add_argument("--output", type=Path, help="prefix of NAME.csv, and of the plots")
    group.add_argument("--no-plots", action="store_true", help="CSV only")
    group.add_argument("--min-gain", type=float, metavar="X",
                       help="fail unless two_phase reaches X times the best fixed length at every "
                       "load")  # fmt: skip
    add_common(parser)
    parser.add_argument("--device", default="cpu", help="cpu alone: no kernel runs here")


def _add_cost(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cost", default="smooth",
                       help="smooth, staircase, a table of `dspark profile` (*.json) or points "
                       "(*.csv: tokens,ms)")  # fmt: skip
    group.add_argument("--believed", help="curve that the scheduler believes in (default: --cost)")
    group.add_argument("--draft-ms", type=float, help="drafter's time, floor")
    group.add_argument("--draft-ms-per-request", type=float, help="and slope")
    group.add_argument("--ms-per-kv-token", type=float)
    group.add_argument("--mtp-draft-share", type=float, default=0.4,
                       help="drafter's time of mtp1 over that of the block drafter")  # fmt: skip
    group.add_argument("--free-draft", action="store_true",
                       help="the scheduler leaves the drafter's time out of Theta")  # fmt: skip


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rounds", type=Path, help="replay an .npz of `dspark calibrate collect`")
    group.add_argument("--calibration", type=Path, help="with --rounds: temperatures to apply")
    group.add_argument("--gamma", type=int, help="drafts a round of the generator (default 7)")
    for name, text in (
        ("base", "logit of an average first draft"),
        ("decay", "loss of logits by position"),
        ("request-spread", "of the difficulty of requests, in logits"),
        ("round-spread", "of its drift inside a request"),
        ("position-spread", "of single drafts"),
        ("persistence", "of the drift, 0..1 a round"),
    ):
        group.add_argument(f"--{name}", type=float, help=f"generator: {text}")
    group.add_argument("--ece", type=float, help="generator: miscalibration; > 0 is overconfident")
    group.add_argument("--auroc", type=float, help="generator: of the first draft's confidence")
    group.add_argument("--drift", type=float, default=0.0,
                       help="generator: logits lost over the run, unnoticed")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Simulate, write and print.

    Returns 0 = done, 1 = the gate failed or a file cannot be read or written, 2 = illegal
    arguments.
    """
    try:
        points, result = _simulate(args)
        _write(args, points, result)
    except OSError as error:
        print(f"dspark simulate: {error}", file=sys.stderr)
        return FAILED
    except ValueError as error:
        print(f"dspark simulate: {error}", file=sys.stderr)
        return USAGE
    from dspark.scheduling.simulate_report import text

    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(text(points))
        print("".join(f"written: {name}\n" for name in result["files"]), end="")
    return _gate(args.min_gain, result["comparison"])


def _simulate(args: argparse.Namespace) -> tuple[list[Point], dict[str, Any]]:
    from tqdm import tqdm

    from dspark.scheduling.simulate import sweep
    from dspark.scheduling.simulate_options import read
    from dspark.scheduling.simulate_report import compare
    from dspark.scheduling.simulate_traces import quality

    setting = read(args)
    trace, loads, policies, workload = (
        setting.trace, setting.loads, setting.policies, setting.workload)  # fmt: skip
    curve, believed = setting.curve, setting.believed
    total = len(loads) * len(policies)
    with tqdm(total=total, desc="simulate", unit="point", disable=args.quiet, leave=False) as bar:
        points = sweep(policies, trace, curve, loads, workload, believed, bar.update)
    head = quality(trace, seed=args.seed)
    return points, {
        "curve": curve.name,
        "gamma": trace.gamma,
        "head": {
            "max_ece": max(r.ece for r in head),
            "auroc": [round(r.auc, 4) for r in head],
            "survival": [round(r.label_mean, 4) for r in head],
            "predicted": [round(r.prediction_mean, 4) for r in head],
        },
        "workload": asdict(workload),
        "points": [asdict(p) for p in points],
        "comparison": compare(points),
        "files": [],
    }


def _write(args: argparse.Namespace, points: Sequence[Point], result: dict[str, Any]) -> None:
    if args.output is None:
        return
    from dspark.scheduling.simulate_report import plot_frontier, plot_load, write_csv

    prefix: Path = args.output
    prefix.parent.mkdir(parents=True, exist_ok=True)
    table = prefix.with_name(prefix.name + ".csv")
    write_csv(table, points)
    result["files"].append(str(table))
    if not args.no_plots:
        title = f"{result['curve']}, {result['workload']['output_tokens']} tokens a request"
        for name, draw in (("frontier", plot_frontier), ("load", plot_load)):
            path = prefix.with_name(f"{prefix.name}-{name}.png")
            draw(path, points, title)
            result["files"].append(str(path))


def _gate(least: float | None, comparison: Sequence[dict[str, Any]]) -> int:
    if least is None:
        return OK
    judged = [row for row in comparison if "two_phase" in row]
    if not judged:
        print("dspark simulate: --min-gain: no two_phase beside fixed lengths", file=sys.stderr)
        return USAGE
    worst = min(judged, key=lambda row: float(row["two_phase"]))
    if worst["two_phase"] < least:
        print(
            f"dspark simulate: two_phase reaches {worst['two_phase']:.3f} of "
            f"{worst['best_static']} at load {worst['load']}, expected {least}",
            file=sys.stderr,
        )
        return FAILED
    return OK
