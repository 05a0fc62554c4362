# SPDX-License-Identifier: Apache-2.0
"""``dspark generate``: stream the answer to a prompt, accepted drafts marked; ``--demo``.

dspark generate "Write a Python function that adds two numbers."
dspark generate --demo
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dspark.engine.options import (
    FAILED,
    OK,
    USAGE,
    add_common,
    add_models,
    add_sampling,
    check_requests,
    sampling_of,
    scheduler_of,
)
from dspark.engine.streaming import MarkedText, wants_color


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dspark generate`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["Hello", "--temperature", "0.7"]).prompt
    ['Hello']
    """
    parser.add_argument("prompt", nargs="*", help="user turns, one answer each")
    parser.add_argument("--demo", action="store_true", help="show what speculation does here")
    parser.add_argument("--raw", action="store_true", help="the prompt as it is, no chat format")
    parser.add_argument("--plain", action="store_true", help="without a drafter")
    parser.add_argument("--no-color", action="store_true", help="brackets instead of colour")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant of --demo")
    add_models(parser)
    add_sampling(parser, max_new_tokens=128)
    add_common(parser)


def main(args: argparse.Namespace) -> int:
    """Generate and print; 0 = done, 1 = failed (a gate, or no weights), 2 = illegal arguments."""
    from dspark.targets.smollm2 import TargetNotInstalledError

    if bool(args.prompt) == args.demo:
        print("dspark generate: give a prompt or --demo", file=sys.stderr)
        return USAGE
    try:
        check_requests(args)
        if args.demo:
            from dspark.engine.demo import run

            return run(args)
        return _generate(args)
    except (FileNotFoundError, TargetNotInstalledError) as error:
        print(f"dspark generate: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, NotImplementedError) as error:
        print(f"dspark generate: {error}", file=sys.stderr)
        return USAGE


def _generate(args: argparse.Namespace) -> int:
    from dspark.engine import Engine
    from dspark.engine.loading import load

    models = load(
        args.dtype, args.model, args.drafter, with_drafter=not args.plain, progress=not args.quiet
    )
    prompts = [models.encode(text, args.raw) for text in args.prompt]
    engine = Engine(
        models.target,
        models.drafter,
        max_requests=1,
        scheduler=None if args.plain else scheduler_of(args, models),
        max_len=max(map(len, prompts)) + args.max_new_tokens,
    )
    answers = [stream(engine, models, ids, sampling_of(args, models), args) for ids in prompts]
    summary = engine.metrics.to_dict() | {"prefill_seconds": engine.prefill_seconds}
    if args.json:
        print(json.dumps({"model": models.name, "answers": answers, **summary}, indent=1))
    else:
        print(
            f"\n{summary['tokens_per_second']:.1f} tokens/s, accepted length "
            f"{summary['acceptance_length']:.2f}",
            file=sys.stderr,
        )
        if engine.metrics.cost_drift.drifted:
            print(engine.metrics.cost_drift.text(), file=sys.stderr)
    return OK


def stream(engine: Any, models: Any, ids: list[int], params: Any, args: Any) -> str:
    """Print one answer as it comes (not with ``--json``) and return its text."""
    shown = not args.json
    text = MarkedText(models.decode, wants_color(sys.stdout, args.no_color))
    tokens: list[int] = []
    for chunk in engine.generate([ids], params):
        tokens += chunk.tokens
        piece = text.push(chunk.tokens, chunk.num_accepted)
        if shown:
            print(piece, end="", flush=True)
    if shown:
        print(text.finish())
    return str(models.decode(tokens))
