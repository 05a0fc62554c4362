# SPDX-License-Identifier: Apache-2.0
"""The bench of verification end to end on tiny shapes; the GPU's part with stand-ins for graphs.

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

import bench_rejection_sampler as bench  # noqa: E402
from peers import verification  # noqa: E402

import dspark_ext as dx  # noqa: E402


@pytest.fixture(autouse=True)
def peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One peer that works, one that is not there, one of another version."""

    def works(p: dict[str, Any]) -> tuple[str, dict[str, Callable[[], object]]]:
        return "1.2", {"flashinfer": verification.composed(p), "flashinfer chain": lambda: None}

    def is_missing(p: dict[str, Any]) -> Any:
        raise ModuleNotFoundError("No module named 'vllm'")

    def is_strange(p: dict[str, Any]) -> Any:
        raise TypeError("takes 3\n positional arguments")

    found = {"flashinfer": works, "vllm": is_missing, "transformers": is_strange}
    monkeypatch.setattr(verification, "PEERS", found)
    return found


def main(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_rejection_sampler.py", *options])
    bench.main()


def test_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    shapes = [(1, 400, f32, 0, 1.0), (2, 400, bf16, 5, 1.0), (2, 400, f32, 0, 0.9)]
    monkeypatch.setattr(bench, "SHORT", shapes)
    monkeypatch.setattr(bench, "stream", lambda: lambda: None)
    kept = tmp_path / "kept.json"
    main(monkeypatch, "--device", "cpu", "--seconds", "0", "--json", "--save", str(kept))
    answer = json.loads(capsys.readouterr().out)
    assert answer == json.loads(kept.read_text("utf-8"))
    assert [row["law"] for row in answer["rows"]] == ["full", "top-k 5", "top-p 0.9"]
    assert all(row["op ms"] > 0 and row["torch/op"] > 0 for row in answer["rows"])
    assert all(1 <= row["rows"] <= 8 for row in answer["rows"])
    (goal,) = answer["goals"]  # the truncated rows have none
    assert goal["wanted"] == ">= 3" and goal["met"] == (goal["got"] >= 3)
    assert {x["peer"]: x["state"] for x in answer["peers"]} == {
        "flashinfer": "1.2",
        "vllm": "not installed: No module named 'vllm'",
        "transformers": "not usable: TypeError: takes 3 positional arguments",
    }


def test_a_missed_goal_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SHORT", [(1, 400, torch.float32, 0, 1.0)])
    monkeypatch.setattr(bench, "stream", lambda: lambda: None)
    slow = [{"R": 1, "V": 400, "dtype": "float32", "law": "full", "torch/op": 2.9}]
    monkeypatch.setattr(bench, "measure_cpu", lambda *_: slow)
    with pytest.raises(SystemExit, match="missed: torch/op, R = 1"):
        main(monkeypatch, "--device", "cpu", "--check")
    monkeypatch.setattr(bench, "measure_cpu", lambda *_: [slow[0] | {"torch/op": 3.1}])
    main(monkeypatch, "--device", "cpu", "--check")


def gpu_stand_ins(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    """A machine whose graphs are plain calls and whose replays take these microseconds."""
    made = bench.problem

    def capture(call: Callable[[], object]) -> Callable[[], object]:
        if times.get("fails") and call.__name__ != "<lambda>":
            raise RuntimeError("operation not permitted when stream is capturing")
        call()
        return call

    def replay(replays: dict[str, Any]) -> dict[str, Any]:
        return {
            name: types.SimpleNamespace(warm=times.get(name, 90.0), warm_p95=95.0, cold=99.0)
            for name in replays
        }

    fake = types.SimpleNamespace(capture=capture, replay_in_turns=replay)
    monkeypatch.setitem(sys.modules, "lib.graphs", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "problem", lambda r, v, t, seed, _: made(r, v, t, seed))
    on_host = bench.truncation
    monkeypatch.setattr(bench, "truncation", lambda row, _: on_host(row, "cpu"))
    monkeypatch.setattr(bench, "GOAL_VOCAB", 300)
    monkeypatch.setattr(
        bench,
        "GPU",
        [
            (1, 300, torch.bfloat16, 0, 1.0),
            (33, 300, torch.bfloat16, 0, 1.0),
            (2, 300, torch.bfloat16, 9, 1.0),
        ],
    )


def test_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_stand_ins(monkeypatch, {"op": 6.0, "flashinfer": 18.0})
    with pytest.raises(SystemExit, match=r"missed: op/floor, R = 33 $"):
        main(monkeypatch, "--device", "cuda", "--json", "--check")
    answer = json.loads(capsys.readouterr().out)
    assert [row["what"] for row in answer["rows"] if row["R"] == 1] == [
        "op", "torch", "flashinfer", "flashinfer chain",
    ]  # fmt: skip
    assert [row["what"] for row in answer["rows"] if row["law"] == "top-k 9"] == ["op", "torch"]
    floor = answer["rows"][4]["floor us"]
    assert floor == pytest.approx(1e6 * 33 * 8 * 300 * 2 / 4.3e12)
    assert {goal["goal"]: goal["met"] for goal in answer["goals"]} == {
        "op us, R = 1": True,
        "flashinfer/op, R = 1": True,
        "op/floor, R = 33": False,  # 300 ids take no microsecond
        "flashinfer/op, R = 33": True,
    }


def test_a_contender_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_stand_ins(monkeypatch, {"fails": 1.0})
    main(monkeypatch, "--device", "cuda", "--json", "--limit", "1e6")
    answer = json.loads(capsys.readouterr().out)
    assert {row["what"] for row in answer["rows"]} == {"op", "flashinfer chain"}
    assert "torch: RuntimeError: operation not permitted" in answer["failed"][0]["what"]


def test_adaptors_say_what_they_need() -> None:
    """Without a GPU the adaptors of GPU libraries must refuse, by their absence or in words."""
    p = verification.problem(2, 300, torch.float32, 0)
    for make in (verification._flashinfer, verification._vllm):
        with pytest.raises((ImportError, NotImplementedError)):
            make(p)


def test_the_adaptor_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that checks what it is given."""
    seen: list[tuple[int, ...]] = []

    def sampling(ids: Any, draft: Any, length: int, target: Any) -> None:
        seen.append((*ids.shape, *draft.shape, length, *target.shape))

    package = types.ModuleType("transformers")
    package.__version__ = "9"  # type: ignore[attr-defined]
    utils = types.ModuleType("transformers.generation.utils")
    utils._speculative_sampling = sampling  # type: ignore[attr-defined]
    for name, module in {
        "transformers": package,
        "transformers.generation": types.ModuleType("transformers.generation"),
        "transformers.generation.utils": utils,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    version, calls = verification._transformers(verification.problem(1, 300, torch.bfloat16, 0))
    calls["transformers"]()
    assert version == "9" and seen == [(1, 7, 1, 7, 300, 7, 1, 8, 300)]
    with pytest.raises(NotImplementedError, match="one request"):
        verification._transformers(verification.problem(2, 300, torch.bfloat16, 0))


def test_the_composition_follows_the_targets_law() -> None:
    """The peer that we compare with verifies too: its last tokens have p > 0, and not all agree."""
    p = verification.problem(4, 300, torch.float32, 3)
    assert (p["draft_tokens"] >= 0).all() and (p["draft_tokens"] < 300).all()
    assert dx.rejection_sample(**p).status.sum() == 0
    run = verification.composed(p, 20, 1.0)
    drawn = torch.stack([run()[:, 0] for _ in range(20)])
    assert ((drawn >= 0) & (drawn < 300)).all() and len(drawn.unique()) > 4
