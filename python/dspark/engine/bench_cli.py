# SPDX-License-Identifier: Apache-2.0
"""``dspark bench``: plain decoding against speculation on prompts of the project's own.

dspark bench --requests 8 --modes off causal two_phase --repeats 5
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dspark.engine.options import (
    FAILED,
    MODES,
    OK,
    USAGE,
    add_common,
    add_models,
    add_sampling,
    check_requests,
    sampling_of,
    scheduler_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dspark bench`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["--modes", "off"]).modes
    ['off']
    """
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "causal", "two_phase"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each mode")
    parser.add_argument("--min-ratio", type=float, help="fail unless the best mode gains so much")
    add_models(parser)
    add_sampling(parser, max_new_tokens=64)
    add_common(parser)


def main(args: argparse.Namespace) -> int:
    """Measure and print; 0 = done, 1 = failed (a gate, or no weights), 2 = illegal arguments."""
    from dspark.targets.smollm2 import TargetNotInstalledError

    try:
        check_requests(args)
        result = _bench(args)
    except (FileNotFoundError, TargetNotInstalledError) as error:
        print(f"dspark bench: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, NotImplementedError) as error:
        print(f"dspark bench: {error}", file=sys.stderr)
        return USAGE
    if args.json:
        print(json.dumps(result, indent=1))
    best = max(r["ratio"] for r in result["rows"][1:])
    if args.min_ratio is not None and best < args.min_ratio:
        print(f"dspark bench: best ratio {best:.3f} < {args.min_ratio}", file=sys.stderr)
        return FAILED
    return OK


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    from tqdm import tqdm

    from dspark.engine.compare import Variant, compare, rows, text_table
    from dspark.engine.loading import load
    from dspark.training.prompts import build

    models = load(args.dtype, args.model, args.drafter, progress=not args.quiet)
    texts = [p.text for p in build(args.prompts, seed=args.seed, split="heldout")]
    variants = [Variant("plain", None)]
    for mode in args.modes:
        args.mode = mode
        variants.append(Variant(f"DSpark, {mode}", scheduler_of(args, models)))
    total = args.repeats * len(variants)
    with tqdm(total=total, unit="run", disable=args.quiet, leave=False) as bar:
        compare(
            models,
            variants,
            [models.encode(t) for t in texts],
            sampling_of(args, models),
            args.requests,
            args.repeats,
            tick=bar.update,
        )
    records = rows(variants)
    if not args.json:
        print("\n".join(text_table(records)))
        for variant in variants:
            if variant.metrics.cost_drift.count:
                print(f"{variant.name}: {variant.metrics.cost_drift.text()}")
    return {
        "model": models.name,
        "dtype": models.dtype,
        "requests": args.requests,
        "prompts": len(texts),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "rows": records,
    }
