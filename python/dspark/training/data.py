# SPDX-License-Identifier: Apache-2.0
"""The data files: samples in safetensors shards ``shard-<worker>-<number>.safetensors``.

A shard concatenates its samples. Per sample of n tokens with a prompt of p tokens it holds the ids
(int32 [n]), the tapped features (float16 [n, m d]), and for positions p-1 .. n-1 the final hidden
state after the final norm (float16 [n - p + 1, d]) and the log-sum-exp of the full logits
(float32 [n - p + 1]): with the head these give exact target probabilities of any subset of ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAME = re.compile(r"shard-(\d+)-(\d+)\.safetensors$")


@dataclass
class Sample:
    """One answered prompt; shapes in the module's text."""

    index: int
    domain: int
    temperature: float
    prompt_length: int
    ids: Tensor
    features: Tensor
    final: Tensor
    lse: Tensor


def shard_paths(folder: Path, worker: int | None = None) -> list[Path]:
    """Shards of a folder in name order, of one worker or of all.

    Examples
    --------
    >>> shard_paths(Path("no such folder"))
    []
    """
    found = [(match, path) for path in folder.glob("shard-*") if (match := _NAME.search(path.name))]
    return sorted(path for match, path in found if worker in (None, int(match[1])))


def next_shard(folder: Path, worker: int) -> int:
    """First unused shard number of a worker."""
    numbers = [int(_NAME.search(p.name)[2]) for p in shard_paths(folder, worker)]  # type: ignore[index]
    return max(numbers, default=-1) + 1


def finished(folder: Path, worker: int) -> set[int]:
    """Prompt indices that a worker has answered already."""
    from safetensors import safe_open

    done: set[int] = set()
    for path in shard_paths(folder, worker):
        with safe_open(path, framework="pt") as file:
            done |= set(file.get_tensor("index").tolist())
    return done


def write_shard(folder: Path, worker: int, number: int, samples: Sequence[Sample]) -> Path:
    """Write samples as one shard; readers see the whole file or none.

    Examples
    --------
    >>> write_shard(Path("data"), 0, 0, samples)                          # doctest: +SKIP
    PosixPath('data/shard-00-0000.safetensors')
    """
    from safetensors.torch import save_file

    tensors = {
        "index": torch.tensor([s.index for s in samples]),
        "domain": torch.tensor([s.domain for s in samples]),
        "temperature": torch.tensor([s.temperature for s in samples]),
        "prompt_length": torch.tensor([s.prompt_length for s in samples]),
        "length": torch.tensor([len(s.ids) for s in samples]),
        "ids": torch.cat([s.ids for s in samples]),
        "features": torch.cat([s.features for s in samples]),
        "final": torch.cat([s.final for s in samples]),
        "lse": torch.cat([s.lse for s in samples]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"shard-{worker:02d}-{number:04d}.safetensors"
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary)
    os.replace(temporary, path)
    return path


def read_shard(path: Path) -> list[Sample]:
    """Read the samples of one shard.

    Examples
    --------
    >>> len(read_shard(Path("data/shard-00-0000.safetensors")))           # doctest: +SKIP
    100
    """
    from safetensors.torch import load_file

    t = load_file(path)
    lengths, prompts = t["length"].tolist(), t["prompt_length"].tolist()
    answers = [n - p + 1 for n, p in zip(lengths, prompts, strict=True)]
    parts = zip(
        t["index"].tolist(),
        t["domain"].tolist(),
        t["temperature"].tolist(),
        prompts,
        torch.split(t["ids"], lengths),
        torch.split(t["features"], lengths),
        torch.split(t["final"], answers),
        torch.split(t["lse"], answers),
        strict=True,
    )
    return [Sample(*part) for part in parts]
