# SPDX-License-Identifier: Apache-2.0
"""Time markov_loop against the same loop composed of torch operations.

    python bench/bench_markov_loop.py [--json] [--seconds S] [--seed N] [--full]

Both draw gamma tokens per request from softmax((U_k + W2 W1[x_{k-1}]) / T) in the same run, in
turns; milliseconds are medians over the run, per call (all gamma steps).

* op: dspark_ext.markov_loop with preallocated results
* torch: embedding, linear, add, softmax, multinomial and the log-probability of the token
* floor: W2 once a step and U once, at the bandwidth a sum over a large array reaches in this run

The bound of the operator on a CPU is the pass over W2: it is read once per step however many
requests there are, and nothing of size V is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib.report import arguments, publish
from lib.timing import read_bandwidth, time_in_turns

import dspark_ext as dx

GAMMA = 7
TEMPERATURE = 0.8
SHORT = [
    # R, V, r, dtype, top_k, top_p
    (1, 49_152, 64, "float32", 0, 1.0),
    (1, 49_152, 256, "bfloat16", 0, 1.0),
    (8, 49_152, 256, "bfloat16", 0, 1.0),
    (1, 151_936, 256, "bfloat16", 0, 1.0),
    (8, 151_936, 256, "bfloat16", 0, 1.0),
]
FULL = [
    *SHORT,
    (1, 16_384, 64, "bfloat16", 0, 1.0),
    (8, 16_384, 64, "bfloat16", 0, 1.0),
    (4, 49_152, 128, "float16", 0, 1.0),
    (8, 151_936, 64, "bfloat16", 0, 1.0),
    (32, 151_936, 256, "bfloat16", 0, 1.0),
    (8, 151_936, 256, "bfloat16", 50, 1.0),
    (8, 151_936, 256, "bfloat16", 0, 0.95),
    (8, 151_936, 256, "int8", 0, 1.0),
]


def problem(requests: int, vocab: int, rank: int, dtype: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    kind = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    w2 = normal(vocab, rank) / rank**0.5
    made: dict[str, Any] = {
        "base_logits": (2 * normal(requests, GAMMA, vocab)).to(kind),
        "w1": normal(vocab, rank).to(kind),
        "w2": w2.to(kind),
        "anchor": torch.randint(vocab, (requests,), generator=generator, dtype=torch.int32),
        "seed": torch.arange(requests),
        "position": torch.full((requests,), 1000),
    }
    if dtype == "int8":
        scale = w2.abs().amax(1) / 127
        made["w2"] = torch.round(w2 / scale[:, None]).to(torch.int8)
        made["w2_scale"] = scale
    return made


def composed(p: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """The loop as one writes it in torch; an int8 W2 is compared with its bfloat16 original."""
    base, w1 = p["base_logits"], p["w1"]
    w2 = p["w2"] if "w2_scale" not in p else (p["w2"] * p["w2_scale"][:, None]).to(w1.dtype)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        previous = p["anchor"].long()
        tokens = []
        for k in range(GAMMA):
            z = base[:, k] + F.linear(F.embedding(previous, w1), w2)
            law = torch.softmax(z.float() / TEMPERATURE, dim=-1)
            previous = torch.multinomial(law, 1)[:, 0]
            law.gather(1, previous[:, None]).log()
            tokens.append(previous)
        return torch.stack(tokens, 1)

    return run


def bytes_of_a_call(p: dict[str, Any]) -> int:
    base, w2 = p["base_logits"], p["w2"]
    return GAMMA * w2.numel() * w2.element_size() + base.numel() * base.element_size()


def measure(row: tuple[Any, ...], seconds: float, seed: int) -> dict[str, Any]:
    requests, vocab, rank, dtype, top_k, top_p = row
    p = problem(requests, vocab, rank, dtype, seed)
    law = {"temperature": torch.full((requests,), TEMPERATURE)}
    law |= {"top_k": torch.full((requests,), top_k, dtype=torch.int32)} if top_k else {}
    law |= {"top_p": torch.full((requests,), top_p)} if top_p < 1 else {}
    out = dx.markov_loop(**p, **law)
    contenders: dict[str, Callable[[], object]] = {
        "op": lambda: dx.markov_loop(**p, **law, out=out),
        "torch": composed(p),
    }
    if top_k or top_p < 1:
        del contenders["torch"]  # the composition would need a sort of the row
    times = time_in_turns(contenders, seconds=seconds)
    floor = bytes_of_a_call(p) / read_bandwidth()
    op, peer = times["op"].median, times["torch"].median if "torch" in times else np.nan
    cut = f"top-k {top_k}" if top_k else f"top-p {top_p}" if top_p < 1 else "full"
    return {
        "R": requests,
        "V": vocab,
        "r": rank,
        "dtype": dtype,
        "law": cut,
        "op ms": 1e3 * op,
        "p95 ms": 1e3 * times["op"].p95,
        "torch ms": 1e3 * peer,
        "torch/op": peer / op,
        "floor ms": 1e3 * floor,
        "op/floor": op / floor,
    }


def main() -> None:
    parser = arguments(str(__doc__).split("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="more shapes")
    options = parser.parse_args()
    shapes = FULL if options.full else SHORT
    rows = [measure(row, options.seconds, options.seed) for row in shapes]
    publish(rows, as_json=options.json, note=f"gamma {GAMMA}, T {TEMPERATURE}; ms per call")


if __name__ == "__main__":
    main()
