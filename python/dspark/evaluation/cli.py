# SPDX-License-Identifier: Apache-2.0
"""``dspark eval``: accepted length on prompt files, and the lossless check.

dspark eval prompts.jsonl more.jsonl --temperature 1 --limit 50
dspark eval --lossless            # 20 held-out prompts of the project's own, float32
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dspark.engine.options import (
    FAILED,
    OK,
    USAGE,
    add_common,
    add_models,
    add_sampling,
    check_requests,
    scheduler_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dspark eval`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["--lossless"]).prompts
    20
    """
    parser.add_argument("files", nargs="*", type=Path, help='JSONL, one {"turns": [...]} a line')
    parser.add_argument("--limit", type=int, help="prompts of each file (a seeded choice)")
    parser.add_argument("--lossless", action="store_true", help="compare with plain decoding")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of --lossless")
    parser.add_argument("--allow", type=float, default=0.01,
                        help="share of tokens that may be near ties (default 0.01)")  # fmt: skip
    add_models(parser, dtype=None)
    add_sampling(parser, max_new_tokens=64)
    add_common(parser)


def main(args: argparse.Namespace) -> int:
    """Evaluate and print; 0 = done, 1 = failed (a gate, or no weights), 2 = illegal arguments."""
    from dspark.targets.smollm2 import TargetNotInstalledError

    if not args.files and not args.lossless:
        print("dspark eval: give prompt files or --lossless", file=sys.stderr)
        return USAGE
    try:
        check_requests(args)
        result = _evaluate(args)
    except (FileNotFoundError, TargetNotInstalledError) as error:
        print(f"dspark eval: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, NotImplementedError) as error:
        print(f"dspark eval: {error}", file=sys.stderr)
        return USAGE
    if args.json:
        print(json.dumps(result, indent=1))
    return OK if result.get("lossless", {}).get("passed", True) else FAILED


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from dspark.engine.loading import load
    from dspark.evaluation.lossless import check_lossless
    from dspark.evaluation.prompts import choose, read_prompts

    sets = {str(p): choose(read_prompts(p), args.limit, args.seed) for p in args.files}
    default = "float32" if args.lossless else "bfloat16"
    models = load(args.dtype or default, args.model, args.drafter, progress=not args.quiet)
    result: dict[str, Any] = {"model": models.name, "dtype": models.dtype}
    say = _printer(args)
    if args.lossless:
        texts = [t for prompts in sets.values() for t in prompts] or _own(args)
        report = check_lossless(
            models.target,
            models.drafter,
            [models.encode(t) for t in texts[: args.prompts]],
            max_new_tokens=args.max_new_tokens,
            stop_ids=models.stop_ids,
            scheduler=scheduler_of(args, models),
        )
        passed = report.passed(args.allow)
        result["lossless"] = report.to_dict() | {"passed": passed}
        say(str(report))
        say(f"lossless: {'passed' if passed else 'FAILED'}")
        return result
    for name, prompts in sets.items():
        metrics = _measure(args, models, prompts)
        result.setdefault("sets", {})[name] = metrics.to_dict() | {"prompts": len(prompts)}
        positions = " ".join(f"{x:.3f}" for x in metrics.acceptance_by_position())
        say(
            f"{name}: {len(prompts)} prompts, accepted length {metrics.acceptance_length:.3f}, "
            f"{metrics.mean_scheduled:.2f} drafts a round, verify rate {metrics.verify_rate:.3f}\n"
            f"  acceptance given the prefix: {positions}"
        )
    return result


def _own(args: argparse.Namespace) -> list[str]:
    from dspark.training.prompts import build

    return [p.text for p in build(args.prompts, seed=args.seed, split="heldout")]


def _measure(args: argparse.Namespace, models: Any, texts: list[str]) -> Any:
    from tqdm import tqdm

    import dspark_ext as dx
    from dspark.engine import Engine
    from dspark.engine.options import sampling_of

    prompts = [models.encode(t) for t in texts]
    # A seed per prompt: the result does not depend on how prompts are batched.
    params = [sampling_of(args, models, seed=args.seed + i) for i in range(len(prompts))]
    longest = max(map(len, prompts)) + args.max_new_tokens
    engine = Engine(
        models.target,
        models.drafter,
        max_requests=args.requests,
        scheduler=scheduler_of(args, models),
        max_len=longest,
    )
    assert isinstance(engine.scheduler, dx.Scheduler)
    with tqdm(total=len(prompts), unit="prompt", disable=args.quiet, leave=False) as bar:
        for chunk in engine.generate(prompts, params):
            bar.update(chunk.finish is not None)
    return engine.metrics


def _printer(args: argparse.Namespace) -> Any:
    return (lambda _: None) if args.json else print
