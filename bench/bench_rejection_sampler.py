# SPDX-License-Identifier: Apache-2.0
"""Time rejection_sample against the same verification by others, beside its floor.

    python bench/bench_rejection_sampler.py [--full] [--device cpu|cuda] [--seconds S] [--limit S]
                                            [--check] [--json] [--save [FILE]]

All verify gamma = 7 drafts a request under the rule `token` with a stored law, in one run and in
turns; times are medians of a call. Drafts are drawn from that law, which is near the target's.
--save keeps the JSON in FILE, or in bench/results/<machine>/; with --check the exit code is 1 when
a goal is missed. On a GPU every contender is a CUDA graph; warm and cold say whether L2 held the
last replay's data.

    op        dspark_ext.rejection_sample with preallocated results; returns both log-probabilities
    torch     softmax of target and draft, gather, compare, residual, a draw; no log-probabilities.
              Truncated rows add a top-k, or a sort and a cumulative sum
    peers     transformers: assisted decoding's sampling, one request a call. flashinfer: softmax of
              both and the chain sampler; "flashinfer chain" is the sampler alone. vllm: softmax, a
              bonus token and the sampler of its V1 engine. The table of peers says which are here
    floor     the target's logits once: on a CPU the rows that were visited, at the bandwidth of a
              sum over a large array; on a GPU all rows, at the 4.3 TB/s of an H200
    rows      mean number of target rows a request visited; the operator stops there
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib import contest, roofline
from lib.timing import STREAM_BYTES, stream, time_in_turns
from peers.verification import GAMMA, TEMPERATURE, composed, find, problem

import dspark_ext as dx

SHORT = [
    # R, V, dtype, top_k, top_p
    (1, 49_152, torch.float32, 0, 1.0),
    (1, 151_936, torch.bfloat16, 0, 1.0),
    (32, 49_152, torch.float32, 0, 1.0),
    (32, 151_936, torch.bfloat16, 0, 1.0),
]
FULL = [
    *SHORT,
    (1, 151_936, torch.float32, 0, 1.0),
    (8, 151_936, torch.float16, 0, 1.0),
    (1, 151_936, torch.bfloat16, 50, 1.0),
    (1, 151_936, torch.bfloat16, 0, 0.95),
    (8, 151_936, torch.bfloat16, 50, 1.0),
    (8, 151_936, torch.bfloat16, 0, 0.95),
    (8, 262_144, torch.bfloat16, 0, 1.0),
]
GOAL_VOCAB = 151_936
GPU = [(r, GOAL_VOCAB, torch.bfloat16, 0, 1.0) for r in (1, 8, 32, 128)]
GPU += [(1, 262_144, torch.bfloat16, 0, 1.0), (32, GOAL_VOCAB, torch.bfloat16, 50, 1.0)]
GPU += [(32, GOAL_VOCAB, torch.bfloat16, 0, 0.95), (32, GOAL_VOCAB, torch.float32, 0, 1.0)]

Rows = list[dict[str, Any]]
Row = tuple[int, int, torch.dtype, int, float]


def truncation(row: Row, device: str) -> dict[str, torch.Tensor]:
    """The arguments that a row's law adds."""
    requests, _, _, top_k, top_p = row
    law: dict[str, torch.Tensor] = {}
    if top_k:
        law["top_k"] = torch.full((requests,), top_k, dtype=torch.int32, device=device)
    if top_p < 1:
        law["top_p"] = torch.full((requests,), top_p, device=device)
    return law


def head(row: Row) -> dict[str, Any]:
    """What a row of the table begins with."""
    requests, vocab, dtype, top_k, top_p = row
    law = f"top-k {top_k}" if top_k else f"top-p {top_p}" if top_p < 1 else "full"
    return {"R": requests, "V": vocab, "dtype": str(dtype).removeprefix("torch."), "law": law}


