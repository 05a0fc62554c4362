# SPDX-License-Identifier: Apache-2.0
"""Prompt files: one JSON object a line with the key ``turns``, a list of user turns."""

from __future__ import annotations

import json
import random
from pathlib import Path


def read_prompts(path: Path) -> list[str]:
    r"""Return the first turn of every line.

    Raises
    ------
    ValueError
        Naming the first line that is not ``{"turns": ["...", ...]}``.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "p.jsonl"
    ...     _ = path.write_text('{"turns": ["Hello?", "And now?"]}\n')
    ...     read_prompts(path)
    ['Hello?']
    """
    prompts = []
    # Not splitlines(): a JSON string may hold characters that it takes for line ends.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
            if not turns or not all(isinstance(t, str) and t for t in turns):
                raise ValueError("turns must be a list of non-empty strings")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        prompts.append(turns[0])
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def choose(prompts: list[str], limit: int | None, seed: int) -> list[str]:
    """Keep all prompts, or a seeded choice of ``limit`` of them.

    Examples
    --------
    >>> len(choose(["a", "b", "c"], 2, seed=1)), choose(["a"], None, seed=1)
    (2, ['a'])
    """
    if limit is None or limit >= len(prompts):
        return prompts
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:limit]
