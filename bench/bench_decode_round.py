# SPDX-License-Identifier: Apache-2.0
"""Time what decode_round costs beside its models.

    python bench/bench_decode_round.py [--json] [--rounds N] [--seed S]

The target and the drafter are stand-ins that return arrays made before, so that all the time is the
round's own: operators, bookkeeping, Python. Medians over rounds, in microseconds.

* plain: no drafter, one row a request
* greedy, sampled: all drafts verified at T = 0, and at T = 1 with stored draft logits
* causal, two_phase: greedy, with a cost table

At V = 49,152 the operators read 0.2 MB a row of target logits and 2.1 MB of W2 a draft step (rank
64, 16,384 columns, bfloat16): these two are the floor of a round, the rest is overhead.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch

import dspark_ext as dx
from dspark_ext import _C

VOCAB, DRAFT_VOCAB, RANK, HIDDEN, GAMMA = 49_152, 16_384, 64, 576, 7
REQUESTS = (1, 8, 32)
VARIANTS = ("plain", "greedy", "sampled", "causal", "two_phase")


class Models:
    """Target and drafter in one: rows of logits and blocks that were drawn before the clock."""

    gamma = GAMMA

    def __init__(self, requests: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        rows = requests * (1 + GAMMA)
        self.logits, self.features = normal(rows, VOCAB) * 3, normal(rows, 3 * HIDDEN)
        self.base, self.hidden = (
            normal(requests, GAMMA, DRAFT_VOCAB),
            normal(requests, GAMMA, HIDDEN),
        )
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values.int()
        self.head = dx.DraftHead(
            w1=normal(VOCAB, RANK).bfloat16(),
            w2=normal(DRAFT_VOCAB, RANK).bfloat16(),
            confidence_weight=normal(HIDDEN + RANK) * 0.1,
            draft_to_target=ids,
        )

    def forward(self, token_ids: Any, *_: Any, logit_rows: Any = None) -> tuple[Any, Any]:
        """Rows of the logits made before."""
        rows = len(token_ids) if logit_rows is None else len(logit_rows)
        return self.logits[:rows], self.features[: len(token_ids)]

    def draft(self, *_: Any) -> tuple[Any, Any]:
        """Return the blocks made before."""
        return self.base, self.hidden


def scheduler(variant: str, requests: int) -> dx.Scheduler:
    cost = dx.CostTable.from_points([requests, 8 * requests], [10.0, 20.0])
    if variant in ("causal", "two_phase"):
        return dx.Scheduler(variant, cost=cost, skip=False)
    return dx.Scheduler()


def run(variant: str, requests: int, rounds: int, seed: int) -> dict[str, float]:
    """Median microseconds of a round, whole and by phase."""
    models = Models(requests, seed)
    state = dx.RoundState.create(requests, GAMMA, max_len=64 + rounds * 8, framework="torch")
    temperature = 1.0 if variant == "sampled" else 0.0
    for r in range(requests):
        params = dx.SamplingParams(temperature, seed=seed + r, max_new_tokens=rounds * 8)
        state.add([1, 2, 3], params)
    models.features = models.features.repeat(4, 1)  # prefill has more rows than a round
    dx.prefill(models, state)
    policy = scheduler(variant, requests)
    taken: dict[str, list[float]] = {"round": [], "draft": [], "schedule": [], "verify": [],
                                     "other": []}  # fmt: skip
    for i in range(rounds):
        start = time.perf_counter()
        got = dx.decode_round(models, None if variant == "plain" else models, state, policy)
        elapsed = time.perf_counter() - start
        if i >= 3:
            taken["round"].append(1e6 * elapsed)
            for phase, seconds in got.seconds.items():
                taken[phase].append(1e6 * seconds)
    return {name: statistics.median(us) for name, us in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decode_round without its models.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the random models (default 0)")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for requests in args.requests:
        for variant in VARIANTS:
            us = run(variant, requests, args.rounds, args.seed)
            rows.append({"requests": requests, "variant": variant,
                         **{f"{name}_us": round(t, 1) for name, t in us.items()}})  # fmt: skip
            if not args.json:
                if len(rows) == 1:
                    print("  ".join(f"{name:>12}" for name in rows[0]))
                print("  ".join(f"{value!s:>12}" for value in rows[-1].values()))
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "level": _C.cpu_level(),
            "torch": torch.__version__,
            "dspark": dx.__version__,
        }
        print(json.dumps({"bench": "decode_round", "machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