def measure_cpu(row: Row, seconds: float, seed: int, states: dict[str, str]) -> Rows:
    """One row of the CPU table."""
    requests, vocab, _, top_k, top_p = row
    p = problem(*row[:3], seed)
    law = truncation(row, "cpu")
    out = dx.rejection_sample(**p, **law)
    visited = int(out.num_emitted.sum())
    peers, found = ({}, {}) if law else find(p)
    states |= {name: text for name, text in found.items() if "request" not in text}
    times = time_in_turns(
        {
            "op": lambda: dx.rejection_sample(**p, **law, out=out),
            "torch": composed(p, top_k, top_p),
            "stream": stream(),
            **peers,
        },
        seconds=seconds,
    )
    bandwidth = STREAM_BYTES / times["stream"].median
    floor = visited * vocab * p["target_logits"].element_size() / bandwidth
    op = times["op"].median
    others = {name: times[name].median / op for name in ("torch", "transformers") if name in times}
    return [
        head(row)
        | {
            "rows": visited / requests,
            "op ms": 1e3 * op,
            "p95 ms": 1e3 * times["op"].p95,
            "torch ms": 1e3 * times["torch"].median,
            "torch/op": others["torch"],
            "transformers/op": others.get("transformers"),
            "floor ms": 1e3 * floor,
            "op/floor": op / floor,
            "stream GB/s": bandwidth / 1e9,
        }
    ]


def measure_gpu(row: Row, seed: int, states: dict[str, str], problems: list[str]) -> Rows:
    """The rows of one shape; a contender that fails is named in ``problems``."""
    from lib.graphs import replay_in_turns

    requests, vocab, _, top_k, top_p = row
    p = problem(*row[:3], seed, "cuda")
    law = truncation(row, "cuda")
    out = dx.rejection_sample(**p, **law)
    visited = int(out.num_emitted.sum())
    peers, found = ({}, {}) if law else find(p)
    states |= {name: text for name, text in found.items() if "request" not in text}
    calls = {
        "op": lambda: dx.rejection_sample(**p, **law, out=out),
        "torch": composed(p, top_k, top_p),
        **peers,
    }
    times = replay_in_turns(contest.capture_each(calls, head(row), problems))
    size = p["target_logits"].element_size()
    floor = 1e6 * roofline.verification_floor(requests * (GAMMA + 1), vocab, size)
    op = times["op"].warm if "op" in times else None
    return [
        head(row)
        | {
            "what": name,
            "rows": visited / requests,
            "warm us": t.warm,
            "p95 us": t.warm_p95,
            "cold us": t.cold,
            "this/op": t.warm / op if op else None,
            "floor us": floor,
            "this/floor": t.warm / floor,
        }
        for name, t in times.items()
    ]


def goals_cpu(rows: Rows) -> Rows:
    """At least three times the composition for one request and for 32."""
    return [
        contest.goal(
            f"torch/op, R = {row['R']}, V = {row['V']}, {row['dtype']}", row["torch/op"], least=3
        )
        for row in rows
        if row["R"] in (1, 32) and row["law"] == "full"
    ]


def goals_gpu(rows: Rows) -> Rows:
    """6 us for one request, 1.4 of the floor from 32 on, three times FlashInfer's chain."""
    found = [r for r in rows if r["V"] == GOAL_VOCAB and r["law"] == "full"]
    found = [r for r in found if r["dtype"] == "bfloat16"]
    goals = []
    for row in found:
        where = f"R = {row['R']}"
        if row["what"] == "op" and row["R"] == 1:
            goals.append(contest.goal(f"op us, {where}", row["warm us"], most=6.0))
        if row["what"] == "op" and row["R"] >= 32:
            goals.append(contest.goal(f"op/floor, {where}", row["this/floor"], most=1.4))
        if row["what"] == "flashinfer" and row["this/op"] is not None:
            goals.append(contest.goal(f"flashinfer/op, {where}", row["this/op"], least=3.0))
    return goals


def main() -> None:
    given = contest.options(str(__doc__), full=True)
    gpu = given.device == "cuda"
    problems: list[str] = []
    states: dict[str, str] = {}

    def measure(row: Row) -> Rows:
        if gpu:
            return measure_gpu(row, given.seed, states, problems)
        return measure_cpu(row, given.seconds, given.seed, states)

    shapes = GPU if gpu else FULL if given.full else SHORT
    rows = contest.until(given.limit, shapes, measure, head, problems)
    contest.finish(
        rows,
        goals_gpu(rows) if gpu else goals_cpu(rows),
        given,
        name="rejection_sampler",
        note=f"gamma {GAMMA}, T {TEMPERATURE}; a call verifies all requests",
        problems=problems,
        states=states,
    )


if __name__ == "__main__":
    main()
