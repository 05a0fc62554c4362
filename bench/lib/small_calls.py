# SPDX-License-Identifier: Apache-2.0
"""One small call of every operator that has CUDA kernels, for tools that slow a kernel down a lot.

    compute-sanitizer --tool racecheck python bench/lib/small_calls.py

Shapes are awkward on purpose: a vocabulary that is no multiple of a segment, padded columns, an
inactive request, greedy and sampled rows beside each other, every head.
"""

from __future__ import annotations

from typing import Any

import torch

import dspark_ext as dx

R, GAMMA, V, PADDED, RANK, HIDDEN = 3, 2, 1000, 1007, 64, 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def arguments(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Random arguments of markov_loop."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    return {
        "base_logits": normal(R, GAMMA, PADDED).to(dtype),
        "w1": normal(V, RANK).to(dtype),
        "w2": (normal(V, RANK) / 8).to(dtype),
        "anchor": torch.tensor([1, 2, 999], dtype=torch.int32, device=device),
        "seed": torch.tensor([1, 2, 3], device=device),
        "position": torch.tensor([10, 11, 12], device=device),
        "temperature": torch.tensor([0.0, 0.8, 1.0], device=device),
        "active": torch.tensor([1, 1, 0], dtype=torch.uint8, device=device),
    }


def heads(device: str) -> list[dict[str, Any]]:
    """The further arguments of each head, with a confidence logit."""
    generator = torch.Generator(device).manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = {
        "hidden": normal(R, GAMMA, HIDDEN),
        "confidence_weight": normal(HIDDEN + RANK),
        "confidence_bias": 0.5,
    }
    gated = {"head_weight": normal(RANK, HIDDEN + RANK), "head_bias": normal(RANK)}
    rnn = {"head_weight": normal(3 * RANK, 2 * RANK + HIDDEN), "head_bias": normal(3 * RANK)}
    return [hidden, hidden | gated | {"head": "gated"}, hidden | rnn | {"head": "rnn"}]


def int8(given: dict[str, Any]) -> dict[str, Any]:
    """The same call with an int8 W2."""
    w2 = given["w2"].float()
    scale = w2.abs().amax(1) / 127
    return given | {"w2": (w2 / scale[:, None]).round().to(torch.int8), "w2_scale": scale}


def verifications(device: str) -> list[dict[str, Any]]:
    """Arguments of rejection_sample: plain, truncated, lists; each rule in one batch."""
    generator = torch.Generator(device).manual_seed(3)
    rows = torch.randn(R * (GAMMA + 1), PADDED, generator=generator, device=device).bfloat16()
    law = torch.randn(R, GAMMA, V, generator=generator, device=device)
    drafts = law.argmax(-1).int()
    rule = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    plain = {
        "target_logits": rows,
        "draft_tokens": drafts,
        "draft_len": torch.full((R,), GAMMA, dtype=torch.int32, device=device),
        "cu_seqlens": torch.arange(R + 1, dtype=torch.int32, device=device) * (GAMMA + 1),
        "seed": torch.arange(R, device=device),
        "position": torch.arange(R, device=device),
        "temperature": torch.tensor([1.0, 0.7, 1.3], device=device),
        "rule": rule,
        "vocab_size": V,
        "draft_logits": law,
        "draft_logit": law.gather(-1, drafts.long()[..., None])[..., 0],
        "draft_lse": law.logsumexp(-1),
    }
    cut = {
        "top_k": torch.tensor([0, 30, 5], dtype=torch.int32, device=device),
        "top_p": torch.tensor([0.9, 1.0, 0.5], device=device),
        "repetition_penalty": torch.tensor([1.0, 1.2, 1.0], device=device),
        "top_logprobs": 5,
    }
    return [plain, plain | cut]


def attention(device: str) -> int:
    """Shared and whole tiles of each kernel of verify_attention; returns the number of calls."""
    generator = torch.Generator(device).manual_seed(3)
    kinds = [
        (torch.float32, torch.float32, 12),
        (torch.bfloat16, torch.bfloat16, 64),
        (torch.float16, torch.float16, 256),
        (torch.bfloat16, torch.float8_e4m3fn, 128),
    ]
    table = torch.randperm(100, generator=generator, device=device).int().view(2, 50)
    lengths = torch.tensor([777, 90], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 5, 7], dtype=torch.int32, device=device)
    for dtype, cache, d in kinds:
        q, k, v = (
            torch.randn(*shape, d, generator=generator, device=device).to(kind)
            for shape, kind in (((7, 14), dtype), ((100, 16, 2), cache), ((100, 16, 2), cache))
        )
        for invariant in (False, True):
            out = dx.verify_attention(
                q, k, v, page_table=table, kv_len=lengths, cu_seqlens=bounds, max_q_len=5,
                window=600, batch_invariant=invariant,
            )  # fmt: skip
            assert bool(out.isfinite().all())
    return 2 * len(kinds)


def main() -> None:
    """Call each; a request that the backend does not serve is named."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = [arguments(dtype, device) for dtype in DTYPES]
    calls += [arguments(torch.bfloat16, device) | more for more in heads(device)]
    calls += [int8(calls[0]), calls[0] | {"topk_support": 16}]
    served = 0
    for given in calls:
        try:
            draft = dx.markov_loop(**given)
        except NotImplementedError as error:
            print(f"not served: {' '.join(str(error).split())}")
            continue
        served += 1
        assert bool((draft.tokens[:2] >= 0).all()) and bool((draft.tokens[:2] < V).all())
        if draft.confidence_logit is not None:
            dx.confidence(draft.confidence_logit[:2].contiguous())
    for given in verifications(device):
        tokens = dx.rejection_sample(**given).tokens[:, 0]
        assert bool((tokens >= 0).all()) and bool((tokens < V).all())
    calls = f"{served} calls of markov_loop, 2 of rejection_sample"
    print(f"{calls}, {attention(device)} of verify_attention on {device}")


if __name__ == "__main__":
    main()
