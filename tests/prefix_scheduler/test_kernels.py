# SPDX-License-Identifier: Apache-2.0
"""The CUDA scheduler beside its CPU twin: every output bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx

MODES = ["causal", "two_phase", "budget", "threshold", "fixed", "off"]
FIELDS = (
    "length",
    "cu_seqlens",
    "total_tokens",
    "theta",
    "row_to_request",
    "row_offset",
    "token_ids",
    "positions",
    "work",
    "status",
)


pytestmark = pytest.mark.parametrize(
    "backend", ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])], indirect=True
)


def problem(rng: np.random.Generator, requests: int, gamma: int, mode: str) -> dict[str, Any]:
    """Arguments with ties, NaN, bad limits, padded rows, a curve with steps and a tight room."""
    c = rng.choice(
        [1.0, 0.9, 0.5, rng.random(), 0.0], (requests, gamma), p=[0.3, 0.3, 0.2, 0.1, 0.1]
    )
    survival = np.cumprod(c, axis=1).astype(np.float32)
    survival[rng.random(survival.shape) < 0.01] = np.nan
    top = requests * (gamma + 1) + 1
    ms = 5.0 + 0.01 * np.arange(top) + 2.0 * (np.arange(top) // 17)
    a: dict[str, Any] = {
        "survival": survival,
        "mode": "two_phase" if mode == "budget" else mode,
        "min_len": rng.integers(0, 3, requests).astype(np.int32),
        "max_len": rng.integers(0, gamma + 2, requests).astype(np.int32),
        "weight": rng.choice([0.0, 0.5, 1.0, 3.0], requests).astype(np.float32),
        "active": (rng.random(requests) < 0.8).astype(np.uint8),
        "kv_len": rng.integers(0, 4096, requests).astype(np.int32),
        "capacity": int(requests * (1 + gamma * rng.choice([0.1, 0.5, 1.0]))),
        "anchor": rng.integers(0, 1000, requests).astype(np.int32),
        "draft_tokens": rng.integers(0, 1000, (requests, gamma)).astype(np.int32),
        "position": rng.integers(0, 2**31, requests),
        "padded_tokens": top + 5,
    }
    table = dx.CostTable.from_points(
        np.arange(1, top), ms[1:], draft_ms=1.5, ms_per_kv_token=1e-5 * rng.random()
    )
    if mode in ("causal", "two_phase", "off"):
        a["cost"] = table
    if mode == "two_phase":
        lagged = dx.LaggedSurvival(rounds=2)
        for _ in range(2):
            lagged.push(np.nan_to_num(survival[rng.permutation(requests)]))
        a["lagged"] = lagged
    if mode == "budget":
        a["budget"] = int(rng.integers(0, requests * gamma + 1))
    if mode == "threshold":
        a |= {"conditional": c.astype(np.float32), "threshold": 0.5}
    if mode == "fixed":
        a["fixed_len"] = gamma // 2
    return a


def compare(a: dict[str, Any], backend: str) -> None:
    """Run both twins and compare the bytes of every output."""
    want = dx.prefix_schedule(**a, backend="cpu")
    got = dx.prefix_schedule(**a, backend=backend)
    for name in FIELDS:
        expected, seen = np.asarray(getattr(want, name)), np.asarray(getattr(got, name))
        assert expected.dtype == seen.dtype
        assert expected.tobytes() == seen.tobytes(), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("requests", "gamma"), [(1, 1), (1, 16), (33, 5), (128, 7), (600, 3)], ids=str
)
def test_equals_its_twin(
    backend: str, rng: np.random.Generator, requests: int, gamma: int, mode: str
) -> None:
    for _ in range(4 if requests < 100 else 1):
        compare(problem(rng, requests, gamma, mode), backend)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("mode", ["causal", "two_phase"])
def test_order_of_threads_does_not_matter(
    backend: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    seed: int,
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(seed))
    compare(problem(rng, 70, 9, mode), backend)


@pytest.mark.parametrize("shared_kb", [227, 80], ids=["shared", "workspace"])
@pytest.mark.parametrize("mode", ["causal", "two_phase"])
def test_many_candidates(
    backend: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    shared_kb: int,
) -> None:
    """8192 candidates, in shared memory and, where that is too small, in the workspace."""
    monkeypatch.setenv("DSPARK_SIMT_SHARED_KB", str(shared_kb))
    compare(problem(rng, 512, 16, mode), backend)


def test_a_price_that_is_no_price_ends_the_table(backend: str, rng: np.random.Generator) -> None:
    """Prices live on the device: the host's checks do not see one that goes bad later."""
    a = problem(rng, 40, 6, "causal")
    a["survival"] = np.full((40, 6), 1.0, dtype=np.float32)
    a |= dict.fromkeys(("min_len", "max_len", "weight", "capacity"))
    a["cost"] = dx.CostTable.from_points([1, 300], [1.0, 1.5])
    a["cost"].array[60] = np.nan
    want = dx.prefix_schedule(**a, backend="cpu")
    assert int(want.total_tokens) == 59
    assert np.all(want.status[a["active"] == 1] & int(dx.Status.BAD_PARAM))
    compare(a, backend)
