# SPDX-License-Identifier: Apache-2.0
"""The README's Python example runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspark.checkpoints import shipped
from dspark.targets.smollm2 import TargetNotInstalledError, find_gguf

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1, "one example, and it is this test"
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) <= 12 and any("decode_round" in line for line in lines)
    try:
        find_gguf()
    except TargetNotInstalledError as error:
        pytest.skip(f"the target's weights are missing: {error}")
    if not (shipped() / "model.safetensors").is_file():
        pytest.skip("this tree has no trained drafter")
    exec(compile(blocks[0], str(README), "exec"), {})
    assert "Paris" in capsys.readouterr().out
