# SPDX-License-Identifier: Apache-2.0
"""Train a drafter on generated data: AdamW, warm-up and cosine, checkpoints, validation.

A run is described by :class:`TrainOptions` and lives in one folder: ``state.pt`` (everything
needed to resume), ``checkpoint/`` (the drafter in its public layout) and ``log.jsonl``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.config import DrafterConfig
from dspark.drafters.modeling import Drafter
from dspark.targets.llama import Llama
from dspark.training import data
from dspark.training.batch import Batch, collate, run_step
from dspark.training.data import Sample
from dspark.training.loss import LossWeights

# Blocks of a held-out sample that are looked at; validation costs as much as that many anchors.
_VALIDATION_ANCHORS = 16


@dataclass
class TrainOptions:
    """What :func:`train` does.

    Parameters
    ----------
    run
        Folder of the run. If it holds a ``state.pt`` the run is continued.
    steps, seconds
        Budget; exactly one of the two. The learning rate's cosine ends with it. A budget in
        seconds counts training time only, over all resumptions.
    sequences, anchors
        Sequences of a step and blocks of a sequence.
    sample_slots
        See :func:`dspark.training.batch.run_step`.
    checkpoint_seconds
        Time between two checkpoints, each with a validation.
    """

    run: Path
    steps: int | None = None
    seconds: float | None = None
    sequences: int = 4
    anchors: int = 64
    learning_rate: float = 1e-3
    final_rate: float = 0.02
    warmup_steps: int = 60
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    sample_slots: bool = True
    seed: int = 0
    checkpoint_seconds: float = 300.0
    loss: LossWeights = field(default_factory=LossWeights)
    progress: bool = True

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError("steps, seconds: give exactly one of the two")


def learning_rate(options: TrainOptions, step: int, spent: float) -> float:
    """Linear warm-up over `warmup_steps`, then a cosine from 1 to `final_rate` over the budget.

    Parameters
    ----------
    step
        Steps done before this one.
    spent
        Fraction of the budget used, 0 to 1.

    Examples
    --------
    >>> o = TrainOptions(Path("run"), steps=50, warmup_steps=5, learning_rate=6e-4, final_rate=0.0)
    >>> [round(1e4 * learning_rate(o, s, s / 50), 2) for s in range(5)]
    [1.2, 2.4, 3.6, 4.8, 6.0]
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    begin = 0.0 if options.steps is None else options.warmup_steps / options.steps
    progress = min(1.0, max(0.0, (spent - begin) / (1 - begin))) if begin < 1 else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return options.learning_rate * (options.final_rate + (1 - options.final_rate) * cosine)


