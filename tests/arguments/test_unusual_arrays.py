# SPDX-License-Identifier: Apache-2.0
"""Arrays whose memory is not what they show, and answers of models that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext.toy import ToyDrafter, ToyTarget


def test_read_only_memory_map_is_refused_as_output(tmp_path: Path) -> None:
    x = np.zeros((2, 3), np.float32)
    x.tofile(tmp_path / "m.bin")
    mapped = np.memmap(tmp_path / "m.bin", dtype=np.float32, mode="r", shape=(2, 3))
    out = dataclasses.replace(dx.confidence(x), conditional=mapped)
    with pytest.raises(dx.ArgumentError, match=r"out\.conditional: got a read-only array"):
        dx.confidence(x, out=out)


def test_packed_record_fields_are_refused() -> None:
    packed = np.zeros((2, 3), [("p", "u1"), ("x", "f4")])["x"]
    with pytest.raises(dx.ArgumentError, match="logit: got byte strides"):
        dx.confidence(packed)
    ones = np.ones(3, [("p", "u1"), ("x", "f4")])["x"]
    with pytest.raises(dx.ArgumentError, match="temperature: got byte strides"):
        dx.confidence(np.zeros((2, 3), np.float32), ones)


def test_lazy_and_sparse_tensors_are_refused() -> None:
    negated = torch.complex(torch.zeros(2, 3), torch.ones(2, 3)).conj().imag
    with pytest.raises(dx.ArgumentError, match="logit: got a lazily negated view"):
        dx.confidence(negated)
    with pytest.raises(dx.ArgumentError, match="logit: got a tensor of layout"):
        dx.confidence(torch.ones(2, 3).to_sparse())


@pytest.mark.parametrize("out", [5, np.zeros(3), {}], ids=["int", "array", "dict"])
def test_results_of_another_class_are_refused(out: Any) -> None:
    with pytest.raises(dx.ArgumentError, match=r"out: got .*, expected a Confidence or None"):
        dx.confidence(np.zeros((2, 3), np.float32), out=out)


@pytest.mark.parametrize("cost", [-1.0, 3, float("nan")])
def test_a_number_is_no_cost_table(cost: float) -> None:
    with pytest.raises(dx.ArgumentError, match="cost: got"):
        dx.prefix_schedule(np.full((2, 3), 0.5, np.float32), cost)


@pytest.mark.parametrize(
    "wrong",
    [{"top_k": 2**31}, {"top_p": None}, {"min_p": "a"}, {"weight": None}, {"temperature": None},
     {"stop_ids": (1.5,)}, {"stop_ids": "12"}, {"stop_ids": None}, {"stop_ids": (True,)}],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_of_wrong_kind(wrong: dict[str, Any]) -> None:
    with pytest.raises(dx.ArgumentError, match=f"{next(iter(wrong))}: got"):
        dx.SamplingParams(**wrong)


class ShortTarget(ToyTarget):
    """Returns one row of logits too few."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        logits, features = super().forward(*args, **kwargs)
        return logits[:-1], features


def test_a_target_that_returns_too_few_rows_is_refused_and_nothing_moves() -> None:
    state = dx.RoundState.create(1, gamma=2)
    state.add([1, 2])
    with pytest.raises(
        dx.ArgumentError, match=r"target\.forward: logits: got .* expected \[1, V\]"
    ):
        dx.prefill(ShortTarget(), state)
    dx.prefill(ToyTarget(), state)
    before = state.host.kv_len.copy(), state.host.anchor.copy()
    with pytest.raises(dx.ArgumentError, match=r"target\.forward: logits"):
        dx.decode_round(ShortTarget(), None, state)
    np.testing.assert_array_equal(state.host.kv_len, before[0])
    np.testing.assert_array_equal(state.host.anchor, before[1])


def test_a_drafter_of_another_gamma_is_refused_and_nothing_moves() -> None:
    target = ToyTarget()
    state = dx.RoundState.create(1, gamma=3)
    state.add([1, 2])
    dx.prefill(target, state)
    before = state.host.kv_len.copy()
    with pytest.raises(dx.ArgumentError, match="base_logits: got"):
        dx.decode_round(target, ToyDrafter(vocab_size=5, gamma=2), state)
    np.testing.assert_array_equal(state.host.kv_len, before)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"head": np.zeros(2)}, "head"),
        ({"backend": np.zeros(2)}, "backend"),
        ({"topk_support": True}, "topk_support"),
        ({"vocab_size": True}, "vocab_size"),
        ({"draft_to_target": [1, [2]]}, "draft_to_target"),
        ({"debug_uniform": [[1], [2, 3]]}, "debug_uniform"),
    ],
    ids=str,
)
def test_values_of_another_kind_are_named(changes: dict[str, Any], name: str) -> None:
    u = np.zeros((1, 1, 8), np.float32)
    w = np.zeros((8, 2), np.float32)
    with pytest.raises(dx.ArgumentError, match=name):
        dx.markov_loop(u, w, w, anchor=[0], seed=[0], position=[0], **changes)


def test_ragged_and_truth_values_in_verification_are_named() -> None:
    x, drafts = np.zeros((2, 8), np.float32), np.zeros((1, 1), np.int32)
    call: dict[str, Any] = {"draft_len": [1], "seed": [0], "position": [0], "temperature": 1.0}
    with pytest.raises(dx.ArgumentError, match="cu_seqlens"):
        dx.rejection_sample(x, drafts, cu_seqlens=[0, [2]], **call)
    with pytest.raises(dx.ArgumentError, match="top_logprobs"):
        dx.rejection_sample(x, drafts, cu_seqlens=[0, 2], top_logprobs=True, **call)
    with pytest.raises(dx.ArgumentError, match="mode"):
        dx.prefix_schedule(np.ones((1, 2), np.float32), mode=np.zeros(2))
