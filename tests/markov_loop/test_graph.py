# SPDX-License-Identifier: Apache-2.0
"""On a device: CUDA graphs, launches that follow each other, and no waiting in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dspark_ext as dx

GAMMA, V, RANK = 4, 3000, 64

usable = bool(dx.info()["cuda"]["usable"])
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not usable, reason="no CUDA device that this build serves"),
]

Case = dict[str, Any]


def case_of(seed: int, requests: int) -> Case:
    """Arguments on the host whose dot products are exact in any order."""
    g = torch.Generator().manual_seed(seed)

    def dyadic(*shape: int, limit: int) -> torch.Tensor:
        return (torch.randint(-limit, limit + 1, shape, generator=g) / 16).bfloat16()

    return {
        "base_logits": dyadic(requests, GAMMA, V, limit=64),
        "w1": dyadic(V, RANK, limit=16),
        "w2": dyadic(V, RANK, limit=16),
        "anchor": torch.randint(V, (requests,), generator=g, dtype=torch.int32),
        "seed": torch.randint(2**62, (requests,), generator=g),
        "position": torch.randint(2**31, (requests,), generator=g),
        "temperature": torch.tensor([0.0, 0.7, 1.0])[torch.arange(requests) % 3],
    }


def on_device(case: Case) -> Case:
    return {k: v.cuda() for k, v in case.items()}


def check(draft: dx.Draft, case: Case) -> None:
    twin = dx.markov_loop(**case)
    assert torch.equal(draft.tokens.cpu(), twin.tokens)
    assert torch.equal(draft.logit.cpu(), twin.logit)
    assert torch.equal(draft.status.cpu(), twin.status)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("requests", [1, 8, 40])
def test_graph_is_replayed_with_other_contents(requests: int) -> None:
    cases = [case_of(seed, requests) for seed in range(3)]
    fixed = on_device(cases[0])
    out = dx.markov_loop(**fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx.markov_loop(**fixed, out=out)
    for case in (*cases, cases[0]):
        for name, value in case.items():
            fixed[name].copy_(value)
        graph.replay()
        check(out, case)


def test_launches_follow_each_other_without_waiting() -> None:
    cases = [case_of(seed, requests) for seed, requests in enumerate((1, 3, 40, 2, 9, 1))]
    there = [on_device(case) for case in cases]
    dx.markov_loop(**there[0])
    torch.cuda.synchronize()
    with waiting_is_an_error():
        drafts = [dx.markov_loop(**arguments) for _ in range(5) for arguments in there]
    for i, draft in enumerate(drafts):
        check(draft, cases[i % len(cases)])


def test_streams_have_scratch_of_their_own() -> None:
    cases = [case_of(seed, 5) for seed in range(4)]
    there = [on_device(case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    drafts = []
    for _ in range(10):
        for stream, arguments in zip(streams, there, strict=True):
            with torch.cuda.stream(stream):
                drafts.append(dx.markov_loop(**arguments))
    torch.cuda.synchronize()
    for i, draft in enumerate(drafts):
        check(draft, cases[i % len(cases)])


def test_scratch_may_hold_anything() -> None:
    case = case_of(9, 8)
    arguments = on_device(case)
    for byte in (0, 255, 90):
        torch.full((64 << 20,), byte, dtype=torch.uint8, device="cuda")  # freed: the next scratch
        check(dx.markov_loop(**arguments), case)


def test_strict_is_refused_under_capture() -> None:
    arguments = on_device(case_of(1, 2))
    dx.markov_loop(**arguments)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="strict"), torch.cuda.graph(graph):
        dx.markov_loop(**arguments, strict=True)
