# SPDX-License-Identifier: Apache-2.0
"""The bench of the cache end to end on tiny shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import bench_paged_kv as bench  # noqa: E402

F32, BF16, F8 = "float32", "bfloat16", "float8_e4m3fn"
SHAPES = [(1, 1, 1, 8, F32, F32, False), (3, 5, 2, 16, BF16, BF16, True),
          (2, 3, 1, 8, BF16, F8, False)]  # fmt: skip


def test_every_kind_of_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "SHORT", SHAPES)
    monkeypatch.setattr(bench, "read_bandwidth", lambda **_: 1e9)
    kept = tmp_path / "kept.json"
    options = ["--seconds", "0", "--json", "--save", str(kept)]
    monkeypatch.setattr(sys, "argv", ["bench_paged_kv.py", *options])
    bench.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(kept.read_text("utf-8"))
    assert [row["cache"] for row in answer["rows"]] == [F32, BF16, F8]
    assert all(row["torch/op"] > 0 and row["index_put/op"] > 0 for row in answer["rows"])
    # k and v of 8 floats, read and written, at a gigabyte a second
    assert answer["rows"][0]["floor us"] == pytest.approx(1e-3 * 2 * 8 * (4 + 4))


def test_contenders_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.turn
    monkeypatch.setattr(bench, "turn", lambda *given: right(*given) + 1)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        bench.measure(SHAPES[1], 0, 0, 1e9)
