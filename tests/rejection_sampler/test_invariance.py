# SPDX-License-Identifier: Apache-2.0
"""The same bits whatever stands around a request: batch, padding, threads, SIMD level, lengths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.results import Verification

FIELDS = ("num_accepted", "num_emitted", "tokens", "logprob", "logprob_raw", "accepted", "status")
GAMMA = 4


PER_REQUEST = (
    "seed", "position", "temperature", "top_p", "top_k", "rule", "repetition_penalty",
    "frequency_penalty",
)  # fmt: skip


def batch(rng: np.random.Generator, requests: int, vocab: int) -> dict[str, Any]:
    """Requests of length GAMMA with a stored law near the target's."""
    z = (rng.normal(size=(requests, GAMMA + 1, vocab)) * 2).astype(np.float32)
    q = (z[:, :GAMMA] + rng.normal(size=(requests, GAMMA, vocab)) * 0.4).astype(np.float32)
    top = q.max(-1, keepdims=True)
    gumbel = rng.gumbel(size=q.shape)
    drafts = (q + gumbel).argmax(-1)
    return {
        "z": z,
        "drafts": drafts,
        "q": q,
        "lse": (np.log(np.exp(q - top).sum(-1)) + top[..., 0]).astype(np.float32),
        "seed": rng.integers(0, 2**64, requests, dtype=np.uint64),
        "position": rng.integers(0, 2**31, requests),
        "temperature": rng.choice([0.0, 0.8, 1.0], requests).astype(np.float32),
        "top_p": rng.choice([1.0, 0.9], requests).astype(np.float32),
        "top_k": rng.choice([0, 40], requests).astype(np.int32),
        "rule": rng.choice([1, 1, 2, 3], requests).astype(np.int32),
        "repetition_penalty": rng.choice([1.0, 1.3], requests).astype(np.float32),
        "frequency_penalty": rng.choice([0.0, 0.4], requests).astype(np.float32),
    }


def run(b: dict[str, Any], order: Any, lead: int = 0, pad: int = 0) -> Verification:
    """Verify requests ``order`` of a batch behind ``lead`` foreign rows, ``pad`` columns wider."""
    z, q = b["z"][order], b["q"][order]
    count, each, vocab = z.shape
    rows = np.full((lead + count * each, vocab + pad), 1e4, np.float32)
    rows[lead:, :vocab] = z.reshape(-1, vocab)
    picked = np.take_along_axis(q, b["drafts"][order][..., None], -1)[..., 0]
    return dx.rejection_sample(
        rows,
        b["drafts"][order],
        draft_len=GAMMA,
        cu_seqlens=lead + np.arange(count + 1) * each,
        draft_logit=picked,
        draft_lse=b["lse"][order],
        draft_logits=q,
        vocab_size=vocab,
        **{name: b[name][order] for name in PER_REQUEST},
    )


def assert_same(got: Verification, want: Verification, rows: Any) -> None:
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field)[rows], field)


@pytest.mark.parametrize("vocab", [100, 1000, 20_000])
def test_v22_permuted_padded_and_split(rng: np.random.Generator, vocab: int) -> None:
    b = batch(rng, 9, vocab)
    whole = run(b, np.arange(9))
    order = rng.permutation(9)
    assert_same(run(b, order), whole, order)
    assert_same(run(b, np.arange(9), lead=3, pad=77), whole, np.arange(9))
    for r in range(9):
        assert_same(run(b, np.array([r])), whole, np.array([r]))


def test_v22_another_position_or_seed_has_other_noise(rng: np.random.Generator) -> None:
    b = batch(rng, 40, 300)
    b["temperature"][:] = 1
    base = run(b, np.arange(40)).tokens
    for name in ("position", "seed"):
        moved = run(b | {name: b[name] + type(b[name][0])(1)}, np.arange(40)).tokens
        assert (moved != base).any(axis=1).mean() > 0.5


@pytest.fixture
def threads() -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("requests", [1, 2, 7])
def test_thread_count_does_not_matter(
    rng: np.random.Generator, threads: Any, requests: int
) -> None:
    # One request: threads share its rows, if they are long.
    b = batch(rng, requests, 170_000 if requests == 1 else 30_000)
    threads(1)
    want = run(b, np.arange(requests))
    for count in (2, 3, 5):
        threads(count)
        assert_same(run(b, np.arange(requests)), want, np.arange(requests))


