# SPDX-License-Identifier: Apache-2.0
"""Random but exactly representable problems for the Markov loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

Case = dict[str, Any]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


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


def tensor_case(
    rng: np.random.Generator,
    requests: int,
    gamma: int,
    vocab: int,
    rank: int,
    *,
    dtype: str = "f32",
    head: str = "vanilla",
    int8: bool = False,
    padding: int = 0,
) -> Case:
    """Tensors of one call, with a confidence logit; U has `padding` more columns of NaN."""
    kind, d = DTYPES[dtype], 11

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, scale, shape)).float()

    w2: torch.Tensor = normal(vocab, rank, scale=0.4)
    case: Case = {
        "base_logits": normal(requests, gamma, vocab + padding, scale=2).to(kind),
        "w1": normal(vocab, rank).to(kind),
        "w2": w2.to(kind),
        "vocab_size": vocab,
        "anchor": torch.from_numpy(rng.integers(0, vocab, requests)).int(),
        "seed": torch.from_numpy(rng.integers(0, 2**63, requests)),
        "position": torch.from_numpy(rng.integers(0, 2**31, requests)),
        "temperature": np.resize(np.float32([0.8, 0, 1]), requests),
        "hidden": normal(requests, gamma, d),
        "confidence_weight": normal(d + rank),
        "head": head,
        "store_logits": True,
    }
    case["base_logits"][..., vocab:] = np.nan
    if int8:
        case["w2"], case["w2_scale"] = dx.quantize_rows(w2)
    if head != "vanilla":
        outputs, inputs = (rank, d + rank) if head == "gated" else (3 * rank, 2 * rank + d)
        case["head_weight"] = normal(outputs, inputs, scale=0.3)
        case["head_bias"] = normal(outputs, scale=0.3)
    return case


def same_bits(case: Case, backend: str, near: float = 0, **extra: Any) -> dx.Draft:
    """Every field of the kernels' answer has the CPU backend's bits.

    ``near``: tolerance of the lse and the confidence logit, where a kernel adds in another order.
    """
    want = dx.markov_loop(**case, **extra)
    there = {
        k: v.cuda() if backend == "cuda" and isinstance(v, torch.Tensor) else v
        for k, v in case.items()
    }
    got = dx.markov_loop(**there, **extra, backend=backend)
    for name, value in vars(want).items():
        answer = getattr(got, name)
        assert (answer is None) == (value is None), name
        if value is not None:
            pair = answer.cpu().float().numpy(), value.float().numpy()
            if name in ("lse", "confidence_logit") and near:
                np.testing.assert_allclose(*pair, rtol=near, atol=near, err_msg=name)
            else:
                np.testing.assert_array_equal(*pair, name)
    return want


@pytest.fixture
def tensors(rng: np.random.Generator) -> Callable[..., Case]:
    """``tensors(requests, gamma, vocab, rank, dtype=..., ...)``: random, not on a grid."""

    def factory(*args: Any, **kwargs: Any) -> Case:
        return tensor_case(rng, *args, **kwargs)

    return factory


@pytest.fixture
def compare() -> Callable[..., dx.Draft]:
    """``compare(case, backend, near=0, **arguments)``; see :func:`same_bits`."""
    return same_bits
