# SPDX-License-Identifier: Apache-2.0
"""The tile source for Hopper, run by the emulation: every number of columns of wgmma, boxes that
stay and boxes that stream, awkward vocabularies, every head, both dtypes of W2.

The inputs are dyadic, so a dot product is exact in any order, and where the r-vectors are rows of
W1 all bits are those of the CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import _simt

pytestmark = pytest.mark.skipif(not _simt.load(), reason="the SIMT library is not built")

Case = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], None]:
    """``device(multiprocessors, capability, seed)``: the emulated GPU of the next calls."""

    def choose(multiprocessors: int, capability: int = 90, seed: int = 0) -> None:
        monkeypatch.setenv("DSPARK_SIMT_SMS", str(multiprocessors))
        monkeypatch.setenv("DSPARK_SIMT_CAPABILITY", str(capability))
        monkeypatch.setenv("DSPARK_SIMT_SEED", str(seed))

    return choose


def typed(case: Case, w1: str, w2: str) -> Case:
    tensors = {
        k: torch.from_numpy(v)
        for k, v in case.items()
        if k in ("hidden", "head_weight", "head_bias", "confidence_weight")
    }
    return {
        **case,
        **tensors,
        "base_logits": torch.from_numpy(case["base_logits"]).bfloat16(),
        "w1": torch.from_numpy(case["w1"]).to(DTYPES[w1]),
        "w2": torch.from_numpy(case["w2"]).to(DTYPES[w2]),
    }


def same(got: dx.Draft, want: dx.Draft, rows: Any = slice(None)) -> None:
    np.testing.assert_array_equal(got.tokens[rows], want.tokens[rows])
    np.testing.assert_array_equal(got.logit[rows], want.logit[rows])
    np.testing.assert_allclose(got.lse[rows], want.lse[rows], rtol=1e-6)
    np.testing.assert_array_equal(got.status[rows], want.status[rows])


# name: requests, vocabulary, rank, multiprocessors
SHAPES = {
    "one request": (1, 300, 64, 6),
    "one id": (2, 1, 64, 6),
    "8 columns, all stays": (8, 1000, 128, 3),
    "8 columns, streams": (5, 2500, 64, 1),
    "16 columns": (9, 700, 64, 2),
    "32 columns, streams": (33, 2400, 64, 1),
    "64 columns, r = 256 streams": (40, 900, 256, 1),
    "two groups": (70, 2200, 64, 1),
    "two groups, four boxes a segment": (66, 600, 256, 1),
    "two launches": (130, 300, 64, 2),
    "r = 320": (3, 520, 320, 1),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("w2", "seed"), [("bf16", 0), ("bf16", 7), ("f16", 3)])
def test_bits_of_the_cpu(
    make: Callable[..., Case],
    device: Callable[..., None],
    rng: np.random.Generator,
    name: str,
    w2: str,
    seed: int,
) -> None:
    requests, vocab, rank, multiprocessors = SHAPES[name]
    case = typed(make(requests, 3, vocab, rank), w2, w2)
    case["temperature"] = rng.choice([0.0, 0.7, 1.0], requests).astype(np.float32)
    device(multiprocessors, 90, seed)
    want = dx.markov_loop(**case, backend="cpu")
    same(dx.markov_loop(**case, backend="simt"), want)


@pytest.mark.parametrize("w1", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("w2", ["bf16", "f16"])
def test_vectors_of_another_dtype_are_exact(
    make: Callable[..., Case], device: Callable[..., None], w1: str, w2: str
) -> None:
    case = make(5, 3, 400, 64)
    case["w1"] = case["w1"] * np.float32(1 + 2.0**-7)  # does not fit one bf16
    case = typed(case, w1, w2)
    device(2, 90, 5)
    same(dx.markov_loop(**case, backend="simt"), dx.markov_loop(**case, backend="cpu"))


@pytest.mark.parametrize("head", ["gated", "rnn"])
@pytest.mark.parametrize("w2", ["bf16", "f16"])
@pytest.mark.parametrize("requests", [3, 40])
def test_heads(
    make: Callable[..., Case], device: Callable[..., None], head: str, w2: str, requests: int
) -> None:
    """Inner vectors are no dyadic numbers: what a sum rounds to depends on its order."""
    case = typed(make(requests, 3, 500, 64, head=head, confidence=True), "f32", w2)
    case["base_logits"] = case["base_logits"].float()
    device(2, 90, 2)
    got = dx.markov_loop(**case, store_logits=True, backend="simt")
    want = dx.markov_loop(**case, store_logits=True, backend="cpu")
    # 64 products of at most 1: sums differ by 2 * 64 roundings of values below 64.
    bound = 2 * 64 * 64 * 2.0**-24
    alike = 0
    for r, k in np.ndindex(requests, 3):
        if (got.tokens[r, :k] != want.tokens[r, :k]).any():
            continue  # behind a close call
        np.testing.assert_allclose(got.logits[r, k], want.logits[r, k], atol=bound)
        alike += 1
    assert alike > 2.5 * requests


def test_a_row_has_its_own_bits(device: Callable[..., None], rng: np.random.Generator) -> None:
    """Whatever the number of requests, hence of columns, groups and launches."""
    requests, vocab, rank = 140, 600, 128
    case: Case = {
        "base_logits": torch.from_numpy(rng.normal(size=(requests, 2, vocab)).astype(np.float32)),
        "w1": torch.from_numpy(rng.normal(size=(vocab, rank)).astype(np.float32)).bfloat16(),
        "w2": torch.from_numpy(rng.normal(size=(vocab, rank)).astype(np.float32)).bfloat16(),
        "anchor": rng.integers(0, vocab, requests).astype(np.int32),
        "seed": rng.integers(0, 2**63, requests).astype(np.uint64),
        "position": rng.integers(0, 2**31, requests),
        "temperature": np.full(requests, 0.9, np.float32),
    }
    whole = dx.markov_loop(**case, store_logits=True, backend="simt")
    per_request = ("base_logits", "anchor", "seed", "position", "temperature")
    for first, count in ((0, 1), (3, 9), (20, 30), (60, 80)):
        device(1 + first % 3)
        rows = slice(first, first + count)
        part = {k: v[rows] if k in per_request else v for k, v in case.items()}
        got = dx.markov_loop(**part, store_logits=True, backend="simt")
        np.testing.assert_array_equal(got.tokens, whole.tokens[rows])
        np.testing.assert_array_equal(got.logits, whole.logits[rows])


def test_padding_inactive_rows_and_reduced_vocabulary(
    make: Callable[..., Case], device: Callable[..., None]
) -> None:
    case = make(12, 3, 333, 64)
    wide = torch.full((12, 3, 344), float("nan")).bfloat16()
    wide[:, :, :333] = torch.from_numpy(case["base_logits"])
    case = {**typed(case, "bf16", "bf16"), "base_logits": wide[:, :, :333]}
    case["w1"] = torch.cat([case["w1"], case["w1"]])
    case["draft_to_target"] = np.arange(333, dtype=np.int32) * 2
    active = np.arange(12) % 3 != 1
    case["active"] = active
    device(2, 90, 9)
    got = dx.markov_loop(**case, backend="simt")
    same(got, dx.markov_loop(**case, backend="cpu"), active)


def test_rows_that_no_copy_can_read(make: Callable[..., Case], device: Callable[..., None]) -> None:
    """W2 off a 16-byte address, or of another rank, goes through another source."""
    case = typed(make(3, 2, 200, 64), "bf16", "bf16")
    flat = torch.zeros(200 * 64 + 1, dtype=torch.bfloat16)
    flat[1:] = case["w2"].flatten()
    case["w2"] = flat[1:].view(200, 64)
    device(2)
    same(dx.markov_loop(**case, backend="simt"), dx.markov_loop(**case, backend="cpu"))


def test_full_vocabulary(make: Callable[..., Case], device: Callable[..., None]) -> None:
    case = typed(make(8, 2, 151_936, 64), "bf16", "bf16")
    device(6)
    same(dx.markov_loop(**case, backend="simt"), dx.markov_loop(**case, backend="cpu"))


def test_no_request_takes_part(make: Callable[..., Case], device: Callable[..., None]) -> None:
    """The copies that began before this was known are waited for."""
    case = typed(make(3, 2, 700, 64), "bf16", "bf16")
    case["active"] = np.zeros(3, bool)
    for seed in range(3):
        device(2, 90, seed)
        dx.markov_loop(**case, backend="simt")
