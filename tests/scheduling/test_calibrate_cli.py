# SPDX-License-Identifier: Apache-2.0
"""dspark calibrate: files in, files out, exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from dspark.scheduling import calibrate_cli


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
    assert "passed: False" in capsys.readouterr().out
    assert run(*check, "--calibration", str(sts)) == 0
    assert "passed: True" in capsys.readouterr().out

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
