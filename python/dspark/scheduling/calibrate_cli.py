# SPDX-License-Identifier: Apache-2.0
"""``dspark calibrate``: collect rounds, then fit, apply and check confidence temperatures.

dspark calibrate collect PROMPTS.jsonl --output ROUNDS.npz
dspark calibrate fit --rounds ROUNDS.npz --output sts.json --plot reliability.png
dspark calibrate apply --rounds ROUNDS.npz --calibration sts.json --output survivals.npz
dspark calibrate check --rounds HELDOUT.npz --calibration sts.json --max-ece 0.02

ROUNDS.npz holds ``logit [N, gamma]`` (raw confidence logits) and ``accepted [N, gamma]`` (flags of
the rejection sampler: 1, 0, -1, -2) of rounds that ran with the scheduler off; ``collect`` also
notes ``rule`` and ``temperature``, and a calibration is refused for rounds of others, and
``request [N]``, by which ``dspark simulate`` replays each request on its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dspark.engine.options import FAILED, OK, USAGE, add_common, add_models
from dspark.scheduling.calibration import (
    Reliability,
    evaluate,
    fit,
    summary,
    survivals,
)
from dspark.scheduling.calibration_plot import plot_reliability
from dspark.scheduling.rounds import calibration_for, notes_of, read_rounds
from dspark_ext._arrays import Checker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of ``dspark calibrate`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["check", "--rounds", "r.npz", "--max-ece", "0.02"]).max_ece
    0.02
    """
    commands = parser.add_subparsers(dest="calibrate_command", required=True, metavar="COMMAND")
    p = commands.add_parser("collect", help="run prompts with the scheduler off, keep the rounds")
    p.add_argument("files", nargs="+", type=Path, help='JSONL, one {"turns": [...]} a line')
    p.add_argument("--output", type=Path, required=True, help=".npz with logit and accepted")
    p.add_argument("--limit", type=int, help="prompts of each file (a seeded choice)")
    p.add_argument("--temperature", type=float, default=0.0, help="as in service; 0 = greedy")
    p.add_argument("--rule", choices=("token", "block", "match"), default="token")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--requests", type=int, default=8, help="concurrent requests")
    add_models(p)
    add_common(p)
    p = commands.add_parser("fit", help="fit one temperature per position")
    p.add_argument("--output", type=Path, required=True, help="file of the temperatures")
    p.add_argument("--drafter", help="name of the drafter, for the fingerprint")
    p.add_argument("--target", help="name of the target, for the fingerprint")
    p.add_argument("--min-rounds", type=int, default=200, help="fewer leave a position at 1")
    p.add_argument("--plot", type=Path, help=".png of reliability diagrams, before and after")
    _add_rounds(p)
    p = commands.add_parser("apply", help="write calibrated survivals")
    p.add_argument("--calibration", type=Path, required=True)
    p.add_argument("--output", type=Path, required=True, help=".npz with survival [N, gamma]")
    _add_rounds(p)
    p = commands.add_parser("check", help="fail when a position is calibrated worse than allowed")
    p.add_argument("--calibration", type=Path, help="without it the raw head is checked")
    p.add_argument("--max-ece", type=float, required=True, help="largest ECE allowed, 0..1")
    p.add_argument("--min-rounds", type=int, default=200, help="fewer are not judged")
    p.add_argument("--plot", type=Path, help=".png of reliability diagrams")
    _add_rounds(p)


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=Path, required=True, help=".npz with logit and accepted")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--device", choices=("cpu",), default="cpu", help="cpu alone: no kernel runs here"
    )
    parser.add_argument("--seed", type=int, default=0, help="of no effect: nothing here is random")


def main(args: argparse.Namespace) -> int:
    """Run a parsed sub-command; returns the exit code.

    0 = done and passed, 1 = the check failed or something cannot be read, 2 = illegal arguments.
    """
    from dspark.targets.smollm2 import TargetNotInstalledError

    commands = {"collect": _collect, "fit": _fit, "apply": _apply, "check": _check}
    try:
        result, code = commands[args.calibrate_command](args)
    except (OSError, TargetNotInstalledError) as error:
        print(f"dspark calibrate: {error}", file=sys.stderr)
        return FAILED
    except ValueError as error:
        print(f"dspark calibrate: {error}", file=sys.stderr)
        return USAGE
    print(json.dumps(result, indent=1) if args.json else _text(result))
    return code


