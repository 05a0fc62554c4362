# SPDX-License-Identifier: Apache-2.0
"""What CTAs say to each other: no result depends on their number, on the order in which threads
run, on how the work is launched, or on anything that was in the workspace before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import _C
from dspark_ext.status import Status

Case = dict[str, Any]
OUTPUTS = ("tokens", "logit", "lse", "status")

pytestmark = pytest.mark.parametrize("backend", ["simt"], indirect=True)


class Call:
    """One problem for the C API, with a workspace of its own; greedy and sampled requests."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rows, gamma, vocab = case["base_logits"].shape
        p = self.params = _C.MarkovLoopParams()
        p.num_requests, p.gamma = rows, gamma
        p.vocab_size = p.draft_vocab_size = vocab
        p.rank = p.w1_stride = p.w2_stride = case["w1"].shape[1]
        p.base_request_stride, p.base_slot_stride = gamma * vocab, vocab
        self.arrays: Case = {}
        self.set("temperature", np.resize(np.float32([1, 0, 0.8]), rows))
        for name in ("base_logits", "w1", "w2", "anchor", "seed", "position"):
            self.set(name, case[name])
        needed = _C.markov_loop_workspace(_C.SIMT, p)
        self.memory = np.frombuffer(
            np.random.default_rng(seed).bytes(needed + 256), np.uint8
        ).copy()
        start = -self.memory.ctypes.data % 256
        self.workspace = self.memory[start : start + needed]

    def set(self, name: str, x: np.ndarray) -> None:
        self.arrays[name] = x = np.ascontiguousarray(x)
        setattr(self.params, name, x.ctypes.data)

    def run(self) -> Case:
        shape = (self.params.num_requests, self.params.gamma)
        for name in OUTPUTS:
            dtype = np.float32 if name in ("logit", "lse") else np.int32
            self.set(name, np.full(shape[:1] if name == "status" else shape, -7, dtype))
        needed = self.workspace.nbytes
        _C.markov_loop(_C.SIMT, self.params, self.workspace.ctypes.data, needed, 0)
        return {name: self.arrays[name] for name in OUTPUTS}


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits of exactly representable values."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture
def problem(make: Callable[..., Case]) -> Case:
    return make(5, 3, 900, 16)


def tensor_cores(call: Call) -> Call:
    """The same problem with bfloat16 weights."""
    for name in ("w1", "w2"):
        call.set(name, bf16(call.arrays[name]))
    call.params.w1_dtype = call.params.w2_dtype = 1
    return call


