# SPDX-License-Identifier: Apache-2.0
"""The rule synthetic: the wanted mean, the smallest variance, and a mark on every result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import Status
from dspark_ext.reference.enumeration import exact_law
from dspark_ext.reference.rejection_sampler import rejection_sample

sys.path.insert(0, str(Path(__file__).resolve().parent))
from beside_cpu import sample

GAMMA = 4


def verify(mean: float, count: int, backend: str, **changes: Any) -> Any:
    rows = np.tile(np.log([0.7, 0.2, 0.1]).astype(np.float32), (count * (GAMMA + 1), 1))
    call: dict[str, Any] = {
        "draft_len": GAMMA,
        "cu_seqlens": np.arange(count + 1) * (GAMMA + 1),
        "seed": np.arange(count),
        "position": 3,
        "temperature": 1.0,
        "rule": "synthetic",
        "synthetic_acceptance": mean,
    }
    drafts = np.tile([2, 1, 2, 2], (count, 1))  # what the target rarely says
    return sample(rows, drafts, backend, **(call | changes))


@pytest.mark.parametrize("mean", [1.0, 1.3, 2.0, 3.75, 5.0])
def test_mean_and_variance(backend: str, mean: float) -> None:
    count = {"reference": 400, "simt": 50}.get(backend, 20_000)
    got = verify(mean, count, backend)
    share = mean - np.floor(mean)
    low, high = int(np.floor(mean)) - 1, int(np.ceil(mean)) - 1
    assert set(got.num_accepted.tolist()) == {low, high}
    assert (got.num_emitted == got.num_accepted + 1).all()
    assert abs(got.num_emitted.mean() - mean) <= 4.5 * np.sqrt(share * (1 - share) / count)
    assert (got.status == Status.SYNTHETIC).all()
    assert got.accepted[0, : got.num_accepted[0]].tolist() == [1] * int(got.num_accepted[0])
    if got.num_accepted[0] < GAMMA:
        assert got.accepted[0, got.num_accepted[0]] == 0


@pytest.mark.parametrize("mean", [1.0, 2.25, 4.5, 5.0])
def test_the_exact_law(mean: float) -> None:
    def run(draws: Any) -> int:
        out = rejection_sample(
            np.zeros((GAMMA + 1, 2)), [[1, 0, 1, 0]], draft_len=[GAMMA], cu_seqlens=[0, GAMMA + 1],
            seed=[1], position=[4], temperature=1.0, rule="synthetic", synthetic_acceptance=mean,
            draws=[draws],
        )  # fmt: skip
        return int(out.num_emitted[0])

    law = exact_law(run)
    assert sum(n * mass for n, mass in law.items()) == pytest.approx(mean, abs=1e-12)
    share = mean % 1
    variance = sum((n - mean) ** 2 * mass for n, mass in law.items())
    assert variance == pytest.approx(share * (1 - share), abs=1e-12)


def test_drafts_are_emitted_and_the_last_token_is_the_targets(backend: str) -> None:
    count = {"reference": 300, "simt": 50}.get(backend, 20_000)
    got = verify(3.0, count, backend)
    assert (got.tokens[:, :2] == [2, 1]).all()
    share = np.bincount(got.tokens[:, 2], minlength=3) / count
    np.testing.assert_allclose(share, [0.7, 0.2, 0.1], atol=4.5 * np.sqrt(0.21 / count))
    np.testing.assert_allclose(got.logprob[:, 0], np.log(0.1), rtol=1e-5)


def test_greedy_requests_take_part(backend: str) -> None:
    got = verify(2.0, 3, backend, temperature=0.0)
    assert got.tokens.tolist() == [[2, 0, -1, -1, -1]] * 3
    assert (got.status == Status.SYNTHETIC).all()


def test_only_synthetic_requests_are_marked(backend: str) -> None:
    got = verify(2.0, 3, backend, rule=[1, 4, 3])
    assert [bool(s & Status.SYNTHETIC) for s in got.status] == [False, True, False]
    assert "not the target's law" in Status.describe(int(got.status[1]))


def test_short_rounds_and_placeholders(backend: str) -> None:
    short = verify(4.0, 1, backend, draft_len=1, cu_seqlens=[0, 5])
    assert short.num_accepted[0] == 1 and short.num_emitted[0] == 2
    drafts = np.array([[1, -1, 1, 1]])
    rows = np.zeros((5, 3), np.float32)
    got = dx.rejection_sample(
        rows, drafts, draft_len=4, cu_seqlens=[0, 5], seed=1, position=2, temperature=1.0,
        rule="synthetic", synthetic_acceptance=5.0, backend=backend,
    )  # fmt: skip
    assert got.accepted.tolist() == [[1, -2, -2, -2]] and got.num_emitted[0] == 2
    assert got.status[0] == Status.SYNTHETIC | Status.BAD_DRAFT_ID


def test_an_illegal_value_on_the_device_accepts_nothing() -> None:
    """The definition; the compiled ones are in test_arguments.py."""
    out = rejection_sample(
        np.zeros((2, 3)), [[1]], draft_len=[1], cu_seqlens=[0, 2], seed=[1], position=[4],
        temperature=1.0, rule="synthetic", synthetic_acceptance=[7.0],
    )  # fmt: skip
    assert out.num_accepted[0] == 0
    assert out.status[0] == Status.SYNTHETIC | Status.BAD_PARAM


def test_rounds_of_a_benchmark() -> None:
    from dspark_ext.toy import ToyDrafter, ToyTarget

    state = dx.RoundState.create(1, GAMMA, max_len=80)
    params = dx.SamplingParams(rule="synthetic", synthetic_acceptance=3.0, max_new_tokens=31)
    state.add([1, 2], params)
    dx.prefill(ToyTarget(), state)
    rounds = 0
    while state.active_slots():
        result = dx.decode_round(ToyTarget(), ToyDrafter(5, GAMMA), state)
        assert result.num_emitted[0] == 3 and result.status[0] & dx.Status.SYNTHETIC
        rounds += 1
    assert rounds == 10
