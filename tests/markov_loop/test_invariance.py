# SPDX-License-Identifier: Apache-2.0
"""A token depends on (seed, position, z) alone: not on the batch, the threads or the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

Case = dict[str, Any]
PER_REQUEST = ("base_logits", "hidden", "anchor", "seed", "position")
LAW: Case = {
    "temperature": np.float32([0, 0.7, 1, 1.3, 0, 2]),
    "top_k": np.int32([0, 0, 30, 0, 5, 0]),
    "top_p": np.float32([1, 1, 1, 0.8, 1, 1]),
}
FIELDS = ("tokens", "logit", "lse", "confidence_logit", "logits", "status")


def take(case: Case, rows: Any) -> Case:
    names = (*PER_REQUEST, *LAW)
    return {k: v[rows] if k in names else v for k, v in case.items()}


def assert_same(got: dx.Draft, want: dx.Draft) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)


@pytest.fixture(params=["vanilla", "gated", "rnn"])
def case(
    request: pytest.FixtureRequest, rng: np.random.Generator, make: Callable[..., Case]
) -> Case:
    case = make(6, 5, 777, 40, head=request.param, confidence=True) | LAW
    for name in ("base_logits", "w1", "w2", "hidden"):  # not on a grid: summation order shows
        case[name] = rng.normal(0, 1, case[name].shape).astype(np.float32)
    return case | {"store_logits": True}


def test_permutation_and_batch_size(case: Case, rng: np.random.Generator) -> None:
    want = dx.markov_loop(**case)
    order = rng.permutation(6)
    got = dx.markov_loop(**take(case, order))
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name)[order], name)
    for rows in ([3], [1, 4], [5, 0, 2, 1]):
        got = dx.markov_loop(**take(case, rows))
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name)[rows], name)


def test_padded_rows_and_columns(case: Case) -> None:
    want = dx.markov_loop(**case)
    padded = take(case, [0, 0, 1, 2, 3, 3, 4, 5])
    padded["base_logits"] = np.pad(
        padded["base_logits"], ((0, 0), (0, 0), (0, 151)), constant_values=9e3
    )
    active = np.array([1, 0, 1, 1, 1, 0, 1, 1], bool)
    got = dx.markov_loop(**padded, active=active)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(got, name)[active], getattr(want, name), name)


def test_a_shorter_draft_is_a_prefix(case: Case) -> None:
    want = dx.markov_loop(**case)
    short = dict(case)
    for name in ("base_logits", "hidden"):
        short[name] = case[name][:, :2]
    got = dx.markov_loop(**short)
    np.testing.assert_array_equal(got.tokens, want.tokens[:, :2])
    np.testing.assert_array_equal(got.lse, want.lse[:, :2])


def test_greedy_neighbours_do_not_change_sampled_ones(case: Case) -> None:
    want = dx.markov_loop(**case)
    other = dict(case, temperature=np.where(case["temperature"] == 0, np.float32(1), 0))
    assert not np.array_equal(dx.markov_loop(**other).tokens, want.tokens)
    for r in (1, 2, 3, 5):
        only = dict(case, temperature=np.zeros(6, np.float32))
        only["temperature"][r] = case["temperature"][r]
        np.testing.assert_array_equal(dx.markov_loop(**only).tokens[r], want.tokens[r])


def test_another_position_or_seed_is_another_draw(make: Callable[..., Case]) -> None:
    case = make(1, 16, 500, 4)
    case["base_logits"][:] = 0
    tokens = {
        tuple(dx.markov_loop(**dict(case, **change), temperature=1.0).tokens[0])
        for change in ({}, {"position": case["position"] + 1}, {"seed": case["seed"] + 1})
    }
    assert len(tokens) == 3


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads(case: Case, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = dx.markov_loop(**case)
        torch.set_num_threads(threads)
        got = dx.markov_loop(**case)
    finally:
        torch.set_num_threads(before)
    assert_same(got, want)


PROGRAM = """
import hashlib, sys
import numpy as np
import dspark_ext as dx
from dspark_ext import _C

rng = np.random.default_rng(5)
digest = hashlib.sha256()
for head in ("vanilla", "gated", "rnn"):
    for dtype in (np.float32, np.float16, np.int8):
        for rank, d, vocab in ((1, 3, 130), (37, 20, 400), (64, 48, 1000), (530, 8, 90)):
            shapes = {"vanilla": None, "gated": (rank, d + rank), "rnn": (3 * rank, 2 * rank + d)}
            base = np.float32 if dtype == np.int8 else dtype
            w2, extra = rng.normal(0, 1, (vocab, rank)).astype(base), {}
            if dtype == np.int8:
                w2, extra["w2_scale"] = dx.quantize_rows(w2)
            if shapes[head]:
                weight = rng.normal(0, 0.3, shapes[head]).astype(np.float32)
                extra |= {"head_weight": weight, "head_bias": weight[:, 0].copy()}
            rows = 6
            draft = dx.markov_loop(
                rng.normal(0, 2, (rows, 3, vocab)).astype(base),
                rng.normal(0, 1, (vocab, rank)).astype(np.float32), w2,
                anchor=rng.integers(0, vocab, rows), seed=rng.integers(0, 2**63, rows),
                position=rng.integers(0, 2**31, rows), head=head,
                hidden=rng.normal(0, 1, (rows, 3, d)).astype(np.float32),
                confidence_weight=rng.normal(0, 1, d + rank).astype(np.float32),
                temperature=[0, 0.7, 1, 1, 1.5, 0.3], top_k=[0, 0, 9, 0, 0, 0],
                top_p=[1, 1, 1, 0.7, 1, 1], store_logits=True, **extra)
            for x in (draft.tokens, draft.logit, draft.lse, draft.confidence_logit, draft.logits):
                digest.update(np.ascontiguousarray(x).tobytes())
print(_C.cpu_level(), digest.hexdigest())
"""


def test_simd_levels_give_the_same_bits() -> None:
    found = {}
    for level in ("baseline", "x86-64-v3", "x86-64-v4"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "DSPARK_CPU_LEVEL": level, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        used, digest = done.stdout.split()
        found[used] = digest
    assert "baseline" in found
    assert len(set(found.values())) == 1, found
