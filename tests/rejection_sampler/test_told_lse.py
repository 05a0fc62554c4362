# SPDX-License-Identifier: Apache-2.0
"""(lse, z(x)) from an engine's LM head: the same decisions without reading the accepted rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_ext as dx
from dspark_ext import Status

FIELDS = ("tokens", "accepted", "num_accepted", "num_emitted", "status", "finish")


def batch(seed: int, gamma: int = 4, requests: int = 3, vocab: int = 150) -> dict[str, Any]:
    """Drafts near the target, with a stored law."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(requests * (gamma + 1), vocab)).astype(np.float32) * 2
    z = rows.reshape(requests, gamma + 1, vocab)[:, :gamma]
    z = (z + rng.normal(size=z.shape) * 0.3).astype(np.float32)
    t = rng.choice([0.7, 1.0, 1.3], requests).astype(np.float32)
    drafts = (z / t[:, None, None] + rng.gumbel(size=z.shape)).argmax(-1)
    scaled = z.astype(float) / t[:, None, None]
    return {
        "target_logits": rows,
        "draft_tokens": drafts,
        "draft_len": gamma,
        "cu_seqlens": np.arange(requests + 1) * (gamma + 1),
        "seed": rng.integers(0, 2**60, requests, dtype=np.uint64),
        "position": 9,
        "temperature": t,
        "draft_logits": z,
        "draft_logit": np.take_along_axis(z, drafts[..., None], -1)[..., 0],
        "draft_lse": np.log(np.exp(scaled).sum(-1)).astype(np.float32),
    }


def told(call: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a fused LM head would return."""
    rows = call["target_logits"].astype(np.float64)
    requests, gamma = call["draft_tokens"].shape
    ids = np.pad(call["draft_tokens"], ((0, 0), (0, 1))).reshape(-1)
    t = np.repeat(np.broadcast_to(call["temperature"], requests), gamma + 1)[:, None]
    return {
        "target_logit": np.take_along_axis(rows, ids[:, None], 1)[:, 0].astype(np.float32),
        "target_lse": np.log(np.exp(rows / t).sum(1)).astype(np.float32),
        "target_lse_raw": np.log(np.exp(rows).sum(1)).astype(np.float32),
    }


def test_the_same_decisions(backend: str) -> None:
    @settings(max_examples=6 if backend == "simt" else 40, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        call = batch(seed)
        want = dx.rejection_sample(**call, backend=backend)
        got = dx.rejection_sample(**call, **told(call), backend=backend)
        for field in FIELDS:  # an lse in float32 moves a coin by 1e-6: 15 coins, 40 examples
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)
        for field in ("logprob", "logprob_raw"):
            np.testing.assert_allclose(getattr(got, field), getattr(want, field), atol=3e-6)

    check()


def test_accepted_rows_are_not_read(backend: str) -> None:
    call = batch(5)
    numbers = told(call)
    want = dx.rejection_sample(**call, **numbers, backend=backend)
    assert want.num_accepted.sum() > 3
    rows = call["target_logits"].reshape(3, 5, -1).copy()
    for r, n in enumerate(want.num_accepted):
        rows[r, :n] = np.nan
    call["target_logits"] = rows.reshape(15, -1)
    got = dx.rejection_sample(**call, **numbers, backend=backend)
    for field in (*FIELDS, "logprob", "logprob_raw"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"logit_bias": np.zeros((3, 150), np.float32)},
        {"token_mask": np.full((15, 5), -1, np.int32)},
        {"stop_ids": [3], "min_tokens_left": 9},
        {"top_logprobs": 2},
        {"rule": "block"},
        {"rule": "match"},
        {"temperature": 0.0, "draft_temperature": 0.0},
    ],
    ids=lambda e: next(iter(e)) + ("-" + str(e["rule"]) if "rule" in e else ""),
)
def test_other_laws_read_their_rows(backend: str, extra: dict[str, Any]) -> None:
    """Wrong numbers do not matter there."""
    call = batch(6) | extra
    want = dx.rejection_sample(**call, backend=backend)
    wrong = {k: np.full(15, 50, np.float32) for k in ("target_logit", "target_lse")}
    got = dx.rejection_sample(**call, **wrong, backend=backend)
    for field in (*FIELDS, "logprob", "logprob_raw"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["target_logit", "target_lse"])
def test_numbers_that_are_not_finite_have_the_row_read(
    backend: str, name: str, value: float
) -> None:
    call = batch(7)
    want = dx.rejection_sample(**call, backend=backend)
    numbers = told(call) | {name: np.full(15, value, np.float32)}
    got = dx.rejection_sample(**call, **numbers, backend=backend)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.logprob, want.logprob)


def test_without_the_raw_lse_the_raw_log_probability_is_unknown(backend: str) -> None:
    call = batch(8) | {"temperature": np.float32([1.0, 0.7, 0.7])}
    call["draft_temperature"] = 1.0
    numbers = told(call)
    del numbers["target_lse_raw"]
    got = dx.rejection_sample(**call, **numbers, backend=backend)
    for r, n in enumerate(got.num_accepted):
        assert np.isnan(got.logprob_raw[r, :n]).all() == (r > 0 or n == 0)
        assert np.isfinite(got.logprob_raw[r, n : got.num_emitted[r]]).all()


def test_a_draft_without_a_law_is_still_refused(backend: str) -> None:
    call = batch(9)
    call["draft_lse"] = np.full_like(call["draft_lse"], np.nan)
    got = dx.rejection_sample(**call, **told(call), backend=backend)
    assert (got.status == Status.NAN_DRAFT | Status.FORCED_REJECT).all()
    assert not got.num_accepted.any()
