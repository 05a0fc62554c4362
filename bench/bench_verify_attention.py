# SPDX-License-Identifier: Apache-2.0
"""Time verify_attention against torch's attention on dense, contiguous keys and values.

    python bench/bench_verify_attention.py [--json] [--seconds S] [--seed N] [--full]

All contenders answer the same queries in the same run, in turns; microseconds are medians per
call, Python included. Before anything is timed the answers are compared.

* op: dspark_ext.verify_attention over a shuffled page table, ragged rows
* sdpa: scaled_dot_product_attention with a causal mask on dense [R, Hkv, L, D], padded to the
  longest request, query heads of a group folded into the rows so that keys are not repeated
* gather: the same, after index_select has brought the pages together, as torch alone would have to
* floor: keys and values of the batch read once, at the bandwidth a sum over a large array reaches

With one row and short contexts the call itself is the cost; with several rows the products are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib.report import arguments, publish
from lib.timing import read_bandwidth, time_in_turns

import dspark_ext as dx

PAGE = 16
SHORT = [
    # R, rows, context, Hq, Hkv, D, dtype: SmolLM2-135M has 9 / 3 heads of 64
    (1, 1, 50, 9, 3, 64, "float32"),
    (1, 1, 300, 9, 3, 64, "float32"),
    (1, 8, 300, 9, 3, 64, "float32"),
    (1, 8, 1000, 9, 3, 64, "float32"),
    (8, 1, 300, 9, 3, 64, "float32"),
    (8, 6, 300, 9, 3, 64, "float32"),
    (1, 1, 300, 9, 3, 64, "bfloat16"),
    (1, 8, 300, 9, 3, 64, "bfloat16"),
    (8, 6, 300, 9, 3, 64, "bfloat16"),
]
FULL = [
    *SHORT,
    (8, 6, 1000, 9, 3, 64, "bfloat16"),
    (1, 8, 4000, 32, 8, 128, "bfloat16"),
    (8, 4, 2000, 32, 8, 128, "bfloat16"),
    (1, 512, 512, 9, 3, 64, "float32"),
    (32, 8, 500, 8, 8, 64, "float32"),
]


def problem(shape: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """Ragged contexts in [L / 2, L], the last one of length L; pages in random order."""
    requests, rows, context, heads, kv_heads, d, dtype = shape
    g = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    length = torch.randint(context // 2, context + 1, (requests,), generator=g).clamp(min=rows)
    length[-1] = context
    columns = -(-context // PAGE)
    pages = requests * columns
    cache = torch.randn(2, pages, PAGE, kv_heads, d, generator=g).to(kind)
    table = torch.randperm(pages, generator=g).int().view(requests, columns)
    q = torch.randn(requests, rows, heads, d, generator=g).to(kind)
    dense = cache[:, table.long()].reshape(2, requests, columns * PAGE, kv_heads, d)
    dense = dense[:, :, :context].transpose(2, 3).contiguous()
    # Folded rows run over the heads of a group first, so the mask of the tokens repeats.
    position = (length[:, None] - rows + torch.arange(rows))[:, :, None]
    mask = torch.arange(context) <= position  # [R, rows, L]
    group = heads // kv_heads
    return {
        "q": q, "length": length.int(), "table": table, "cache": cache, "dense": dense,
        "cu": torch.arange(requests + 1, dtype=torch.int32) * rows,
        "folded": q.view(requests, rows, kv_heads, group, d).permute(0, 2, 3, 1, 4)
                   .reshape(requests, kv_heads, group * rows, d).contiguous(),
        "mask": mask.repeat(1, group, 1)[:, None],
    }  # fmt: skip


def unfold(out: torch.Tensor, p: dict[str, Any]) -> torch.Tensor:
    """[R, Hkv, group * rows, D] back to [R, rows, Hq, D]."""
    requests, rows, heads, d = p["q"].shape
    kv_heads = p["cache"].shape[3]
    out = out.view(requests, kv_heads, heads // kv_heads, rows, d)
    return out.permute(0, 3, 1, 2, 4).reshape(requests, rows, heads, d)


def measure(shape: tuple[Any, ...], seconds: float, seed: int, bandwidth: float) -> dict[str, Any]:
    requests, rows, context, heads, kv_heads, d, dtype = shape
    p = problem(shape, seed)
    q, k_cache, v_cache = p["q"].reshape(-1, heads, d), *p["cache"]
    out = torch.empty_like(q)

    def op() -> torch.Tensor:
        return dx.verify_attention(
            q, k_cache, v_cache, page_table=p["table"], kv_len=p["length"], cu_seqlens=p["cu"],
            max_q_len=rows, out=out,
        )  # fmt: skip

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(p["folded"], *p["dense"], attn_mask=p["mask"])

    def gather() -> torch.Tensor:
        flat = p["table"].flatten().long()
        k, v = (
            c.index_select(0, flat).view(requests, -1, kv_heads, d).transpose(1, 2)[:, :, :context]
            for c in (k_cache, v_cache)
        )
        return F.scaled_dot_product_attention(p["folded"], k, v, attn_mask=p["mask"])

    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for peer in (sdpa, gather):
        torch.testing.assert_close(
            op().view(requests, rows, heads, d), unfold(peer(), p), atol=tolerance, rtol=tolerance
        )
    times = time_in_turns({"op": op, "sdpa": sdpa, "gather": gather}, seconds=seconds)
    moved = 2 * int(p["length"].sum()) * kv_heads * d * k_cache.element_size()
    us = {name: 1e6 * t.median for name, t in times.items()}
    work = 4 * heads * d * int((p["length"] * rows).sum())
    return {
        "R": requests,
        "rows": rows,
        "L": context,
        "heads": f"{heads}/{kv_heads}x{d}",
        "dtype": dtype,
        "op us": us["op"],
        "p95 us": 1e6 * times["op"].p95,
        "sdpa us": us["sdpa"],
        "sdpa/op": us["sdpa"] / us["op"],
        "gather us": us["gather"],
        "gather/op": us["gather"] / us["op"],
        "GFLOP/s": work / times["op"].median / 1e9,
        "floor us": 1e6 * moved / bandwidth,
    }


def main() -> None:
    parser = arguments(str(__doc__).split("\n\n")[0])
    parser.add_argument("--full", action="store_true", help="more shapes")
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    shapes = FULL if options.full else SHORT
    rows = [measure(shape, options.seconds, options.seed, bandwidth) for shape in shapes]
    publish(rows, as_json=options.json, note=f"causal, page size {PAGE}; us per call")


if __name__ == "__main__":
    main()
