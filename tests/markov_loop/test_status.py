# SPDX-License-Identifier: Apache-2.0
"""Trouble in the data: status bits, defined tokens, and neighbours that do not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import _C
from dspark_ext.status import Status

Case = dict[str, Any]
BOTH = pytest.mark.parametrize("t", [0.0, 1.0], ids=["greedy", "sampled"])


@BOTH
def test_a_nan_logit_counts_as_minus_infinity(
    backend: str, t: float, make: Callable[..., Case]
) -> None:
    case = make(3, 2, 260, 4)
    case["base_logits"][1, :, 5] = 1e4
    want = dx.markov_loop(**case, temperature=t, backend=backend)
    case["base_logits"][1, 1, 5] = np.nan
    got = dx.markov_loop(**case, temperature=t, store_logits=True, backend=backend)
    assert got.status.tolist() == [0, Status.NAN_DRAFT, 0]
    assert got.tokens[1, 0] == 5 and got.tokens[1, 1] != 5
    assert got.logits[1, 1, 5] == -np.inf and np.isfinite(got.lse).all()
    np.testing.assert_array_equal(got.tokens[[0, 2]], want.tokens[[0, 2]])


@BOTH
@pytest.mark.parametrize("fill", [np.nan, -np.inf])
def test_no_support(backend: str, t: float, fill: float, make: Callable[..., Case]) -> None:
    case = make(2, 2, 260, 4)
    case["base_logits"][0, 0] = fill
    got = dx.markov_loop(**case, temperature=t, backend=backend)
    nan = Status.NAN_DRAFT if np.isnan(fill) else 0
    assert got.status.tolist() == [Status.EMPTY_SUPPORT | nan, 0]
    assert got.tokens[0, 0] == 0
    assert got.logit[0, 0] == -np.inf and got.lse[0, 0] == -np.inf
    assert np.isfinite(got.lse[0, 1])  # the next slot goes on from token 0


def test_no_support_with_a_reduced_vocabulary(backend: str, make: Callable[..., Case]) -> None:
    case = make(1, 1, 9, 2)
    case["base_logits"] = np.full((1, 1, 3), -np.inf, np.float32)
    case["w2"] = case["w2"][:3]
    got = dx.markov_loop(**case, draft_to_target=[4, 6, 8], temperature=1.0, backend=backend)
    assert got.tokens == 4 and got.status == Status.EMPTY_SUPPORT


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}], ids=["top-k", "top-p"])
def test_no_support_under_truncation(backend: str, cut: Case, make: Callable[..., Case]) -> None:
    case = make(1, 1, 140, 2)
    case["base_logits"][:] = -np.inf
    got = dx.markov_loop(**case, **cut, temperature=1.0, backend=backend)
    assert got.tokens == 0 and got.status == Status.EMPTY_SUPPORT


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_plus_infinity_is_the_largest_finite_value(
    backend: str, t: float, dtype: type, make: Callable[..., Case]
) -> None:
    case = make(1, 1, 260, 4)
    case["base_logits"] = case["base_logits"].astype(dtype)
    case["base_logits"][0, 0, [7, 200]] = np.inf
    got = dx.markov_loop(**case, temperature=t, backend=backend)
    assert got.tokens in (7, 200) and got.status == 0
    assert got.logit == float(np.finfo(dtype).max)
    assert np.isfinite(got.lse).all()
    if t == 0:
        assert got.tokens == 7


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("anchor", [-1, -(2**31), 300, 2**31 - 1])
def test_a_bad_anchor_is_never_an_index(
    backend: str, head: str, anchor: int, make: Callable[..., Case]
) -> None:
    case = make(3, 3, 300, 8, head=head, confidence=True)
    case["anchor"][1] = anchor
    got = dx.markov_loop(**case, temperature=[0, 0, 1], store_logits=True, backend=backend)
    assert got.status.tolist() == [0, Status.BAD_DRAFT_ID, 0]
    zero = dict(case, w1=np.concatenate([case["w1"], np.zeros((1, 8), np.float32)]))
    zero["anchor"] = np.array([case["anchor"][0], 300, case["anchor"][2]])
    # the same with a real row of zeros: w1 has one row more than the vocabulary of w2
    zero["draft_to_target"] = np.arange(300)
    want = dx.markov_loop(**zero, temperature=[0, 0, 1], store_logits=True, backend=backend)
    np.testing.assert_array_equal(got.logits, want.logits)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.confidence_logit, want.confidence_logit)


def test_nan_hidden_states_are_seen(backend: str, make: Callable[..., Case]) -> None:
    case = make(3, 3, 50, 4, head="gated", confidence=True)
    case["hidden"][1, 1] = np.nan
    got = dx.markov_loop(**case, temperature=1.0, backend=backend)
    assert got.status.tolist() == [0, Status.NAN_DRAFT | Status.EMPTY_SUPPORT, 0]
    assert np.isnan(got.confidence_logit[1, 1]) and np.isfinite(got.confidence_logit[1, 0])
    assert got.tokens[1, 1] == 0


@BOTH
def test_minus_infinity_next_to_huge_logits(
    backend: str, t: float, make: Callable[..., Case]
) -> None:
    case = make(1, 1, 260, 1)
    case["w2"][:] = 0
    case["base_logits"][0, 0] = -np.finfo(np.float32).max
    case["base_logits"][0, 0, 100:] = -np.inf
    case["base_logits"][0, 0, 42] = np.finfo(np.float32).max
    got = dx.markov_loop(**case, temperature=t and 1e-3, backend=backend)
    assert got.tokens == 42 and got.status == 0


def test_strict_names_the_request(backend: str, make: Callable[..., Case]) -> None:
    case = make(2, 1, 30, 2)
    case["anchor"][1] = -1
    with pytest.raises(dx.StatusError, match="request 1: BAD_DRAFT_ID"):
        dx.markov_loop(**case, strict=True, backend=backend)


class Native:
    """The C API without the Python checks: what device data can bring."""

    def __init__(self, case: Case) -> None:
        self.arrays = dict(case)
        rows, gamma, vocab = case["base_logits"].shape
        p = self.params = _C.MarkovLoopParams()
        p.num_requests, p.gamma, p.num_threads = rows, gamma, 1
        p.vocab_size = p.draft_vocab_size = vocab
        p.rank = p.w1_stride = p.w2_stride = case["w1"].shape[1]
        p.base_request_stride, p.base_slot_stride = gamma * vocab, vocab
        shape = (rows, gamma)
        self.arrays |= {
            "tokens": np.full(shape, -5, np.int32),
            "logit": np.zeros(shape, np.float32),
            "lse": np.zeros(shape, np.float32),
            "status": np.full(rows, -5, np.int32),
        }
        for name in ("base_logits", "w1", "w2", "anchor", "seed", "position"):
            self.set(name, self.arrays[name])
        for name in ("tokens", "logit", "lse", "status"):
            self.set(name, self.arrays[name])

    def set(self, name: str, x: np.ndarray) -> None:
        self.arrays[name] = x = np.ascontiguousarray(x)
        setattr(self.params, name, x.ctypes.data)

    def run(self, spare: int = 0) -> None:
        needed = _C.markov_loop_workspace(_C.CPU, self.params)
        scratch = np.zeros(needed + 64, np.uint8)
        start = -scratch.ctypes.data % 64
        _C.markov_loop(_C.CPU, self.params, scratch.ctypes.data + start, needed - spare)
        assert not scratch[start + needed :].any()  # nothing behind the workspace


@pytest.mark.parametrize("bad", [-1.0, 9e-4, np.nan, np.inf, -np.inf])
def test_a_bad_temperature_on_the_device_is_greedy(bad: float, make: Callable[..., Case]) -> None:
    case = make(3, 4, 300, 4)
    native = Native(case)
    native.set("temperature", np.float32([1, bad, 1]))
    native.run()
    assert native.arrays["status"].tolist() == [0, Status.BAD_PARAM, 0]
    greedy = dx.markov_loop(**case)
    np.testing.assert_array_equal(native.arrays["tokens"][1], greedy.tokens[1])
    sampled = dx.markov_loop(**case, temperature=1.0)
    np.testing.assert_array_equal(native.arrays["tokens"][[0, 2]], sampled.tokens[[0, 2]])


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, np.nan])
def test_a_bad_top_p_on_the_device_is_off(bad: float, make: Callable[..., Case]) -> None:
    case = make(2, 4, 300, 4)
    native = Native(case)
    native.set("temperature", np.float32([1, 1]))
    native.set("top_p", np.float32([bad, 1]))
    native.run()
    assert native.arrays["status"].tolist() == [Status.BAD_PARAM, 0]
    np.testing.assert_array_equal(
        native.arrays["tokens"], dx.markov_loop(**case, temperature=1.0).tokens
    )


def test_a_short_workspace_is_refused_before_anything_is_written(make: Callable[..., Case]) -> None:
    native = Native(make(2, 2, 30, 3))
    with pytest.raises(ValueError, match="workspace: got"):
        native.run(spare=1)
    assert (native.arrays["tokens"] == -5).all() and (native.arrays["status"] == -5).all()


def test_the_c_api_lists_everything() -> None:
    p = _C.MarkovLoopParams()
    p.num_requests, p.gamma, p.head, p.topk_support = 1, 17, 5, -1
    with pytest.raises(ValueError, match="gamma: got 17") as error:
        _C.markov_loop(_C.CPU, p)
    for part in ("head: got 5", "rank: got 0", "topk_support: got -1", "w1: got NULL", "tokens"):
        assert part in str(error.value)


def test_the_c_api_wants_both_arrays_of_a_support(make: Callable[..., Case]) -> None:
    native = Native(make(1, 1, 30, 3))
    native.set("support_ids", np.zeros((1, 1, 8), np.int32))
    with pytest.raises(ValueError, match="got one of them, expected both") as error:
        native.run()
    assert "support_ids: got an array with topk_support 0" in str(error.value)
    native.params.topk_support = 1025
    with pytest.raises(ValueError, match=r"topk_support: got 1025, expected 0\.\.1024"):
        native.run()
    native.params.topk_support, native.params.support_ids = 8, 0
    native.run()  # neither: the draft alone


def test_the_c_api_names_what_is_missing(make: Callable[..., Case]) -> None:
    native = Native(make(1, 1, 30, 3))
    if not dx.info()["cuda"]["compiled"]:
        with pytest.raises(NotImplementedError, match="built without CUDA"):
            _C.markov_loop(_C.CUDA, native.params)
        return
    with pytest.raises(ValueError, match="workspace: got 0 bytes"):
        _C.markov_loop(_C.CUDA, native.params)
