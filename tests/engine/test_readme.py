# SPDX-License-Identifier: Apache-2.0
"""The README's Python examples run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspark.checkpoints import shipped
from dspark.targets.smollm2 import TargetNotInstalledError, find_gguf

README = Path(__file__).parents[2] / "README.md"


BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_a_short_example_of_decode_round() -> None:
    rounds = [block for block in BLOCKS if "decode_round" in block]
    assert rounds
    assert all(len([line for line in b.splitlines() if line.strip()]) <= 12 for b in rounds)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"example-{i}" for i in range(len(BLOCKS))])
def test_the_python_example_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_gguf()
    except TargetNotInstalledError as error:
        pytest.skip(f"the target's weights are missing: {error}")
    if not (shipped() / "model.safetensors").is_file():
        pytest.skip("this tree has no trained drafter")
    exec(compile(block, str(README), "exec"), {})
    assert re.search(r"\w", capsys.readouterr().out)
