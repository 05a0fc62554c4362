# SPDX-License-Identifier: Apache-2.0
"""Options that the commands share, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dspark_ext as dx
    from dspark.engine.loading import Models

OK, FAILED, USAGE = 0, 1, 2
CONFIDENCES = ("head", "online", "constant", "draft-probability")
MODES = ("off", "fixed", "threshold", "causal", "two_phase")


def add_models(parser: argparse.ArgumentParser, dtype: str | None = "bfloat16") -> None:
    """``--model``, ``--drafter``, ``--dtype``, ``--threads``, ``--device``."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", type=Path, help="folder of the target (default: SmolLM2-135M)")
    group.add_argument("--drafter", type=Path, help="folder of the drafter (default: shipped)")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default=dtype)
    group.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    group.add_argument("--device", choices=("cpu",), default="cpu")


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Sampling parameters and the scheduler."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--rule", choices=("token", "match"), default="token")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    group = parser.add_argument_group("schedule")
    group.add_argument(
        "--mode",
        choices=MODES,
        default="off",
        help="how many drafts to verify; off (default): all of them",
    )
    group.add_argument("--fixed-len", type=int, help="drafts a round, of --mode fixed")
    group.add_argument("--threshold", type=float, help="least confidence, of --mode threshold")
    group.add_argument("--cost", type=Path, help="cost table of `dspark profile`, or measured now")
    group.add_argument("--requests", type=int, default=8, help="concurrent requests")
    group.add_argument("--calibration", type=Path, help="temperatures of `dspark calibrate fit`")
    group.add_argument(
        "--confidence",
        choices=CONFIDENCES,
        default="head",
        help="where confidences come from; draft-probability needs greedy drafts",
    )
    group.add_argument(
        "--gate", action="store_true", help="requests whose drafts do not pay sit out the draft"
    )
    group.add_argument(
        "--ageing", type=int, metavar="N", help="one draft for whoever verified none for N rounds"
    )
    group.add_argument(
        "--monitor", action="store_true", help="report the calibration of this run (--json)"
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """``--seed``, ``--json``, ``--quiet``."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def sampling_of(args: argparse.Namespace, models: Models, seed: int | None = None) -> Any:
    """Return the :class:`dspark_ext.SamplingParams` of the options."""
    import dspark_ext as dx

    return dx.SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        rule=args.rule,
        max_new_tokens=args.max_new_tokens,
        stop_ids=models.stop_ids,
        seed=args.seed if seed is None else seed,
    )


def check_requests(args: argparse.Namespace) -> None:
    """Refuse a wrong ``--requests`` before a model is loaded."""
    from dspark_ext._arrays import Checker

    check = Checker("options")
    check.whole("--requests", args.requests, 1)
    check.done()


def scheduler_of(args: argparse.Namespace, models: Models) -> dx.Scheduler:
    """Return the scheduler of the options; measures a cost table where one is needed."""
    import dspark_ext as dx
    from dspark.engine.costs import cached, load_for
    from dspark.scheduling.monitor import Monitor
    from dspark.scheduling.providers import PROVIDERS
    from dspark.scheduling.rounds import calibration_for, notes_of

    cost, found, gamma = None, None, models.drafter.gamma
    if args.calibration is not None:
        notes = notes_of(args.rule, args.temperature)
        try:
            found = calibration_for(args.calibration, gamma, notes, "this run's drafts")
        except dx.ArgumentError as error:
            raise dx.ArgumentError(f"--calibration: {error}") from error
    if args.mode in ("causal", "two_phase") or args.gate:
        if args.cost is not None:
            cost = load_for(args.cost, models)
        else:
            cost, _ = cached(models, args.requests, cost_folder(), progress=not args.quiet)
    return dx.Scheduler(
        args.mode,
        cost=cost,
        temperature=models.temperature if found is None else found.temperature,
        fixed_len=args.fixed_len,
        threshold=args.threshold,
        confidence=None if args.confidence == "head" else PROVIDERS[args.confidence](),
        gate=dx.Gate() if args.gate else None,
        ageing=None if args.ageing is None else dx.Ageing(rounds=args.ageing),
        monitor=Monitor(gamma, found) if args.monitor else None,
    )


def cost_folder() -> Path:
    """Folder of measured cost tables."""
    from dspark.targets.smollm2 import cache_dir

    return cache_dir() / "cost"
