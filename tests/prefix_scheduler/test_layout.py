# SPDX-License-Identifier: Apache-2.0
"""The flattened batch: marker tensor, ids, positions, padding, results of the caller's kind."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

import dspark_ext as dx

RNG_IDS = 151_936


def test_rows_follow_the_requests(backend: str, rng: np.random.Generator) -> None:
    requests, gamma = 5, 4
    length = np.array([0, 4, 0, 2, 1], np.int32)
    active = np.array([1, 1, 0, 1, 1], np.uint8)
    anchor = rng.integers(0, RNG_IDS, requests).astype(np.int32)
    drafts = rng.integers(0, RNG_IDS, (requests, gamma)).astype(np.int32)
    position = rng.integers(2**31, 2**32, requests).astype(np.int64)
    plan = dx.prefix_schedule(
        np.ones((requests, gamma), "f4"), mode="off", max_len=length, active=active,
        anchor=anchor, draft_tokens=drafts, position=position, padded_tokens=30, backend=backend,
    )  # fmt: skip
    rows = [(r, j) for r in (0, 1, 3, 4) for j in range(length[r] + 1)]
    n = len(rows)
    assert int(plan.total_tokens) == n
    assert plan.cu_seqlens.tolist() == [0, 1, 6, 6, 9, 11]
    assert plan.row_to_request.tolist() == [r for r, _ in rows] + [-1] * (30 - n)
    assert plan.row_offset.tolist() == [j for _, j in rows] + [-1] * (30 - n)
    ids = [anchor[r] if j == 0 else drafts[r, j - 1] for r, j in rows]
    assert plan.token_ids.tolist() == ids + [0] * (30 - n)
    assert plan.positions.tolist() == [position[r] + j for r, j in rows] + [0] * (30 - n)
    assert plan.work[4:16].reshape(4, 3).tolist() == [[0, 0, 1], [1, 1, 5], [3, 6, 3], [4, 9, 2]]


def test_ids_may_be_64_bit_and_strided(backend: str) -> None:
    wide = np.arange(24, dtype=np.int64).reshape(2, 12)
    survival = np.ones((2, 8), np.float32)[:, :3]
    plan = dx.prefix_schedule(
        survival, mode="off", anchor=[7, 8], draft_tokens=wide[:, :3], position=[5, 6],
        backend=backend,
    )  # fmt: skip
    assert plan.token_ids.tolist() == [7, 0, 1, 2, 8, 12, 13, 14]
    assert plan.token_ids.dtype == np.int32
    assert plan.positions.tolist() == [5, 6, 7, 8, 6, 7, 8, 9]


def test_without_ids_there_are_none(backend: str) -> None:
    plan = dx.prefix_schedule(np.ones((1, 2), "f4"), mode="off", backend=backend)
    assert plan.token_ids is None and plan.positions is None


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        ({"mode": "off"}, 12),
        ({"mode": "off", "capacity": 7}, 7),
        ({"mode": "off", "capacity": 2, "active": [1, 0, 1]}, 3),
        ({"mode": "fixed", "fixed_len": 1}, 6),
        ({"mode": "fixed", "fixed_len": 1, "min_len": 2}, 12),
        ({"mode": "two_phase", "budget": 2}, 5),
        ({"mode": "two_phase", "budget": 99}, 12),
        ({"cost": np.ones(6)}, 5),
        ({"cost": np.ones(2)}, 3),
        ({"cost": np.ones(99), "capacity": 11}, 11),
        ({"mode": "off", "cost": np.ones(6)}, 12),
    ],
    ids=lambda x: (
        "-".join(f"{k}={np.size(v) if k == 'cost' else v}" for k, v in x.items())
        if isinstance(x, dict)
        else str(x)
    ),
)
def test_padding_must_hold_the_largest_batch(
    backend: str, arguments: dict[str, object], largest: int
) -> None:
    a = np.ones((3, 3), np.float32)
    plan = dx.prefix_schedule(a, backend=backend, **arguments)
    assert plan.row_to_request.shape == (largest,)
    with pytest.raises(
        dx.ArgumentError, match=f"padded_tokens: got .*at least {largest}, the larg"
    ):
        dx.prefix_schedule(a, backend=backend, padded_tokens=largest - 1, **arguments)


def test_preallocated_results_are_reused(backend: str, rng: np.random.Generator) -> None:
    a = np.cumprod(rng.uniform(0.5, 1, (3, 4)).astype(np.float32), axis=1)
    tokens = {"anchor": [1, 2, 3], "draft_tokens": np.zeros((3, 4), "i4"), "position": [1, 1, 1]}
    first = dx.prefix_schedule(a, np.ones(16), backend=backend, **tokens)
    for field in fields(dx.Plan):
        getattr(first, field.name)[...] = 77
    again = dx.prefix_schedule(a, np.ones(16), out=first, backend=backend, **tokens)
    fresh = dx.prefix_schedule(a, np.ones(16), backend=backend, **tokens)
    for field in fields(dx.Plan):
        assert getattr(again, field.name) is getattr(first, field.name)
        assert np.array_equal(getattr(again, field.name), getattr(fresh, field.name)), field.name
    with pytest.raises(dx.ArgumentError, match=r"out.length: got shape \[2\]"):
        dx.prefix_schedule(
            a, np.ones(16), out=replace(first, length=np.zeros(2, "i4")), backend=backend, **tokens
        )


def test_torch_tensors_give_torch_tensors(backend: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    a = np.cumprod(rng.uniform(0.5, 1, (3, 4)).astype(np.float32), axis=1)
    drafts = rng.integers(0, 99, (3, 4))
    cost = np.linspace(1, 2, 16)
    want = dx.prefix_schedule(
        a, cost, anchor=[1, 2, 3], draft_tokens=drafts, position=[4, 5, 6], backend=backend
    )
    got = dx.prefix_schedule(
        torch.from_numpy(a), torch.from_numpy(cost), anchor=torch.tensor([1, 2, 3]),
        draft_tokens=torch.from_numpy(drafts), position=torch.tensor([4, 5, 6]), backend=backend,
    )  # fmt: skip
    for field in fields(dx.Plan):
        value = getattr(got, field.name)
        assert isinstance(value, torch.Tensor)
        assert np.array_equal(value.numpy(), getattr(want, field.name)), field.name
