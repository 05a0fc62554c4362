# SPDX-License-Identifier: Apache-2.0
"""Time the products of a small decoder at few rows: ours, torch's linear, torch's packed bfloat16.

    python bench/bench_linear.py [--json] [--seconds S] [--seed S]

The four products of a SmolLM2-135M layer, ten layers with weights of their own so that no cache
holds them. The floor is reading the weights once; what decides whether speculation pays is how
little 8 rows cost more than 1 (column `x 1 row`).
"""

from __future__ import annotations

import torch
from lib.report import arguments, publish
from lib.timing import time_in_turns
from torch.nn import functional as F

from dspark.targets.linear import Linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 10
ROWS = (1, 4, 8, 16, 64)


def main() -> int:
    """Print one row a contender and row count."""
    args = arguments(__doc__ or "").parse_args()
    torch.manual_seed(args.seed)
    weights = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    ours = [Linear(w) for w in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise
    one: dict[str, float] = {}
    table = []
    for rows in ROWS:
        x = {n: torch.randn(rows, n).bfloat16() for _, n in SHAPES}
        inputs = [x[w.shape[1]] for w in weights]
        with torch.inference_mode():
            timed = time_in_turns(
                {
                    "dspark": lambda i=inputs: [f(v) for f, v in zip(ours, i, strict=True)],
                    "torch packed": lambda i=inputs: [
                        pointwise(v, p, None, "none", [], "")
                        for p, v in zip(packed, i, strict=True)
                    ],
                    "torch linear": lambda i=inputs: [
                        F.linear(v, w) for w, v in zip(weights, i, strict=True)
                    ],
                },
                seconds=args.seconds,
            )
        for name, sample in timed.items():
            one.setdefault(name, sample.median)
            table.append(
                {
                    "rows": rows,
                    "product": name,
                    "ms": round(1e3 * sample.median, 2),
                    "x dspark": round(sample.median / timed["dspark"].median, 2),
                    "x 1 row": round(sample.median / one[name], 2),
                }
            )
    publish(table, as_json=args.json, note="bfloat16 weights, medians of alternating runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
