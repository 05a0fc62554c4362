# SPDX-License-Identifier: Apache-2.0
"""Argument errors: all of them at once, named, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

Case = dict[str, Any]


def problems(case: Case) -> str:
    with pytest.raises(dx.ArgumentError) as error:
        dx.markov_loop(**case)
    return str(error.value)


CHANGES: dict[str, tuple[Case, str]] = {
    "base-dtype": ({"base_logits": np.zeros((2, 3, 40))}, "base_logits: got float64"),
    "base-rank": ({"base_logits": np.zeros((2, 40), np.float32)}, "base_logits: got shape [2, 40]"),
    "base-narrow": ({"base_logits": np.zeros((2, 3, 39), np.float32)}, "base_logits: got 39"),
    "base-strides": (
        {"base_logits": np.zeros((2, 3, 80), np.float32)[..., ::2]},
        "base_logits: got strides",
    ),
    "base-none": ({"base_logits": None}, "base_logits: got None"),
    "gamma-0": ({"base_logits": np.zeros((2, 0, 40), np.float32)}, "gamma: got 0"),
    "gamma-17": ({"base_logits": np.zeros((2, 17, 40), np.float32)}, "gamma: got 17"),
    "kind": ({"w1": torch.zeros(40, 4)}, "w1: got torch on cpu, expected NumPy"),
    "w2-rows": ({"w2": np.zeros((41, 4), np.float32)}, "w2: got 41 rows"),
    "w2-rank": ({"w2": np.zeros((40, 5), np.float32)}, "w2: got shape [40, 5], expected [any, 4]"),
    "int8-scale": ({"w2": np.zeros((40, 4), np.int8)}, "w2_scale: got None"),
    "scale": ({"w2_scale": np.ones(40, np.float32)}, "w2_scale: got scales, expected None"),
    "anchor-shape": ({"anchor": [1, 2, 3]}, "anchor: got shape [3]"),
    "anchor-none": ({"anchor": None}, "anchor: got None"),
    "anchor-float": ({"anchor": [0.5, 1.0]}, "anchor: got"),
    "anchor-wide": ({"anchor": [2**31, 0]}, "anchor: got"),
    "seed-wide": ({"seed": [2**64, 0]}, "seed: got"),
    "seed-negative": ({"seed": [-1, 0]}, "seed: got"),
    "position-negative": ({"position": [-1, 0]}, "position: got [-1]"),
    "position-wide": ({"position": [0, 2**32 - 3]}, "position: got [4294967293]"),
    "temperature-small": ({"temperature": 5e-4}, "temperature: got [0.0005"),
    "temperature-negative": ({"temperature": [-1.0, 1.0]}, "temperature: got [-1.0]"),
    "temperature-nan": ({"temperature": [1.0, float("nan")]}, "temperature: got [nan]"),
    "temperature-inf": ({"temperature": float("inf")}, "temperature: got [inf"),
    "temperature-shape": ({"temperature": [1.0] * 3}, "temperature: got shape [3]"),
    "top-p": ({"top_p": [0.0, 1.5]}, "top_p: got [0.0, 1.5]"),
    "head": ({"head": "lstm"}, "head: got 'lstm'"),
    "gated-alone": ({"head": "gated"}, "hidden: got None, expected [R, gamma, d] with head gated"),
    "vanilla-weight": ({"head_weight": np.zeros((4, 4), np.float32)}, "head_weight: got float32"),
    "confidence-alone": ({"confidence_weight": np.zeros(4, np.float32)}, "hidden: got None"),
    "confidence-size": (
        {
            "confidence_weight": np.zeros(7, np.float32),
            "hidden": np.zeros((2, 3, 5), np.float32),
        },
        "confidence_weight: got 7 values, expected d + r = 9 or d = 5",
    ),
    "hidden-shape": (
        {"head": "gated", "hidden": np.zeros((2, 4, 5), np.float32)},
        "hidden: got shape [2, 4, 5]",
    ),
    "vocab": ({"vocab_size": 41}, "vocab_size: got 41"),
    "d2t-order": ({"draft_to_target": [3, 3, 4]}, "draft_to_target: got ids"),
    "d2t-range": ({"draft_to_target": [3, 39, 40]}, "draft_to_target: got ids"),
    "d2t-negative": ({"draft_to_target": [-1, 0]}, "draft_to_target: got ids"),
    "d2t-size": ({"draft_to_target": list(range(30))}, "w2: got 40 rows, expected V_d = 30"),
    "topk-support": ({"topk_support": -1}, "topk_support: got -1"),
    "topk-support-large": ({"topk_support": 1025}, "topk_support: got 1025"),
    "topk-support-float": ({"topk_support": 2.0}, "topk_support: got 2.0"),
    "uniform": ({"debug_uniform": [[2**53] * 3] * 2}, "debug_uniform: got 9007199254740992"),
    "out": (
        {"out": dx.Draft(*[np.zeros((2, 3), np.float32)] * 3, None, None, None, None, None)},
        "out.tokens: got float32",
    ),
    "backend": ({"backend": "gpu"}, "backend: got 'gpu'"),
    "cuda": ({"backend": "cuda"}, "backend: got 'cuda'"),
}


@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES)
def test_each_problem_is_named(change: Case, text: str, make: Callable[..., Case]) -> None:
    assert text in problems(make(2, 3, 40, 4) | change)


def test_all_problems_at_once(make: Callable[..., Case]) -> None:
    case = make(2, 3, 40, 4)
    case |= {"temperature": -1.0, "position": [-3, 0], "head": "gated", "top_p": 2.0, "seed": 1.5}
    text = problems(case)
    assert text.startswith("markov_loop: ")
    for name in ("temperature", "position", "hidden", "head_weight", "head_bias", "top_p", "seed"):
        assert f"\n  {name}: got" in text, name


def test_nothing_is_written(make: Callable[..., Case]) -> None:
    case = make(2, 3, 40, 4)
    out = dx.markov_loop(**case)
    for x in (out.tokens, out.logit, out.lse, out.status):
        x[...] = 77
    problems(case | {"out": out, "temperature": -1.0})
    assert all((x == 77).all() for x in (out.tokens, out.logit, out.lse, out.status))


def test_scalars_lists_and_other_integers(make: Callable[..., Case]) -> None:
    case = make(2, 3, 40, 4)
    case["seed"] = np.array([5, 5], np.uint64)
    case["position"] = np.array([9, 9])
    want = dx.markov_loop(**case, temperature=np.float32([0.5, 0.5]))
    case |= {"seed": 5, "position": 9, "anchor": case["anchor"].astype(np.int64)}
    got = dx.markov_loop(**case, temperature=0.5, active=[True, True])
    np.testing.assert_array_equal(got.tokens, want.tokens)
    torch_case = {
        k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()
    }
    got = dx.markov_loop(**torch_case, temperature=0.5)
    assert isinstance(got.tokens, torch.Tensor)
    np.testing.assert_array_equal(got.tokens.numpy(), want.tokens)


def test_vocabulary_smaller_than_the_tables(make: Callable[..., Case]) -> None:
    case = make(2, 3, 40, 4)
    want = dx.markov_loop(**case, temperature=1.0)
    for name in ("w1", "w2"):
        case[name] = np.concatenate([case[name], np.full((8, 4), np.nan, np.float32)])
    case["base_logits"] = np.pad(case["base_logits"], ((0, 0), (0, 0), (0, 8)))
    got = dx.markov_loop(**case, vocab_size=40, temperature=1.0)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert not got.status.any()
