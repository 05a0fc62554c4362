# SPDX-License-Identifier: Apache-2.0
"""Time verify_attention against the same attention by others, beside its floor.

    python bench/bench_verify_attention.py [--full] [--device cpu|cuda] [--seconds S] [--limit S]
                                           [--check] [--json] [--save [FILE]]

All answer the same queries over ragged contexts in one run and in turns; times are medians of a
call, Python included, and on a GPU of a CUDA graph's replay. Before anything is timed the answers
are compared. --save keeps the JSON in FILE, or in bench/results/<machine>/; with --check the exit
code is 1 when a goal is missed. Warm and cold say whether L2 held the last replay's data.

    op        dspark_ext.verify_attention over a shuffled page table of pages of 16
    op inv.   the same with batch_invariant=True (on a CPU it always is)
    sdpa      torch's scaled_dot_product_attention with a mask on dense keys and values, padded to
              the longest request, the heads of a group folded into rows so that no key is repeated
    gather    the same after index_select has brought the pages together: what torch has to do when
              the cache is paged
    peers     torch's FlexAttention and varlen_attn on dense keys, FlashInfer's paged prefill,
              FlashAttention 2 (pages of 256) and 3. The table of peers says which are here
    floor     keys and values of the batch read once: on a GPU at the 4.3 TB/s of an H200, on a CPU
              at the bandwidth of a sum over a large array in the same turns; there the products at
              the rate of a loop of multiply-adds on registers (peak) count as well, and the larger
              of the two is the floor

On a CPU with one thread times are the processor's, not the clock's on the wall: others may run
meanwhile. With one row and short contexts the call itself is the cost; with several rows the
products are.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib import contest, roofline
from lib.peak import multiply_adds
from lib.timing import STREAM_BYTES, stream, time_in_turns
from peers.attention import Problem, find, problem, sdpa_calls

import dspark_ext as dx

PAGE = 16
GOAL_ROWS, GOAL_CONTEXT = 8, 2000
F32, BF16, F8 = "float32", "bfloat16", "float8_e4m3fn"
Row = tuple[int, int, int, int, int, int, str, str]
SHORT: list[Row] = [
    # R, rows, context, Hq, Hkv, D, dtype, cache: SmolLM2-135M has 9 / 3 heads of 64
    (1, 1, 300, 9, 3, 64, F32, F32),
    (1, 8, 300, 9, 3, 64, F32, F32),
    (8, 1, 300, 9, 3, 64, F32, F32),
    (8, 6, 300, 9, 3, 64, BF16, BF16),
    (8, 8, 2000, 9, 3, 64, F32, F32),
    (8, 8, 2000, 9, 3, 64, BF16, BF16),
    (8, 8, 2000, 32, 8, 128, F32, F32),
    (8, 8, 2000, 32, 8, 128, BF16, BF16),
    (8, 8, 2000, 32, 8, 128, BF16, F8),
]
FULL: list[Row] = [
    *SHORT,
    (1, 1, 50, 9, 3, 64, F32, F32),
    (1, 8, 1000, 9, 3, 64, F32, F32),
    (8, 6, 1000, 9, 3, 64, BF16, BF16),
    (1, 8, 4000, 32, 8, 128, BF16, BF16),
    (8, 1, 2000, 32, 8, 128, BF16, BF16),
    (1, 512, 512, 9, 3, 64, F32, F32),
    (32, 8, 500, 8, 8, 64, F32, F32),
]
GPU: list[Row] = [
    (requests, rows, context, 32, 8, 128, BF16, cache)
    for requests, rows, context in (
        (1, 8, 4096), (1, 1, 4096), (8, 8, 4096), (32, 8, 4096), (32, 2, 4096), (32, 1, 4096),
        (128, 8, 2048),
    )
    for cache in (BF16, F8)
]  # fmt: skip
GPU += [(32, 8, 4096, 32, 8, 64, BF16, BF16), (32, 8, 4096, 16, 8, 256, BF16, BF16)]

Rows = list[dict[str, Any]]


def head(row: Row) -> dict[str, Any]:
    """What a row of the table begins with."""
    requests, rows, context, heads, kv_heads, d, dtype, cache = row
    return {"R": requests, "rows": rows, "L": context, "heads": f"{heads}/{kv_heads}x{d}",
            "dtype": dtype, "cache": cache}  # fmt: skip


def moved(p: Problem) -> int:
    """Bytes of the keys and values that the batch needs."""
    _, _, kv_heads, d = p["k_cache"].shape
    return int(2 * sum(p["lengths"]) * kv_heads * d * p["k_cache"].element_size())


def call_of(p: Problem, batch_invariant: bool = False) -> Any:
    """dspark's call, its result preallocated."""
    out = torch.empty_like(p["q"])

    def call() -> torch.Tensor:
        return dx.verify_attention(
            p["q"], p["k_cache"], p["v_cache"], page_table=p["table"], kv_len=p["kv_len"],
            cu_seqlens=p["cu"], max_q_len=p["rows"], k_scale=p["scale"], v_scale=p["scale"],
            batch_invariant=batch_invariant, out=out,
        )  # fmt: skip

    return call


