# SPDX-License-Identifier: Apache-2.0
"""Cases about the law of what is emitted, by chi-square on every backend.

tests/statistics has the same kinds on the CPU with more draws and more laws, tests/reference has
them without any draw, by enumeration. The few draws that the emulated kernels have time for say
little about a law: they must also have the bits of the CPU's, whose law is tested.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx
from dspark_ext.results import Draft, Verification

sys.path.insert(0, str(Path(__file__).resolve().parent))
from beside_cpu import sample

LEVEL = 1e-5  # of a right implementation, one test in 10^5 fails
COUNT = {"reference": 1200, "cpu": 60_000, "simt": 100, "cuda": 60_000}
CONTROLLED = 10_000  # draws that show the fault of a control


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def p_value(tokens: np.ndarray, law: Any) -> float:
    law = np.asarray(law, np.float64)
    counts = np.bincount(tokens, minlength=len(law))
    if counts[law == 0].any():
        return 0.0
    cells = law > 0
    expected = law[cells] / law.sum() * len(tokens)
    return float(stats.chisquare(counts[cells], expected).pvalue)


def draft_from(z: Any, count: int, temperature: float = 1.0) -> Draft:
    """One draft each for ``count`` requests, by the law of the logits z [V]."""
    nothing = np.zeros((len(z), 1), np.float32)
    return dx.markov_loop(
        np.broadcast_to(z, (count, 1, len(z))), nothing, nothing,
        anchor=np.zeros(count, np.int32), seed=np.arange(count, dtype=np.uint64), position=77,
        temperature=temperature,
    )  # fmt: skip


def verify(backend: str, p: Any, q: Any, draft: Draft, **changes: Any) -> Verification:
    """Every row has the logits p, every stored law the logits q."""
    count = len(draft.tokens)
    call: dict[str, Any] = {
        "draft_len": 1,
        "cu_seqlens": 2 * np.arange(count + 1),
        "seed": np.arange(count, dtype=np.uint64),
        "position": 77,
        "temperature": 1.0,
        "draft_logit": draft.logit,
        "draft_lse": draft.lse,
        "draft_logits": np.broadcast_to(q, (count, 1, len(q))),
    }
    rows = np.broadcast_to(p, (2 * count, len(p)))
    return sample(rows, draft.tokens, backend, **(call | changes))


def coins(count: int) -> np.ndarray:
    """One 53-bit integer for all draws of a row: the fault of a stream that is shared."""
    return np.random.default_rng(10).integers(0, 2**53, (count, 2), dtype=np.uint64)


def test_v7_a_greedy_drafts_law_is_one_hot(backend: str) -> None:
    p, q, count = np.array([0.6, 0.4]), log([0.9, 0.1]), COUNT[backend]
    draft = draft_from(q, count, temperature=0.0)
    got = verify(backend, log(p), q, draft, draft_temperature=0.0)
    assert p_value(got.tokens[:, 0], p) > LEVEL
    if count >= CONTROLLED:  # the ratio against the softmax gives (2/3, 1/3)
        soft = verify(backend, log(p), q, draft, draft_temperature=1.0)
        assert p_value(soft.tokens[:, 0], p) < LEVEL
        assert p_value(soft.tokens[:, 0], [2 / 3, 1 / 3]) > LEVEL


def test_v8_bf16_drafts_are_verified_by_the_law_they_came_from(backend: str) -> None:
    """p = q: all are accepted, but for the rounding of lse, and tokens follow that law."""
    torch = pytest.importorskip("torch")
    count = COUNT[backend]
    z = torch.tensor([8, 7.96875, 7.9375]).bfloat16()
    law = np.exp(z.double().numpy() / 0.7)
    law /= law.sum()
    np.testing.assert_allclose(law, [0.3483, 0.3331, 0.3186], atol=5e-5)
    nothing, ids = torch.zeros(3, 1), torch.arange(count)
    draft = dx.markov_loop(
        z.expand(count, 1, 3), nothing, nothing, anchor=torch.zeros(count, dtype=torch.int32),
        seed=ids, position=77, temperature=0.7,
    )  # fmt: skip
    got = sample(
        z.expand(2 * count, 3), draft.tokens, backend, draft_len=1,
        cu_seqlens=2 * torch.arange(count + 1), seed=ids, position=77, temperature=0.7,
        draft_logit=draft.logit, draft_lse=draft.lse, draft_logits=z.expand(count, 1, 3),
    )  # fmt: skip
    assert int(got.num_accepted.sum()) >= count - 2
    assert p_value(got.tokens.numpy()[:, 0], law) > LEVEL


def test_v9_draft_and_recovery_do_not_share_a_stream(backend: str) -> None:
    p, q = np.full(4, 0.25), log([0.55, 0.30, 0.10, 0.05])
    count = {"cpu": 200_000}.get(backend, COUNT[backend])
    draft = draft_from(q, count)
    got = verify(backend, log(p), q, draft)
    assert p_value(got.tokens[:, 0], p) > LEVEL
    # Sum min(p, q) = .65 of the drafts are accepted, the others recover ids 2 and 3 only.
    assert stats.binomtest(int(got.num_accepted.sum()), count, 0.65).pvalue > LEVEL
    recovered = got.tokens[got.num_accepted == 0, 0]
    assert p_value(recovered, [0, 0, 3, 4]) > LEVEL
    if count >= CONTROLLED:
        shared = verify(backend, log(p), q, draft, debug_uniform=coins(count))
        assert p_value(shared.tokens[:, 0], p) < LEVEL


def test_v10_the_accept_uniform_is_not_used_again(backend: str) -> None:
    p, q, count = np.array([0.4, 0.3, 0.3]), log([1.0, 0, 0]), COUNT[backend]
    draft = draft_from(q, count)
    got = verify(backend, log(p), q, draft)
    assert p_value(got.tokens[:, 0], p) > LEVEL
    if count >= CONTROLLED:
        reused = verify(backend, log(p), q, draft, debug_uniform=coins(count))
        assert p_value(reused.tokens[:, 0], p) < LEVEL
        assert p_value(reused.tokens[:, 0], [0.4, 0.1, 0.5]) > LEVEL


def test_v13_truncation_holds_in_the_residual(backend: str) -> None:
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), log([0.1, 0.1, 0.4, 0.4])
    kept, count = np.array([4 / 7, 3 / 7, 0, 0]), COUNT[backend]
    draft = draft_from(q, count)
    got = verify(backend, log(p), q, draft, top_k=2)
    assert p_value(got.tokens[:, 0], kept) > LEVEL
    assert stats.binomtest(int(got.num_accepted.sum()), count, 0.2).pvalue > LEVEL
    left = np.maximum(kept - [0.1, 0.1, 0.4, 0.4], 0)
    np.testing.assert_allclose(left / left.sum(), [0.5893, 0.4107, 0, 0], atol=5e-5)
    residual = got.tokens[got.num_accepted == 0, 0]
    assert p_value(residual, left) > LEVEL
    if count >= CONTROLLED:  # p' itself in place of its residual
        assert p_value(residual, kept) < LEVEL


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_any_rule_emits_the_targets_law(backend: str, rule: str) -> None:
    """With a temperature, a truncation and a bias; the second token given that it came."""
    p, q = np.array([0.35, 0.25, 0.2, 0.12, 0.08]), log([0.1, 0.3, 0.15, 0.4, 0.05])
    count = COUNT[backend]
    draft = draft_from(q, count)
    bias = np.broadcast_to(np.float32([0, 0, 0.7, 0, 0]), (count, 5))
    got = verify(
        backend, log(p), q, draft, rule=rule, temperature=0.8, draft_temperature=1.0, top_k=4,
        logit_bias=bias,
    )  # fmt: skip
    law = (p * np.exp(bias[0])) ** (1 / 0.8) * [1, 1, 1, 1, 0]
    assert p_value(got.tokens[:, 0], law) > LEVEL
    assert p_value(got.tokens[got.num_emitted > 1, 1], law) > LEVEL
    if count >= CONTROLLED:  # without the bias
        plain = p ** (1 / 0.8) * [1, 1, 1, 1, 0]
        assert p_value(got.tokens[:, 0], plain) < LEVEL
