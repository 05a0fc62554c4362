# SPDX-License-Identifier: Apache-2.0
"""What the float32 lse of a draft costs: the law that leaves a verification, without a coin."""

from __future__ import annotations

import numpy as np
import pytest

import dspark_ext as dx

IDS = 6


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def emitted(p: np.ndarray, q: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Law of the first token when drafts follow q and the verifier believes ``log_q``."""
    log_p = np.log(p)
    accepted = q * np.exp(np.minimum(0.0, log_p - log_q))
    residual = p * -np.expm1(np.minimum(0.0, log_q - log_p))
    total = residual.sum()
    return accepted + (1.0 - accepted.sum()) * (residual / total if total > 0 else p)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_the_law_is_off_by_no_more_than_its_rounding(
    temperature: float, rng: np.random.Generator
) -> None:
    t = np.float32(temperature)
    worst = 0.0
    for _ in range(200):
        level = rng.uniform(15, 60)
        target, draft = (
            (level + temperature * rng.standard_normal(IDS)).astype(np.float32) for _ in range(2)
        )
        nothing = np.zeros((IDS, 1), np.float32)
        drafted = dx.markov_loop(
            draft[None, None], nothing, nothing, anchor=[0], seed=[1], position=[0], temperature=t
        )
        lse = float(drafted.lse[0, 0])
        p, q = softmax(target / np.float64(t)), softmax(draft / np.float64(t))
        law = emitted(p, q, draft / np.float64(t) - lse)
        off = 0.5 * np.abs(law - p).sum()
        assert off <= abs(lse) * 2.0**-24
        worst = max(worst, off)
    # The effect is there: a verifier that knew log q to the last bit would be off by 1e-15.
    assert worst > 1e-7