def measure_cpu(row: Row, seconds: float, seed: int, states: dict[str, str]) -> Rows:
    """One row of the CPU table."""
    p = problem(*row, PAGE, seed)
    op = call_of(p)
    p["answer"] = op().clone()
    peers, found = find(p)
    states |= found
    multiply, operations = multiply_adds()
    calls = {"op": op, **sdpa_calls(p), **peers, "stream": stream(), "peak": multiply}
    threads = torch.get_num_threads()
    clock = time.process_time if threads == 1 else time.perf_counter
    times = time_in_turns(calls, seconds=seconds, clock=clock)
    us = {name: 1e6 * t.median for name, t in times.items()}
    heads, d = p["q"].shape[1:]
    work = 4 * heads * d * p["rows"] * sum(p["lengths"])
    bandwidth = STREAM_BYTES / times["stream"].median
    peak = threads * operations / times["peak"].median
    products, reading = 1e6 * work / peak, 1e6 * moved(p) / bandwidth
    floor = max(products, reading)
    least = max(
        work * times["peak"].best / (threads * operations),
        moved(p) * times["stream"].best / STREAM_BYTES,
    )
    return [
        head(row)
        | {
            "op us": us["op"],
            "p95 us": 1e6 * times["op"].p95,
            "best us": 1e6 * times["op"].best,
            "sdpa us": us["sdpa"],
            "sdpa/op": us["sdpa"] / us["op"],
            "gather/op": us["gather"] / us["op"],
            "best sdpa/op": times["sdpa"].best / times["op"].best,
            "GFLOP/s": work / times["op"].median / 1e9,
            "peak GFLOP/s": peak / 1e9,
            "stream GB/s": bandwidth / 1e9,
            "products us": products,
            "reading us": reading,
            "floor us": floor,
            "floor/op": floor / us["op"],
            "floor/sdpa": floor / us["sdpa"],
            "best floor/op": least / times["op"].best,
            "best floor/sdpa": least / times["sdpa"].best,
        }
    ]


def measure_gpu(row: Row, seed: int, states: dict[str, str], problems: list[str]) -> Rows:
    """The rows of one shape; a contender that fails is named in ``problems``."""
    from lib.graphs import replay_in_turns

    p = problem(*row, PAGE, seed, "cuda")
    op = call_of(p)
    p["answer"] = op().clone()
    peers, found = find(p)
    states |= {f"{name} ({row[-1]})": text for name, text in found.items()}
    calls = {"op": op, "op inv.": call_of(p, batch_invariant=True), **sdpa_calls(p), **peers}
    times = replay_in_turns(contest.capture_each(calls, head(row), problems))
    floor = 1e6 * moved(p) / roofline.H200.memory
    own = times["op"].cold if "op" in times else None
    return [
        head(row)
        | {
            "what": name,
            "cold us": t.cold,
            "warm us": t.warm,
            "p95 us": t.warm_p95,
            "this/op": t.cold / own if own else None,
            "floor us": floor,
            "floor/this": floor / t.cold,
        }
        for name, t in times.items()
    ]


def goals_cpu(rows: Rows) -> Rows:
    """1.5 times torch's attention for 8 requests with 2000 tokens, with and without its gather."""
    return [
        contest.goal(f"{what}, {row['heads']}, {row['cache']}", row[what], least=1.5)
        for row in rows
        for what in ("gather/op", "sdpa/op")
        if row["R"] == 8 and row["rows"] == GOAL_ROWS and row["L"] == GOAL_CONTEXT
    ]


def goals_gpu(rows: Rows) -> Rows:
    """85 % of the memory's speed from 64k tokens on, 8 us for one request, ahead of every peer."""
    goals = []
    for row in rows:
        where = (f"R = {row['R']}, rows = {row['rows']}, L = {row['L']}, {row['heads']}, "
                 f"{row['cache']}")  # fmt: skip
        if row["what"] == "op":
            if row["R"] * row["L"] >= 65536:
                goals.append(contest.goal(f"floor/op, {where}", row["floor/this"], least=0.85))
            if row["R"] == 1 and row["L"] == 4096:
                goals.append(contest.goal(f"op us, {where}", row["cold us"], most=8.0))
        elif row["what"] != "op inv." and 2 <= row["rows"] <= 8 and row["this/op"] is not None:
            goals.append(contest.goal(f"{row['what']}/op, {where}", row["this/op"], least=1.0))
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
        name="verify_attention",
        note=f"causal, page size {PAGE}",
        problems=problems,
        states=states,
    )


if __name__ == "__main__":
    main()
