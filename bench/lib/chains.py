# SPDX-License-Identifier: Apache-2.0
"""The Markov loop as one writes it in torch: the peers that the operator is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["DTYPES", "composed", "problem", "race"]

DTYPES = ("float32", "bfloat16", "float16", "int8")


def problem(
    requests: int,
    vocab: int,
    rank: int,
    dtype: str,
    seed: int,
    *,
    gamma: int = 7,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return random arguments of ``markov_loop``; an int8 W2 comes with its row scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    kind = torch.bfloat16 if dtype == "int8" else getattr(torch, dtype)
    w2 = normal(vocab, rank) / rank**0.5
    base = torch.stack([2 * normal(gamma, vocab).to(kind) for _ in range(requests)])
    anchor = torch.randint(vocab, (requests,), generator=generator, device=device)
    made: dict[str, Any] = {
        "base_logits": base,
        "w1": normal(vocab, rank).to(kind),
        "w2": w2.to(kind),
        "anchor": anchor.to(torch.int32),
        "seed": torch.arange(requests, device=device),
        "position": torch.full((requests,), 1000, device=device),
    }
    if dtype == "int8":
        scale = w2.abs().amax(1) / 127
        made["w2"] = torch.round(w2 / scale[:, None]).to(torch.int8)
        made["w2_scale"] = scale
    return made


def _weights(p: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, W1 and W2 of 16 or 32 bits: torch has no product for int8 rows with scales."""
    base, w1 = p["base_logits"], p["w1"]
    w2 = p["w2"] if "w2_scale" not in p else (p["w2"] * p["w2_scale"][:, None]).to(w1.dtype)
    return base, w1, w2


def composed(p: dict[str, Any], temperature: float) -> Callable[[], torch.Tensor]:
    """Embedding, linear, add, softmax, multinomial and the token's log-probability."""
    base, w1, w2 = _weights(p)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        previous = p["anchor"].long()
        tokens = []
        for k in range(base.shape[1]):
            z = base[:, k] + F.linear(F.embedding(previous, w1), w2)
            law = torch.softmax(z.float() / temperature, dim=-1)
            previous = torch.multinomial(law, 1)[:, 0]
            law.gather(1, previous[:, None]).log()
            tokens.append(previous)
        return torch.stack(tokens, 1)

    return run


def race(p: dict[str, Any], temperature: float) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The same law by a race of exponentials, which engines prefer on a GPU: no cumulative sum.

    With ``temperature`` 0 it is the argmax. Captured into a graph it is what :mod:`lib.roofline`
    calls the stock chain.
    """
    base, w1, w2 = _weights(p)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        previous = p["anchor"].long()
        tokens, logs = [], []
        for k in range(base.shape[1]):
            z = (base[:, k] + F.linear(F.embedding(previous, w1), w2)).float()
            if temperature == 0:
                previous = z.argmax(-1)
            else:
                z = z / temperature
                noise = torch.empty_like(z).exponential_()
                previous = (z - noise.log()).argmax(-1)
            logs.append(z.gather(1, previous[:, None])[:, 0] - z.logsumexp(-1))
            tokens.append(previous)
        return torch.stack(tokens, 1), torch.stack(logs, 1)

    return run
