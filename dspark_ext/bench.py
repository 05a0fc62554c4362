# SPDX-License-Identifier: Apache-2.0
"""Timings: one small problem of each family, a few seconds in all.

The problem is a round of decoding with 4 requests, 7 drafts each and a vocabulary of 32,000.
It answers "is this installation as fast as it should be", not "how fast is dspark": that takes the
floors and the peers of the programs in the source tree's ``bench/``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dspark_ext.info import info
from dspark_ext.ops.confidence import confidence
from dspark_ext.ops.markov_loop import markov_loop
from dspark_ext.ops.paged_kv import paged_kv_append
from dspark_ext.ops.prefix_scheduler import prefix_schedule
from dspark_ext.ops.rejection_sampler import rejection_sample
from dspark_ext.ops.verify_attention import verify_attention
from dspark_ext.scheduling import CostTable

__all__ = ["main", "time_families"]

REQUESTS, GAMMA, VOCAB, RANK, CONTEXT, PAGE = 4, 7, 32000, 64, 1024, 16
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
ROWS = REQUESTS * (GAMMA + 1)
SECONDS_EACH = 0.5

Call = Callable[[], object]


def _problems(rng: np.random.Generator) -> dict[str, tuple[str, Call]]:
    """Return, for every family, the text of its problem and a call that solves it."""

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    seed, position = np.arange(REQUESTS, dtype=np.uint64), np.full(REQUESTS, CONTEXT, np.int64)
    anchor = np.arange(REQUESTS, dtype=np.int32)
    base, w1, w2 = normal(REQUESTS, GAMMA, VOCAB), normal(VOCAB, RANK), normal(VOCAB, RANK)
    survival = np.cumprod(rng.uniform(0.5, 1, (REQUESTS, GAMMA)), axis=1, dtype=np.float32)
    cost = CostTable.from_points([1, ROWS + 1], [20.0, 40.0])
    pages = (CONTEXT + GAMMA + PAGE) // PAGE
    cache = (REQUESTS * pages, PAGE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = normal(*cache), normal(*cache)
    paging: dict[str, Any] = {
        "page_table": np.arange(REQUESTS * pages, dtype=np.int32).reshape(REQUESTS, pages),
        "cu_seqlens": np.arange(0, ROWS + 1, GAMMA + 1, dtype=np.int32),
    }
    before = np.full(REQUESTS, CONTEXT, np.int32)
    q, new = normal(ROWS, HEADS, HEAD_DIM), normal(ROWS, KV_HEADS, HEAD_DIM)
    target = normal(ROWS, VOCAB)
    drafts = rng.integers(0, VOCAB, (REQUESTS, GAMMA)).astype(np.int32)
    draft_len = np.full(REQUESTS, GAMMA, np.int32)
    size = f"{REQUESTS} x {GAMMA}"
    return {
        "markov_loop": (
            f"{size}, V {VOCAB}, r {RANK}, f32, sampled",
            lambda: markov_loop(
                base, w1, w2, anchor=anchor, seed=seed, position=position, temperature=0.8
            ),
        ),
        "confidence": (size, lambda: confidence(survival)),
        "prefix_scheduler": (f"{size}, causal", lambda: prefix_schedule(survival, cost)),
        "paged_kv": (
            f"{ROWS} rows, {KV_HEADS} x {HEAD_DIM}, f32",
            lambda: paged_kv_append(new, new, k_cache, v_cache, kv_len=before, **paging),
        ),
        "verify_attention": (
            f"{ROWS} rows, {HEADS}/{KV_HEADS} x {HEAD_DIM}, context {CONTEXT}, f32",
            lambda: verify_attention(
                q, k_cache, v_cache, kv_len=before + GAMMA + 1, max_q_len=GAMMA + 1, **paging
            ),
        ),
        "rejection_sampler": (
            f"{ROWS} rows, V {VOCAB}, f32, one-hot drafts, sampled",
            lambda: rejection_sample(
                target,
                drafts,
                draft_len=draft_len,
                cu_seqlens=paging["cu_seqlens"],
                seed=seed,
                position=position,
                temperature=0.8,
            ),
        ),
    }


def time_families(seed: int = 0, families: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Time one small problem of each family on the CPU.

    Parameters
    ----------
    seed : int
        Seed of the random problems.
    families : sequence of str, optional
        Names of families; all when absent.

    Returns
    -------
    list of dict
        ``family``, ``problem``, ``median_us``, ``p95_us`` and ``runs``; microseconds of wall time
        of the Python call.

    Examples
    --------
    >>> time_families(families=["confidence"])[0]["family"]
    'confidence'
    """
    problems = _problems(np.random.default_rng(seed))
    rows = []
    for name in families or problems:
        problem, call = problems[name]
        call()  # the first call allocates scratch memory and starts the threads
        times: list[float] = []
        while sum(times) < SECONDS_EACH or len(times) < 5:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        rows.append(
            {
                "family": name,
                "problem": problem,
                "median_us": 1e6 * statistics.median(times),
                "p95_us": 1e6 * float(np.quantile(times, 0.95)),
                "runs": len(times),
            }
        )
    return rows


def main(*, json_output: bool = False, seed: int = 0, families: Sequence[str] | None = None) -> int:
    """Run ``python -m dspark_ext bench``.

    Parameters
    ----------
    json_output : bool
        Print one JSON object instead of a table.
    seed : int
        Seed of the problems.
    families : sequence of str, optional
        Names of families; all when absent.

    Returns
    -------
    int
        0: there is nothing to fail.

    Examples
    --------
    >>> main(families=["confidence"])
    cpu ... microseconds a call
    family ...
    confidence ...
    0
    """
    rows = time_families(seed, families)
    report = {"machine": info(), "families": rows}
    print(json.dumps(report, indent=2) if json_output else _text(rows))
    return 0


def _text(rows: Sequence[dict[str, Any]]) -> str:
    cpu = info()["cpu"]
    lines = [
        f"cpu {cpu['level']}, {cpu['threads']} threads, microseconds a call",
        f"{'family':<18} {'median':>10} {'p95':>10}  problem",
    ]
    for row in rows:
        times = f"{row['median_us']:>10.1f} {row['p95_us']:>10.1f}"
        lines.append(f"{row['family']:<18} {times}  {row['problem']}")
    return "\n".join(lines)
