# SPDX-License-Identifier: Apache-2.0
"""The bench of the Markov loop end to end on tiny shapes; the GPU's part with stand-ins for graphs.

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

import bench_markov_loop as bench  # noqa: E402
from lib import chains, report  # noqa: E402


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_markov_loop.py", *options])
    bench.main()


def test_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shapes = [(2, 600, 16, "bfloat16", 0, 1.0), (2, 600, 16, "int8", 5, 1.0)]
    monkeypatch.setattr(bench, "SHORT", shapes)
    monkeypatch.setattr(bench, "stream", lambda: lambda: None)
    kept = tmp_path / "kept.json"
    main(monkeypatch, "--device", "cpu", "--seconds", "0", "--json", "--save", str(kept))
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(kept.read_text("utf-8"))
    assert [row["law"] for row in answer["rows"]] == ["full", "top-k 5"]
    assert all(row["op ms"] > 0 and row["of stream"] > 0 for row in answer["rows"])
    (model,) = [rows for key, rows in answer.items() if key.startswith("model")]
    assert len(model) == len(bench.SHAPES)


def test_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def on_host(*sizes: Any, device: str, **options: Any) -> dict[str, Any]:
        assert device == "cuda"
        return chains.problem(*sizes, **options)

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        call()
        if call is failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    def replay(replays: dict[str, Any]) -> dict[str, Any]:
        time = types.SimpleNamespace(warm=50.0, warm_p95=60.0, cold=70.0)
        return dict.fromkeys(replays, time)

    contenders = bench.contenders_gpu
    failing: Any = None

    def with_a_failure(*arguments: Any) -> dict[str, Any]:
        nonlocal failing
        calls = contenders(*arguments)
        failing = calls["op greedy"]
        return calls

    fake = types.SimpleNamespace(capture=capture, replay_in_turns=replay)
    monkeypatch.setitem(sys.modules, "lib.graphs", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: full(*a, **(k | {"device": "cpu"})))
    monkeypatch.setattr(bench, "problem", on_host)
    monkeypatch.setattr(bench, "contenders_gpu", with_a_failure)
    monkeypatch.setattr(bench, "SHAPES", [(2, 300)])
    main(monkeypatch, "--device", "cuda", "--json")
    answer = json.loads(capsys.readouterr().out)
    found = {row["what"]: row for row in answer["rows"]}
    ours = {"op", "op int8", "op screened", "op top-M", "op mma", "op scalar"}
    assert set(found) == ours | {"chain", "chain greedy"}
    assert "op greedy: RuntimeError: operation not permitted" in answer["failed"][0]["what"]
    assert found["op"]["chain/this"] == 1.0
    assert bench.SOURCE not in bench.os.environ


@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"gpu": "NVIDIA H200"}, "nvidia-h200"),
        ({"cpu": "AMD EPYC 9654", "simd": "x86-64-v4"}, "epyc-avx512-"),
        ({"cpu": "Neoverse-V2", "simd": "baseline"}, "neoverse-baseline-"),
    ],
)
def test_results_have_a_folder_of_their_machine(about: dict[str, Any], name: str) -> None:
    assert report.machine_name(about).startswith(name)
