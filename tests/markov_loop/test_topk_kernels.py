# SPDX-License-Identifier: Apache-2.0
"""The kernels of a law on the M largest base logits: the bits of the CPU backend, all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

Case = dict[str, Any]
Make = Callable[..., Case]
Compare = Callable[..., dx.Draft]
DTYPES = ["f32", "bf16", "f16"]
KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
FIELDS = ("support_ids", "tokens", "logit", "lse", "logits", "support_logits", "status")

pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("requests", "gamma", "vocab", "rank", "m"),
    [(1, 3, 700, 16, 37), (3, 2, 9001, 20, 64), (2, 2, 300, 7, 300), (2, 16, 50, 33, 64)],
    ids=["small", "slices", "all-columns", "more-than-columns"],
)
def test_bits_of_the_cpu_backend(
    requests: int,
    gamma: int,
    vocab: int,
    rank: int,
    m: int,
    dtype: str,
    head: str,
    int8: bool,
    backend: str,
    tensors: Make,
    compare: Compare,
) -> None:
    case = tensors(requests, gamma, vocab, rank, dtype=dtype, head=head, int8=int8)
    compare(case, backend, topk_support=m)


@pytest.mark.parametrize("seed", ["0", "1", "2", "3"])
def test_thread_order(
    seed: str, backend: str, tensors: Make, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_SEED", seed)
    compare(tensors(2, 3, 17_000, 32, dtype="bf16"), backend, topk_support=64)


@pytest.mark.parametrize("m", [1, 2, 1000, 1024])
def test_sizes_of_a_support(m: int, backend: str, tensors: Make, compare: Compare) -> None:
    compare(tensors(2, 2, 2500, 16), backend, topk_support=m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", range(1, 9))
def test_rows_of_any_alignment(
    padding: int, dtype: str, backend: str, tensors: Make, compare: Compare
) -> None:
    """Padding is NaN: one column read too many would set a status bit."""
    case = tensors(2, 3, 4096 - 3 * padding, 18, dtype=dtype, padding=padding)
    assert not compare(case, backend, topk_support=50).status.any()


@pytest.mark.parametrize("levels", [1, 2, 40])
def test_ties_within_and_between_slices(
    levels: int, backend: str, tensors: Make, compare: Compare, rng: np.random.Generator
) -> None:
    case = tensors(1, 2, 40_000, 8, dtype="bf16")
    shape = case["base_logits"].shape
    case["base_logits"] = torch.from_numpy(rng.integers(0, levels, shape) / 8).bfloat16()
    draft = compare(case, backend, topk_support=64)
    if levels == 1:
        assert draft.support_ids[0, 0].tolist() == list(range(64))


def test_ascending_logits_overflow_no_buffer(backend: str, tensors: Make, compare: Compare) -> None:
    """Every column beats all before it: the most candidates there can be."""
    case = tensors(1, 1, 20_000, 8)
    case["base_logits"][0, 0] = torch.arange(20_000) / 1000
    draft = compare(case, backend, topk_support=64)
    assert draft.support_ids[0, 0].tolist() == list(range(20_000 - 64, 20_000))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("t", [0.0, 1.0], ids=["greedy", "sampled"])
def test_special_values(
    t: float,
    special: float,
    backend: str,
    tensors: Make,
    compare: Compare,
    rng: np.random.Generator,
) -> None:
    case = tensors(3, 2, 900, 16)
    case["temperature"] = t
    where = torch.from_numpy(rng.random(case["base_logits"].shape) < 0.3)
    case["base_logits"][where] = special
    case["base_logits"][1] = special
    case["w1"][5, 3] = special
    case["anchor"][2] = 5
    compare(case, backend, topk_support=20)


def test_segments_with_many_members(backend: str, tensors: Make, compare: Compare) -> None:
    """Sums of three weights and more follow the sampler's tree."""
    case = tensors(3, 3, 3000, 16)
    case["base_logits"][..., 256:512] += 12  # two crowded segments, and a few others
    case["temperature"] = np.float32([3, 1.5, 0])
    compare(case, backend, topk_support=200)


def test_inactive_requests_and_bad_arguments(backend: str, tensors: Make, compare: Compare) -> None:
    case = tensors(5, 2, 600, 16, head="gated")
    case["anchor"][0] = -3
    want = compare(case, backend, topk_support=30)
    case["active"] = np.array([1, 0, 1, 1, 0], np.uint8)
    case["base_logits"][1] = np.nan
    out = dx.Draft(*(None if x is None else torch.full_like(x, 77) for x in vars(want).values()))
    if backend == "cuda":
        case = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        out = dx.Draft(*(None if x is None else x.cuda() for x in vars(out).values()))
    got = dx.markov_loop(**case, topk_support=30, out=out, backend=backend)
    for name in FIELDS:
        result = getattr(got, name).cpu().float().numpy()
        expected = getattr(want, name).float().numpy()
        assert (result[[1, 4]] == 77).all(), name
        np.testing.assert_array_equal(result[[0, 2, 3]], expected[[0, 2, 3]], name)


@pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])
def test_long_vectors(int8: bool, backend: str, tensors: Make, compare: Compare) -> None:
    """Beyond 512 columns integers are summed in 64 bits."""
    case = tensors(1, 2, 300, 1100, int8=int8)
    case["temperature"] = 40.0
    compare(case, backend, topk_support=20)


def test_reduced_vocabulary_and_strides(
    backend: str, tensors: Make, compare: Compare, rng: np.random.Generator
) -> None:
    case = tensors(2, 3, 900, 16)
    columns = np.sort(rng.choice(900, 400, replace=False))
    case["draft_to_target"] = torch.from_numpy(columns).int()
    case["base_logits"] = case["base_logits"][:, :, 33:433]
    wide = torch.full((400, 19), np.nan)
    wide[:, 1:17] = case["w2"][:400]
    case["w2"] = wide[:, 1:17]
    compare(case, backend, topk_support=64)


def test_the_full_vocabulary(backend: str, tensors: Make, compare: Compare) -> None:
    case = tensors(1, 2, 151_936, 16, dtype="bf16")
    compare(case, backend, topk_support=64)


def test_truncation_is_refused_with_its_name(backend: str, tensors: Make, compare: Compare) -> None:
    case = tensors(1, 1, 300, 8)
    if backend == "cuda":
        case = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.items()}
    with pytest.raises(NotImplementedError, match="top_k: got an array"):
        dx.markov_loop(**case, topk_support=8, top_k=3, backend=backend)
