# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels beside the CPU backend: every result has the same bits, however it is divided.

The emulated device of tests/simt runs them here; on a machine with a GPU tests/rejection_sampler
runs with ``backend="cuda"`` as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.results import Verification

#: name -> environment: how a call is divided, and the order in which the emulation runs threads.
DIVISIONS = {
    "as-chosen": {},
    "alone": {"TEAM": "1", "ROWS": "0", "SEED": "1"},
    "team-of-two": {"TEAM": "2", "ROWS": "0", "SEED": "2"},
    "team-of-eight": {"TEAM": "8", "ROWS": "0", "SEED": "3"},
    "all-rows-alone": {"TEAM": "1", "ROWS": "1", "SEED": "4"},
    "all-rows-in-teams": {"TEAM": "4", "ROWS": "1", "SEED": "5"},
    "ampere": {"CAPABILITY": "80", "SEED": "6"},
    "little-shared-memory": {"SHARED_KB": "48", "TEAM": "2", "ROWS": "0", "SEED": "7"},
}


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``divide(name)`` sets the environment of a division."""

    def there(name: str) -> None:
        for key, value in DIVISIONS[name].items():
            own = key in ("TEAM", "ROWS")
            prefix = "DSPARK_REJECTION_SAMPLER_" if own else "DSPARK_SIMT_"
            monkeypatch.setenv(prefix + key, value)

    return there


def assert_same_bits(got: Verification, want: Verification, where: str) -> None:
    for field, value in vars(want).items():
        if value is not None:
            np.testing.assert_array_equal(getattr(got, field), value, f"{field}, {where}")


@pytest.fixture
def kernels() -> str:
    from dspark_ext import _simt

    if not _simt.load():
        pytest.skip("the SIMT library is not built: run `make simt`")
    return "simt"


@pytest.mark.parametrize("name", DIVISIONS)
def test_any_call_has_the_bits_of_the_cpu(
    kernels: str, divide: Any, random_call: Any, name: str
) -> None:
    divide(name)
    each = 8 if name in ("team-of-eight", "all-rows-in-teams") else 16
    first = 24 * list(DIVISIONS).index(name)
    for seed in range(first, first + each):
        target, drafts, kwargs = random_call(np.random.default_rng(seed))
        want = dx.rejection_sample(target, drafts, **kwargs, backend="cpu")
        got = dx.rejection_sample(target, drafts, **kwargs, backend=kernels)
        assert_same_bits(got, want, f"call {seed}")


def large_call(vocab: int, **kwargs: Any) -> dict[str, Any]:
    """Two requests with two drafts each over a vocabulary of the usual size, in bf16."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(6, vocab + 24, generator=generator) * 2.5).bfloat16()
    return {
        "target_logits": rows[:, 3:],  # rows that begin at odd elements
        "draft_tokens": rows[:, 3 : vocab + 3].float().argmax(1).view(2, 3)[:, :2].int(),
        "draft_len": 2,
        "cu_seqlens": [0, 3, 6],
        "seed": [11, 12],
        "position": [5, 2**31],
        "vocab_size": vocab,
        **kwargs,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": [1.0, 0.0], "top_logprobs": 5},
        {"temperature": 0.8, "top_k": [50, 0], "top_p": [0.9, 0.8], "min_p": [0.0, 0.02]},
        {"temperature": [1.0, 3.0], "rule": "match", "top_p": [0.999, 0.95]},
    ],
    ids=["plain", "truncated", "wide-nucleus"],
)
def test_a_usual_vocabulary(kernels: str, options: dict[str, Any]) -> None:
    call = large_call(151_936, **options)
    want = dx.rejection_sample(**call, backend="cpu")
    assert_same_bits(dx.rejection_sample(**call, backend=kernels), want, "all")


def test_ties_at_the_cut_go_to_the_lower_id(kernels: str, divide: Any) -> None:
    """Equal logits over many segments: top-k and top-p keep the first of them, in any division."""
    vocab = 1500
    logits = np.zeros((4, vocab), np.float32)
    logits[:, 7::3] = 1
    arguments: dict[str, Any] = {
        "target_logits": logits,
        "draft_tokens": np.zeros((2, 1), np.int32),
        "draft_len": 1,
        "cu_seqlens": [0, 2, 4],
        "seed": [1, 2],
        "position": 3,
        "temperature": 1.0,
        "top_k": [321, 0],
        "top_p": [1.0, 0.4],
        "top_logprobs": 128,
    }
    want = dx.rejection_sample(**arguments, backend="cpu")
    assert want.top_ids[0, 0, -1] == 7 + 3 * 127
    for name in ("alone", "team-of-eight", "all-rows-in-teams"):
        divide(name)
        got = dx.rejection_sample(**arguments, backend=kernels)
        assert_same_bits(got, want, name)
