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


KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
KERNEL = pytest.mark.parametrize("backend", KERNELS, indirect=True)


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dx.Draft]:
    """``agree(case, backend)``: the screened answer has the bits of the tensor-core source."""

    def check(case: Case, backend: str) -> dx.Draft:
        if backend == "cuda":
            case = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        got = dx.markov_loop(**screened(case), backend=backend)
        monkeypatch.setenv("DSPARK_MARKOV_LOOP_SOURCE", "mma")
        want = dx.markov_loop(**case, backend=backend)
        monkeypatch.delenv("DSPARK_MARKOV_LOOP_SOURCE")
        assert got.lse is None
        for field in ("tokens", "logit", "status"):
            a, b = getattr(got, field).cpu().numpy(), getattr(want, field).cpu().numpy()
            np.testing.assert_array_equal(a, b, field)
        return want

    return check


@KERNEL
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("base", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("requests", "vocab", "rank"),
    [(1, 1500, 16), (3, 700, 48), (9, 900, 64), (33, 400, 32), (2, 600, 512)],
    ids=lambda x: str(x),
)
def test_bits_of_the_unscreened_kernel(
    requests: int,
    vocab: int,
    rank: int,
    base: str,
    head: str,
    backend: str,
    greedy: Callable[..., Case],
    agree: Callable[..., dx.Draft],
) -> None:
    case = greedy(requests, 3, vocab, rank, head=head)
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    case["base_logits"] = case["base_logits"].to(kinds[base])
    agree(case, backend)


@KERNEL
@pytest.mark.parametrize("w1", ["f32", "f16"])
def test_vectors_in_parts(
    w1: str, backend: str, greedy: Callable[..., Case], agree: Callable[..., dx.Draft]
) -> None:
    case = greedy(4, 3, 600, 48)
    case["w1"] = torch.randn(600, 48, generator=torch.Generator().manual_seed(1))
    case["w1"] = case["w1"].half() if w1 == "f16" else case["w1"]
    agree(case, backend)


@KERNEL
@pytest.mark.parametrize("spread", [0.0, 1e-3, 2e-2], ids=["equal", "close", "near"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_rows_that_the_bytes_cannot_tell_apart(
    base: torch.dtype,
    spread: float,
    backend: str,
    rng: np.random.Generator,
    greedy: Callable[..., Case],
    agree: Callable[..., dx.Draft],
) -> None:
    """Many survivors, and with equal rows more than the list holds; ties go to the lowest id."""
    case = greedy(3, 2, 3000, 64)
    rows = rng.normal(0, 1, (1, 64)) + rng.normal(0, spread, (3000, 64))
    case["w2"] = torch.from_numpy(rows).bfloat16()
    case["base_logits"] = torch.zeros(3, 2, 3000).to(base)
    draft = agree(case, backend)
    if spread == 0:
        assert not draft.tokens.any()


@KERNEL
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["base", "vector", "all"])
def test_special_values(
    where: str,
    special: float,
    backend: str,
    rng: np.random.Generator,
    greedy: Callable[..., Case],
    agree: Callable[..., dx.Draft],
) -> None:
    case = greedy(4, 2, 700, 32)
    if where == "base":
        case["base_logits"][torch.from_numpy(rng.random((4, 2, 700)) < 0.2)] = special
    elif where == "vector":
        case["w1"][7, 3] = special
        case["anchor"][1] = 7
    else:
        case["base_logits"][2] = special
    case["anchor"][3] = -1
    agree(case, backend)


@KERNEL
@pytest.mark.parametrize("sms", ["1", "4"])
@pytest.mark.parametrize("seed", ["0", "3"])
def test_grids_and_thread_orders(
    sms: str,
    seed: str,
    backend: str,
    greedy: Callable[..., Case],
    agree: Callable[..., dx.Draft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_SMS", sms)
    monkeypatch.setenv("DSPARK_SIMT_SEED", seed)
    agree(greedy(3, 3, 3100, 256), backend)


@KERNEL
@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["all-equal", "random"])
def test_inactive_requests(
    spread: float, backend: str, greedy: Callable[..., Case], agree: Callable[..., dx.Draft]
) -> None:
    case = greedy(11, 2, 700, 32)
    case["base_logits"] *= spread
    case["w2"] *= spread
    case["active"] = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]).to(torch.uint8)
    case["base_logits"][0] = np.nan
    on = case["active"].bool()
    moved = {
        k: v.cuda() if backend == "cuda" and torch.is_tensor(v) else v
        for k, v in screened(case).items()
    }
    got = dx.markov_loop(**moved, backend=backend)
    part = {
        k: v[on] if torch.is_tensor(v) and v.shape[0] == 11 else v
        for k, v in case.items()
        if k != "active"
    }
    want = agree(part, backend)
    for field in ("tokens", "logit", "status"):
        a, b = getattr(got, field).cpu(), getattr(want, field).cpu()
        assert torch.equal(a[on], b), field


@KERNEL
@pytest.mark.parametrize("rank", [24, 528], ids=["r=24", "r=528"])
def test_ranks_without_a_screen_are_served_all_the_same(
    rank: int, backend: str, greedy: Callable[..., Case], agree: Callable[..., dx.Draft]
) -> None:
    agree(greedy(2, 2, 300, rank), backend)


@KERNEL
def test_the_full_vocabulary(
    backend: str, greedy: Callable[..., Case], agree: Callable[..., dx.Draft]
) -> None:
    agree(greedy(1, 1, 151_936, 16), backend)
