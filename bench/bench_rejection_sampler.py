# SPDX-License-Identifier: Apache-2.0
"""Time rejection_sample against the same verification composed of torch operations.

    python bench/bench_rejection_sampler.py [--json] [--seconds S] [--seed N] [--full]

Both verify gamma drafts per request under the rule `token` with a stored law, in the same run, in
turns; milliseconds are medians over the run, per call.

* op: dspark_ext.rejection_sample with preallocated results; also returns both log-probabilities
* torch: softmax of target and draft, gather, compare, residual, multinomial; no log-probabilities.
  Truncated rows add a top-k, or a sort and a cumulative sum
* floor: the target rows that were visited, read once at the bandwidth a sum over a large array
  reaches in this run

Drafts are drawn from the stored law, which is near the target's; `rows` is the mean number of
target rows a request visited. The operator stops there, the composition works on all gamma + 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib.report import arguments, publish
from lib.timing import read_bandwidth, time_in_turns

import dspark_ext as dx

GAMMA = 7
TEMPERATURE = 0.8
SHORT = [
    # R, V, dtype, top_k, top_p
    (1, 49_152, torch.float32, 0, 1.0),
    (1, 151_936, torch.bfloat16, 0, 1.0),
    (32, 49_152, torch.float32, 0, 1.0),
    (32, 151_936, torch.bfloat16, 0, 1.0),
]
FULL = [
    *SHORT,
    (8, 151_936, torch.float16, 0, 1.0),
    (1, 151_936, torch.bfloat16, 50, 1.0),
    (1, 151_936, torch.bfloat16, 0, 0.95),
    (8, 151_936, torch.bfloat16, 50, 1.0),
    (8, 151_936, torch.bfloat16, 0, 0.95),
    (8, 262_144, torch.bfloat16, 0, 1.0),
]


def problem(requests: int, vocab: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Logits with the spread of a language model's: most mass on few ids."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(requests, GAMMA + 1, vocab, generator=generator).mul_(2.5)
    lifted = torch.randint(vocab, (requests, GAMMA + 1, 20), generator=generator)
    target.scatter_(2, lifted, 10 + 3 * torch.randn(lifted.shape, generator=generator))
    noise = torch.randn(requests, GAMMA, vocab, generator=generator).mul_(0.3)
    draft = (target[:, :GAMMA] + noise).to(dtype)
    law = torch.softmax(draft.float() / TEMPERATURE, -1)
    tokens = torch.multinomial(law.flatten(0, 1), 1, generator=generator).view(requests, GAMMA)
    return {
        "target_logits": target.to(dtype).flatten(0, 1),
        "draft_tokens": tokens.int(),
        "draft_len": torch.full((requests,), GAMMA, dtype=torch.int32),
        "cu_seqlens": torch.arange(requests + 1, dtype=torch.int32) * (GAMMA + 1),
        "seed": torch.arange(requests),
        "position": torch.full((requests,), 1000),
        "temperature": torch.full((requests,), TEMPERATURE),
        "draft_logits": draft,
        "draft_logit": draft.gather(2, tokens[..., None])[..., 0].float(),
        "draft_lse": torch.logsumexp(draft.float() / TEMPERATURE, -1),
    }


def truncate(z: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    if top_k:
        smallest = z.topk(top_k, dim=-1).values[..., -1:]
        z = z.masked_fill(z < smallest, -torch.inf)
    if top_p < 1:
        values, order = z.sort(dim=-1, descending=True)
        mass = torch.softmax(values, -1)
        out = mass.cumsum(-1) - mass >= top_p
        z = z.masked_fill(out.scatter(-1, order, out), -torch.inf)
    return z


def composed(p: dict[str, Any], top_k: int, top_p: float) -> Callable[[], torch.Tensor]:
    requests, gamma, vocab = p["draft_logits"].shape
    tokens = p["draft_tokens"].long()
    rows = torch.arange(requests)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        z = p["target_logits"].view(requests, gamma + 1, vocab).float() / TEMPERATURE
        law = torch.softmax(truncate(z, top_k, top_p), -1)
        draft = torch.softmax(p["draft_logits"].float() / TEMPERATURE, -1)
        px = law[:, :gamma].gather(2, tokens[..., None])[..., 0]
        qx = draft.gather(2, tokens[..., None])[..., 0]
        accepted = (torch.rand(requests, gamma) < px / qx).int().cumprod(1).sum(1)
        last = law[rows, accepted]
        rejected = accepted < gamma
        q = draft[rows, accepted.clamp(max=gamma - 1)]
        residual = torch.where(rejected[:, None], (last - q).clamp(min=0), last)
        return torch.multinomial(residual, 1)

    return run


def measure(row: tuple[Any, ...], seconds: float, seed: int) -> dict[str, Any]:
    requests, vocab, dtype, top_k, top_p = row
    p = problem(requests, vocab, dtype, seed)
    law: dict[str, torch.Tensor] = {}
    law |= {"top_k": torch.full((requests,), top_k, dtype=torch.int32)} if top_k else {}
    law |= {"top_p": torch.full((requests,), top_p)} if top_p < 1 else {}
    out = dx.rejection_sample(**p, **law)
    visited = int(out.num_emitted.sum())
    times = time_in_turns(
        {
            "op": lambda: dx.rejection_sample(**p, **law, out=out),
            "torch": composed(p, top_k, top_p),
        },
        seconds=seconds,
    )
    size = p["target_logits"].element_size()
    floor = visited * vocab * size / read_bandwidth()
    op, peer = times["op"].median, times["torch"].median
    return {
        "R": requests,
        "V": vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "law": f"top-k {top_k}" if top_k else f"top-p {top_p}" if top_p < 1 else "full",
        "rows": visited / requests,
        "op ms": 1e3 * op,
        "p95 ms": 1e3 * times["op"].p95,
        "torch ms": 1e3 * peer,
        "torch/op": peer / op,
        "floor ms": 1e3 * floor,
        "op/floor": op / floor if floor else np.nan,
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
