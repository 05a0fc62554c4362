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
