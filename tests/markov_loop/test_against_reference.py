# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against the float64 reference, over everything the operator can vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dspark_ext as dx
from dspark_ext.reference.markov_loop import markov_loop as reference

Case = dict[str, Any]
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

# Where the reference's deciding margin is below this, float32 weights may decide otherwise. A
# weight has a relative error of at most 87 * 2^-24 (its argument) + 1.3e-7 (exp): 5.3e-6, and a
# segment's log-mass as much.
SAMPLING_MARGIN = 2e-5


def oracle(case: Case, base: torch.Tensor, **extra: Any) -> tuple[dx.Draft, np.ndarray]:
    margin = np.full(base.shape[:2], np.inf)
    arguments = {
        k: v.float().numpy() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in case.items()
    }
    arguments["base_logits"] = base.float().numpy()
    with np.errstate(all="ignore"):
        draft = reference(
            **arguments, **extra, dtype=NAMES[base.dtype], margin=margin, store_logits=True
        )
    return draft, margin


def compare(
    got: dx.Draft, want: dx.Draft, margin: np.ndarray, bound: float, z_error: float
) -> tuple[int, int]:
    """Assert equality up to the first close call of every request; return (compared, close)."""
    compared = close = 0
    tokens = np.asarray(got.tokens)
    for r, k in np.ndindex(tokens.shape):
        if k and np.any(tokens[r, :k] != want.tokens[r, :k]):
            continue  # behind a close call: other conditions
        compared += 1
        if tokens[r, k] != want.tokens[r, k]:
            assert margin[r, k] < bound, (r, k, tokens[r, k], want.tokens[r, k], margin[r, k])
            close += 1
            continue
        assert float(got.logit[r, k]) == pytest.approx(want.logit[r, k], abs=z_error)
        if margin[r, k] > bound:  # a truncation at another place has another lse
            lse = pytest.approx(want.lse[r, k], abs=1e-5 + 2 * z_error, rel=1e-6)
            assert float(got.lse[r, k]) == lse
    return compared, close


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_exact_weights_give_equal_tokens(data: st.DataObject) -> None:
    """Weights on a grid: z is the same in every summation order, so every token must agree."""
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="entropy"))
    requests, gamma = draw(st.integers(0, 5), label="R"), draw(st.integers(1, 16), label="gamma")
    vocab, rank = draw(st.integers(1, 700), label="V"), draw(st.integers(1, 70), label="r")
    dtype = draw(st.sampled_from(list(NAMES)), label="dtype of U")
    weights = draw(st.sampled_from(list(NAMES)), label="dtype of W1, W2")

    def grid(*shape: int, limit: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-limit, limit + 1, shape) / 16)

    base = grid(requests, gamma, vocab, limit=64).to(dtype)
    case: Case = {
        "base_logits": base,
        "w1": grid(vocab, rank, limit=16).to(weights),
        "w2": grid(vocab, rank, limit=16).to(weights),
        "anchor": rng.integers(0, vocab, requests).astype(np.int32),
        "seed": rng.integers(0, 2**63, requests).astype(np.uint64),
        "position": rng.integers(0, 2**31, requests),
    }
    extra: Case = {
        "temperature": rng.choice([0, 0.05, 0.7, 1, 3], requests).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 50, 10_000], requests).astype(np.int32),
        "top_p": rng.choice([1, 0.95, 0.5, 0.01], requests).astype(np.float32),
    }
    got = dx.markov_loop(**case, **extra, store_logits=True)
    want, margin = oracle(case, base, **extra)
    compare(got, want, margin, SAMPLING_MARGIN, z_error=0)
    assert got.status.tolist() == want.status.tolist()


