# SPDX-License-Identifier: Apache-2.0
"""The Python face with tensors on a device, played by tensors of the host.

A machine without a GPU cannot make a CUDA tensor, but all that the Python layer does with one is to
ask for its device, allocate beside it and pass its address on. So tensors of the host claim to be
on ``cuda:0`` here, the library's CUDA entry is replaced by its CPU entry, and reading a value
(which would wait for a device) is made to fail.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import _arrays, _backend

R, GAMMA, V, RANK = 3, 2, 300, 16
STREAM = 77


class Library:
    """``_C`` that knows CUDA: notes each call and lets the CPU backend compute."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.calls: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if name not in ("markov_loop", "confidence"):
            return (lambda _, p: value(0, p)) if name.endswith("_workspace") else value

        def run(device: int, params: Any, address: int, size: int, stream: int) -> None:
            assert device == self.real.CUDA
            self.calls.append((name, size, stream))
            value(self.real.CPU, params, address, size, 0)

        return run


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Tensors claim to be on a device; whoever reads one of their values fails."""
    fake = Library(_backend._C)
    monkeypatch.setattr(_backend, "_C", fake)

    def device_name(x: Any) -> str:
        return "cuda:0" if _arrays.is_torch(x) else "cpu"

    monkeypatch.setattr(_arrays, "device_name", device_name)
    monkeypatch.setattr(_backend, "device_name", device_name)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
    return fake


@contextlib.contextmanager
def values_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> Any:
    def waits(*_: Any, **__: Any) -> Any:
        raise AssertionError("this reads a value of a device tensor: it waits for the device")

    with monkeypatch.context() as m:
        for name in (
            "cpu",
            "item",
            "numpy",
            "tolist",
            "__bool__",
            "__float__",
            "__int__",
            "nonzero",
        ):
            m.setattr(torch.Tensor, name, waits)
        yield


def problem() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    return {
        "base_logits": torch.randn(R, GAMMA, V, generator=g).bfloat16(),
        "w1": torch.randn(V, RANK, generator=g).bfloat16(),
        "w2": torch.randn(V, RANK, generator=g).bfloat16(),
        "anchor": torch.tensor([4, 5, 299], dtype=torch.int32),
        "seed": torch.tensor([1, -2, 3]),
        "position": torch.tensor([10, 11, 12]),
        "temperature": torch.tensor([0.0, 0.7, 1.0]),
    }


def test_markov_loop(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    with values_out_of_reach(monkeypatch):
        draft = dx.markov_loop(**p, store_logits=True)
    assert [(name, stream) for name, _, stream in library.calls] == [("markov_loop", STREAM)]
    monkeypatch.undo()
    expected = dx.markov_loop(**p, store_logits=True)
    for name in ("tokens", "logit", "lse", "logits", "status"):
        assert torch.equal(getattr(draft, name), getattr(expected, name)), name


def test_small_arguments_are_converted_on_the_device(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem()
    variants = [
        p | {"anchor": p["anchor"].long(), "position": p["position"].int()},
        p | {"seed": p["seed"].view(torch.uint64), "temperature": p["temperature"].double()},
        p | {"active": torch.tensor([True, True, True])},
        p | {"active": torch.tensor(1)},
    ]
    with values_out_of_reach(monkeypatch):
        drafts = [dx.markov_loop(**v) for v in variants]
        one = dx.markov_loop(**(p | {"seed": 2**64 - 2, "position": 11, "temperature": 0.7}))
    monkeypatch.undo()
    expected = dx.markov_loop(**p)
    for draft in drafts:
        assert torch.equal(draft.tokens, expected.tokens)
    assert torch.equal(one.tokens[1], expected.tokens[1])  # that row's own scalars


def test_heads_confidence_and_draft_vocabulary(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(2)
    columns, d = 200, 8
    p = problem() | {
        "head": "gated",
        "head_weight": torch.randn(RANK, d + RANK, generator=g).bfloat16(),
        "head_bias": torch.randn(RANK, generator=g),
        "hidden": torch.randn(R, GAMMA, d, generator=g).half(),
        "confidence_weight": torch.randn(d + RANK, generator=g).bfloat16(),
        "confidence_bias": 0.5,
        "draft_to_target": torch.arange(columns) + 50,
    }
    p["base_logits"], p["w2"] = p["base_logits"][..., :columns], p["w2"][:columns]
    with values_out_of_reach(monkeypatch):
        draft = dx.markov_loop(**p)
        law = dx.confidence(draft.confidence_logit, torch.tensor([1.0, 2.0]))
    assert [name for name, *_ in library.calls] == ["markov_loop", "confidence"]
    monkeypatch.undo()
    expected = dx.markov_loop(**p)
    assert torch.equal(draft.tokens, expected.tokens)
    assert torch.equal(draft.confidence_logit, expected.confidence_logit)
    same = dx.confidence(expected.confidence_logit, torch.tensor([1.0, 2.0]))
    assert torch.equal(law.survival, same.survival)


def test_values_that_only_a_kernel_can_judge_set_a_status_bit(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem() | {"temperature": torch.tensor([0.0, -1.0, 1.0])}
    with values_out_of_reach(monkeypatch):
        draft = dx.markov_loop(**p)
    assert draft.status.tolist() == [0, int(dx.Status.BAD_PARAM), 0]


def test_scratch_is_allocated_beside_the_tensors(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, Any]] = []
    empty = torch.empty

    def recorded(*shape: Any, **options: Any) -> torch.Tensor:
        made.append((shape, options))
        return empty(*shape, **options)

    p = problem()
    out = dx.markov_loop(**p)
    monkeypatch.setattr(torch, "empty", recorded)
    dx.markov_loop(**p, out=out)
    ((shape, options),) = made  # one allocation: the scratch
    assert shape == (library.calls[-1][1],)
    assert options == {"dtype": torch.uint8, "device": p["w1"].device}


def test_wrong_arguments(library: Library) -> None:
    p = problem()
    wrong = p | {
        "seed": torch.tensor([1, 2]),
        "anchor": torch.tensor([1.0, 2.0, 3.0]),
        "position": np.arange(3),
        "confidence_bias": torch.tensor(0.5),
    }
    with pytest.raises(dx.ArgumentError) as info:
        dx.markov_loop(**wrong)
    text = str(info.value)
    assert "seed: got shape [2], expected [3] or a scalar" in text
    assert "anchor: got float32 [3] on cuda:0" in text
    assert "position: got int64 [3] on cpu, expected an array on cuda:0" in text
    assert "confidence_bias: got float32 [] on cuda:0, expected a number of the host" in text
    for backend in ("cpu", "reference"):
        with pytest.raises(dx.ArgumentError, match="arrays on cuda:0, expected arrays on the CPU"):
            dx.markov_loop(**p, backend=backend)
    assert library.calls == []


def test_strict_is_refused_under_capture(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem() | {"anchor": torch.tensor([4, 5, 999])}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a graph cannot hold strict=True"):
        dx.markov_loop(**p, strict=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(dx.StatusError):
        dx.markov_loop(**p, strict=True)
