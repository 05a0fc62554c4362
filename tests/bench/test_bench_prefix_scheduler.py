# SPDX-License-Identifier: Apache-2.0
"""The bench of the scheduler end to end on tiny shapes; the GPU's part with stand-ins for graphs.

Nothing else runs the lines for a GPU before a GPU does.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import bench_prefix_scheduler as bench  # noqa: E402

from dspark_ext import _C, _simt  # noqa: E402


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_prefix_scheduler.py", *options])
    bench.main()


def test_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "SHAPES", ((3, 2), (128, 7)))
    kept = tmp_path / "kept.json"
    main(monkeypatch, "--device", "cpu", "--seconds", "0", "--json", "--save", str(kept))
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(kept.read_text("utf-8"))
    assert [(row["mode"], row["R"]) for row in answer["rows"]] == [
        ("causal", 3), ("two_phase", 3), ("causal", 128), ("two_phase", 128),
    ]  # fmt: skip
    assert all(row["c us"] > 0 and row["numpy/c"] > 0 for row in answer["rows"])
    assert [goal["goal"] for goal in answer["goals"]] == [
        f"numpy/c, {mode}, R = 128, gamma = 7" for mode in ("causal", "two_phase")
    ]
    assert all(goal["met"] == (goal["got"] >= 5) for goal in answer["goals"])


def test_missed_goals_and_rows_without_time_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHAPES", ((128, 7),))
    ratio = {"causal": 5.0, "two_phase": 4.9}

    def measure(shape: tuple[int, int], search: bool, *_: Any) -> dict[str, Any]:
        row = bench.head(*shape, search)
        return row | {"numpy/c": ratio[row["mode"]]}

    monkeypatch.setattr(bench, "measure", measure)
    with pytest.raises(SystemExit, match=r"missed: numpy/c, two_phase, R = 128, gamma = 7 $"):
        main(monkeypatch, "--device", "cpu", "--check")
    ratio["two_phase"] = 5.0
    main(monkeypatch, "--device", "cpu", "--check")
    with pytest.raises(SystemExit, match=r"nothing measured .*two_phase.*: out of time"):
        main(monkeypatch, "--device", "cpu", "--check", "--limit", "-1")


def test_contenders_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.numpy_schedule

    def wrong(*given: Any) -> Any:
        length, *rest = right(*given)
        return (length + 1, *rest)

    monkeypatch.setattr(bench, "numpy_schedule", wrong)
    with pytest.raises(SystemExit, match="numpy disagrees with the reference at R=3 gamma=2"):
        bench.contenders(3, 2, False, 0, "cpu")


def test_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine whose graphs are plain calls; its kernels are the emulation's where it is built."""

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        call()
        return call

    def replay(replays: dict[str, Any]) -> dict[str, Any]:
        us = {"op": 4.0 if len(replays["op"]()[0]) == 3 else 8.5}
        return {name: types.SimpleNamespace(warm=us.get(name, 90.0), cold=99.0) for name in replays}

    fake = types.SimpleNamespace(capture=capture, replay_in_turns=replay)
    monkeypatch.setitem(sys.modules, "lib.graphs", fake)
    device = _C.SIMT if _simt.load() else _C.CPU
    calls = ("PrefixSchedulerParams", "prefix_scheduler", "prefix_scheduler_workspace")
    functions = {name: getattr(_C, name) for name in calls}
    monkeypatch.setattr(bench, "_C", types.SimpleNamespace(CUDA=device, **functions))
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    on_host = bench.tensors

    def tensors(device: str, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        assert device == "cuda"
        return list(on_host("cpu", *arrays))

    monkeypatch.setattr(bench, "tensors", tensors)
    monkeypatch.setattr(bench, "SHAPES", ((3, 2), (80, 16)))
    with pytest.raises(SystemExit, match=r"missed: op us, causal, R = 80, .*two_phase, R = 80, "):
        main(monkeypatch, "--device", "cuda", "--json", "--check")
    answer = json.loads(capsys.readouterr().out)
    assert [row["torch/op"] for row in answer["rows"]] == [22.5, 22.5, 10.59, 10.59]
    assert [(goal["wanted"], goal["met"]) for goal in answer["goals"]] == [
        ("<= 4", True), ("<= 4", True), ("<= 8", False), ("<= 8", False),
    ]  # fmt: skip
