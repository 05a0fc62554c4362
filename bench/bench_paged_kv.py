# SPDX-License-Identifier: Apache-2.0
"""Time paged_kv_append against index_put on the same paged cache.

    python bench/bench_paged_kv.py [--json] [--seconds S] [--seed N] [--full] [--save [FILE]]

All contenders write the same rows in the same run, in turns; microseconds are medians per call,
Python included. Before anything is timed the caches are compared.

* op: dspark_ext.paged_kv_append; where a rotation is asked for, it is part of the call
* torch: page and row of every token from the table, index_put of k and of v (converted when the
  dtypes differ), and the rotation in torch where one is asked for. FP8 is written as bytes
* index_put: the two index_put alone, the places known and k turned beforehand
* floor: k and v read, and written once, at the bandwidth a sum over a large array reaches. What
  fits in the caches, as all but the longest appends do here, can be faster than that

A step of a decoder appends a few tokens per layer: there the call is the cost, not the bytes. With
one thread times are the processor's, so that others may run meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib.report import arguments, publish
from lib.timing import read_bandwidth, time_in_turns

import dspark_ext as dx

PAGE = 16
SHORT = [
    # R, tokens per request, Hkv, D, dtype, cache dtype, rope
    (1, 1, 3, 64, "float32", "float32", False),
    (8, 1, 3, 64, "bfloat16", "bfloat16", False),
    (8, 8, 3, 64, "float32", "float32", False),
    (8, 8, 3, 64, "float32", "bfloat16", False),
    (8, 8, 3, 64, "bfloat16", "bfloat16", True),
    (8, 8, 3, 64, "bfloat16", "float8_e4m3fn", False),
    (1, 1000, 3, 64, "float32", "float32", False),
]
FULL = [
    *SHORT,
    (64, 8, 8, 128, "bfloat16", "bfloat16", False),
    (64, 8, 8, 128, "bfloat16", "bfloat16", True),
    (1, 4000, 8, 128, "bfloat16", "bfloat16", False),
    (1, 4000, 8, 128, "float32", "float16", False),
    (1, 4000, 8, 128, "bfloat16", "float8_e4m3fn", True),
]


def clock() -> Callable[[], float]:
    """The processor's time, which adds up threads, or that on the wall."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def turn(k: torch.Tensor, position: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Half-split rotation as a model writes it in torch."""
    angle = position.double()[:, None, None] * inv_freq
    c, s = angle.cos().float(), angle.sin().float()
    a, b = k.float().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of FP8, for which index_put has no kernel; anything else as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def measure(shape: tuple[Any, ...], seconds: float, seed: int, bandwidth: float) -> dict[str, Any]:
    requests, tokens, heads, d, dtype, cache_dtype, rotated = shape
    g = torch.Generator().manual_seed(seed)
    kinds = getattr(torch, dtype), getattr(torch, cache_dtype)
    columns = (300 + tokens) // PAGE + 1
    pages = requests * columns
    k, v = (torch.randn(requests * tokens, heads, d, generator=g).to(kinds[0]) for _ in "kv")
    table = torch.randperm(pages, generator=g).int().view(requests, columns)
    kv_len = torch.randint(0, 300, (requests,), generator=g).int()
    cu = torch.arange(requests + 1, dtype=torch.int32) * tokens
    rope = dx.Rope(1e5) if rotated else None
    caches = {
        name: torch.zeros(2, pages, PAGE, heads, d, dtype=kinds[1])
        for name in ("op", "torch", "index_put")
    }
    status = torch.empty(requests, dtype=torch.int32)
    owner = torch.arange(requests).repeat_interleave(tokens)
    inv_freq = torch.tensor(dx.Rope(1e5).inv_freq(d).tolist(), dtype=torch.float64)

    def places() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        position = kv_len[owner] + torch.arange(requests * tokens) - cu[owner]
        return position, (table[owner, position // PAGE].long(), position % PAGE)

    position, place = places()
    ready = (turn(k, position, inv_freq) if rotated else k).to(kinds[1]), v.to(kinds[1])

    def op() -> None:
        dx.paged_kv_append(
            k, v, *caches["op"], page_table=table, kv_len=kv_len, cu_seqlens=cu, rope=rope,
            out=status,
        )  # fmt: skip

    def composed() -> None:
        position, place = places()
        new_k = turn(k, position, inv_freq) if rotated else k
        for cache, new in zip(caches["torch"], (new_k, v), strict=True):
            raw(cache).index_put_(place, raw(new.to(kinds[1])))

    def index_put() -> None:
        for cache, new in zip(caches["index_put"], ready, strict=True):
            raw(cache).index_put_(place, raw(new))

    for call in (op, composed, index_put):
        call()
    for name in ("torch", "index_put"):
        torch.testing.assert_close(caches["op"].float(), caches[name].float())
    contenders = {"op": op, "torch": composed, "index_put": index_put}
    times = time_in_turns(contenders, seconds=seconds, clock=clock())
    moved = 2 * k.numel() * (k.element_size() + caches["op"].element_size())
    return head(shape) | results(times, moved / bandwidth)


def head(shape: tuple[Any, ...]) -> dict[str, Any]:
    """What a row of the table begins with."""
    requests, tokens, heads, d, dtype, cache_dtype, rotated = shape
    return {
        "R": requests,
        "tokens": tokens,
        "heads": f"{heads}x{d}",
        "dtype": dtype,
        "cache": cache_dtype,
        "rope": "yes" if rotated else "no",
    }


def results(times: Mapping[str, Any], floor: float) -> dict[str, float]:
    """The rest of a row, from the times of the contenders and the floor in seconds."""
    us = {name: 1e6 * t.median for name, t in times.items()}
    return {
        "op us": us["op"],
        "p95 us": 1e6 * times["op"].p95,
        "torch us": us["torch"],
        "torch/op": us["torch"] / us["op"],
        "index_put us": us["index_put"],
        "index_put/op": us["index_put"] / us["op"],
        "floor us": 1e6 * floor,
    }


def main() -> None:
    parser = arguments(str(__doc__).split("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="more shapes")
    parser.add_argument(
        "--save", nargs="?", const="", help="keep the JSON in FILE or in bench/results"
    )
    options = parser.parse_args()
    bandwidth = read_bandwidth(clock=clock())
    shapes = FULL if options.full else SHORT
    rows = [measure(shape, options.seconds, options.seed, bandwidth) for shape in shapes]
    publish(
        rows,
        as_json=options.json,
        note=f"page size {PAGE}; us per call",
        save="paged_kv_cpu" if options.save == "" else options.save,
    )


if __name__ == "__main__":
    main()
