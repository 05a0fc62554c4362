# SPDX-License-Identifier: Apache-2.0
"""``dspark generate --demo``: text, exactness, speed, all from the very run that prints them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import dspark_ext as dx
from dspark.engine.compare import Variant, compare, rows, text_table
from dspark.engine.costs import by_requests, cached
from dspark.engine.engine import Engine
from dspark.engine.generate_cli import stream
from dspark.engine.loading import Models, load
from dspark.engine.options import FAILED, OK, cost_folder

PROMPTS = (
    ("math", ("A baker has 48 eggs and uses 7 eggs for each cake. How many cakes can he bake and "
             "how many eggs are left? Show each step.")),
    ("code", "Write a Python function that returns the three smallest numbers of a list."),
    ("chat", "Explain in a few sentences why the sea is salty."),
)  # fmt: skip
SHOWN_TOKENS, TIMED_TOKENS = 72, 48
EXACT_PROMPTS, EXACT_TOKENS = 6, 40
MOST_SECONDS = 240.0  # no further run of the timings begins that would end later than this


class _Report:
    """Prints for people, or keeps quiet for ``--json``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.quiet = args.json

    def __call__(self, text: str = "") -> None:
        if not self.quiet:
            print(text, flush=True)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 when greedy output was not exact, else 0 (also when speculation loses)."""
    started, say = time.perf_counter(), _Report(args)
    say("Loading SmolLM2-135M-Instruct and its DSpark drafter ...")
    models = load("bfloat16", args.model, args.drafter, progress=not args.quiet)
    result: dict[str, Any] = {"model": models.name, "gamma": models.drafter.gamma}
    result["texts"] = _texts(models, args, say)
    costs = _costs(models, args, say)
    result["speed"] = []
    for requests, share in ((1, 0.5), (8, 0.9)):
        left = started + share * MOST_SECONDS - time.perf_counter()
        result["speed"].append(_speed(models, costs, requests, args, say, left))
    result["exactness"] = _exactness(models, args, say)
    result["seconds"] = time.perf_counter() - started
    say(f"\n{result['seconds']:.0f} seconds in all.")
    if args.json:
        print(json.dumps(result, indent=1))
    return OK if result["exactness"]["passed"] else FAILED


def _texts(models: Models, args: argparse.Namespace, say: _Report) -> list[dict[str, Any]]:
    """Answer one prompt of each kind and show what was drafted."""
    marks = "in green" if sys.stdout.isatty() and not args.no_color else "in [brackets]"
    say(f"Tokens the drafter proposed and the target accepted are {marks}; greedy, bfloat16.")
    shown = []
    for kind, prompt in PROMPTS:
        ids = models.encode(prompt)
        engine = Engine(
            models.target, models.drafter, max_requests=1, max_len=len(ids) + SHOWN_TOKENS
        )
        params = dx.SamplingParams(max_new_tokens=SHOWN_TOKENS, stop_ids=models.stop_ids)
        say(f"\n{kind}: {prompt}")
        text = stream(engine, models, ids, params, args)
        length = engine.metrics.acceptance_length
        say(f"({length:.2f} tokens per round)")
        shown.append({"kind": kind, "prompt": prompt, "text": text, "acceptance_length": length})
    return shown


def _costs(models: Models, args: argparse.Namespace, say: _Report) -> dict[int, dx.CostTable]:
    """Cost tables for 1 and 8 requests: measured here, or from an earlier run of this set-up."""
    say("\nCost of a target step on this machine (milliseconds by rows), for the scheduler:")
    measured = []
    for requests in (1, 8):
        table, known = cached(models, requests, cost_folder(), progress=not args.quiet)
        measured.append(table)
        points = "  ".join(f"{b}: {table.ms(int(b)):.0f}" for b in table.tokens)
        say(f"  {requests} requests{' (cached)' if known else ''}: {points}"
            f"  draft: {table.draft_ms:.0f}")  # fmt: skip
    one, many = measured
    return by_requests(one, many, 8)


def _speed(
    models: Models,
    costs: dict[int, dx.CostTable],
    requests: int,
    args: Any,
    say: _Report,
    seconds: float,
) -> dict[str, Any]:
    """Plain decoding and DSpark in turns."""
    from tqdm import tqdm

    kinds = list(PROMPTS) * 3
    prompts = [models.encode(text) for _, text in (kinds[:3] if requests == 1 else kinds[:8])]
    variants = [
        Variant("plain", None),
        Variant("DSpark, all drafts", dx.Scheduler("off")),
        Variant("DSpark, causal", dx.Scheduler("causal", cost=costs)),
        Variant("DSpark, two-phase", dx.Scheduler("two_phase", cost=costs)),
    ]
    params = dx.SamplingParams(
        temperature=args.temperature,
        seed=args.seed,
        max_new_tokens=TIMED_TOKENS,
        stop_ids=() if args.temperature == 0 else models.stop_ids,
    )
    total = args.repeats * len(variants)
    with tqdm(total=total, desc="timing", disable=args.quiet or args.json, leave=False) as bar:
        turns = compare(
            models,
            variants,
            prompts,
            params,
            requests,
            args.repeats,
            tick=bar.update,
            seconds=seconds,
        )
    records = rows(variants)
    runs = f"median of {turns} alternating runs" if turns > 1 else "one run each (time limit)"
    how = "greedy" if args.temperature == 0 else f"T = {args.temperature}"
    say(f"\n{requests} concurrent request{'s' if requests > 1 else ''}, bfloat16, {how}, "
        f"{len(prompts)} prompts x {TIMED_TOKENS} tokens, {runs}:")  # fmt: skip
    for line in text_table(records):
        say(line)
    same = {v.name: _identical(variants[0], v) for v in variants[1:]}
    if args.temperature == 0:
        say("Outputs identical to plain decoding: "
            + ", ".join(f"{name.removeprefix('DSpark, ')} {n}/{len(prompts)}"
                        for name, n in same.items()))  # fmt: skip
    say(_verdict(records))
    return {
        "identical": same,
        "requests": requests,
        "turns": turns,
        "rows": records,
        "verdict": _verdict(records),
    }


def _identical(plain: Variant, other: Variant) -> int:
    return sum(a == b for a, b in zip(plain.answers, other.answers, strict=True))


def _verdict(records: list[dict[str, Any]]) -> str:
    """Say what the numbers say, also when speculation loses."""
    best = max(records[1:], key=lambda r: float(r["ratio"]))
    if best["ratio"] >= 1.02:
        return f"=> {best['name']} is {best['ratio']:.2f}x as fast as plain decoding."
    if best["ratio"] > 0.98:
        return f"=> No gain here: {best['name']} runs as fast as plain decoding."
    return (
        f"=> Speculation loses here: its best schedule reaches {best['ratio']:.2f}x of plain "
        "decoding."
    )


def _exactness(models: Models, args: argparse.Namespace, say: _Report) -> dict[str, Any]:
    """Compare greedy output with plain decoding in float32, where bits can be compared."""
    from dspark.evaluation.lossless import check_lossless
    from dspark.training.prompts import build

    say("\nExactness (float32, greedy, plain decoding against DSpark with all drafts verified):")
    exact = load("float32", args.model, args.drafter, progress=False)
    texts = [p.text for p in build(EXACT_PROMPTS, seed=args.seed, split="heldout")]
    report = check_lossless(
        exact.target,
        exact.drafter,
        [models.encode(t) for t in texts],
        max_new_tokens=EXACT_TOKENS,
        stop_ids=exact.stop_ids,
    )
    say(str(report))
    return report.to_dict() | {"passed": report.passed()}
