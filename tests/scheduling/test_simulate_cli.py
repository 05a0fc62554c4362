# SPDX-License-Identifier: Apache-2.0
"""``dspark simulate``: what it writes and prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark.cli import main
from dspark.scheduling import fit
from dspark.scheduling.simulate_report import read_csv

SHORT = ("--loads", "2", "4", "--tokens", "300", "--output-tokens", "40", "--quiet")
NAMES = ("--policies", "none", "static2", "two_phase", "oracle")


def simulate(*options: str) -> int:
    return main(["simulate", *SHORT, *options])


def test_csv_and_json_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "new" / "smooth"
    assert simulate(*NAMES, "--json", "--no-plots", "--output", str(prefix)) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [f"{prefix}.csv"]
    points = read_csv(tmp_path / "new" / "smooth.csv")
    assert [(p.load, p.policy) for p in points] == [
        (p["load"], p["policy"]) for p in result["points"]
    ]
    for read, given in zip(points, result["points"], strict=True):
        assert read.throughput == pytest.approx(given["throughput"], rel=1e-5)
    assert [row["load"] for row in result["comparison"]] == [2, 4]
    assert 0 < result["head"]["max_ece"] < 0.02


def test_every_policy_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--gamma", "3", "--cost", "staircase") == 0
    text = capsys.readouterr().out
    for name in ("mtp1", "static3", "threshold0.5", "two_phase:unsafe_lag0", "oracle"):
        assert name in text
    assert "static4" not in text and "throughput over the best fixed length" in text


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert simulate(*NAMES, "--output", str(tmp_path / "x")) == 0
    written = capsys.readouterr().out
    for name in ("x-frontier.png", "x-load.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
        assert name in written
    again = (tmp_path / "x-load.png").read_bytes()
    assert simulate(*NAMES, "--output", str(tmp_path / "x")) == 0
    assert (tmp_path / "x-load.png").read_bytes() == again


def test_plots_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate(*NAMES, "--output", str(tmp_path / "x")) == 2
    assert "pip install 'dspark[plots]'" in capsys.readouterr().err
    assert (tmp_path / "x.csv").exists()  # the table never needs it


def test_recorded_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    logit = rng.normal(1, 1, (400, 3)).astype(np.float32)
    run = (np.cumprod(rng.random((400, 3)) < 1 / (1 + np.exp(-logit)), axis=1)).sum(axis=1)
    k = np.arange(3)
    flags = np.where(k < run[:, None], 1, np.where(k == run[:, None], 0, -1)).astype(np.int8)
    path = tmp_path / "rounds.npz"
    np.savez(path, logit=logit, accepted=flags)
    assert simulate("--rounds", str(path), "--json", "--policies", "static3") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gamma"] == 3
    # Requests end: their last rounds may not draft so much.
    assert result["points"][0]["acceptance"] == pytest.approx(1 + run.mean(), rel=0.15)
    assert simulate("--rounds", str(path), "--ece", "0.1") == 2
    assert "--ece: of the generator, not of --rounds" in capsys.readouterr().err


def test_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*NAMES, "--min-gain", "0.5") == 0
    assert simulate(*NAMES, "--min-gain", "9") == 1
    assert "two_phase reaches" in capsys.readouterr().err
    assert simulate("--policies", "none", "--min-gain", "0.5") == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--policies", "two_phase:lag1"), "unsafe_lag1"),
        (("--cost", "steep"), "expected smooth, staircase"),
        (("--loads", "0"), "--loads: got 0"),
        (("--ece", "0.9"), "--ece: got 0.9"),
        (("--tokens", "0"), "--tokens: got 0"),
        (("--seed", "-1"), "--seed: got -1"),
        (("--draft-ms", "-1"), "--draft-ms: got -1.0"),
        (("--ms-per-kv-token", "inf"), "--ms-per-kv-token: got inf"),
        (("--mtp-draft-share", "-0.5"), "--mtp-draft-share: got -0.5"),
        (("--request-spread", "-1"), "--request-spread: got -1.0"),
        (("--base", "nan"), "--base: got nan"),
        (("--persistence", "2"), "--persistence: got 2.0"),
        (("--drift", "nan"), "--drift: got nan"),
        (("--gamma", "17"), "--gamma: got 17"),
        (("--min-gain", "nan"), "--min-gain: got nan"),
        (("--loads", "1000000000000"), "--loads: got 1000000000000"),
        (("--auroc", "0.99"), "--auroc: got 0.99, expected 0.51.."),
        (("--believed", "steep"), "--believed: got 'steep'"),
        (("--device", "cuda"), "--device: got 'cuda', expected cpu: "),
        (("--calibration", "x.json"), "without --rounds"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*options) == 2
    assert text in capsys.readouterr().err


def test_everything_wrong_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cost.csv").touch()
    (tmp_path / "rounds.npz").touch()
    options = ("--policies", "bogus", "none", "staticX", "--seed", "-1", "--loads", "0", "-3",
               "--device", "cuda", "--cost", str(tmp_path / "cost.csv"), "--believed", "no.csv",
               "--rounds", str(tmp_path / "rounds.npz"), "--ece", "0.1")  # fmt: skip
    assert simulate(*options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "dspark simulate: options: 9 problems"
    for text in ("--policies: got 'bogus'", "--policies: got 'staticX'", "--seed: got -1",
                 "--loads: got 0", "--loads: got -3", "--device: got 'cuda'", "--ece: of the",
                 f"--cost: {tmp_path / 'cost.csv'}: ",
                 f"--rounds: {tmp_path / 'rounds.npz'}: "):  # fmt: skip
        assert any(line.startswith(f"  {text}") for line in lines), text


def replay(path: Path, **arrays: object) -> int:
    whole = {"logit": np.ones((8, 2)), "accepted": np.ones((8, 2), np.int8), **arrays}
    np.savez(path, **whole)  # type: ignore[arg-type]
    return simulate("--rounds", str(path), "--policies", "static1")


def test_files_that_are_no_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "array.npy", np.zeros((2, 2)))
    (tmp_path / "nothing.npz").touch()
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 and no more")
    for name in ("array.npy", "nothing.npz", "torn.npz"):
        assert simulate("--rounds", str(tmp_path / name)) == 2
        assert f"--rounds: {tmp_path / name}: expected an .npz" in capsys.readouterr().err
    path = tmp_path / "rounds.npz"
    assert replay(path) == 0
    for name, wrong in (
        ("accepted", np.full((8, 2), 7)),
        ("logit", np.full((8, 2), "x")),
        ("request", np.zeros(3, int)),
        ("logit, accepted", np.zeros(8)),
    ):
        assert replay(path, **{name.split(",")[0]: wrong}) == 2
        assert f"--rounds: {path}: {name}: got" in capsys.readouterr().err


def test_a_calibration_for_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, sts = tmp_path / "rounds.npz", tmp_path / "sts.json"
    notes = {"rule": "token", "temperature": 1.0}
    replay(path, **notes)
    again = ("--rounds", str(path), "--calibration", str(sts), "--policies", "static1")
    flags = np.ones((8, 3), int)
    fit(flags[:, 1:] * 1.0, flags[:, 1:], min_rounds=1, fingerprint=notes).save(sts)
    assert simulate(*again) == 0
    fit(flags * 1.0, flags, min_rounds=1, fingerprint={**notes, "rule": "block"}).save(sts)
    capsys.readouterr()
    assert simulate(*again) == 2
    found = capsys.readouterr().err
    assert f"--calibration: {sts}: got a calibration of {{'rule': 'block'}}" in found
    assert f"{sts}: got 3 temperatures, expected 2" in found


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--cost", "nowhere.csv") == 1
    assert "nowhere.csv" in capsys.readouterr().err
