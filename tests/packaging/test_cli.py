# SPDX-License-Identifier: Apache-2.0
"""``python -m dspark_ext``: output for people and for machines, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import bench, cli, selftest
from dspark_ext.selftest.tally import Tally


def test_module_runs_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dspark_ext", "info", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["version"] == dx.__version__
    assert done.stderr == ""


def test_info_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"dspark {dx.__version__}" in text
    assert dx.info()["cpu"]["level"] in text


def test_selftest_passes_in_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--json", "--seed", "5"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert [family["name"] for family in answer["families"]] == list(selftest.FAMILIES)
    assert all(family["values"] > 0 for family in answer["families"])
    assert sum(family["seconds"] for family in answer["families"]) < 60


def test_selftest_fails_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(tally: Tally, rng: np.random.Generator) -> None:
        tally.close("value", rng.normal(), 1e9, rtol=1e-6)

    monkeypatch.setitem(selftest.FAMILIES, "confidence", wrong)
    assert cli.main(["selftest", "--family", "confidence"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text
    assert "value: got" in text


def test_selftest_reports_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(tally: Tally, rng: np.random.Generator) -> None:
        raise ValueError("boom")

    monkeypatch.setitem(selftest.FAMILIES, "confidence", crash)
    result = selftest.run_family("confidence")
    assert not result.ok
    assert result.failures == ["ValueError: boom"]


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([1.0, np.nan], [1.0, 2.0], "other places"),
        ([1.0, -np.inf], [1.0, np.inf], "other places"),
        ([1.0], [1.0, 2.0], "shape"),
        ([1.0, 2.1], [1.0, 2.0], "times the bound"),
    ],
    ids=["nan", "sign-of-inf", "shape", "value"],
)
def test_tally_sees(got: list[float], want: list[float], message: str) -> None:
    tally = Tally()
    tally.close("x", got, want, rtol=1e-3)
    assert message in tally.failures[0]


def test_tally_allows_few_close_calls() -> None:
    tally = Tally()
    want = np.zeros((2000, 5), np.int32)
    got = want.copy()
    got[3] = 1
    assert not tally.drawn(got, want)[3]
    assert tally.result("x", 0.0).ok
    got[:50] = 1
    tally.drawn(got, want)
    assert not tally.result("x", 0.0).ok


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["frobnicate"])
    assert error.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_bench_times_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(json_output=True, families=["confidence"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [family["family"] for family in answer["families"]] == ["confidence"]
    assert answer["families"][0]["median_us"] > 0


def test_bench_takes_seconds_in_the_source_tree(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All families, half a second each, wherever it runs: the long benches are not started."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(bench, "SECONDS_EACH", 0.0)  # five calls each
    start = time.process_time(), sum(os.times()[2:4])
    assert cli.main(["bench"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[2:]] == list(selftest.FAMILIES)
    assert time.process_time() - start[0] < 20
    assert sum(os.times()[2:4]) == start[1], "processes were started"
