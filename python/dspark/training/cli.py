# SPDX-License-Identifier: Apache-2.0
"""``dspark train``: make data, fit a drafter, export it.

dspark train generate --data DATA --prompts 6000 --seed 0
dspark train generate --data HELDOUT --prompts 64 --split heldout
dspark train fit --data DATA --heldout HELDOUT --run RUN --seconds 3600
dspark train export --run RUN --out CHECKPOINT
dspark train prompts --split heldout --prompts 48 --out PROMPTS   (files for ``dspark eval``)
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

OK, FAILED, USAGE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of ``dspark train`` to a parser.

    Examples
    --------
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> parser.parse_args(["export", "--run", "r", "--out", "o"]).out
    PosixPath('o')
    """
    commands = parser.add_subparsers(dest="train_command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_fit(commands)
    export = commands.add_parser("export", help="copy a run's checkpoint with its recipe")
    export.add_argument("--run", type=Path, required=True, help="folder of the run")
    export.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    _add_common(export)
    prompts = commands.add_parser("prompts", help="write prompts, one file per domain")
    prompts.add_argument("--out", type=Path, required=True, help="folder of the JSONL files")
    prompts.add_argument("--prompts", type=int, default=48, help="prompts in all")
    prompts.add_argument("--split", choices=("train", "heldout"), default="heldout")
    prompts.add_argument("--seed", type=int, default=0)
    _add_common(prompts)


def main(args: argparse.Namespace) -> int:
    """Run a parsed sub-command; returns the exit code.

    0 = done, 1 = could not be done (missing weights, no data), 2 = illegal arguments.

    Examples
    --------
    >>> main(argparse.Namespace(train_command="export", run=Path("no run"), out=Path("o"),
    ...                         json=False, quiet=True))
    1
    """
    from dspark.targets.smollm2 import TargetNotInstalledError

    commands = {"generate": _generate, "fit": _fit, "export": _export, "prompts": _prompts}
    command = commands[args.train_command]
    try:
        summary = command(args)
    except (FileNotFoundError, TargetNotInstalledError) as error:
        print(f"dspark train: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, NotImplementedError) as error:
        print(f"dspark train: {error}", file=sys.stderr)
        return USAGE
    if args.json:
        print(json.dumps(summary))
    else:
        print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    return OK


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_generate(commands: Any) -> None:
    p = commands.add_parser("generate", help="answer prompts with the target, keep its states")
    p.add_argument("--data", type=Path, required=True, help="folder of the shards")
    p.add_argument("--prompts", type=int, default=6000, help="prompts in all (default %(default)s)")
    p.add_argument("--split", choices=("train", "heldout"), default="train")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--worker", type=int, default=0, help="number of this process")
    p.add_argument("--workers", type=int, default=1, help="processes that share the prompts")
    p.add_argument("--slots", type=int, default=64, help="sequences decoded together")
    p.add_argument("--max-new-tokens", type=int, default=160)
    p.add_argument("--seconds", type=float, help="stop starting answers after this time")
    p.add_argument("--threads", type=int, default=1)
    _add_common(p)


def _add_fit(commands: Any) -> None:
    p = commands.add_parser("fit", help="train a drafter; continues the run if it exists")
    p.add_argument("--data", type=Path, required=True, help="folder of the training shards")
    p.add_argument("--heldout", type=Path, help="folder of the validation shards")
    p.add_argument("--run", type=Path, required=True, help="folder of the run")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int)
    budget.add_argument("--seconds", type=float, help="training time")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--block-size", type=int, default=7, help="tokens proposed per round")
    p.add_argument("--rank", type=int, default=64, help="rank of the Markov head, 0 = none")
    p.add_argument("--head", choices=("vanilla", "gated", "rnn"), default="vanilla")
    p.add_argument("--draft-vocab", type=int, default=16384, help="0 = the whole vocabulary")
    p.add_argument("--sequences", type=int, default=4, help="sequences of a step")
    p.add_argument("--anchors", type=int, default=64, help="blocks of a sequence")
    p.add_argument("--learning-rate", type=float, default=1.2e-3)
    p.add_argument("--checkpoint-seconds", type=float, default=300.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    _add_common(p)


def _generate(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from dspark.training.generate import GenerateOptions, generate

    torch.set_num_threads(args.threads)
    return generate(
        GenerateOptions(
            folder=args.data,
            prompts=args.prompts,
            seed=args.seed,
            worker=args.worker,
            workers=args.workers,
            slots=args.slots,
            max_new_tokens=args.max_new_tokens,
            seconds=args.seconds,
            split=args.split,
            progress=not args.quiet,
        )
    )


def _fit(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from dspark.targets import smollm2
    from dspark.targets.llama import Llama
    from dspark.training import train

    torch.set_num_threads(args.threads)
    options = train.TrainOptions(
        run=args.run,
        steps=args.steps,
        seconds=args.seconds,
        sequences=args.sequences,
        anchors=args.anchors,
        learning_rate=args.learning_rate,
        checkpoint_seconds=args.checkpoint_seconds,
        sample_slots=args.head != "rnn",
        seed=args.seed,
        progress=not args.quiet,
    )
    samples = train.load_samples(args.data)
    if not samples:
        raise FileNotFoundError(f"no shards in {args.data}; run `dspark train generate` first")
    heldout = train.load_samples(args.heldout) if args.heldout else []
    target = Llama.load(smollm2.ensure(not args.quiet))
    shape = train.DrafterShape(
        layers=args.layers,
        block_size=args.block_size,
        rank=args.rank,
        head=args.head,
        draft_vocab=args.draft_vocab or None,
        num_anchors=args.anchors,
    )
    drafter = train.start(shape, target, samples, options)
    del target  # half a gigabyte that training does not need
    return train.Trainer(drafter, samples, heldout, options).train()


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from dspark.drafters.modeling import Drafter

    source = args.run / "checkpoint"
    if not source.is_dir():
        raise FileNotFoundError(f"{args.run} holds no checkpoint; run `dspark train fit` first")
    drafter = Drafter.load(source)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "recipe.json"):
        shutil.copyfile(source / name, args.out / name)
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "bytes": (args.out / "model.safetensors").stat().st_size,
        "folder": str(args.out),
    }


def _prompts(args: argparse.Namespace) -> dict[str, Any]:
    from dspark.training.prompts import DOMAINS, build

    args.out.mkdir(parents=True, exist_ok=True)
    counts = {}
    chosen = build(args.prompts, args.seed, args.split)
    for domain in DOMAINS:
        lines = [json.dumps({"turns": [p.text]}) + "\n" for p in chosen if p.domain == domain]
        (args.out / f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[domain] = len(lines)
    return counts
