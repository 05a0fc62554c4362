# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: one error that lists everything, or a status bit where only data shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import _C, Status


def arguments(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "target_logits": np.zeros((4, 40), np.float32),
        "draft_tokens": np.zeros((2, 3), np.int32),
        "draft_len": [1, 1],
        "cu_seqlens": [0, 2, 4],
        "seed": [1, 2],
        "position": [10, 20],
        "temperature": 1.0,
    }
    return base | changes


STORED = {
    "draft_logit": np.zeros((2, 3), np.float32),
    "draft_lse": np.zeros((2, 3), np.float32),
    "draft_logits": np.zeros((2, 3, 40), np.float32),
}
LISTED = {
    "draft_logit": np.zeros((2, 3), np.float32),
    "draft_lse": np.zeros((2, 3), np.float32),
    "support_ids": np.zeros((2, 3, 5), np.int32),
    "support_logits": np.zeros((2, 3, 5), np.float32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_logits": np.zeros((4, 40))}, "target_logits: got float64"),
        ({"target_logits": np.zeros(40, np.float32)}, r"target_logits: got shape \[40\]"),
        ({"target_logits": np.zeros((4, 80), np.float32)[:, ::2]}, "contiguous last dimension"),
        ({"target_logits": None}, "target_logits: got None"),
        ({"draft_tokens": np.zeros((2, 3), np.float32)}, "draft_tokens: got float32"),
        ({"draft_tokens": np.zeros((2, 17), np.int32)}, "gamma: got 17, expected 1..16"),
        ({"draft_tokens": np.zeros((2, 0), np.int32)}, "gamma: got 0, expected 1..16"),
        ({"target_lse": np.zeros(4, np.float32)}, "target_logit, target_lse: got one of them"),
        ({"target_lse_raw": np.zeros(4, np.float32)}, "target_logit, target_lse: got one"),
        (
            {k: np.zeros(3, np.float32) for k in ("target_logit", "target_lse")},
            r"target_logit: got shape \[3\]",
        ),
        ({"draft_len": [1, 1, 1]}, r"draft_len: got shape \[3\]"),
        ({"draft_len": [0.5, 1]}, "draft_len: got"),
        ({"cu_seqlens": [0, 2]}, "cu_seqlens: got shape"),
        ({"cu_seqlens": 0}, "cu_seqlens: got shape"),
        ({"cu_seqlens": [0, 2, 2**31]}, "cu_seqlens: got"),
        ({"seed": None}, "seed: got None"),
        ({"seed": [0.5, 1]}, "seed: got"),
        ({"position": [0, -1]}, "position: got -1"),
        ({"position": 2**32 - 4}, "position: got"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": 9e-4}, "temperature: got"),
        ({"temperature": np.nan}, "temperature: got nan"),
        ({"temperature": np.inf}, "temperature: got inf"),
        ({"draft_temperature": [1.0, 1e-6]}, "draft_temperature: got"),
        ({"top_p": 0.0}, r"top_p: got 0.0.*\(0, 1\]"),
        ({"top_p": [1.5, 1]}, "top_p: got 1.5"),
        ({"top_p": np.nan}, "top_p: got nan"),
        ({"min_p": -0.1}, "min_p: got"),
        ({"min_p": 1.1}, "min_p: got"),
        ({"top_k": 0.5}, "top_k: got"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: got 0.0.*, expected finite values > 0"),
        ({"repetition_penalty": np.nan}, "repetition_penalty: got nan"),
        ({"presence_penalty": np.inf}, "presence_penalty: got inf.*, expected finite"),
        ({"frequency_penalty": [0, np.nan]}, "frequency_penalty: got nan"),
        ({"min_tokens_left": -1}, "min_tokens_left: got -1"),
        ({"output_counts": np.zeros((2, 41), np.int32)}, "output_counts: got shape"),
        ({"output_counts": np.zeros((2, 40))}, "output_counts: got float64"),
        ({"prompt_mask": np.zeros((2, 1), np.int32)}, "prompt_mask: got 1 words a row"),
        ({"top_logprobs": 129}, r"top_logprobs: got 129, expected an integer in 0..128"),
        ({"top_logprobs": -1}, "top_logprobs: got -1"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1"),
        ({"rule": "tokens"}, "rule: got 'tokens'"),
        ({"rule": [0, 7]}, "rule: got 7"),
        ({"rule": "synthetic"}, "synthetic_acceptance: got None, expected values in 1..4"),
        ({"rule": [1, 4]}, "synthetic_acceptance: got None"),
        ({"rule": "synthetic", "synthetic_acceptance": 4.5}, "synthetic_acceptance: got 4.5"),
        ({"rule": "synthetic", "synthetic_acceptance": 0.5}, "synthetic_acceptance: got 0.5"),
        ({"logit_bias": np.zeros((2, 41), np.float32)}, "logit_bias: got shape"),
        (
            {"token_mask": np.zeros((4, 1), np.int32)},
            "token_mask: got 1 words a row, expected >= 2",
        ),
        ({"token_mask": np.zeros((3, 2), np.int32)}, "token_mask: got shape"),
        ({"token_mask": np.zeros((2, 3, 2), np.int32)}, "token_mask: got shape"),
        ({"token_mask": np.zeros((4, 40), bool)}, "token_mask: got bool"),
        ({"vocab_size": 41}, "vocab_size: got 41, expected 1..40"),
        ({"vocab_size": 0}, "vocab_size: got 0"),
        ({"vocab_size": 2.5}, "vocab_size: got 2.5"),
        ({"stop_ids": ["eos"]}, "stop_ids: got .'eos'., expected ids"),
        ({"stop_ids": np.zeros((3, 2), np.int32)}, "stop_ids: got shape"),
        ({"draft_logits": STORED["draft_logits"]}, "only draft_logits, expected all three or none"),
        ({"draft_logit": STORED["draft_logit"]}, "only draft_logit, expected all three or none"),
        (
            STORED | {"draft_logits": np.zeros((2, 3, 39), np.float32)},
            "draft_logits: got 39 columns",
        ),
        (STORED | {"draft_lse": np.zeros((2, 6), np.float32)[:, ::2]}, "draft_lse: got strides"),
        (STORED | LISTED, "draft_logits: got .*, expected None beside support_ids"),
        ({"support_ids": LISTED["support_ids"]}, "only support_ids, expected all four or none"),
        (
            LISTED | {"support_logits": np.zeros((2, 3, 4), np.float32)},
            r"support_logits: got shape \[2, 3, 4\]",
        ),
        (LISTED | {"support_ids": np.zeros((2, 3, 5), np.int64)}, "support_ids: got int64"),
        (
            {k: v[..., :0] if v.ndim == 3 else v for k, v in LISTED.items()},
            "support_ids: got 0 ids a slot, expected at least 1",
        ),
        ({"draft_to_target": np.array([3, 3])}, "draft_to_target: got other values"),
        ({"draft_to_target": np.array([3, 40])}, r"strictly increasing ids in \[0, 40\)"),
        ({"debug_uniform": np.zeros((2, 3), np.uint64)}, "debug_uniform: got shape"),
        ({"active": [1]}, "active: got shape"),
        ({"backend": "gpu"}, "backend: got 'gpu'"),
        ({"backend": "cuda"}, "backend: got 'cuda'"),
    ],
)
def test_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(dx.ArgumentError, match=message):
        dx.rejection_sample(**arguments(**changes))


def test_everything_wrong_is_listed_and_nothing_written() -> None:
    kept = dx.rejection_sample(**arguments())
    before = kept.tokens.copy()
    with pytest.raises(dx.ArgumentError) as error:
        dx.rejection_sample(
            **arguments(temperature=-1, top_p=2, min_p=-1, position=-5, rule="x"), out=kept
        )
    for name in ("temperature", "top_p", "min_p", "position", "rule"):
        assert f"{name}: got" in str(error.value)
    np.testing.assert_array_equal(kept.tokens, before)


def test_kinds_of_arrays_do_not_mix() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(dx.ArgumentError, match="draft_tokens: got torch"):
        dx.rejection_sample(**arguments(draft_tokens=torch.zeros((2, 3), dtype=torch.int32)))
    with pytest.raises(dx.ArgumentError, match="draft_tokens: got torch on meta"):
        dx.rejection_sample(
            **arguments(
                target_logits=torch.zeros((4, 40)),
                draft_tokens=torch.zeros((2, 3), dtype=torch.int32, device="meta"),
            )
        )


@pytest.mark.parametrize(
    ("length", "cu", "emitted"),
    [
        pytest.param([4, 1], [0, 2, 4], [(0, 2), (1, 2)], id="longer-than-gamma"),
        pytest.param([-1, 1], [0, 2, 4], [(1, 1), (1, 2)], id="negative"),
        pytest.param([3, 1], [0, 2, 4], [(1, 2), (1, 2)], id="more-than-rows"),
        pytest.param([1, 1], [0, 2, 5], [(1, 2), (0, 0)], id="past-num-rows"),
        pytest.param([1, 1], [-2, 2, 4], [(0, 0), (1, 2)], id="negative-start"),
        pytest.param([1, 1], [2, 2, 4], [(0, 0), (1, 2)], id="no-row"),
        pytest.param([1, 1], [4, 0, 2], [(0, 0), (1, 2)], id="descending"),
    ],
)
def test_bad_row_maps_set_bad_param(
    backend: str, length: list[int], cu: list[int], emitted: list[tuple[int, int]]
) -> None:
    got = dx.rejection_sample(**arguments(draft_len=length, cu_seqlens=cu), backend=backend)
    for r, (low, high) in enumerate(emitted):
        assert low <= got.num_emitted[r] <= high
        assert (got.tokens[r] < 40).all()
    assert got.status[0] & Status.BAD_PARAM or got.status[1] & Status.BAD_PARAM


@pytest.mark.parametrize("backend", ["cpu", "simt"], indirect=True)
def test_illegal_values_on_the_device_are_status_bits(backend: str) -> None:
    """The C API sees what Python refuses; the values count as off."""
    device = {"cpu": _C.CPU, "simt": _C.SIMT}[backend]
    rows = np.arange(8, dtype=np.float32).reshape(1, 8)
    keep: dict[str, np.ndarray] = {
        "target_logits": rows,
        "draft_tokens": np.zeros((1, 1), np.int32),
        "draft_len": np.zeros(1, np.int32),
        "cu_seqlens": np.array([0, 1], np.int32),
        "seed": np.zeros(1, np.uint64),
        "position": np.zeros(1, np.int64),
        "num_accepted": np.zeros(1, np.int32),
        "num_emitted": np.zeros(1, np.int32),
        "tokens": np.zeros((1, 2), np.int32),
        "next_anchor": np.zeros(1, np.int32),
        "logprob": np.zeros((1, 2), np.float32),
        "logprob_raw": np.zeros((1, 2), np.float32),
        "accepted": np.zeros((1, 1), np.int8),
        "finish": np.zeros(1, np.int32),
        "status": np.zeros(1, np.int32),
    }
    bad: dict[str, list[Any]] = {
        "temperature": [np.float32(x) for x in (-1, 1e-4, np.nan, np.inf)],
        "draft_temperature": [np.float32(-1)],
        "top_p": [np.float32(x) for x in (0, 2, np.nan)],
        "min_p": [np.float32(x) for x in (-1, 2, np.nan)],
        "repetition_penalty": [np.float32(x) for x in (0, -1, np.nan, np.inf)],
        "presence_penalty": [np.float32(x) for x in (np.nan, np.inf)],
        "frequency_penalty": [np.float32(x) for x in (np.nan, -np.inf)],
        "min_tokens_left": [np.int32(-1)],
        "rule": [np.int32(x) for x in (-1, 5, 99)],
        "synthetic_acceptance": [np.float32(x) for x in (0, -1, 3, np.nan)],
    }
    synthetic = {"rule": np.array([4], np.int32), "draft_len": np.ones(1, np.int32)}
    synthetic |= {"cu_seqlens": np.array([0, 2], np.int32), "target_logits": np.tile(rows, (2, 1))}
    for name, values in bad.items():
        for value in values:
            p = _C.RejectionSamplerParams()
            p.num_requests, p.gamma, p.vocab_size, p.num_rows = 1, 1, 8, 1
            p.target_stride, p.draft_tokens_stride = 8, 1
            arrays, mark = keep | {name: np.array([value])}, Status.BAD_PARAM
            if name == "synthetic_acceptance":  # a round with a draft, which is not accepted
                arrays, mark, p.num_rows = arrays | synthetic, mark | Status.SYNTHETIC, 2
            for field, array in arrays.items():
                setattr(p, field, array.ctypes.data)
            scratch = np.zeros(_C.rejection_sampler_workspace(device, p) + 256, np.uint8)
            address = (scratch.ctypes.data + 255) // 256 * 256
            _C.rejection_sampler(device, p, address, scratch.size - 256, 0)
            assert keep["status"][0] == mark, (name, value)
            assert keep["tokens"].tolist() == [[7, -1]], (name, value)  # greedy


def test_c_api_lists_its_problems() -> None:
    p = _C.RejectionSamplerParams()
    p.num_requests, p.gamma, p.vocab_size = 2, 0, 0
    with pytest.raises(ValueError, match="gamma: got 0") as error:
        _C.rejection_sampler(_C.CPU, p)
    for part in ("vocab_size: got 0", "draft_tokens: got NULL", "status: got NULL"):
        assert part in str(error.value)


def test_the_next_anchor_is_not_written_over_the_anchor() -> None:
    result = dx.rejection_sample(**arguments())
    before = result.next_anchor.copy()
    with pytest.raises(ValueError, match="anchor: got the array of next_anchor"):
        dx.rejection_sample(**arguments(anchor=result.next_anchor), out=result)
    np.testing.assert_array_equal(result.next_anchor, before)


def test_workspace_too_small_is_refused() -> None:
    p = _C.RejectionSamplerParams()
    p.num_requests, p.gamma, p.vocab_size = 0, 1, 1000
    needed = _C.rejection_sampler_workspace(_C.CPU, p)
    assert needed > 0
    with pytest.raises(ValueError, match="workspace: got 0 bytes"):
        _C.rejection_sampler(_C.CPU, p)


@pytest.mark.parametrize("requests", [0, 2])
def test_empty_batches(backend: str, requests: int) -> None:
    got = dx.rejection_sample(
        np.zeros((0, 40), np.float32),
        np.zeros((requests, 3), np.int32),
        draft_len=np.zeros(requests, np.int32),
        cu_seqlens=np.zeros(requests + 1, np.int32),
        seed=np.zeros(requests, np.uint64),
        position=np.zeros(requests, np.int64),
        active=np.zeros(requests, np.uint8),
        backend=backend,
    )
    assert got.tokens.shape == (requests, 4) and (got.tokens == -1).all()
    assert not got.num_emitted.any() and not got.status.any()


def test_inactive_requests_are_neither_read_nor_written(backend: str) -> None:
    args = arguments(
        target_logits=np.zeros((2, 40), np.float32),
        cu_seqlens=[0, 2, 2],
        draft_len=[1, 99],
        active=[1, 0],
    )
    kept = dx.rejection_sample(**args, backend=backend)
    assert kept.tokens[1].tolist() == [-1] * 4 and kept.num_emitted[1] == 0
    for name in ("tokens", "num_emitted", "accepted", "status", "logprob", "finish"):
        getattr(kept, name)[1] = 77
    dx.rejection_sample(**args, out=kept, backend=backend)
    for name in ("tokens", "num_emitted", "accepted", "status", "logprob", "finish"):
        assert (getattr(kept, name)[1] == 77).all()


def test_a_cap_of_zero_emits_nothing_but_is_written(backend: str) -> None:
    kept = dx.rejection_sample(**arguments(), backend=backend)
    dx.rejection_sample(**arguments(max_new_tokens=[0, 5]), out=kept, backend=backend)
    assert kept.num_emitted[0] == 0 and kept.tokens[0].tolist() == [-1] * 4
    assert kept.accepted[0].tolist() == [-2] * 3 and kept.next_anchor[0] == -1


def test_strict_raises_with_the_request(backend: str) -> None:
    rows = np.zeros((4, 40), np.float32)
    rows[2] = np.nan
    with pytest.raises(dx.StatusError, match="request 1: NAN_TARGET"):
        dx.rejection_sample(**arguments(target_logits=rows), strict=True, backend=backend)
    dx.rejection_sample(**arguments(stop_ids=range(40)), strict=True, backend=backend)
