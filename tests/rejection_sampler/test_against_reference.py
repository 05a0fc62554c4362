# SPDX-License-Identifier: Apache-2.0
"""Property tests: the CPU backend and the float64 reference emit the same on random calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dspark_ext as dx

_SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@_SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_any_call(random_call: Any, assert_like_reference: Any, seed: int) -> None:
    call = random_call(np.random.default_rng(seed))
    assert_like_reference(dx.rejection_sample(call[0], call[1], **call[2]), call)


def test_close_decisions_are_few(random_call: Any, assert_like_reference: Any) -> None:
    close = total = 0
    for seed in range(200):
        call = random_call(np.random.default_rng(seed))
        close += assert_like_reference(dx.rejection_sample(call[0], call[1], **call[2]), call)
        total += len(call[1])
    assert close <= 0.01 * total


@_SETTINGS
@given(seed=st.integers(0, 2**32 - 1))
def test_strides_and_kinds_of_arrays_do_not_matter(random_call: Any, seed: int) -> None:
    """Row strides, torch tensors and int64 drafts read the same numbers."""
    torch = pytest.importorskip("torch")
    target, drafts, kwargs = random_call(np.random.default_rng(seed))
    want = dx.rejection_sample(target, drafts, **kwargs)
    wide = np.full((len(target), target.shape[1] + 13), np.nan, target.dtype)
    wide[:, : target.shape[1]] = target
    moved = dict(kwargs)
    if "draft_logits" in moved:
        law = moved["draft_logits"]
        padded = np.full((*law.shape[:2], law.shape[2] + 5), np.nan, law.dtype)
        padded[..., : law.shape[2]] = law
        moved["draft_logits"] = torch.from_numpy(padded)[..., : law.shape[2]]
    for name, value in moved.items():
        if isinstance(value, np.ndarray) and name != "seed":
            moved[name] = torch.from_numpy(value)
    rows = torch.from_numpy(wide)[:, : target.shape[1]]
    got = dx.rejection_sample(rows, torch.from_numpy(drafts), **moved)
    on = np.asarray(kwargs.get("active", np.ones(len(drafts)))) != 0
    for field in ("tokens", "accepted", "logprob", "logprob_raw", "status"):
        np.testing.assert_array_equal(
            getattr(got, field).numpy()[on], getattr(want, field)[on], field
        )


@pytest.mark.parametrize("level", [1e17, 3e38, np.inf], ids=str)
def test_huge_logits_keep_their_shares(backend: str, level: float) -> None:
    """Ids tied at the top share it, however large it is: four at +inf have p = 1/4 each."""
    requests = 60 if backend == "simt" else 300
    logits = np.zeros((2 * requests, 8), np.float32)
    logits[:, :4] = level
    call = {
        "draft_len": [1] * requests,
        "cu_seqlens": np.arange(0, 2 * requests + 1, 2),
        "seed": np.arange(requests),
        "position": [3] * requests,
        "temperature": 1.0,
        "top_logprobs": 4,
    }
    drafts = np.zeros((requests, 1), np.int32)
    got = dx.rejection_sample(logits, drafts, **call, backend=backend)
    want = dx.rejection_sample(logits, drafts, **call, backend="reference")
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.accepted, want.accepted)
    spread = 4.7 * (requests * 3 / 16) ** 0.5
    assert abs(got.num_accepted.sum() - requests / 4) < spread
    emitted = got.tokens >= 0
    for field in (got.logprob, got.logprob_raw):
        np.testing.assert_allclose(field[emitted], np.log(0.25), rtol=1e-6)
    np.testing.assert_allclose(got.top_logprob[:, 0], np.log(0.25), rtol=1e-6)


def test_a_prompt_mask_of_no_request(backend: str) -> None:
    got = dx.rejection_sample(
        np.zeros((0, 8), np.float32), np.zeros((0, 2), np.int32), draft_len=[], cu_seqlens=[0],
        seed=[], position=[], temperature=1.0, prompt_mask=np.zeros((0, 1), np.int32),
        backend=backend,
    )  # fmt: skip
    assert got.tokens.shape == (0, 3)
