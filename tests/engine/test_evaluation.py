# SPDX-License-Identifier: Apache-2.0
"""Prompt files, and a lossless check that can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.engine.streaming import MarkedText
from dspark.evaluation.lossless import check_lossless
from dspark.evaluation.prompts import choose, read_prompts
from dspark_ext.toy import ToyDrafter, ToyTarget

PROMPTS = [[1], [2, 3], [4, 4, 4], [5]]


class Wobbly(ToyTarget):
    """Logits that move with the number of rows, as a matrix product's rounding may."""

    def __init__(self, size: float) -> None:
        super().__init__(9)
        self.size = size
        # make the two best logits of every row nearly equal
        second = self.table.argsort(axis=-1)[..., -2:-1]
        best = self.table.max(axis=-1, keepdims=True)
        np.put_along_axis(self.table, second, best - 1e-4, axis=-1)

    def forward(self, *args: Any, logit_rows: Any = None) -> Any:
        logits, features = super().forward(*args, logit_rows=logit_rows)
        cache = args[3]
        if logit_rows is None and cache.max_q_len > 1:
            logits = logits.copy()
            logits[np.arange(len(logits)), logits.argmax(axis=-1)] -= self.size
        return logits, features


def test_exact_models_pass() -> None:
    target = ToyTarget(9)
    report = check_lossless(target, ToyDrafter(9, 3, like=target), PROMPTS, framework="numpy",
                            max_requests=3)  # fmt: skip
    assert report.passed() and report.differences == () and report.tokens == 4 * 64
    assert report.acceptance_length > 1.2


def test_near_ties_are_counted_apart() -> None:
    target = Wobbly(2e-4)
    report = check_lossless(target, ToyDrafter(9, 3), PROMPTS, framework="numpy")
    assert report.near_ties == len(report.differences) > 0 == report.wrong
    assert report.passed(allowed=0.05) and not report.passed(allowed=0.0)
    first = report.differences[0]
    assert first.gap_plain < 1e-3 and first.gap_speculative < 1e-3
    assert "near tie" in str(report)


def test_real_differences_fail() -> None:
    target = Wobbly(0.5)
    report = check_lossless(target, ToyDrafter(9, 3), PROMPTS, framework="numpy")
    assert report.wrong > 0 and not report.passed(allowed=1.0)


@pytest.mark.parametrize(
    ("text", "line"),
    [('{"turns": []}', 1), ('{"turns": ["a"]}\n{"turn": ["b"]}', 2), ("[1]", 1), ("{", 1)],
)
def test_bad_prompt_files_name_the_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"line {line}"):
        read_prompts(path)


def test_prompt_files_are_split_at_newlines_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a\u2028b"]}\n\n{"turns": ["c", "d"]}\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b", "c"]
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(path)


def test_choice_is_seeded() -> None:
    prompts = [str(i) for i in range(30)]
    assert choose(prompts, 5, 1) == choose(prompts, 5, 1) != choose(prompts, 5, 2)
    assert choose(prompts, 99, 1) == prompts


def test_marked_text_holds_unfinished_characters_back() -> None:
    pieces = [b"a", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b"b"]

    def decode(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    text = MarkedText(decode, color=False)
    assert text.push([0, 1], 1) == "[a]"
    assert text.push([2], 1) == "[\u00e9]"
    assert text.push([3], 0) == "b"
    assert text.push([1], 0) == ""
    assert text.finish() == "\ufffd"
    assert MarkedText(decode, color=True).push([0], 1) == "\x1b[32ma\x1b[0m"
