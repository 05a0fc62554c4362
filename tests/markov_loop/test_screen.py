# SPDX-License-Identifier: Apache-2.0
"""A greedy call screened by the bytes of W2: the tokens of the bf16 W2, all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import _backend

Case = dict[str, Any]


def screened(case: Case) -> Case:
    bytes8, scale = dx.quantize_rows(case["w2"])
    return case | {"w2_screen": bytes8, "screen_scale": scale}


@pytest.fixture
def greedy(tensors: Callable[..., Case]) -> Callable[..., Case]:
    """A bf16 problem without temperature and stored logits."""

    def factory(*args: Any, **kwargs: Any) -> Case:
        case = tensors(*args, dtype="bf16", **kwargs)
        return {k: v for k, v in case.items() if k not in ("temperature", "store_logits")}

    return factory


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_tokens_and_logits_are_those_of_w2(
    head: str, name: str, greedy: Callable[..., Case]
) -> None:
    case = greedy(5, 4, 700, 32, head=head)
    want = dx.markov_loop(**case, backend=name)
    got = dx.markov_loop(**screened(case), temperature=[0.0] * 5, backend=name)
    assert got.lse is None and got.logits is None
    for field in ("tokens", "logit", "confidence_logit", "status"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field


CHANGES: dict[str, tuple[Case, str]] = {
    "alone": ({"screen_scale": None}, "w2_screen, screen_scale: got one of them"),
    "sampled": ({"temperature": 1.0}, "w2_screen: got temperature [1.0"),
    "logits": ({"store_logits": True}, "w2_screen: got store_logits"),
    "support": ({"topk_support": 4}, "w2_screen: got topk_support"),
    "dtype": ({"w2": torch.zeros(90, 16)}, "w2_screen: got bytes for a float32 w2"),
    "rows": ({"w2_screen": torch.zeros(89, 16, dtype=torch.int8)}, "w2_screen: got 89 rows"),
    "scales": ({"screen_scale": torch.zeros(5)}, "screen_scale: got 5 rows"),
    "rank": ({"w2_screen": torch.zeros(90, 8, dtype=torch.int8)}, "w2_screen: got shape [90, 8]"),
}


@pytest.mark.parametrize(("change", "text"), CHANGES.values(), ids=CHANGES)
def test_each_problem_is_named(change: Case, text: str, greedy: Callable[..., Case]) -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.markov_loop(**screened(greedy(2, 2, 90, 16)) | change)
    assert text in str(error.value)


def test_the_c_api_wants_an_lse_or_a_screen(greedy: Callable[..., Case]) -> None:
    seen: list[Any] = []
    case = screened(greedy(1, 1, 90, 16))
    original = _backend.run
    try:
        _backend.run = lambda family, p, *rest: seen.append(p) or original(family, p, *rest)
        dx.markov_loop(**case)
    finally:
        _backend.run = original
    p = seen[0]
    p.screen_scale = 0
    with pytest.raises(ValueError, match="screen_scale: got one of them"):
        _backend.run("markov_loop", p, "cpu", case["base_logits"])
    p.w2_screen = 0
    with pytest.raises(ValueError, match="lse: got NULL without w2_screen"):
        _backend.run("markov_loop", p, "cpu", case["base_logits"])
    assert np.isfinite(float(case["base_logits"].float().sum()))
