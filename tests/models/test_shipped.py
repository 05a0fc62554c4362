# SPDX-License-Identifier: Apache-2.0
"""The drafter that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import dspark_ext as dx  # noqa: E402
from dspark.checkpoints import NAMES, shipped  # noqa: E402
from dspark.drafters.config import DrafterConfig  # noqa: E402
from dspark.drafters.dspark import DSparkDrafter  # noqa: E402
from dspark.drafters.modeling import Drafter  # noqa: E402
from dspark.targets import smollm2  # noqa: E402
from dspark.targets.paged import PagedLlama  # noqa: E402
from dspark.training.prompts import build  # noqa: E402

MEBIBYTE = 1 << 20


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_complete_and_small(name: str) -> None:
    folder = shipped(name)
    assert (folder / "README.md").is_file()
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["heldout"]["tau_greedy"] > 1.5
    assert (folder / "model.safetensors").stat().st_size <= 24 * MEBIBYTE


def test_sizes() -> None:
    config = DrafterConfig.load(shipped())
    assert (config.block_size, config.num_hidden_layers) == (7, 2)
    assert (config.markov_rank, config.draft_vocab_size) == (64, 16384)
    assert (config.vocab_size, config.hidden_size) == (49152, 576)
    assert config.target_layer_ids == (1, 14, 27) and config.num_target_layers == 30
    drafter = Drafter.load(shipped())
    assert sum(p.numel() for p in drafter.parameters()) == 12_271_617
    assert all(bool(p.isfinite().all()) for p in drafter.parameters())
    assert drafter.d2t is not None and bool((drafter.d2t.diff() > 0).all())


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        shipped("another")


def test_speculates_on_the_real_target(smollm2_folder: Path) -> None:
    """Same greedy tokens as plain decoding, in clearly fewer rounds."""
    tokenizer = smollm2.load_tokenizer(smollm2_folder)
    target = PagedLlama.load(smollm2_folder, torch.float32, taps=(1, 14, 27))
    drafter = DSparkDrafter.load(shipped(), target.llama)
    answers, rounds = [], []
    for draft in (None, drafter):
        state = dx.RoundState.create(2, gamma=7, max_len=256, framework="torch")
        for prompt in build(2, seed=1, split="heldout"):
            ids = tokenizer.encode(smollm2.chat_prompt(prompt.text)).ids
            state.add(ids, dx.SamplingParams(max_new_tokens=28, stop_ids=(smollm2.EOS_ID,)))
        done = [dx.prefill(target, state)]
        while state.active_slots():
            done.append(dx.decode_round(target, draft, state))
        answers.append(
            [
                [t for r in done for t in r.tokens[slot, : r.num_emitted[slot]].tolist()]
                for slot in range(2)
            ]
        )
        rounds.append(sum(len(r.slots) for r in done[1:]))
    assert answers[0] == answers[1]
    assert rounds[1] < rounds[0] / 1.2
