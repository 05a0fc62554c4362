# SPDX-License-Identifier: Apache-2.0
"""The rule block: every decision by forced coins, its acceptance, and trouble inside a block."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_ext import Status

sys.path.insert(0, str(Path(__file__).resolve().parent))
from beside_cpu import sample

P, Q = [0.2, 0.4, 0.4], [0.1, 0.1, 0.8]


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def verify(drafts: Any, backend: str, q: Any = Q, rows: Any = None, **changes: Any) -> Any:
    """Every slot has the law q; all rows the law p unless given."""
    drafts = np.asarray(drafts)
    count, gamma = drafts.shape
    rows = np.tile(log(P), (count * (gamma + 1), 1)) if rows is None else rows
    z = np.broadcast_to(log(q), (count, gamma, 3)).copy()
    logit = np.take_along_axis(z, np.clip(drafts, 0, 2)[..., None], -1)[..., 0]
    call: dict[str, Any] = {
        "draft_len": gamma,
        "cu_seqlens": np.arange(count + 1) * (gamma + 1),
        "seed": np.arange(count),
        "position": 40,
        "temperature": 1.0,
        "rule": "block",
        "draft_logit": logit,
        "draft_lse": np.zeros((count, gamma), np.float32),
        "draft_logits": z,
    }
    return sample(rows, drafts, backend, **(call | changes))


def forced(*u: float) -> np.ndarray:
    return np.array([[min(int(x * 2**53), 2**53 - 1) for x in u]], np.uint64)


# drafts (2, 2): P_1 = .5, P_2 = .25, S_1 = .1, h_1 = .1 / (.1 + .5) = 1/6, h_2 = P_2
@pytest.mark.parametrize(
    ("u", "accepted", "token"),
    [
        pytest.param((0.9, 0.2499, 0.0), [1, 1], 0, id="h2-passes"),
        pytest.param((0.1666, 0.2501, 0.0), [1, 0], 1, id="h1-passes"),
        pytest.param((0.1667, 0.2501, 0.0), [0, -1], 0, id="neither"),
        pytest.param((0.26, 0.2501, 0.0), [0, -1], 1, id="neither-and-further-in-the-residual"),
    ],
)
def test_v26_every_decision(
    backend: str, u: tuple[float, ...], accepted: list[int], token: int
) -> None:
    """The residual of one accepted draft is (0, .1, 0), that of none (.1, .3, 0)."""
    got = verify([[2, 2]], backend, debug_uniform=forced(*u))
    assert got.accepted.tolist() == [accepted]
    assert got.tokens[0, got.num_accepted[0]] == token
    assert got.num_emitted[0] == got.num_accepted[0] + 1
    assert (got.tokens[0, got.num_emitted[0] :] == -1).all()
    assert (got.logprob[0, got.num_emitted[0] :] == 0).all()
    emitted = got.tokens[0, : got.num_emitted[0]]
    np.testing.assert_allclose(
        got.logprob[0, : len(emitted)], np.log(np.array(P)[emitted]), rtol=1e-6
    )


def test_a_good_later_draft_saves_a_bad_one(backend: str) -> None:
    """(2, 1): P_1 = .5, P_2 = min(1, .5 * 4) = 1: both are accepted whatever the coins."""
    got = verify([[2, 1]], backend, debug_uniform=forced(1.0, 1.0, 0.0))
    assert got.accepted.tolist() == [[1, 1]] and got.num_emitted[0] == 3


def test_v26_acceptance_and_law(backend: str) -> None:
    count = {"reference": 3000, "simt": 50}.get(backend, 60_000)
    drafts = np.random.default_rng(26).choice(3, (count, 2), p=Q)
    got = verify(drafts, backend)
    token = verify(drafts, backend, rule="token")
    for result, mean in ((got, 1.04), (token, 0.96)):
        spread = result.num_accepted.std() / np.sqrt(count)
        assert abs(result.num_accepted.mean() - mean) < 4.5 * spread
    share = (got.tokens[got.num_emitted > 1, :2] == [2, 0]).all(1).mean()
    first = (got.tokens[got.num_emitted > 1, 0] == 2).mean()
    assert abs(share - first * 0.2) < 4.5 * np.sqrt(0.09 / count)


def test_a_single_draft_equals_the_rule_token(backend: str) -> None:
    drafts = np.random.default_rng(1).choice(3, (40, 1), p=Q)
    got, want = verify(drafts, backend), verify(drafts, backend, rule="token")
    for field in ("tokens", "accepted", "logprob", "status"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field))


def test_greedy_requests_stay_greedy(backend: str) -> None:
    got = verify([[1, 1]], backend, temperature=0.0)
    assert got.tokens.tolist() == [[1, 1, 1]] and got.accepted.tolist() == [[1, 1]]


def test_a_placeholder_ends_the_block(backend: str) -> None:
    """h at the end is P: 1 here, so one draft and a token of p."""
    got = verify([[1, -1, 1]], backend, debug_uniform=forced(1.0, 0.0, 0.0, 0.0))
    assert got.accepted.tolist() == [[1, -2, -2]] and got.tokens.tolist() == [[1, 0, -1, -1]]
    assert got.status[0] == Status.BAD_DRAFT_ID


@pytest.mark.parametrize(("u", "first"), [(0.4999, 1), (0.5001, 0)])
def test_a_nan_law_ends_the_block_with_a_refusal(backend: str, u: float, first: int) -> None:
    """Draft 2 has no law: drafts (2,) are a block of one with P_1 = .5."""
    lse = np.zeros((1, 3), np.float32)
    lse[0, 1] = np.nan
    got = verify([[2, 1, 1]], backend, draft_lse=lse, debug_uniform=forced(u, 1.0, 0.0, 0.0))
    assert got.accepted.tolist() == [[1, 0, -1] if first else [0, -1, -1]]
    assert got.status[0] == Status.NAN_DRAFT | Status.FORCED_REJECT


def test_a_row_without_mass_ends_the_block(backend: str) -> None:
    rows = np.tile(log(P), (3, 1))
    rows[1] = -np.inf
    got = verify([[1, 1]], backend, rows=rows, debug_uniform=forced(0.5, 0.5, 0.5))
    assert got.accepted.tolist() == [[1, 0]] and got.tokens.tolist() == [[1, 0, -1]]
    assert got.status[0] == Status.EMPTY_SUPPORT | Status.FORCED_REJECT


def test_p_zero_is_never_accepted(backend: str) -> None:
    rows = np.tile(log([0.5, 0.5, 0.0]), (3, 1))
    got = verify([[0, 2]], backend, rows=rows, debug_uniform=forced(0.0, 0.0, 0.0))
    assert got.accepted.tolist() == [[1, 0]] and got.status[0] == Status.FORCED_REJECT
    assert got.tokens[0, 1] in (0, 1)


@pytest.mark.parametrize("cut", ["stop", "cap"])
def test_a_stop_inside_the_accepted_prefix(backend: str, cut: str) -> None:
    extra = {"stop_ids": [1]} if cut == "stop" else {"max_new_tokens": [2]}
    got = verify([[0, 1, 1]], backend, debug_uniform=forced(0, 0, 0, 0), **extra)
    assert got.tokens.tolist() == [[0, 1, -1, -1]] and got.accepted.tolist() == [[1, 1, -2]]
    assert got.num_accepted[0] == 2 and got.next_anchor[0] == 1
    assert got.status[0] == Status.STOPPED and got.finish[0] == (1 if cut == "stop" else 2)


def test_one_hot_drafts_are_accepted_like_token(backend: str) -> None:
    """For a one-hot law both rules accept sum of products of p."""
    count = {"reference": 2000, "simt": 50}.get(backend, 20_000)
    drafts = np.tile([1, 2], (count, 1))
    got = verify(drafts, backend, draft_temperature=0.0)
    assert abs(got.num_accepted.mean() - (0.4 + 0.16)) < 4.5 * got.num_accepted.std() / count**0.5
    first = np.bincount(got.tokens[:, 0], minlength=3) / count
    np.testing.assert_allclose(first, P, atol=4.5 * np.sqrt(0.24 / count))