def _collect(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    import dspark_ext as dx
    from dspark.engine.loading import load
    from dspark.evaluation.prompts import choose, read_prompts
    from dspark.scheduling.collect import collect

    _check_collect(args)
    texts = [t for f in args.files for t in choose(read_prompts(f), args.limit, args.seed)]
    models = load(args.dtype, args.model, args.drafter, progress=not args.quiet)
    params = [
        dx.SamplingParams(
            temperature=args.temperature,
            max_new_tokens=args.max_new_tokens,
            rule=args.rule,
            stop_ids=models.stop_ids,
            seed=args.seed + i,
        )
        for i in range(len(texts))
    ]
    logit, accepted, request = collect(
        models.target,
        models.drafter,
        [models.encode(t) for t in texts],
        params,
        max_requests=args.requests,
        progress=not args.quiet,
    )
    notes: dict[str, Any] = {
        k: np.array(v) for k, v in notes_of(args.rule, args.temperature).items()
    }
    np.savez(args.output, logit=logit, accepted=accepted, request=request, **notes)
    return {"prompts": len(texts), "rounds": len(logit), "output": str(args.output)}, OK


def _check_collect(args: argparse.Namespace) -> None:
    """Refuse before the work what would fail behind it, or collect nothing."""
    check = Checker("collect")
    if args.limit is not None:
        check.whole("--limit", args.limit, 1)
    check.whole("--requests", args.requests, 1)
    check.done()
    if not args.output.parent.is_dir():
        raise FileNotFoundError(f"--output: {args.output.parent}: no such folder")


def _rows(positions: tuple[Reliability, ...]) -> list[dict[str, Any]]:
    return [
        {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(r).items()}
        for r in (*positions, summary(positions))
    ]


def _fit(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    arrays, notes = read_rounds(args.rounds)
    logit, accepted = arrays["logit"], arrays["accepted"]
    names = {"drafter": args.drafter, "target": args.target, **notes}
    found = fit(
        logit,
        accepted,
        min_rounds=args.min_rounds,
        fingerprint={k: v for k, v in names.items() if v is not None},
    )
    found.save(args.output)
    if args.plot is not None:
        plot_reliability(args.plot, logit, accepted, found.temperature)
    return {
        "temperature": list(found.temperature),
        "fitted": list(found.fitted),
        "before": _rows(found.before),
        "after": _rows(found.after),
        "output": str(args.output),
        **({} if args.plot is None else {"plot": str(args.plot)}),
    }, OK


def _apply(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    arrays, notes = read_rounds(args.rounds)
    logit = arrays["logit"]
    found = _temperature(args.calibration, logit, notes)
    survival = survivals(logit, found).astype(np.float32)
    np.savez(args.output, survival=survival)
    return {"rounds": len(survival), "output": str(args.output)}, OK


def _temperature(path: Path | None, logit: Any, notes: dict[str, Any]) -> tuple[float, ...] | None:
    """Temperatures of a calibration that fits the rounds; ``None`` without a file."""
    if path is None:
        return None
    return calibration_for(path, logit.shape[1], notes, "the rounds").temperature


def _check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    check = Checker("check")
    check.number("--max-ece", args.max_ece, lambda x: 0 <= x <= 1, "in 0..1")
    check.whole("--min-rounds", args.min_rounds, 1)
    check.done()
    arrays, notes = read_rounds(args.rounds)
    logit, accepted = arrays["logit"], arrays["accepted"]
    tau = _temperature(args.calibration, logit, notes)
    positions = evaluate(survivals(logit, tau), accepted)
    if args.plot is not None:
        plot_reliability(args.plot, logit, accepted, tau)
    judged = [r for r in positions if r.count >= args.min_rounds]
    worst = max((r.ece for r in judged), default=None)
    passed = worst is not None and worst <= args.max_ece
    return {
        "passed": passed,
        "worst_ece": worst,
        "max_ece": args.max_ece,
        "judged": len(judged),
        **({} if tau is None else {"before": _rows(evaluate(survivals(logit), accepted))}),
        "after" if tau is not None else "before": _rows(positions),
    }, OK if passed else FAILED


def _text(result: dict[str, Any]) -> str:
    lines = []
    for name in ("before", "after"):
        if name in result:
            lines += [f"{name:<8} {'count':>8} {'ECE':>8} {'AUC':>8} {'Brier':>8} {'mean a':>8}"]
            rows = result[name]
            for k, row in enumerate(rows, start=1):
                label = "all" if k == len(rows) else str(k)
                values = (row[x] for x in ("ece", "auc", "brier", "prediction_mean"))
                text = " ".join(f"{'-':>8}" if v is None else f"{v:>8.4f}" for v in values)
                lines += [f"{label:<8} {row['count']:>8} {text}"]
    rest = {k: v for k, v in result.items() if k not in ("before", "after")}
    return "\n".join(lines + [f"{k}: {v}" for k, v in rest.items()])
