# SPDX-License-Identifier: Apache-2.0
"""Time markov_loop against the same loop composed of torch operations, beside its floor.

    python bench/bench_markov_loop.py [--full] [--device cpu|cuda] [--seconds S] [--limit S]
                                      [--json] [--save [FILE]]

--save keeps the JSON in FILE, or in bench/results/<machine>/.

The model of an H200 (lib/roofline.py; assumptions, not measurements): the floor, what the design
and what the kernel that was built should take. And what this machine has, measured in one run,
contenders in turns, medians; every time is of a whole call, all gamma = 7 steps.

On a CPU
    op        dspark_ext.markov_loop with preallocated results
    torch     embedding, linear, add, softmax, multinomial, log-probability of the token
    stream    a sum over a large array: the bandwidth that memory gives to all threads
    of stream W2 once a step, over the time of op, against the bandwidth of stream: the operator's
              bound on a CPU is the pass over W2, whatever the number of requests

On a GPU every contender is a CUDA graph; warm and cold say whether L2 held the last replay's data.
    op        sampled; greedy; screened, greedy by way of bytes; an int8 W2; top-M, the law over
              the 64 largest base logits; wgmma is left out in mma, and that too in scalar
    chain     embed, product, add, noise, argmax, log-probability; compile: the same through
              torch.compile
    GB/s      W2 once a step and U once, over the warm time: more than the memory's bandwidth where
              W2 stays on the chip
    of floor  floor / warm, of design: design / warm (1 = as predicted)
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib import roofline
from lib.chains import composed, problem, race
from lib.report import arguments, publish
from lib.timing import STREAM_BYTES, stream, time_in_turns

import dspark_ext as dx

GAMMA, RANK, TEMPERATURE, SUPPORT = 7, 256, 0.8, 64
REQUESTS, VOCABULARIES = (1, 8, 32, 128, 256), (49_152, 129_280, 151_936, 262_144)
SHAPES = [(r, v) for r in REQUESTS for v in VOCABULARIES]
SHORT = [
    # R, V, r, dtype, top_k, top_p
    (1, 49_152, RANK, "bfloat16", 0, 1.0),
    (1, 151_936, RANK, "bfloat16", 0, 1.0),
    (1, 151_936, RANK, "int8", 0, 1.0),
    (8, 49_152, RANK, "bfloat16", 0, 1.0),
    (8, 151_936, RANK, "bfloat16", 0, 1.0),
]
FULL = [
    *[(r, v, RANK, "bfloat16", 0, 1.0) for r, v in SHAPES],
    (1, 49_152, 64, "float32", 0, 1.0),
    (8, 16_384, 64, "bfloat16", 0, 1.0),
    (4, 49_152, 128, "float16", 0, 1.0),
    (1, 151_936, RANK, "int8", 0, 1.0),
    (8, 151_936, RANK, "int8", 0, 1.0),
    (8, 151_936, RANK, "bfloat16", 50, 1.0),
    (8, 151_936, RANK, "bfloat16", 0, 0.95),
]
SOURCE = "DSPARK_MARKOV_LOOP_SOURCE"
COMPILED = [(1, 151_936), (32, 151_936)]  # each takes the compiler half a minute

Rows = list[dict[str, Any]]


def model() -> Rows:
    """Floor and predictions of an H200 for every shape, in microseconds."""
    return [
        {
            "R": r,
            "V": v,
            "floor us": 1e6 * roofline.floor(r, v),
            "design us": 1e6 * roofline.loop(r, v),
            "built us": 1e6 * roofline.built(r, v),
            "design int8 us": 1e6 * roofline.loop(r, v, width=1),
            "top-M floor us": 1e6 * roofline.support_floor(r, v),
            "chain us": 1e6 * roofline.stock(r, v),
        }
        for r, v in SHAPES
    ]


def bytes_of(p: dict[str, Any]) -> tuple[int, int]:
    """Bytes of W2 (once a step) and of U."""
    base, w2 = p["base_logits"], p["w2"]
    return GAMMA * w2.numel() * w2.element_size(), base.numel() * base.element_size()


def measure_cpu(row: tuple[Any, ...], seconds: float, seed: int) -> dict[str, Any]:
    """One row of the CPU table."""
    requests, vocab, rank, dtype, top_k, top_p = row
    p = problem(requests, vocab, rank, dtype, seed)
    law = {"temperature": torch.full((requests,), TEMPERATURE)}
    law |= {"top_k": torch.full((requests,), top_k, dtype=torch.int32)} if top_k else {}
    law |= {"top_p": torch.full((requests,), top_p)} if top_p < 1 else {}
    out = dx.markov_loop(**p, **law)
    contenders: dict[str, Callable[[], object]] = {
        "op": lambda: dx.markov_loop(**p, **law, out=out),
        "torch": composed(p, TEMPERATURE),
        "stream": stream(),
    }
    if top_k or top_p < 1:
        del contenders["torch"]  # the composition would need a sort of the row
    times = time_in_turns(contenders, seconds=seconds)
    op, peer = times["op"].median, times["torch"].median if "torch" in times else np.nan
    bandwidth = STREAM_BYTES / times["stream"].median
    w2, base = bytes_of(p)
    return {
        "R": requests,
        "V": vocab,
        "r": rank,
        "dtype": dtype,
        "law": f"top-k {top_k}" if top_k else f"top-p {top_p}" if top_p < 1 else "full",
        "op ms": 1e3 * op,
        "p95 ms": 1e3 * times["op"].p95,
        "torch ms": 1e3 * peer,
        "torch/op": peer / op,
        "W2 GB/s": w2 / op / 1e9,
        "stream GB/s": bandwidth / 1e9,
        "of stream": w2 / op / bandwidth,
        "floor ms": 1e3 * (w2 + base) / bandwidth,
    }


def contenders_gpu(requests: int, vocab: int, seed: int) -> dict[str, Callable[[], object]]:
    """Calls to capture; what they read stays alive in them."""
    p = problem(requests, vocab, RANK, "bfloat16", seed, gamma=GAMMA, device="cuda")
    q = problem(requests, vocab, RANK, "int8", seed, gamma=GAMMA, device="cuda")
    q["base_logits"] = p["base_logits"]
    sampled = torch.full((requests,), TEMPERATURE, device="cuda")

    def op(given: dict[str, Any], **law: Any) -> Callable[[], object]:
        return lambda: dx.markov_loop(**given, **law)

    calls: dict[str, Callable[[], object]] = {
        "op": op(p, temperature=sampled),
        "op greedy": op(p),
        "op int8": op(q, temperature=sampled),
        "op screened": op(p, w2_screen=q["w2"], screen_scale=q["w2_scale"]),
        "op top-M": op(p, temperature=sampled, topk_support=SUPPORT),
        "chain": race(p, TEMPERATURE),
        "chain greedy": race(p, 0.0),
    }
    if (requests, vocab) in COMPILED:
        calls["compile"] = torch.compile(race(p, TEMPERATURE), dynamic=False)
    if requests > 32:
        for name in ("op greedy", "op screened", "chain greedy"):
            del calls[name]  # the arithmetic of sampling is what grows
    for source in ("mma", "scalar") if requests <= 32 else ("mma",):
        calls[f"op {source}"] = by_source(source, calls["op"])
    return calls


def by_source(source: str, call: Callable[[], object]) -> Callable[[], object]:
    """The same call with the faster sources of dot products held back."""

    def run() -> object:
        os.environ[SOURCE] = source
        try:
            return call()
        finally:
            del os.environ[SOURCE]

    return run


def measure_gpu(requests: int, vocab: int, seed: int, problems: list[str]) -> Rows:
    """The rows of one shape; a contender that fails is named in ``problems``."""
    from lib.graphs import capture, replay_in_turns

    replays = {}
    for name, call in contenders_gpu(requests, vocab, seed).items():
        try:
            replays[name] = capture(call)
        except Exception as error:  # the others still have something to say
            problems.append(f"R={requests} V={vocab} {name}: {type(error).__name__}: {error}"[:400])
            torch.cuda.synchronize()
    times = replay_in_turns(replays)
    rows = []
    for name, t in times.items():
        width = 1 if "int8" in name or "screened" in name else 2
        top_m = "top-M" in name
        floor = roofline.floor(requests, vocab, width=width)
        floor = roofline.support_floor(requests, vocab) if top_m else floor
        design = floor if top_m else roofline.loop(requests, vocab, width=width)
        base = 2 * GAMMA * requests * vocab
        traffic = base + (0 if top_m else GAMMA * roofline.w2_bytes(vocab, RANK, width))
        greedy = "greedy" in name or "screened" in name
        peer = times.get("chain greedy" if greedy else "chain")
        compiled = times.get("compile")
        rows.append(
            {
                "R": requests,
                "V": vocab,
                "what": name,
                "warm us": t.warm,
                "p95 us": t.warm_p95,
                "cold us": t.cold,
                "GB/s": traffic / t.warm / 1e3,
                "floor us": 1e6 * floor,
                "of floor": 1e6 * floor / t.warm,
                "of design": 1e6 * design / t.warm,
                "chain/this": peer.warm / t.warm if peer else np.nan,
                "compile/this": compiled.warm / t.warm if compiled else np.nan,
            }
        )
    return rows


def main() -> None:
    parser = arguments(str(__doc__))
    parser.add_argument("--full", action="store_true", help="on a CPU: all shapes (many minutes)")
    parser.add_argument("--save", nargs="?", const="", help="keep the JSON, see above")
    parser.add_argument("--limit", type=float, default=1e9, help="begin no row after these seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    problems: list[str] = []
    rows: Rows = []
    end = time.monotonic() + options.limit
    for shape in SHAPES if device == "cuda" else FULL if options.full else SHORT:
        if time.monotonic() > end:
            problems.append(f"{shape}: out of time")
        elif device == "cuda":
            rows += measure_gpu(*shape, options.seed, problems)
        else:
            rows.append(measure_cpu(shape, options.seconds, options.seed))
    publish(
        rows,
        as_json=options.json,
        note=f"gamma {GAMMA}, T {TEMPERATURE}; a call is all {GAMMA} steps",
        more={
            "model of an H200, bf16 base logits, r 256": model(),
            **({"failed": [{"what": text} for text in problems]} if problems else {}),
        },
        save=f"markov_loop_{device}" if options.save == "" else options.save,
    )


if __name__ == "__main__":
    main()
