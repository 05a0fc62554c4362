# SPDX-License-Identifier: Apache-2.0
"""An int8 W2: one exact definition, the same bits on every backend and at every batch size."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import dspark_ext as dx

Case = dict[str, Any]
FIELDS = ("tokens", "logit", "lse", "status")


def definition(x: np.ndarray, w2: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The biases by the words of the contract, in exact arithmetic and float32 roundings."""
    exact = [Fraction(float(v)) for v in x]
    e = -100
    while max(abs(v) for v in exact) > 32512 * Fraction(2) ** e:
        e += 1
    q = [round(v / Fraction(2) ** e) for v in exact]  # Python rounds ties to even
    dots = [sum(int(w) * n for w, n in zip(row, q, strict=True)) for row in w2]
    s = np.float32(2.0**e)
    return np.float32([np.float32(d) * (s * c) for d, c in zip(dots, scale, strict=True)])


def random_case(rng: np.random.Generator, requests: int, rank: int, vocab: int = 140) -> Case:
    w2, scale = dx.quantize_rows(rng.normal(0, 1, (vocab, rank)).astype(np.float32))
    return {
        "base_logits": rng.normal(0, 2, (requests, 3, vocab)).astype(np.float32),
        "w1": rng.normal(0, 1, (vocab, rank)).astype(np.float32),
        "w2": w2,
        "w2_scale": scale,
        "anchor": rng.integers(0, vocab, requests).astype(np.int32),
        "seed": rng.integers(0, 2**63, requests).astype(np.uint64),
        "position": rng.integers(0, 2**31, requests),
    }


@pytest.mark.parametrize("rank", [1, 7, 32, 33, 256, 512, 513, 1100])
def test_the_definition(backend: str, rank: int, rng: np.random.Generator) -> None:
    case = random_case(rng, 2, rank)
    case["base_logits"][:] = 0  # z is the bias
    got = dx.markov_loop(**case, store_logits=True, backend=backend).logits[:, 0]
    for r, anchor in enumerate(case["anchor"]):
        want = definition(case["w1"][anchor], case["w2"], case["w2_scale"])
        np.testing.assert_array_equal(got[r], want)


@pytest.mark.parametrize("rank", [256, 512, 1100])
def test_the_largest_sums(backend: str, rank: int) -> None:
    """Every product at its largest: 2,130,706,432 at r = 512, beyond 32 bits at r = 1100."""
    w2 = np.full((3, rank), -128, np.int8)
    w2[1] = 127
    w2[2, ::2] = 127
    w1 = np.full((3, rank), 32512, np.float32)
    w1[1] *= -1
    zero = np.zeros((2, 1, 3), np.float32)
    where: Case = {"anchor": [0, 1], "seed": [0, 0], "position": [0, 0], "store_logits": True}
    one = np.ones(3, np.float32)
    got = dx.markov_loop(zero, w1, w2, w2_scale=one, **where, backend=backend)
    dots = (w2.astype(np.int64) @ w1[:2].astype(np.int64).T).T
    np.testing.assert_array_equal(got.logits[:, 0], dots.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("t", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("requests", [1, 2, 3, 17])
def test_backends_agree_bit_for_bit(
    requests: int, t: float, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    case = random_case(rng, requests, 96, vocab=515)
    case = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.items()}
    case["base_logits"] = case["base_logits"].to(dtype)
    case["w1"] = case["w1"].to(dtype)
    cpu, reference = (
        dx.markov_loop(**case, temperature=t, store_logits=True, backend=name)
        for name in ("cpu", "reference")
    )
    same = (cpu.tokens == reference.tokens).all()
    assert same or t > 0  # a sampled token may sit on a cell boundary of the float64 sampler
    assert torch.equal(cpu.logits[:, 0], reference.logits[:, 0])
    if same:
        assert torch.equal(cpu.logits, reference.logits)
        assert torch.equal(cpu.logit, reference.logit)


def test_batch_size_does_not_change_a_bit(rng: np.random.Generator) -> None:
    case = random_case(rng, 19, 200, vocab=700)
    names = ("base_logits", "anchor", "seed", "position")
    want = dx.markov_loop(**case, temperature=0.9, store_logits=True)
    for rows in ([4], [18, 3], [7, 1, 2], list(range(5))):
        part = {k: v[rows] if k in names else v for k, v in case.items()}
        got = dx.markov_loop(**part, temperature=0.9, store_logits=True)
        for name in (*FIELDS, "logits"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name)[rows], name)


POWERS = [2.0**-126, 2.0**-90, 1.0, 2.0**100]


@pytest.mark.parametrize("power", POWERS, ids=["2^-126", "2^-90", "1", "2^100"])
@pytest.mark.parametrize("step", [-1, 0, 1], ids=["below", "at", "above"])
def test_the_grid_changes_where_it_says(backend: str, power: float, step: int) -> None:
    """Around max|x| = 32512 s the next power of two takes over."""
    top = np.float32(32512 * power)
    if step:
        top = np.nextafter(top, np.float32(np.inf if step > 0 else 0))
    w1 = np.zeros((4, 3), np.float32)
    w1[0] = [top, top / 3, -top / 7]
    w2 = np.int8([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-128, 127, 99]])
    scale = np.float32([1, 1, 1, 0.0078125])
    zero = np.zeros((1, 1, 4), np.float32)
    where: Case = {"anchor": [0], "seed": [0], "position": [0], "store_logits": True}
    got = dx.markov_loop(zero, w1, w2, w2_scale=scale, **where, backend=backend)
    np.testing.assert_array_equal(got.logits[0, 0], definition(w1[0], w2, scale))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite(backend: str, value: float, rng: np.random.Generator) -> None:
    case = random_case(rng, 3, 40)
    case["anchor"] = np.int32([1, 2, 3])
    want = dx.markov_loop(**case, store_logits=True, backend=backend)
    case["w1"][2, 17] = value
    got = dx.markov_loop(**case, store_logits=True, backend=backend)
    bits = int(dx.Status.NAN_DRAFT | dx.Status.EMPTY_SUPPORT)
    assert got.status[1] & bits == bits and got.tokens[1, 0] == 0
    assert np.all(got.logits[1, 0] == -np.inf)
    np.testing.assert_array_equal(got.logits[[0, 2], 0], want.logits[[0, 2], 0])


