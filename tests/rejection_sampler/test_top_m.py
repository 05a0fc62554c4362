# SPDX-License-Identifier: Apache-2.0
"""Draft laws as lists of M ids: the same decisions as a full row that is -inf outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_ext as dx
from dspark_ext import Status

FIELDS = ("tokens", "accepted", "num_accepted", "logprob", "logprob_raw", "status", "finish")


def batch(rng: np.random.Generator, dtype: Any = np.float32) -> tuple[dict[str, Any], Any, Any]:
    """A call, the ids [R, gamma, M] with their logits, and the full rows."""
    requests, gamma = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    vocab = int(rng.choice([5, 130, 700]))
    m = int(rng.integers(1, min(vocab, 40) + 1))
    rows = (rng.normal(size=(requests * (gamma + 1), vocab)) * 2).astype(dtype)
    ids = np.stack(
        [np.sort(rng.choice(vocab, m, replace=False)) for _ in range(requests * gamma)]
    ).reshape(requests, gamma, m)
    near = rows.reshape(requests, gamma + 1, vocab)[:, :gamma]
    logits = np.take_along_axis(near, ids, -1)
    logits = (logits + rng.normal(size=logits.shape) * 0.5).astype(dtype)
    pick = rng.integers(0, m, (requests, gamma, 1))
    full = np.full((requests, gamma, vocab), -np.inf, dtype)
    np.put_along_axis(full, ids, logits, -1)
    call = {
        "target_logits": rows,
        "draft_tokens": np.take_along_axis(ids, pick, -1)[..., 0],
        "draft_len": gamma,
        "cu_seqlens": np.arange(requests + 1) * (gamma + 1),
        "seed": rng.integers(0, 2**60, requests, dtype=np.uint64),
        "position": 50,
        "temperature": rng.choice([0.7, 1.0, 1.6], requests).astype(np.float32),
    }
    t = call["temperature"][:, None, None]
    call["draft_lse"] = np.log(np.exp(logits.astype(float) / t).sum(-1)).astype(np.float32)
    call["draft_logit"] = np.take_along_axis(logits, pick, -1)[..., 0].astype(np.float32)
    return call, (ids.astype(np.int32), logits), full


def test_a_list_decides_like_the_full_row(backend: str) -> None:
    @settings(max_examples=6 if backend == "simt" else 60, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), half=st.booleans(), padding=st.integers(0, 3))
    def check(seed: int, half: bool, padding: int) -> None:
        rng = np.random.default_rng(seed)
        call, (ids, logits), full = batch(rng, np.float16 if half else np.float32)
        if rng.random() < 0.5:
            call["top_k"] = int(rng.integers(1, 9))
        space = ((0, 0), (0, 0), (0, padding))
        ids = np.pad(ids, space, constant_values=-1)
        logits = np.pad(logits, space, constant_values=np.nan)  # not read
        got = dx.rejection_sample(**call, support_ids=ids, support_logits=logits, backend=backend)
        want = dx.rejection_sample(**call, draft_logits=full, backend=backend)
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)

    check()


def one(backend: str, ids: Any, logits: Any, draft: int = 1, **changes: Any) -> Any:
    """One request, one draft, p = (.1, .2, .3, .4)."""
    logits = np.array([[logits]], np.float32)
    call: dict[str, Any] = {
        "draft_logit": np.zeros((1, 1), np.float32),
        "draft_lse": np.full((1, 1), np.log(2), np.float32),
        "support_ids": np.array([[ids]], np.int32),
        "support_logits": logits,
    }
    rows = np.log(np.array([[0.1, 0.2, 0.3, 0.4]] * 2, np.float32))
    return dx.rejection_sample(
        rows, np.array([[draft]]), draft_len=1, cu_seqlens=[0, 2], seed=[3], position=[9],
        temperature=1.0, backend=backend, **(call | changes),
    )  # fmt: skip


def test_a_good_list_is_quiet(backend: str) -> None:
    got = one(backend, [1, 3, -1], [0, 0, 7])
    assert got.status[0] == 0


def test_the_residual_reaches_ids_outside_the_list(backend: str) -> None:
    """q = (0, .5, 0, .5): the residual is (.25, 0, .75, 0) of what is left."""
    top = np.full((1, 2), 2**53 - 1, np.uint64)
    low = np.array([[2**53 - 1, 0]], np.uint64)
    assert one(backend, [1, 3], [0, 0], debug_uniform=top).tokens[0, 0] == 2
    assert one(backend, [1, 3], [0, 0], debug_uniform=low).accepted[0, 0] == 0


@pytest.mark.parametrize("draft", [0, 2])
def test_a_draft_outside_the_list_ends_the_prefix(backend: str, draft: int) -> None:
    got = one(backend, [1, 3], [0, 0], draft)
    assert got.status[0] == Status.BAD_DRAFT_ID and got.accepted[0, 0] == -2
    assert got.num_emitted[0] == 1


def test_a_truncated_member_has_no_mass(backend: str) -> None:
    got = one(backend, [1, 3], [-np.inf, 0], draft_logit=np.full((1, 1), -np.inf, np.float32))
    assert got.status[0] == Status.BAD_DRAFT_ID and got.accepted[0, 0] == -2


@pytest.mark.parametrize(
    "ids",
    [[3, 1, -1], [1, 1, 3], [1, -1, 3], [1, 4, -1], [1, 2**31 - 1, -1]],
    ids=["descending", "twice", "hole", "past-V", "far-past-V"],
)
def test_lists_out_of_order_refuse_the_draft(backend: str, ids: list[int]) -> None:
    got = one(backend, ids, [0, 0, 0])
    assert got.status[0] == Status.BAD_DRAFT_ID | Status.FORCED_REJECT
    assert got.accepted[0, 0] == 0 and 0 <= got.tokens[0, 0] < 4


@pytest.mark.parametrize("place", ["member", "logit", "lse"])
def test_a_nan_refuses_before_the_coin(backend: str, place: str) -> None:
    nan = np.full((1, 1), np.nan, np.float32)
    changes = {} if place == "member" else {f"draft_{place}": nan}
    got = one(backend, [1, 3], [0, np.nan if place == "member" else 0], **changes)
    assert got.status[0] == Status.NAN_DRAFT | Status.FORCED_REJECT and got.accepted[0, 0] == 0


@pytest.mark.parametrize("rule", ["greedy", "match"])
def test_rules_without_a_law_do_not_read_it(backend: str, rule: str) -> None:
    got = one(backend, [3, 1], [np.nan, np.nan], rule=rule)
    assert got.status[0] == 0


def test_an_empty_list_is_no_law(backend: str) -> None:
    got = one(backend, [-1, -1], [0, 0])
    assert got.status[0] == Status.BAD_DRAFT_ID and got.accepted[0, 0] == -2


def test_drafts_of_markov_loop(backend: str, rng: Any) -> None:
    """The producer's lists fit as they come, V_d < M and a draft vocabulary included."""
    ids = np.array([2, 5, 7])
    draft = dx.markov_loop(
        rng.normal(size=(6, 3, 3)).astype(np.float32), np.zeros((10, 2), np.float32),
        np.zeros((3, 2), np.float32), anchor=np.zeros(6, int), seed=np.arange(6), position=4,
        temperature=1.0, draft_to_target=ids, topk_support=4, backend=backend,
    )  # fmt: skip
    got = dx.rejection_sample(
        rng.normal(size=(24, 10)).astype(np.float32), draft.tokens, draft_len=3,
        cu_seqlens=np.arange(7) * 4, seed=np.arange(6), position=4, temperature=1.0,
        draft_logit=draft.logit, draft_lse=draft.lse, support_ids=draft.support_ids,
        support_logits=draft.support_logits, backend=backend,
    )  # fmt: skip
    assert not got.status.any()
