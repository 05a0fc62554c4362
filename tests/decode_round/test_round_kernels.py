# SPDX-License-Identifier: Apache-2.0
"""Whole rounds on the CUDA kernels, emulated: the tokens of the CPU, round by round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.toy import ToyDrafter, ToyTarget

V, GAMMA = 40, 3
COST = dx.CostTable.from_points([1, 40, 400], [1.0, 1.5, 6.0], draft_ms=0.1)


def rounds(backend: str, scheduler: dx.Scheduler, params: list[dx.SamplingParams]) -> list[Any]:
    target = ToyTarget(V, seed=3, spread=1.0)
    drafter = ToyDrafter(V, GAMMA, seed=4, like=target)
    state = dx.RoundState.create(len(params), GAMMA, page_size=4, max_len=64)
    for r, p in enumerate(params):
        state.add([r, 2 * r + 1], p)
    results = [dx.prefill(target, state, backend=backend)]
    while state.active_slots() and len(results) < 8:
        results.append(dx.decode_round(target, drafter, state, scheduler, backend=backend))
    return results


@pytest.mark.parametrize("mode", ["off", "causal"])
def test_rounds_have_the_tokens_of_the_cpu(mode: str) -> None:
    from dspark_ext import _simt

    if not _simt.load():
        pytest.skip("the SIMT library is not built: run `make simt`")
    params = [
        dx.SamplingParams(temperature=0.0, max_new_tokens=12),
        dx.SamplingParams(temperature=0.8, min_p=0.02, seed=5, max_new_tokens=9),
        dx.SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=6, max_new_tokens=15),
    ]
    cost = {} if mode == "off" else {"cost": COST}
    one, two = (rounds(b, dx.Scheduler(mode, **cost), params) for b in ("cpu", "simt"))
    assert len(one) == len(two) > 3
    for i, (want, got) in enumerate(zip(one, two, strict=True)):
        for field in ("tokens", "num_emitted", "num_accepted", "accepted", "finish", "status"):
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), f"{field} {i}")


def test_a_truncated_target_keeps_its_support() -> None:
    """Drafts come from the full law there, and what the target cannot say is refused."""
    from dspark_ext import _simt

    if not _simt.load():
        pytest.skip("the SIMT library is not built: run `make simt`")
    params = [dx.SamplingParams(1.0, top_k=2, seed=r, max_new_tokens=12) for r in range(3)]
    target = ToyTarget(V, seed=3, spread=1.0)
    results = rounds("simt", dx.Scheduler(), params)
    answers = [
        np.concatenate([got.tokens[r, : got.num_emitted[r]] for got in results]) for r in range(3)
    ]
    for r, answer in enumerate(answers):
        text = [r, 2 * r + 1, *answer.tolist()]
        for i in range(2, len(text)):
            best = np.sort(target.joint(text[:i], 1))[-2]
            assert target.joint(text[:i], 1)[text[i]] >= best
