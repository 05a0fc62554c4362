# SPDX-License-Identifier: Apache-2.0
"""dspark calibrate: files in, files out, exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark.scheduling import calibrate_cli
from dspark.scheduling.calibration_plot import curves


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    calibrate_cli.add_arguments(parser)
    return calibrate_cli.main(parser.parse_args(list(argv)))


@pytest.fixture
def rounds(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Rounds whose logits are twice too sharp."""
    logit = rng.normal(1, 3, (20_000, 2))
    taken = rng.random((20_000, 2)) < 1 / (1 + np.exp(-logit / 2))
    accepted = taken.astype(np.int8)
    accepted[:, 1] = np.where(taken[:, 0], taken[:, 1], -1)
    path = tmp_path / "rounds.npz"
    np.savez(path, logit=logit.astype(np.float32), accepted=accepted)
    return path


def test_fit_apply_check(rounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sts, out = tmp_path / "sts.json", tmp_path / "survivals.npz"
    fit = ("fit", "--rounds", str(rounds), "--output", str(sts), "--json", "--drafter", "d")
    assert run(*fit) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["temperature"] == pytest.approx([2.0, 2.0], abs=0.15)
    assert json.loads(sts.read_text())["fingerprint"] == {"drafter": "d"}

    check = ("check", "--rounds", str(rounds), "--max-ece", "0.03")
    assert run(*check) == 1  # the raw head
    text = capsys.readouterr().out
    assert "passed: False" in text and "after" not in text
    assert run(*check, "--calibration", str(sts), "--json", "--device", "cpu", "--seed", "7") == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["passed"]
    for k in range(2):
        before, after = checked["before"][k], checked["after"][k]
        assert after["ece"] < before["ece"] / 2 and after["brier"] < before["brier"]
        assert before["auc"] is not None and after["auc"] > 0.7

    apply = ("apply", "--rounds", str(rounds), "--calibration", str(sts), "--output", str(out))
    assert run(*apply) == 0
    with np.load(out) as file:
        assert file["survival"].shape == (20_000, 2)
        assert file["survival"].dtype == np.float32


def test_too_few_rounds_never_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.npz"
    np.savez(path, logit=np.full((3, 1), 20.0), accepted=np.ones((3, 1), np.int8))
    assert run("check", "--rounds", str(path), "--max-ece", "1") == 1
    assert "judged: 0" in capsys.readouterr().out


def test_illegal_input(rounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.npz")
    assert run("check", "--rounds", missing, "--max-ece", "0.1") == 1
    assert run("check", "--rounds", str(rounds), "--max-ece", "7") == 2
    assert "--max-ece: got 7.0" in capsys.readouterr().err
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, logit=np.zeros((2, 2)))
    assert run("check", "--rounds", str(wrong), "--max-ece", "0.1") == 2
    assert "expected an .npz with logit and accepted" in capsys.readouterr().err
    wrong.write_text("no archive")
    assert run("check", "--rounds", str(wrong), "--max-ece", "0.1") == 2
    sts = tmp_path / "sts.json"
    sts.write_text("{}")
    check = ("check", "--rounds", str(rounds), "--max-ece", "0.1", "--calibration", str(sts))
    assert run(*check) == 2


def test_plots(rounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png, sts = tmp_path / "reliability.png", tmp_path / "sts.json"
    fit = ("fit", "--rounds", str(rounds), "--output", str(sts), "--plot", str(png))
    assert run(*fit) == 0
    assert f"plot: {png}" in capsys.readouterr().out
    first = png.read_bytes()
    assert first[:4] == b"\x89PNG"
    assert run(*fit) == 0 and png.read_bytes() == first
    check = ("check", "--rounds", str(rounds), "--max-ece", "1", "--plot", str(png))
    assert run(*check) == 0
    assert png.read_bytes() != first, "the raw head alone"


def test_plots_without_matplotlib(
    rounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sts = tmp_path / "sts.json"
    fit = ("fit", "--rounds", str(rounds), "--output", str(sts), "--plot", "x.png")
    assert run(*fit) == 2
    assert "pip install 'dspark[plots]'" in capsys.readouterr().err
    assert sts.exists(), "the temperatures do not need it"


def test_the_curves_are_the_bins_of_the_ece(rng: np.random.Generator) -> None:
    logit = rng.normal(0, 2, (500, 2))
    accepted = rng.choice([1, 0, -2], (500, 2))
    accepted[:, 1] = np.where(accepted[:, 0] == 1, accepted[:, 1], np.minimum(accepted[:, 0], -1))
    for curve in curves(logit, accepted, [1.5, 0.8]):
        used = curve.count > 0
        gaps = curve.count[used] * np.abs(curve.prediction[used] - curve.label[used])
        assert gaps.sum() / curve.count.sum() == pytest.approx(curve.measures.ece, abs=1e-12)
        low = np.flatnonzero(used) / 20
        assert np.all((curve.prediction[used] >= low) & (curve.prediction[used] <= low + 0.05))


def test_a_calibration_of_another_rule_or_temperature_is_refused(
    rounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(rounds) as file:
        arrays = dict(file)
    sts, paths = tmp_path / "sts.json", {}
    for name, note in (
        ("hot", {"rule": "token", "temperature": 1.0}),
        ("block", {"rule": "block", "temperature": 1.0}),
        ("greedy", {"rule": "greedy", "temperature": 0.0}),
    ):
        paths[name] = str(tmp_path / f"{name}.npz")
        np.savez(paths[name], **arrays, **note)
    assert run("fit", "--rounds", paths["hot"], "--output", str(sts)) == 0
    assert json.loads(sts.read_text())["fingerprint"] == {"rule": "token", "temperature": 1.0}
    check = ("check", "--calibration", str(sts), "--max-ece", "1", "--rounds")
    assert run(*check, paths["hot"]) == run(*check, str(rounds)) == 0
    capsys.readouterr()
    assert run(*check, paths["block"]) == 2
    assert "got a calibration of {'rule': 'token'}" in capsys.readouterr().err
    assert run(*check, paths["greedy"]) == 2
