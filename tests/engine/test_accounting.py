# SPDX-License-Identifier: Apache-2.0
"""The words of measures (docs/contract.md, section 7) on what the sampler itself reports."""

from __future__ import annotations

import numpy as np
import pytest

import dspark_ext as dx
from dspark.engine.metrics import Metrics

EOS = 9


def greedy_round(drafts: list[int], target: list[int]) -> tuple[int, int]:
    """(accepted, emitted) of one request; the target's choices behind every row are given."""
    logits = np.full((len(drafts) + 1, 16), -5.0, np.float32)
    logits[np.arange(len(target)), target] = 5.0
    ver = dx.rejection_sample(
        logits,
        np.array([drafts], np.int32),
        draft_len=np.array([len(drafts)], np.int32),
        cu_seqlens=np.array([0, len(drafts) + 1], np.int32),
        seed=np.array([1], np.uint64),
        position=np.array([10]),
        temperature=0.0,
        stop_ids=[EOS],
        max_new_tokens=np.array([100], np.int32),
    )
    return int(ver.num_accepted[0]), int(ver.num_emitted[0])


def test_c3_acceptance_length_and_verify_rate() -> None:
    seven = [1, 2, 3, 4, 5, 6, 7]
    rounds = {
        "three of seven": greedy_round(seven, [1, 2, 3, 0, 0, 0, 0, 0]),
        "seven of seven": greedy_round(seven, [*seven, 8]),
        "a stop accepted second": greedy_round([1, EOS, 3, 4, 5, 6, 7], [1, EOS, 3, 4, 5, 6, 7, 8]),
    }
    assert list(rounds.values()) == [(3, 4), (7, 8), (2, 2)]
    metrics = Metrics()
    for accepted, emitted in rounds.values():
        metrics.count(7, 7, accepted, emitted)
    assert metrics.acceptance_length == pytest.approx(14 / 3)
    assert metrics.verify_rate == pytest.approx(14 / 19)
    # emitted = accepted + rounds - rounds cut inside an accepted draft
    assert metrics.emitted == metrics.accepted + metrics.rounds - metrics.cut
    assert metrics.cut == 1
    # Rates by position name what was observed: the stop ends the third round's proposal.
    assert metrics.observed_at[:7].tolist() == [3, 3, 2, 2, 1, 1, 1]
    assert metrics.accepted_at[:7].tolist() == [3, 3, 2, 1, 1, 1, 1]
