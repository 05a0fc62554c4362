# SPDX-License-Identifier: Apache-2.0
"""The kernels of an int8 W2: z, tokens and status of the CPU backend, bit for bit."""

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
KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
NEAR = 3e-5  # lse and confidence logit, whose sums have another order

pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("requests", "vocab", "rank"),
    [(1, 300, 16), (2, 1000, 48), (3, 515, 256), (9, 700, 64), (33, 400, 32)],
    ids=lambda x: str(x),
)
def test_bits_of_the_cpu_backend(
    requests: int,
    vocab: int,
    rank: int,
    dtype: str,
    head: str,
    backend: str,
    tensors: Make,
    compare: Compare,
) -> None:
    case = tensors(requests, 3, vocab, rank, dtype=dtype, head=head, int8=True)
    compare(case, backend, near=NEAR)


@pytest.mark.parametrize("rank", [1, 7, 33, 40, 512, 528, 1100], ids=lambda r: f"r={r}")
def test_every_rank(rank: int, backend: str, tensors: Make, compare: Compare) -> None:
    """Tensor cores for multiples of 16 up to 512, the plain source for the rest."""
    case = tensors(3, 2, 290, rank, int8=True)
    case["temperature"] = np.float32([2, 0, rank])
    compare(case, backend, near=NEAR)


@pytest.mark.parametrize("rank", [48, 528], ids=["tensor-cores", "plain"])
def test_batch_size_does_not_change_a_bit(rank: int, backend: str, tensors: Make) -> None:
    case = tensors(20, 2, 390, rank, dtype="bf16", int8=True)
    case = {k: v.cuda() if backend == "cuda" and torch.is_tensor(v) else v for k, v in case.items()}
    want = dx.markov_loop(**case, backend=backend)
    rows = [17, 3, 8]
    names = ("base_logits", "anchor", "seed", "position", "temperature", "hidden")
    part = {k: v[rows] if k in names else v for k, v in case.items()}
    got = dx.markov_loop(**part, backend=backend)
    for name in ("tokens", "logit", "lse", "confidence_logit", "logits", "status"):
        assert torch.equal(getattr(got, name), getattr(want, name)[rows]), name


@pytest.mark.parametrize("rank", [48, 50], ids=["tensor-cores", "plain"])
def test_inactive_requests(rank: int, backend: str, tensors: Make) -> None:
    case = tensors(11, 2, 390, rank, int8=True)
    on = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]).bool()
    case["base_logits"][0] = np.nan
    part = {k: v[on.numpy()] if len(v) == 11 else v for k, v in case.items() if hasattr(v, "shape")}
    rest = {k: v for k, v in case.items() if k not in part}
    want = dx.markov_loop(**part, **rest)
    case["active"] = on.to(torch.uint8)
    case = {k: v.cuda() if backend == "cuda" and torch.is_tensor(v) else v for k, v in case.items()}
    got = dx.markov_loop(**case, backend=backend)
    for name in ("tokens", "logit", "logits", "status"):
        assert torch.equal(getattr(got, name).cpu()[on], getattr(want, name)), name


@pytest.mark.parametrize("sms", ["1", "3", "60"])
@pytest.mark.parametrize("seed", ["0", "5"])
def test_grids_and_thread_orders(
    sms: str,
    seed: str,
    backend: str,
    tensors: Make,
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grid of one streams most of W2 through the ring, one of many has all of it resident."""
    monkeypatch.setenv("DSPARK_SIMT_SMS", sms)
    monkeypatch.setenv("DSPARK_SIMT_SEED", seed)
    compare(tensors(3, 3, 4000, 256, dtype="bf16", int8=True), backend, near=NEAR)


def test_a_device_without_tensor_cores_for_it(
    backend: str, tensors: Make, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_CAPABILITY", "75")
    compare(tensors(2, 2, 400, 64, int8=True), backend, near=NEAR)


def test_unaligned_rows(backend: str, tensors: Make, compare: Compare) -> None:
    case = tensors(2, 2, 400, 32, int8=True)
    wide = torch.zeros(400, 37, dtype=torch.int8)
    wide[:, 3:35] = case["w2"]
    case["w2"] = wide[:, 3:35]
    compare(case, backend, near=NEAR)


@pytest.mark.parametrize("rank", [48, 50], ids=["tensor-cores", "plain"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite(
    value: float, rank: int, backend: str, tensors: Make, compare: Compare
) -> None:
    case = tensors(3, 2, 300, rank, int8=True)
    case["w1"][7, 5] = value
    case["w1"][9] = 0
    case["anchor"][:] = torch.tensor([7, 9, 11])
    draft = compare(case, backend, near=NEAR)
    assert draft.status[0] & int(dx.Status.NAN_DRAFT)
    assert torch.equal(draft.logits[1, 0], case["base_logits"][1, 0])


def test_the_full_vocabulary(backend: str, tensors: Make, compare: Compare) -> None:
    compare(tensors(2, 2, 151_936, 32, dtype="bf16", int8=True), backend, near=NEAR)