@pytest.fixture(params=["mma", "wgmma"])
def call(
    problem: Case, backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Call:
    monkeypatch.setenv("DSPARK_MARKOV_LOOP_SOURCE", str(request.param))
    return tensor_cores(Call(problem))


@pytest.fixture
def want(problem: Case) -> Case:
    """The CPU's answer; weights on a grid, so every source has the same z."""
    temperature = np.resize(np.float32([1, 0, 0.8]), 5)
    draft = dx.markov_loop(**problem, temperature=temperature)
    return {name: getattr(draft, name) for name in OUTPUTS}


def same(got: Case, want: Case) -> None:
    for name in ("tokens", "logit", "status"):
        np.testing.assert_array_equal(got[name], want[name], name)
    np.testing.assert_allclose(got["lse"], want["lse"], rtol=2e-7)


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 40])
def test_any_grid(
    multiprocessors: int, call: Call, want: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    lse = call.run()["lse"]
    monkeypatch.setenv("DSPARK_SIMT_SMS", str(multiprocessors))
    got = call.run()
    same(got, want)
    np.testing.assert_array_equal(got["lse"], lse)  # its order of additions is no matter of grid


@pytest.mark.parametrize("order", range(6))
def test_any_order_of_threads(
    order: int, call: Call, want: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(order))
    monkeypatch.setenv("DSPARK_SIMT_ASYNC", ["late", "early", "random"][order % 3])
    same(call.run(), want)


@pytest.mark.parametrize("refusal", ["2", "3"], ids=["by-the-device", "when-tried"])
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_a_launch_for_each_phase(
    head: str,
    refusal: str,
    make: Callable[..., Case],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    """Without cooperative launches the order of the stream takes the place of waiting."""
    case = make(5, 4, 900, 16, head=head, confidence=True) | {"temperature": [0, 1, 1, 0.5, 2]}
    want = dx.markov_loop(**case, store_logits=True, backend=backend)
    monkeypatch.setenv("DSPARK_SIMT_COOPERATIVE", refusal)
    got = dx.markov_loop(**case, store_logits=True, backend=backend)
    for name in (*OUTPUTS, "logits", "confidence_logit"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)


def test_one_workspace_for_many_calls(call: Call, want: Case) -> None:
    for _ in range(4):
        same(call.run(), want)


def test_without_tensor_cores(problem: Case, want: Case, backend: str) -> None:
    call = Call(problem)
    same(call.run(), want)
    same(call.run(), want)


@pytest.mark.parametrize("garbage", range(8))
def test_garbage_in_the_workspace(garbage: int, call: Call, want: Case) -> None:
    """Zeros, ones, ramps, noise: also what looks like the answer to this launch's questions."""
    words = call.workspace.view(np.uint32)
    fills: list[Any] = [
        0,
        0xFFFFFFFF,
        np.arange(words.size),
        np.arange(words.size)[::-1],
        np.arange(words.size) // 256,
        1 - np.arange(words.size) // 256 % 2,
        5,
        np.random.default_rng(garbage).integers(0, 2**32, words.size),
    ]
    words[:] = np.asarray(fills[garbage]).astype(np.uint32)
    same(call.run(), want)


def test_whatever_a_killed_launch_left(call: Call, want: Case, rng: np.random.Generator) -> None:
    """A launch that dies leaves words of before, of its middle and of its end, in any mixture."""
    before = call.workspace.copy()
    same(call.run(), want)
    after = call.workspace.copy()
    same(call.run(), want)
    latest = call.workspace.copy()
    for _ in range(6):
        chosen = rng.integers(0, 3, call.workspace.size // 4)
        for state, number in ((before, 0), (after, 1), (latest, 2)):
            words = call.workspace.view(np.uint32)
            words[chosen == number] = state.view(np.uint32)[chosen == number]
        same(call.run(), want)


@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("fill", [0, 5, 2**32 - 1])
def test_a_block_that_is_late(
    last: int, fill: int, call: Call, want: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 0 prepares the exchange; nobody may rely on it before it has begun."""
    monkeypatch.setenv("DSPARK_SIMT_LAST", str(last))
    for order in ("0", "1"):
        monkeypatch.setenv("DSPARK_SIMT_SEED", order)
        call.workspace.view(np.uint32)[:] = fill
        same(call.run(), want)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_launch_that_dies(
    order: int, call: Call, want: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its first words, in the handshake, later: the next one is good."""
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(order))
    died = 0
    for change in (1, 2, 4, 6, 9, 13, 20, 40, 60, 80):
        monkeypatch.setenv("DSPARK_SIMT_STOP", str(change))
        message = ""
        try:
            call.run()
        except RuntimeError as error:
            message = str(error)
        died += "killed here" in message
        monkeypatch.delenv("DSPARK_SIMT_STOP")
        same(call.run(), want)
    assert died >= 6


def test_every_echo_is_one_too_far(call: Call, want: Case) -> None:
    """The handshake's own words from all sides of the number that a CTA will ask for."""
    check, echo = (call.workspace[1024 * i : 1024 * (i + 1)].view(np.uint32) for i in (0, 1))
    for ahead in (0, 1, 2, 2**32 - 1):
        echo[:] = 41
        check[:] = np.uint32((41 + ahead) % 2**32)
        same(call.run(), want)


@pytest.mark.parametrize("bad", [-1.0, 9e-4, np.nan, np.inf, -np.inf])
def test_a_bad_temperature_on_the_device_is_greedy(bad: float, call: Call, want: Case) -> None:
    call.set("temperature", np.float32([1, bad, 0.8, 1, 0]))
    got = call.run()
    assert got["status"].tolist() == [0, Status.BAD_PARAM, 0, 0, 0]
    np.testing.assert_array_equal(got["tokens"], want["tokens"])  # request 1 is greedy there too


def test_a_short_workspace_is_refused(call: Call) -> None:
    call.workspace = call.workspace[:-1]
    with pytest.raises(ValueError, match="workspace: got"):
        call.run()
    assert (call.arrays["tokens"] == -7).all() and (call.arrays["status"] == -7).all()


@pytest.mark.parametrize("name", ["top_k", "top_p"])
def test_truncation_is_refused(name: str, call: Call) -> None:
    call.set(name, np.ones(5, np.int32 if name == "top_k" else np.float32))
    with pytest.raises(NotImplementedError, match=f"{name}: got an array"):
        call.run()
    assert (call.arrays["tokens"] == -7).all()
