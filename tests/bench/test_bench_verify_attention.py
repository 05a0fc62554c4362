# SPDX-License-Identifier: Apache-2.0
"""The bench of attention end to end on tiny shapes; the GPU's part with stand-ins for graphs.

Nothing else runs these lines before a GPU does.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import bench_verify_attention as bench  # noqa: E402
from peers import attention  # noqa: E402

F32, BF16, F8 = "float32", "bfloat16", "float8_e4m3fn"


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer that works, one that is not there, one with another mask."""

    def works(p: dict[str, Any]) -> tuple[str, dict[str, Callable[[], object]]]:
        attention._compare(p["answer"], p)
        return "1.2", {"flashinfer": lambda: None}

    def is_missing(p: dict[str, Any]) -> Any:
        raise ModuleNotFoundError("No module named 'flash_attn'")

    def is_wrong(p: dict[str, Any]) -> Any:
        attention._compare(p["answer"] + 1, p)

    found = {"flashinfer": works, "flash_attn": is_missing, "torch varlen": is_wrong}
    monkeypatch.setattr(attention, "PEERS", found)
    monkeypatch.setattr(bench, "stream", lambda: lambda: None)


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_verify_attention.py", *options])
    bench.main()


def test_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "GOAL_CONTEXT", 40)
    shapes = [(1, 2, 30, 4, 2, 16, F32, F32), (8, 8, 40, 4, 2, 16, BF16, BF16),
              (3, 4, 50, 2, 2, 8, BF16, F8)]  # fmt: skip
    monkeypatch.setattr(bench, "SHORT", shapes)
    kept = tmp_path / "kept.json"
    main(monkeypatch, "--device", "cpu", "--seconds", "0", "--json", "--save", str(kept))
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(kept.read_text("utf-8"))
    assert [row["cache"] for row in answer["rows"]] == [F32, BF16, F8]
    assert all(row["op us"] > 0 and row["gather/op"] > 0 for row in answer["rows"])
    assert [goal["goal"].split(",")[0] for goal in answer["goals"]] == ["gather/op", "sdpa/op"]
    states = {x["peer"]: x["state"] for x in answer["peers"]}
    assert states["flashinfer"] == "1.2"
    assert states["flash_attn"] == "not installed: No module named 'flash_attn'"
    assert states["torch varlen"].startswith("not usable: AssertionError: Tensor-likes are not")


def test_a_missed_goal_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHORT", [(8, 8, 2000, 4, 2, 16, F32, F32)])
    row = {"R": 8, "rows": 8, "L": 2000, "heads": "4/2x16", "cache": F32, "gather/op": 1.6}
    monkeypatch.setattr(bench, "measure_cpu", lambda *_: [row | {"sdpa/op": 1.4}])
    with pytest.raises(SystemExit, match="missed: sdpa/op, 4/2x16, float32"):
        main(monkeypatch, "--device", "cpu", "--check")
    monkeypatch.setattr(bench, "measure_cpu", lambda *_: [row | {"sdpa/op": 1.5}])
    main(monkeypatch, "--device", "cpu", "--check")


def test_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine whose graphs are plain calls and whose replays take these microseconds."""
    times = {"op": 8.0, "flashinfer": 7.0}
    made = bench.problem

    def replay(replays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: types.SimpleNamespace(warm=1.0, warm_p95=2.0, cold=times.get(name, 20.0))
            for name in replays
        }

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        call()
        return call

    fake = types.SimpleNamespace(capture=capture, replay_in_turns=replay)
    monkeypatch.setitem(sys.modules, "lib.graphs", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "problem", lambda *row: made(*row[:-1]))
    monkeypatch.setattr(
        bench, "GPU", [(1, 2, 4096, 2, 1, 8, BF16, BF16), (16, 1, 4096, 1, 1, 8, BF16, F8)]
    )
    with pytest.raises(SystemExit, match=r"missed: flashinfer/op, R = 1, .*, floor/op, R = 16"):
        main(monkeypatch, "--device", "cuda", "--json", "--check")
    answer = json.loads(capsys.readouterr().out)
    names = ["op", "op inv.", "sdpa", "gather", "flashinfer"]
    assert [row["what"] for row in answer["rows"]] == names * 2
    assert answer["rows"][0]["floor us"] == pytest.approx(1e6 * 4096 * 2 * 8 * 2 / 4.3e12)
    goals = {goal["goal"].split(",")[0]: goal["met"] for goal in answer["goals"]}
    assert goals == {
        "op us": True, "sdpa/op": True, "gather/op": True, "flashinfer/op": False,
        "floor/op": False,
    }  # fmt: skip
