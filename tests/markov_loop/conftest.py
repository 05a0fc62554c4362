# SPDX-License-Identifier: Apache-2.0
"""Random but exactly representable problems for the Markov loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Case = dict[str, Any]


def dyadic(rng: np.random.Generator, shape: tuple[int, ...], limit: float) -> np.ndarray:
    """Multiples of 2^-4 in [-limit, limit]: products of two are multiples of 2^-8, and sums of
    a few hundred of those are exact in float32, in any order."""
    n = int(limit * 16)
    return (rng.integers(-n, n + 1, shape) / 16).astype(np.float32)


def build(
    rng: np.random.Generator,
    requests: int = 3,
    gamma: int = 4,
    vocab: int = 300,
    rank: int = 8,
    *,
    head: str = "vanilla",
    hidden: int = 0,
    confidence: bool = False,
) -> Case:
    """Keyword arguments of one call of ``markov_loop``."""
    d = hidden or (5 if head != "vanilla" or confidence else 0)
    case: Case = {
        "base_logits": dyadic(rng, (requests, gamma, vocab), 4),
        "w1": dyadic(rng, (vocab, rank), 1),
        "w2": dyadic(rng, (vocab, rank), 1),
        "anchor": rng.integers(0, vocab, requests).astype(np.int32),
        "seed": rng.integers(0, 2**63, requests).astype(np.uint64),
        "position": rng.integers(0, 2**31, requests),
        "head": head,
    }
    if d:
        case["hidden"] = dyadic(rng, (requests, gamma, d), 2)
    if head != "vanilla":
        outputs, inputs = (rank, d + rank) if head == "gated" else (3 * rank, 2 * rank + d)
        case["head_weight"] = dyadic(rng, (outputs, inputs), 1)
        case["head_bias"] = dyadic(rng, (outputs,), 1)
    if confidence:
        case["confidence_weight"] = dyadic(rng, (d + rank,), 1)
        case["confidence_bias"] = 0.25
    return case


@pytest.fixture
def make(rng: np.random.Generator) -> Callable[..., Case]:
    """``make(requests, gamma, vocab, rank, head=..., ...)``: arguments of one call."""

    def factory(*args: Any, **kwargs: Any) -> Case:
        return build(rng, *args, **kwargs)

    return factory
