# SPDX-License-Identifier: Apache-2.0
"""Make training data: the target answers prompts, and its hidden states are kept on the way.

Continuous batching over a fixed number of slots: when an answer ends, the next prompt takes its
slot. Half of the prompts are answered greedily, half sampled at temperature 1. Each prompt draws
its uniform numbers from its own stream, so a run that was interrupted and resumed samples as one
that was not. Shards are safetensors files, see :mod:`dspark.training.data`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.targets import smollm2
from dspark.targets.dense import DecodeAttention, PrefillAttention, SlotCache
from dspark.targets.llama import Llama
from dspark.training import data
from dspark.training.prompts import DOMAINS, Prompt, build


@dataclass
class GenerateOptions:
    """What :func:`generate` makes.

    Parameters
    ----------
    folder
        Where shards go; existing shards of the same seed are continued.
    prompts
        Size of the whole prompt list, shared by all workers.
    worker, workers
        This process answers prompts ``worker, worker + workers, ...``.
    slots
        Sequences decoded together.
    max_new_tokens, max_prompt_tokens
        Limits of one answer and of one prompt (longer prompts are skipped).
    seconds
        Stop admitting prompts after this time; None = answer all.
    shard_sequences
        Answers per shard file.
    """

    folder: Path
    prompts: int = 6000
    seed: int = 0
    worker: int = 0
    workers: int = 1
    slots: int = 64
    max_new_tokens: int = 160
    max_prompt_tokens: int = 160
    seconds: float | None = None
    shard_sequences: int = 100
    taps: tuple[int, ...] = (1, 14, 27)
    split: str = "train"
    progress: bool = True


@dataclass
class _Slot:
    index: int
    prompt: Prompt
    ids: list[int]
    prompt_length: int
    temperature: float
    uniforms: np.ndarray
    lse: list[float] = field(default_factory=list)


def generate(options: GenerateOptions) -> dict[str, float]:
    """Answer prompts until they or the time are used up; returns counts.

    Returns
    -------
    dict
        ``sequences`` and ``tokens`` (answer tokens) made by this call, ``seconds`` spent.

    Raises
    ------
    dspark.targets.smollm2.TargetNotInstalledError
        If the target's weights are not installed.

    Examples
    --------
    >>> generate(GenerateOptions(Path("data"), prompts=64))["sequences"]  # doctest: +SKIP
    64
    """
    folder = smollm2.ensure(options.progress)
    llama = Llama.load(folder, taps=options.taps)
    tokenizer = smollm2.load_tokenizer(folder)
    done = data.finished(options.folder, options.worker)
    queue: list[tuple[int, Prompt, list[int]]] = []
    for index, prompt in enumerate(build(options.prompts, options.seed, options.split)):
        if index % options.workers != options.worker or index in done:
            continue
        ids = tokenizer.encode(smollm2.chat_prompt(prompt.text)).ids
        if len(ids) <= options.max_prompt_tokens:
            queue.append((index, prompt, ids))
    prefix = len(tokenizer.encode(smollm2.chat_prompt("").split("user\n")[0] + "user\n").ids)
    return _Generator(llama, options, queue, prefix).run()


class _Generator:
    def __init__(
        self,
        llama: Llama,
        options: GenerateOptions,
        queue: Sequence[tuple[int, Prompt, list[int]]],
        prefix: int,
    ) -> None:
        self._llama, self._options = llama, options
        self._queue = list(reversed(queue))
        length = options.max_prompt_tokens + options.max_new_tokens + 1
        # One slot more than is decoded: it keeps the system prompt's keys and values.
        self._cache = SlotCache(llama.config, options.slots + 1, length)
        width = llama.config.hidden_size * (len(options.taps) + 1)
        self._states = torch.zeros(options.slots + 1, length, width, dtype=torch.float16)
        self._slots: list[_Slot] = []
        self._prefix = prefix if queue else 0
        self._finished: list[data.Sample] = []
        self._shard = data.next_shard(options.folder, options.worker)
        self._sequences = self._tokens = 0

    def run(self) -> dict[str, float]:
        from tqdm import tqdm

        start = time.monotonic()
        limit = self._options.seconds
        self._cache_prefix()
        total = len(self._queue)
        with tqdm(total=total, unit="answer", disable=not self._options.progress) as bar:
            while True:
                late = limit is not None and time.monotonic() - start > limit
                while self._queue and len(self._slots) < self._options.slots and not late:
                    self._admit()
                if not self._slots:
                    break
                self._step()
                bar.update(self._sequences - bar.n)
                elapsed = time.monotonic() - start
                bar.set_postfix_str(f"{self._tokens / elapsed:.0f} tokens/s", refresh=False)
        self._save()
        return {
            "sequences": self._sequences,
            "tokens": self._tokens,
            "seconds": time.monotonic() - start,
        }

    def _cache_prefix(self) -> None:
        if self._queue and self._prefix:
            self._prefill(self._options.slots, 0, self._queue[-1][2][: self._prefix])

    def _prefill(self, slot: int, start: int, ids: list[int]) -> Tensor:
        positions = torch.arange(start, start + len(ids))
        hidden, features = self._llama.hidden(
            torch.tensor(ids), positions, PrefillAttention(self._cache, slot, start)
        )
        self._states[slot, positions] = torch.cat([features, hidden], dim=-1).half()
        return hidden[-1:]

    def _admit(self) -> None:
        index, prompt, ids = self._queue.pop()
        number, prefix, spare = len(self._slots), self._prefix, self._options.slots
        self._cache.copy_prefix(spare, number, prefix)
        self._states[number, :prefix] = self._states[spare, :prefix]
        stream = np.random.Generator(np.random.Philox(key=[self._options.seed, index]))
        slot = _Slot(
            index=index,
            prompt=prompt,
            ids=list(ids),
            prompt_length=len(ids),
            temperature=float(stream.random() < 0.5),
            uniforms=stream.random(self._options.max_new_tokens, dtype=np.float32),
        )
        self._slots.append(slot)
        hidden = self._prefill(number, prefix, ids[prefix:])
        self._append([slot], hidden)

    def _step(self) -> None:
        """One decoding step of all slots, then retire those that ended."""
        positions = torch.tensor([len(slot.ids) - 1 for slot in self._slots])
        last = torch.tensor([slot.ids[-1] for slot in self._slots])
        hidden, features = self._llama.hidden(
            last, positions, DecodeAttention(self._cache, positions)
        )
        rows = torch.arange(len(self._slots))
        self._states[rows, positions] = torch.cat([features, hidden], dim=-1).half()
        self._append(self._slots, hidden)
        for number in reversed(range(len(self._slots))):
            slot = self._slots[number]
            answer = len(slot.ids) - slot.prompt_length
            # The newest token has no states yet, hence the last one looked at is ids[-2].
            if slot.ids[-2] == smollm2.EOS_ID or answer > self._options.max_new_tokens:
                self._retire(number)

    def _append(self, slots: Sequence[_Slot], hidden: Tensor) -> None:
        """Choose the next token of each slot from final hidden states ``[n, d]``."""
        logits = self._llama.logits(hidden)
        top, greedy = logits.max(dim=-1)
        weight = torch.exp(logits - top[:, None])
        total = weight.sum(dim=-1)
        lse = (total.log() + top).tolist()
        tokens = greedy.tolist()
        for row, slot in enumerate(slots):
            answer = len(slot.ids) - slot.prompt_length
            if slot.temperature > 0 and answer < len(slot.uniforms):
                threshold = float(slot.uniforms[answer]) * float(total[row])
                below = torch.searchsorted(weight[row].cumsum(0), threshold, right=True)
                tokens[row] = min(int(below), logits.shape[-1] - 1)
            slot.lse.append(lse[row])
            slot.ids.append(tokens[row])

    def _retire(self, number: int) -> None:
        slot = self._slots[number]
        length = len(slot.ids) - 1
        size = self._llama.config.hidden_size
        states = self._states[number, :length].clone()
        self._finished.append(
            data.Sample(
                index=slot.index,
                domain=DOMAINS.index(slot.prompt.domain),
                temperature=slot.temperature,
                prompt_length=slot.prompt_length,
                ids=torch.tensor(slot.ids[:length], dtype=torch.int32),
                features=states[:, :-size],
                final=states[slot.prompt_length - 1 :, -size:],
                lse=torch.tensor(slot.lse),
            )
        )
        self._sequences += 1
        self._tokens += length - slot.prompt_length
        # The last slot moves into the gap, so the decoded slots stay 0 .. n-1.
        last = len(self._slots) - 1
        if number != last:
            used = len(self._slots[last].ids)
            self._cache.copy_prefix(last, number, used)
            self._states[number, :used] = self._states[last, :used]
        self._slots[number] = self._slots[last]
        self._slots.pop()
        if len(self._finished) >= self._options.shard_sequences:
            self._save()

    def _save(self) -> None:
        if self._finished:
            data.write_shard(
                self._options.folder, self._options.worker, self._shard, self._finished
            )
            self._shard += 1
            self._finished = []
