# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M with the shipped drafter: greedy speculative output equals plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspark_ext as dx
from dspark.checkpoints import shipped
from dspark.engine import Engine
from dspark.engine.loading import Models, load
from dspark.evaluation.lossless import check_lossless
from dspark.targets.smollm2 import TargetNotInstalledError, find_gguf
from dspark.training.prompts import build

PROMPTS, TOKENS = 20, 64


@pytest.fixture(scope="module")
def models() -> Any:
    """Both models in float32."""
    try:
        find_gguf()
    except TargetNotInstalledError as error:
        pytest.skip(f"the target's weights are missing: {error}")
    if not (shipped() / "model.safetensors").is_file():
        pytest.skip("this tree has no trained drafter")
    return load("float32", progress=False)


def prompts(models: Models, count: int) -> list[list[int]]:
    return [models.encode(p.text) for p in build(count, seed=11, split="heldout")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "causal"])
def test_greedy_output_is_that_of_plain_decoding(models: Models, mode: str) -> None:
    """20 prompts x 64 tokens, token for token; near ties are counted and at most 1 %."""
    cost = dx.CostTable.from_points([1, 20, 200], [30.0, 100.0, 600.0], draft_ms=10.0)
    scheduler = dx.Scheduler(mode, cost=cost if mode == "causal" else None, skip=False)
    count = PROMPTS if mode == "off" else 6
    report = check_lossless(
        models.target,
        models.drafter,
        prompts(models, count),
        max_new_tokens=TOKENS,
        stop_ids=models.stop_ids,
        scheduler=scheduler,
    )
    print(report)
    assert report.passed(0.01), str(report)
    assert report.acceptance_length > 1.2, "a drafter that is never right proves little"


@pytest.mark.slow
def test_match_equals_plain_seeded_decoding(models: Models) -> None:
    """Sampled, rule match, another batch: the same text as plain seeded decoding."""
    ids = prompts(models, 3)
    params = [
        dx.SamplingParams(0.8, top_p=0.9, seed=i, rule="match", max_new_tokens=16) for i in range(3)
    ]
    longest = max(map(len, ids)) + 16
    texts = []
    for drafter, slots in ((None, 1), (models.drafter, 3)):
        engine = Engine(
            models.target, drafter, gamma=models.drafter.gamma, max_requests=slots, max_len=longest
        )
        texts.append(engine.complete(ids, params))
    same = sum(a == b for a, b in zip(*texts, strict=True))
    # one draw may sit on a rounding difference between 1 row and 8
    assert same >= 2, texts


def test_bfloat16_is_exact_too(models: Models) -> None:
    """Rows do not change each other's bits on this backend, so even bfloat16 has no near ties."""
    fast = load("bfloat16", progress=False)
    assert fast.target.llama.dtype == torch.bfloat16
    report = check_lossless(
        fast.target, fast.drafter, prompts(fast, 4), max_new_tokens=24, stop_ids=fast.stop_ids
    )
    assert report.differences == (), str(report)
    ids = fast.encode("What is the capital of France?")
    texts = []
    for m in (fast, models):
        engine = Engine(m.target, m.drafter, max_requests=1, max_len=len(ids) + 8)
        texts.append(m.decode(engine.complete([ids], dx.SamplingParams(max_new_tokens=7))[0]))
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