def test_a_vector_of_zeros(backend: str, rng: np.random.Generator) -> None:
    case = random_case(rng, 2, 40)
    case["w1"][:] = 0
    got = dx.markov_loop(**case, store_logits=True, backend=backend)
    np.testing.assert_array_equal(got.logits, case["base_logits"])
    assert not got.status.any()


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads(head: str, rng: np.random.Generator, make: Callable[..., Case]) -> None:
    """The inner vector of the float32 backend is rounded; the grid adds half a step to that."""
    case = make(5, 4, 301, 24, head=head)
    case["w2"], scale = dx.quantize_rows(rng.normal(0, 1, (301, 24)).astype(np.float32))
    got, want = (
        dx.markov_loop(**case, w2_scale=scale, store_logits=True, backend=name)
        for name in ("cpu", "reference")
    )
    bound = 24 * 127 * scale.max() / 32512 * 2 + 1e-4
    np.testing.assert_allclose(got.logits[:, 0], want.logits[:, 0], rtol=0, atol=bound)


def test_sampled_from_the_law_of_the_quantised_logits(rng: np.random.Generator) -> None:
    """2^18 draws against softmax of the z that are returned; one per cent of bias is seen."""
    case, t, rows = random_case(rng, 1, 32, vocab=150), 0.9, 2**18
    case["w1"] *= np.float32(0.07)
    case["base_logits"] *= np.float32(0.5)
    law = dx.markov_loop(**case, store_logits=True).logits[0, 0].astype(np.float64) / t
    law = np.exp(law - law.max())
    law /= law.sum()
    many = dict(case, base_logits=np.broadcast_to(case["base_logits"][:, :1], (rows, 1, 150)))
    many["anchor"] = np.repeat(case["anchor"], rows)
    many["position"] = np.repeat(case["position"], rows)
    many["seed"] = np.arange(rows, dtype=np.uint64)
    tokens = dx.markov_loop(**many, temperature=t).tokens[:, 0]

    def p_value(tokens: np.ndarray) -> float:
        return float(stats.chisquare(np.bincount(tokens, minlength=150), law * rows).pvalue)

    assert (law * rows).min() > 8
    assert p_value(tokens) > 1e-6
    moved = tokens.copy()  # .01 of total variation from the likeliest id to the id behind it
    top = int(np.argmax(law))
    moved[np.flatnonzero(tokens == top)[: rows // 100]] = (top + 1) % 150
    assert p_value(moved) < 1e-6


def test_quantize_rows_is_half_a_step_off_at_most(rng: np.random.Generator) -> None:
    w2 = rng.normal(0, 1, (50, 33)).astype(np.float32)
    w2[7] = 0
    bytes8, scale = dx.quantize_rows(w2)
    assert np.abs(bytes8).max() == 127 and bytes8.dtype == np.int8 and scale.dtype == np.float32
    error = np.abs(bytes8 * scale[:, None].astype(np.float64) - w2)
    assert np.all(error <= scale[:, None] * (0.5 + 1e-5))
    tensors = dx.quantize_rows(torch.from_numpy(w2))
    np.testing.assert_array_equal(tensors[0].numpy(), bytes8)
    np.testing.assert_array_equal(tensors[1].numpy(), scale)
    with pytest.raises(dx.ArgumentError, match="w2: got NaN or infinite"):
        dx.quantize_rows(np.full((2, 2), np.nan, np.float32))