_LEVEL_SCRIPT = """
import numpy as np, sys, runpy
m = runpy.run_path(sys.argv[1])
b = m["batch"](np.random.default_rng(22), 6, 5000)
got = m["run"](b, np.arange(6))
np.savez(sys.argv[2], **{f: getattr(got, f) for f in m["FIELDS"]})
"""


@pytest.mark.parametrize("level", ["baseline", "x86-64-v3"])
def test_simd_level_does_not_matter(level: str, tmp_path: Path) -> None:
    """Each level in a process of its own: the choice is made once."""
    out = tmp_path / "out.npz"
    environment = os.environ | {"DSPARK_CPU_LEVEL": level, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _LEVEL_SCRIPT, __file__, str(out)]
    subprocess.run(command, check=True, env=environment)
    want = run(batch(np.random.default_rng(22), 6, 5000), np.arange(6))
    with np.load(out) as got:
        for field in FIELDS:
            np.testing.assert_array_equal(got[field], getattr(want, field), field)


def plain_decoding(logits: np.ndarray, seed: int, first: int, **sampling: Any) -> list[int]:
    """One token a step: rows are the logits of positions first, first + 1, ..."""
    tokens = []
    for i, row in enumerate(logits):
        got = dx.rejection_sample(
            row[None],
            np.zeros((1, 1), np.int32),
            draft_len=0,
            cu_seqlens=[0, 1],
            seed=seed,
            position=first - 1 + i,
            rule="match",
            **sampling,
        )
        tokens.append(int(got.tokens[0, 0]))
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_match_equals_plain_seeded_decoding(
    rng: np.random.Generator, gamma: int, temperature: float
) -> None:
    """For any gamma, lengths and drafts: logits depend on the position only here."""
    steps, vocab, seed, first = 40, 500, 991, 12
    logits = (rng.normal(size=(steps + 20, vocab)) * 2).astype(np.float32)
    sampling = {"temperature": temperature, "top_p": 0.95}
    want = plain_decoding(logits[:steps], seed, first, **sampling)
    tokens: list[int] = []
    while len(tokens) < steps:
        at = len(tokens)
        length = int(rng.integers(0, gamma + 1))
        ahead = (want + [0] * 20)[at : at + gamma]
        drafts = np.where(rng.random(gamma) < 0.7, ahead, rng.integers(0, vocab, gamma))
        got = dx.rejection_sample(
            logits[at : at + 1 + length],
            drafts[None],
            draft_len=length,
            cu_seqlens=[0, 1 + length],
            seed=seed,
            position=first - 1 + at,
            rule="match",
            **sampling,
        )
        tokens += got.tokens[0, : got.num_emitted[0]].tolist()
    assert tokens[:steps] == want


def test_rows_behind_the_first_rejection_are_not_touched() -> None:
    """Their NaN would set a bit."""
    rows = np.full((1, 5, 64), np.nan, np.float32)
    rows[0, 0] = 0
    rows[0, 0, 9] = 50
    got = dx.rejection_sample(
        rows[0], np.zeros((1, 4), np.int32), draft_len=4, cu_seqlens=[0, 5], seed=1, position=1
    )
    assert got.tokens.tolist() == [[9, -1, -1, -1, -1]]
    assert got.accepted.tolist() == [[0, -1, -1, -1]] and got.status[0] == 0


def test_requests_that_share_rows(rng: np.random.Generator) -> None:
    """Rows of stride 0, and parameters that change between requests on the same row."""
    row = rng.normal(size=(1, 3000)).astype(np.float32)
    count = 24
    rows = np.broadcast_to(row, (count, 3000))
    temperature = np.tile(np.float32([1, 1, 0.5, 0]), 6)
    top_k = np.tile(np.int32([0, 5, 5, 5]), 6)
    common = {"draft_len": 0, "cu_seqlens": np.arange(count + 1), "seed": np.arange(count)}
    common |= {"position": 3, "temperature": temperature, "top_k": top_k}
    drafts = np.zeros((count, 1), np.int32)
    shared = dx.rejection_sample(rows, drafts, **common)
    apart = dx.rejection_sample(np.ascontiguousarray(rows), drafts, **common)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(shared, field), getattr(apart, field), field)