@pytest.mark.parametrize("dtype", list(NAMES), ids=NAMES.values())
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("rank", [1, 16, 100])
def test_heads(
    head: str, dtype: torch.dtype, rank: int, rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    case = make(6, 5, 413, rank, head=head, hidden=37, confidence=True)
    base = torch.from_numpy(rng.normal(0, 2, (6, 5, 413))).to(dtype)
    case = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    case["w1"] = torch.from_numpy(rng.normal(0, 1, (413, rank)) / rank**0.5).float()
    case["base_logits"] = base
    extra: Case = {"temperature": np.float32([0, 0.5, 1, 0, 1.5, 1])}
    got = dx.markov_loop(**case, **extra, store_logits=True)
    want, margin = oracle(case, base, **extra)
    # Summation error: a dot product is rank / 16 + 4 additions deep over rank terms below 1, U is
    # below 16, and the inner vector carries a few roundings itself. In 16-bit types z moves by a
    # whole step where that error crosses a midpoint.
    exact = 2.0**-24 * (rank / 16 + 8) * (rank + 16)
    step = {torch.float32: exact, torch.bfloat16: 2.0**-3, torch.float16: 2.0**-6}[dtype]
    bound = step if dtype == torch.float32 else np.inf
    compared, _ = compare(got, want, margin, bound, z_error=step)
    assert compared >= 6
    first = got.confidence_logit[:, 0]
    np.testing.assert_allclose(first, want.confidence_logit[:, 0], rtol=1e-5, atol=1e-5)
    slot = got.logits[:, 0].float().numpy(), want.logits[:, 0]
    np.testing.assert_allclose(*slot, rtol=2.0**-7, atol=step)


@pytest.mark.parametrize("gamma", range(1, 9))
@pytest.mark.parametrize("requests", [1, 2, 3, 8, 33])
def test_full_rank(requests: int, gamma: int, make: Callable[..., Case]) -> None:
    case = make(requests, gamma, 1031, 256)
    base = torch.from_numpy(case["base_logits"])
    extra: Case = {"temperature": np.resize(np.float32([0, 1, 0.6]), requests)}
    got = dx.markov_loop(**case, **extra)
    want, margin = oracle(case, base, **extra)
    compared, close = compare(got, want, margin, SAMPLING_MARGIN, z_error=0)
    assert compared - close >= 0.99 * requests * gamma


def test_full_vocabulary(make: Callable[..., Case]) -> None:
    case = make(2, 3, 151_936, 64)
    base = torch.from_numpy(case["base_logits"]).bfloat16()
    for name in ("w1", "w2"):
        case[name] = torch.from_numpy(case[name]).bfloat16()
    case["base_logits"] = base
    case = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    case["seed"] = [11, 12]
    extra: Case = {"temperature": np.float32([1, 0]), "top_p": np.float32(0.9)}
    got = dx.markov_loop(**case, **extra)
    want, margin = oracle(case, base, **extra)
    compare(got, want, margin, SAMPLING_MARGIN, z_error=0)


@pytest.mark.parametrize("requests", [1, 6])
def test_rows_longer_than_the_widening_buffer(requests: int, make: Callable[..., Case]) -> None:
    case = make(requests, 2, 133, 1040)
    base = torch.from_numpy(case["base_logits"])
    got = dx.markov_loop(**case, temperature=1.0, store_logits=True)
    want, margin = oracle(case, base, temperature=1.0)
    compare(got, want, margin, SAMPLING_MARGIN, z_error=0)
    np.testing.assert_array_equal(got.logits[:, 0], want.logits[:, 0])


@pytest.mark.parametrize("t", [0.0, 1.0], ids=["greedy", "sampled"])
def test_int8_projection(
    t: float, backend: str, rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    case = make(5, 4, 301, 24)
    case["w2"] = rng.integers(-127, 128, (301, 24)).astype(np.int8)
    scale = (2.0 ** rng.integers(-9, -5, 301)).astype(np.float32)  # exact products
    got = dx.markov_loop(**case, w2_scale=scale, temperature=t, backend=backend)
    case["w2"] = case["w2"] * scale[:, None]
    want = dx.markov_loop(**case, temperature=t, backend=backend)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lse, want.lse)


@pytest.mark.parametrize("t", [0.0, 0.8], ids=["greedy", "sampled"])
def test_reduced_draft_vocabulary(
    t: float, backend: str, rng: np.random.Generator, make: Callable[..., Case]
) -> None:
    case = make(4, 6, 900, 7)
    columns = np.sort(rng.choice(900, 211, replace=False))
    case["base_logits"] = case["base_logits"][:, :, :211].copy()
    case["w2"] = case["w2"][:211].copy()
    draft = dx.markov_loop(
        **case, draft_to_target=columns, temperature=t, store_logits=True, backend=backend
    )
    assert draft.logits.shape == (4, 6, 211)
    assert np.isin(draft.tokens, columns).all()
    column = np.searchsorted(columns, draft.tokens)
    np.testing.assert_array_equal(
        draft.logit, np.take_along_axis(draft.logits, column[..., None], 2)[..., 0]
    )
    previous = np.concatenate([case["anchor"][:, None], draft.tokens[:, :-1]], axis=1)
    z = case["base_logits"] + case["w1"][previous] @ case["w2"].T  # W1 has rows of target ids
    np.testing.assert_array_equal(draft.logits, z)


def test_strided_arguments(make: Callable[..., Case]) -> None:
    case = make(3, 4, 210, 9, head="rnn", hidden=6, confidence=True)
    want = dx.markov_loop(**case, temperature=1.0, store_logits=True)

    def spaced(x: np.ndarray) -> np.ndarray:
        wide = np.full((*[2 * n for n in x.shape[:-1]], x.shape[-1] + 5), np.nan, x.dtype)
        view = wide[tuple(slice(None, None, 2) for _ in x.shape[:-1])][..., : x.shape[-1]]
        view[...] = x
        return view

    for name in ("base_logits", "w1", "w2", "hidden"):
        case[name] = spaced(case[name])
        assert not case[name].flags.c_contiguous
    got = dx.markov_loop(**case, temperature=1.0, store_logits=True)
    for name in ("tokens", "logit", "lse", "confidence_logit", "logits", "status"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_head_weights_of_other_dtypes_are_widened(
    dtype: torch.dtype, make: Callable[..., Case]
) -> None:
    case = make(2, 3, 150, 8, head="gated", confidence=True)
    names = ("head_weight", "head_bias", "hidden", "confidence_weight")
    case = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    want = dx.markov_loop(**case)
    for name in names:
        case[name] = case[name].to(dtype)  # exact: multiples of 2^-4 below 2
    got = dx.markov_loop(**case)
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.lse, want.lse)
    assert torch.equal(got.confidence_logit, want.confidence_logit)
