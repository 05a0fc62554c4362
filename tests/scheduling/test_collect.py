# SPDX-License-Identifier: Apache-2.0
"""Rounds collected from the engine, with the toy target and drafter."""

from __future__ import annotations

import numpy as np
import pytest

import dspark_ext as dx
from dspark.scheduling import fit
from dspark.scheduling.collect import Rounds, collect
from dspark_ext.toy import ToyDrafter, ToyTarget


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    target = ToyTarget(5)
    drafter = ToyDrafter(5, gamma=3, like=target)
    prompts = [[i % 5, (i + 1) % 5] for i in range(12)]
    params = [dx.SamplingParams(temperature=1.0, max_new_tokens=40, seed=i) for i in range(12)]
    return collect(target, drafter, prompts, params, max_requests=4, framework="numpy")


def test_flags_and_logits_belong_together(rounds: Rounds) -> None:
    logit, accepted, _ = rounds
    assert logit.shape == accepted.shape
    assert logit.shape[1] == 3 and len(logit) > 100
    assert np.all(np.isfinite(logit))
    assert set(np.unique(accepted)) <= {1, 0, -1, -2}
    # Behind a rejection nothing was observed, and nothing is accepted again.
    for row in accepted:
        seen = [f for f in row.tolist() if f >= 0]
        assert seen == sorted(seen, reverse=True)


def test_rounds_of_a_request_are_neighbours_and_its_own(rounds: Rounds) -> None:
    """Collected alone, a request has the very rounds that it had among others."""
    logit, accepted, request = rounds
    assert np.all(np.diff(request) >= 0) and set(request.tolist()) == set(range(12))
    target = ToyTarget(5)
    drafter = ToyDrafter(5, gamma=3, like=target)
    for i in (0, 7, 11):
        params = dx.SamplingParams(temperature=1.0, max_new_tokens=40, seed=i)
        alone = collect(target, drafter, [[i % 5, (i + 1) % 5]], params, framework="numpy")
        # Its last token needs no draft; among others it is there when they draft.
        own = (request == i) & np.any(accepted != -2, axis=1)
        np.testing.assert_array_equal(accepted[own], alone[1])
        np.testing.assert_array_equal(logit[own], alone[0])


def test_they_can_be_fitted(rounds: Rounds) -> None:
    """On its own rounds the first position cannot get worse: temperature 1 is on the grid."""
    found = fit(*rounds[:2], min_rounds=50)
    assert found.fitted[0]
    assert found.after[0].ece <= found.before[0].ece
    assert found.before[0].count == len(rounds[0]) - int((rounds[1][:, 0] == -2).sum())


def test_a_drafter_without_confidence_head_is_refused() -> None:
    target = ToyTarget(5)

    headless = ToyDrafter(5, gamma=3, like=target, confidence=False)
    with pytest.raises(dx.ArgumentError, match="without a confidence head"):
        collect(target, headless, [[1, 2]], framework="numpy")
