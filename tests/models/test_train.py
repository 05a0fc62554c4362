# SPDX-License-Identifier: Apache-2.0
"""The training loop: schedule, resumption, data files, prompts, the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dspark.drafters.config import DrafterConfig  # noqa: E402
from dspark.drafters.modeling import Drafter  # noqa: E402
from dspark.targets.llama import Llama  # noqa: E402
from dspark.training import cli, data, prompts, topics, train  # noqa: E402
from dspark.training.data import Sample  # noqa: E402


def samples(llama: Llama, count: int, seed: int) -> list[Sample]:
    """Random sequences with states of the right shapes (their values do not matter here)."""
    generator = torch.Generator().manual_seed(seed)
    size, taps, found = llama.config.hidden_size, 2, []
    for index in range(count):
        length, prompt = 18 + index % 5, 3 + index % 2
        final = torch.randn(length - prompt + 1, size, generator=generator)
        found.append(
            Sample(
                index=index,
                domain=index % 3,
                temperature=float(index % 2),
                prompt_length=prompt,
                ids=torch.randint(0, 40, (length,), generator=generator).int(),
                features=torch.randn(length, taps * size, generator=generator).half(),
                final=final.half(),
                lse=torch.logsumexp(final @ llama.head_weight.T, -1),
            )
        )
    return found


def drafter(llama: Llama, d2t: torch.Tensor) -> Drafter:
    c = llama.config
    config = DrafterConfig(
        architecture="LlamaDSparkModel",
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        block_size=4,
        target_layer_ids=(0, 2),
        mask_token_id=1,
        num_target_layers=c.num_hidden_layers,
        markov_rank=3,
        draft_vocab_size=len(d2t),
    )
    torch.manual_seed(5)
    made = Drafter(config, d2t)
    train.initialise(made, llama)
    return made.attach(llama.embedding, llama.head_weight)


def test_learning_rate() -> None:
    options = train.TrainOptions(
        Path("run"), steps=50, warmup_steps=5, learning_rate=6e-4, final_rate=0.0
    )
    rates = [1e4 * train.learning_rate(options, s, s / 50) for s in range(50)]
    assert rates[:5] == pytest.approx([1.2, 2.4, 3.6, 4.8, 6.0])
    # A clean cosine behind the warm-up.
    import math

    expected = [3.0 * (1 + math.cos(math.pi * t / 45)) for t in range(45)]
    assert rates[5:] == pytest.approx(expected)


def test_budget_is_one_of_two() -> None:
    for wrong in ({}, {"steps": 3, "seconds": 2.0}):
        with pytest.raises(ValueError, match="exactly one"):
            train.TrainOptions(Path("run"), **wrong)  # type: ignore[arg-type]


def test_starts_from_the_target(tiny_llama: Callable[..., Llama]) -> None:
    llama = tiny_llama()
    made = drafter(llama, torch.arange(0, 40, 2))
    assert torch.equal(
        made.layers[1].mlp.up_proj.weight, llama.layer_weights(3)["mlp.up_proj.weight"]
    )
    assert torch.equal(
        made.layers[0].self_attn.k_proj.weight, llama.layer_weights(2)["self_attn.k_proj.weight"]
    )
    assert torch.equal(made.norm.weight, llama.norm)


def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, tiny_llama: Callable[..., Llama]
) -> None:
    llama = tiny_llama()
    some = samples(llama, 7, seed=1)
    d2t = train.draft_vocabulary(some, 40, 30)

    def run(folder: Path, stop: int) -> train.Trainer:
        options = train.TrainOptions(
            folder, steps=6, sequences=2, anchors=5, warmup_steps=2, progress=False
        )
        trainer = train.Trainer(drafter(llama, d2t), some, some[:2], options)
        while trainer.step < stop:
            trainer._one_step()
        trainer.checkpoint()
        return trainer

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 2)
    torch.manual_seed(99)  # whatever happens between two sittings
    parts = run(tmp_path / "parts", 6)
    for (name, a), b in zip(
        whole.drafter.state_dict().items(), parts.drafter.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    lines = (tmp_path / "parts" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 6]
    with pytest.raises(ValueError, match="seed"):
        train.Trainer(
            drafter(llama, d2t), some, [], train.TrainOptions(tmp_path / "parts", steps=6, seed=1)
        )


def test_training_lowers_the_loss(tmp_path: Path, tiny_llama: Callable[..., Llama]) -> None:
    llama = tiny_llama()
    some = samples(llama, 4, seed=2)
    options = train.TrainOptions(
        tmp_path, steps=40, sequences=4, anchors=8, learning_rate=1e-2, warmup_steps=3,
        progress=False,
    )  # fmt: skip
    trainer = train.Trainer(drafter(llama, torch.arange(40)), some, some, options)
    before = train.validate(trainer.drafter, some, options)["tau"]
    after = trainer.train()
    assert after["step"] == 40 and after["tau"] > before + 0.3
    loaded = Drafter.load(tmp_path / "checkpoint")
    assert torch.equal(loaded.d2t, torch.arange(40).int())
    assert json.loads((tmp_path / "checkpoint" / "recipe.json").read_text())["samples"] == 4


def test_draft_vocabulary_prefers_frequent_ids(tiny_llama: Callable[..., Llama]) -> None:
    one = samples(tiny_llama(), 1, seed=3)[0]
    one.ids[:] = torch.tensor([30] * 3 + [7] * 2 + [9] * (len(one.ids) - 5)).int()
    one.prompt_length = 3
    # 30 occurs in the prompt only: three thirds; 7 twice, 9 often; then the lowest ids.
    assert train.draft_vocabulary([one], 40, 3).tolist() == [7, 9, 30]
    assert train.draft_vocabulary([one], 40, 5).tolist() == [0, 1, 7, 9, 30]


def test_shards_round_trip(tmp_path: Path, tiny_llama: Callable[..., Llama]) -> None:
    some = samples(tiny_llama(), 5, seed=4)
    data.write_shard(tmp_path, 0, data.next_shard(tmp_path, 0), some[:2])
    data.write_shard(tmp_path, 0, data.next_shard(tmp_path, 0), some[2:3])
    data.write_shard(tmp_path, 3, data.next_shard(tmp_path, 3), some[3:])
    assert [p.name for p in data.shard_paths(tmp_path)] == [
        "shard-00-0000.safetensors",
        "shard-00-0001.safetensors",
        "shard-03-0000.safetensors",
    ]
    assert data.finished(tmp_path, 0) == {0, 1, 2} and data.finished(tmp_path, 3) == {3, 4}
    again = train.load_samples(tmp_path)
    for a, b in zip(some, again, strict=True):
        assert (a.index, a.domain, a.temperature, a.prompt_length) == (
            b.index, b.domain, b.temperature, b.prompt_length,
        )  # fmt: skip
        for name in ("ids", "features", "final", "lse"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_prompts_are_distinct_and_reproducible() -> None:
    first = prompts.build(1500, seed=3)
    assert first == prompts.build(1500, seed=3) != prompts.build(1500, seed=4)
    assert len({p.text for p in first}) == 1500
    assert {p.domain for p in first} == set(prompts.DOMAINS)


def test_splits_share_no_template_and_no_topic() -> None:
    for table in (
        topics.NAMES, topics.THINGS, topics.MATH, topics.CODE_TASKS, topics.CODE_TEMPLATES,
        topics.CHAT_TOPICS, topics.CHAT_TEMPLATES,
    ):  # fmt: skip
        assert not set(table["train"]) & set(table["heldout"])
    train_texts = {p.text for p in prompts.build(3000)}
    assert not train_texts & {p.text for p in prompts.build(200, split="heldout")}


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: prompts.build(5, split="test"), "split: got 'test'"),
        (lambda: prompts.build(-1), "count: got -1"),
        (lambda: prompts.build(1000, split="heldout"), "run out"),
    ],
    ids=["split", "negative", "too-many"],
)
def test_prompt_errors(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        call()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


def test_command_exports_a_run(
    tmp_path: Path, tiny_llama: Callable[..., Llama], capsys: pytest.CaptureFixture[str]
) -> None:
    llama = tiny_llama()
    some = samples(llama, 3, seed=6)
    options = train.TrainOptions(tmp_path / "run", steps=1, sequences=1, anchors=4, progress=False)
    train.Trainer(drafter(llama, torch.arange(40)), some, [], options).train()
    words = ("export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--json")
    assert cli.main(arguments(*words)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    Drafter.load(tmp_path / "out")


def test_command_writes_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments("prompts", "--out", str(tmp_path), "--prompts", "20", "--json")) == 0
    counts = json.loads(capsys.readouterr().out)
    assert sum(counts.values()) == 20
    texts = [
        json.loads(line)["turns"][0]
        for domain in prompts.DOMAINS
        for line in (tmp_path / f"{domain}.jsonl").read_text().splitlines()
    ]
    assert sorted(texts) == sorted(p.text for p in prompts.build(20, split="heldout"))


def test_command_fails_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("fit", "--data", str(tmp_path), "--run", str(tmp_path / "run"), "--steps", "1")
    assert cli.main(arguments(*words)) == 1
    assert "dspark train generate" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        arguments("fit", "--data", "d", "--run", "r", "--steps", "1", "--seconds", "2")
    assert stop.value.code == 2