def draft_vocabulary(samples: list[Sample], vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent ids of the data, ascending; answers count full, prompts a third.

    Ids that never occur are filled up from the lowest (byte-level BPE gives frequent pieces low
    ids).

    Examples
    --------
    >>> draft_vocabulary(samples, 49152, 16384).shape                     # doctest: +SKIP
    torch.Size([16384])
    """
    score = -1e-7 * torch.arange(vocab_size, dtype=torch.float64)
    for sample in samples:
        ids = sample.ids.long()
        amount = torch.full(ids.shape, 1.0, dtype=torch.float64)
        amount[: sample.prompt_length] = 1 / 3
        score.index_add_(0, ids, amount)
    return score.argsort(descending=True, stable=True)[:size].sort().values.to(torch.int32)


def initialise(drafter: Drafter, target: Llama) -> None:
    """Start from the target: its last layers, its final norm, the last tap as context.

    Only for the flavour without q/k norms, whose layers are plain Llama layers. W2 starts at zero:
    the sequential head begins as no bias.
    """
    depth = drafter.config.num_hidden_layers
    first = target.config.num_hidden_layers - depth
    size = drafter.config.hidden_size
    with torch.no_grad():
        for number, layer in enumerate(drafter.layers):
            layer.load_state_dict(target.layer_weights(first + number))
        drafter.norm.weight.copy_(target.norm)
        norm = target.layer_weights(first)["input_layernorm.weight"]
        drafter.hidden_norm.weight.copy_(norm)
        drafter.fc.weight.mul_(0.1)
        drafter.fc.weight[:, -size:] += torch.eye(size)
        if drafter.markov_head is not None:
            torch.nn.init.normal_(drafter.markov_head.markov_w1.weight, std=0.1)
            torch.nn.init.zeros_(drafter.markov_head.markov_w2.weight)
        if drafter.confidence_head is not None:
            torch.nn.init.zeros_(drafter.confidence_head.proj.weight)


@dataclass
class DrafterShape:
    """Choices of a new drafter; the remaining sizes are the target's.

    Parameters
    ----------
    draft_vocab
        V_d; None = the whole vocabulary.
    mask_token_id
        16 is ``<empty_output>`` of SmolLM2, a special token that plain text never holds.
    taps
        Target layers whose outputs were kept in the data.
    """

    layers: int = 2
    block_size: int = 7
    rank: int = 64
    head: str = "vanilla"
    draft_vocab: int | None = 16384
    num_anchors: int = 64
    mask_token_id: int = 16
    taps: tuple[int, ...] = (1, 14, 27)


def start(
    shape: DrafterShape, target: Llama, samples: list[Sample], options: TrainOptions
) -> Drafter:
    """Build the drafter of a run, with the target's tables attached.

    A new one starts from the target's weights and takes its draft vocabulary from the data; a
    run that exists keeps the vocabulary of its checkpoint.

    Examples
    --------
    >>> start(DrafterShape(), target, samples, options).config.markov_rank  # doctest: +SKIP
    64
    """
    t = target.config
    config = DrafterConfig(
        architecture="LlamaDSparkModel",
        vocab_size=t.vocab_size,
        hidden_size=t.hidden_size,
        intermediate_size=t.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=t.num_attention_heads,
        num_key_value_heads=t.num_key_value_heads,
        head_dim=t.head_dim,
        rms_norm_eps=t.rms_norm_eps,
        rope_theta=t.rope_theta,
        max_position_embeddings=t.max_position_embeddings,
        block_size=shape.block_size,
        target_layer_ids=shape.taps,
        mask_token_id=shape.mask_token_id,
        num_target_layers=t.num_hidden_layers,
        num_anchors=shape.num_anchors,
        markov_rank=shape.rank,
        markov_head_type=shape.head,
        confidence_head_with_markov=shape.rank > 0,
        draft_vocab_size=shape.draft_vocab,
    )
    checkpoint = options.run / "checkpoint"
    if shape.draft_vocab is None:
        d2t = None
    elif checkpoint.is_dir():
        d2t = Drafter.load(checkpoint).d2t
    else:
        d2t = draft_vocabulary(samples, t.vocab_size, shape.draft_vocab)
    torch.manual_seed(options.seed)
    drafter = Drafter(config, d2t)
    initialise(drafter, target)
    return drafter.attach(target.embedding.clone(), target.head_weight)


class Trainer:
    """State of one run and its loop.

    Parameters
    ----------
    drafter
        With the target's tables attached.
    samples, validation
        Training and held-out samples.
    """

    def __init__(
        self,
        drafter: Drafter,
        samples: list[Sample],
        validation: list[Sample],
        options: TrainOptions,
    ) -> None:
        self.drafter, self.samples, self.options = drafter, samples, options
        self.validation = validation
        matrices = [p for p in drafter.parameters() if p.dim() >= 2]
        vectors = [p for p in drafter.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=options.betas, fused=True)
        self.step = 0
        self.elapsed = 0.0
        if (options.run / "state.pt").is_file():
            self._resume()

    def train(self) -> dict[str, Any]:
        """Run until the budget is spent; returns the last validation's metrics.

        Examples
        --------
        >>> Trainer(drafter, samples, validation, options).train()["tau"] # doctest: +SKIP
        1.9
        """
        from tqdm import tqdm

        total = self.options.steps if self.options.steps is not None else self.options.seconds
        saved = time.monotonic()
        metrics: dict[str, Any] = {}
        unit = "step" if self.options.steps is not None else "s"
        with tqdm(total=round(total or 0), unit=unit, disable=not self.options.progress) as bar:
            while self._spent() < 1:
                begin = time.monotonic()
                shown = self._one_step()
                self.elapsed += time.monotonic() - begin
                done = self.step if self.options.steps is not None else round(self.elapsed)
                bar.update(min(done, bar.total) - bar.n)
                bar.set_postfix_str(shown, refresh=False)
                if time.monotonic() - saved > self.options.checkpoint_seconds:
                    metrics = self.checkpoint()
                    saved = time.monotonic()
        return self.checkpoint() if metrics.get("step") != self.step else metrics

    def checkpoint(self) -> dict[str, Any]:
        """Validate, save state and weights, append a line to the log."""
        metrics = {"step": self.step, "seconds": round(self.elapsed, 1)}
        if self.validation:
            metrics |= validate(self.drafter, self.validation, self.options)
        run = self.options.run
        run.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
            "seed": self.options.seed,
            "torch_rng": torch.get_rng_state(),
        }
        torch.save(state, run / "state.pt.partial")
        os.replace(run / "state.pt.partial", run / "state.pt")
        self.drafter.save(run / "checkpoint")
        recipe = describe(self.options, self.samples) | {"metrics": metrics}
        text = json.dumps(recipe, indent=2, default=str) + "\n"
        (run / "checkpoint" / "recipe.json").write_text(text, encoding="utf-8")
        with (run / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(metrics) + "\n")
        return metrics

    def _resume(self) -> None:
        state = torch.load(self.options.run / "state.pt", weights_only=True)
        if state["seed"] != self.options.seed:
            raise ValueError(f"seed: got {self.options.seed}, the run has {state['seed']}")
        self.drafter.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed = state["step"], state["elapsed"]
        torch.set_rng_state(state["torch_rng"])

    def _spent(self) -> float:
        if self.options.steps is not None:
            return self.step / self.options.steps if self.options.steps else 1.0
        return self.elapsed / (self.options.seconds or 1e-9)

    def _one_step(self) -> str:
        options = self.options
        rate = learning_rate(options, self.step, self._spent())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        random = np.random.Generator(np.random.Philox(key=[options.seed, self.step]))
        batch = collate(self._samples(self.step), options.anchors, random)
        result = run_step(
            self.drafter, batch, options.loss, random if options.sample_slots else None
        )
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(result.loss)
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), options.clip)
        self.optimizer.step()
        self.step += 1
        return (
            f"step {self.step} loss {float(result.loss.detach()):.3f} "
            f"l1 {result.l1:.3f} lr {rate:.1e}"
        )

    def _samples(self, step: int) -> list[Sample]:
        """Samples of a step: epoch after epoch, each in its own order."""
        count, total = self.options.sequences, len(self.samples)
        chosen = []
        for number in range(step * count, (step + 1) * count):
            epoch, index = divmod(number, total)
            chosen.append(self.samples[self._order(epoch)[index]])
        return chosen

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_order_epoch", None) != epoch:
            key = [self.options.seed + (1 << 32), epoch]
            generator = np.random.Generator(np.random.Philox(key=key))
            self._order_epoch, self._cached = epoch, generator.permutation(len(self.samples))
        return self._cached


@torch.no_grad()
def validate(drafter: Drafter, samples: list[Sample], options: TrainOptions) -> dict[str, Any]:
    """Metrics with true prefixes on held-out samples, every slot counted.

    Returns
    -------
    dict
        ``accept_rate`` [γ] (mean c* at T = 1), ``greedy_match`` [γ] (equal argmax), ``tau`` and
        ``tau_greedy`` (tokens a round would commit, expected at T = 1 and for greedy decoding),
        ``confidence_error`` (mean absolute difference of c and c*).
    """
    accept, match, valid, error = [], [], [], []
    for start in range(0, len(samples), 8):
        random = np.random.Generator(np.random.Philox(key=[12345, start]))
        batch: Batch = collate(samples[start : start + 8], _VALIDATION_ANCHORS, random)
        result = run_step(drafter, batch, options.loss)
        whole = result.valid[:, 0]
        accept.append(result.accept[whole])
        match.append(result.match[whole])
        valid.append(result.valid[whole])
        if result.confidence_logit is not None:
            difference = (torch.sigmoid(result.confidence_logit) - result.accept).abs()
            error.append(difference[result.valid])
    a, m, v = torch.cat(accept), torch.cat(match), torch.cat(valid)
    number = v.sum(dim=0)
    summary: dict[str, Any] = {
        "accept_rate": _rounded((a * v).sum(dim=0) / number),
        "greedy_match": _rounded((m * v).sum(dim=0) / number),
        "tau": round(float(1 + (a * v).cumprod(dim=1).sum(dim=1).mean()), 4),
        "tau_greedy": round(float(1 + (m * v).cumprod(dim=1).sum(dim=1).mean()), 4),
    }
    if error:
        summary["confidence_error"] = round(float(torch.cat(error).mean()), 4)
    return summary


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 4) for value in values]


def load_samples(folder: Path, minimum: int = 14) -> list[Sample]:
    """All samples of a data folder with at least `minimum` answer tokens.

    Examples
    --------
    >>> len(load_samples(Path("data")))                                   # doctest: +SKIP
    2400
    """

    def all_samples() -> Iterator[Sample]:
        for path in data.shard_paths(folder):
            yield from data.read_shard(path)

    return [s for s in all_samples() if len(s.ids) - s.prompt_length >= minimum]


def describe(options: TrainOptions, samples: list[Sample]) -> dict[str, Any]:
    """Options and amount of data as plain values, for the checkpoint's ``recipe.json``."""
    plain = asdict(options) | {"run": options.run.name}
    return {
        "options": plain,
        "samples": len(samples),
        "answer_tokens": sum(len(s.ids) - s.prompt_length for s in samples),
    }
