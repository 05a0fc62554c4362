# SPDX-License-Identifier: Apache-2.0
"""Options of the commands become the scheduler that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.cli import main
from dspark.engine.options import add_sampling, scheduler_of
from dspark.scheduling import DraftProbability, Monitor, OnlineAcceptance, fit

GAMMA = 2
MODELS: Any = SimpleNamespace(drafter=SimpleNamespace(gamma=GAMMA), temperature=None)


def scheduler(*argv: str) -> dx.Scheduler:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quiet", action="store_true")
    add_sampling(parser, max_new_tokens=8)
    return scheduler_of(parser.parse_args(list(argv)), MODELS)


@pytest.fixture
def cost(tmp_path: Path) -> str:
    path = tmp_path / "cost.json"
    dx.CostTable.from_points([1, 9], [1.0, 2.0], draft_ms=0.5).save(path)
    return str(path)


def test_nothing_by_default() -> None:
    plain = scheduler()
    assert plain.mode == "off"
    assert [plain.confidence, plain.gate, plain.ageing, plain.monitor] == [None] * 4


def test_each_option(cost: str, tmp_path: Path) -> None:
    sts = tmp_path / "sts.json"
    flags = np.ones((300, GAMMA), int)
    flags[::3] = (0, -1)
    found = fit(np.full((300, GAMMA), 2.0), flags)
    found.save(sts)
    made = scheduler(
        "--mode", "causal", "--cost", cost, "--calibration", str(sts), "--confidence", "online",
        "--gate", "--ageing", "7", "--monitor",
    )  # fmt: skip
    np.testing.assert_allclose(made.temperature, found.temperature, rtol=1e-6)
    assert isinstance(made.confidence, OnlineAcceptance)
    assert made.gate is not None and made.ageing == dx.Ageing(rounds=7)
    assert isinstance(made.monitor, Monitor) and made.monitor.calibration == found
    assert isinstance(scheduler("--confidence", "draft-probability").confidence, DraftProbability)


def test_the_gate_brings_a_cost_table_into_any_mode(cost: str) -> None:
    made = scheduler("--gate", "--cost", cost)
    assert made.mode == "off" and made.cost(1).draft_ms == 0.5


def test_illegal_values(tmp_path: Path) -> None:
    sts = tmp_path / "sts.json"
    fit(np.zeros((2, 3)), np.ones((2, 3), int)).save(sts)
    with pytest.raises(dx.ArgumentError, match=r"--calibration: .*got 3 temperatures, expected 2"):
        scheduler("--calibration", str(sts))
    with pytest.raises(dx.ArgumentError, match="rounds"):
        scheduler("--ageing", "0")


@pytest.mark.parametrize("command", [["generate", "x"], ["bench"], ["eval", "--lossless"]], ids=str)
def test_no_requests_are_refused_before_a_model_is_loaded(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("dspark.engine.loading.load", loaded)
    assert main([*command, "--requests", "0"]) == 2
    assert "--requests: got 0, expected an integer >= 1" in capsys.readouterr().err


def test_a_calibration_of_another_rule_or_temperature_is_refused(tmp_path: Path) -> None:
    sts = tmp_path / "sts.json"
    flags, notes = np.ones((4, GAMMA + 1), int), {"rule": "token", "temperature": 1.0}
    fit(flags * 1.0, flags, min_rounds=1, fingerprint=notes).save(sts)
    with pytest.raises(dx.ArgumentError) as error:
        scheduler("--calibration", str(sts), "--temperature", "0.5")
    for text in ("--calibration: ", "sts.json: got a calibration of {'temperature': 1.0}",
                 f"got {GAMMA + 1} temperatures, expected {GAMMA}"):  # fmt: skip
        assert text in str(error.value)
    fit(flags[:, 1:] * 1.0, flags[:, 1:], min_rounds=1, fingerprint=notes).save(sts)
    assert scheduler("--calibration", str(sts), "--temperature", "1").temperature is not None
    for other in ((), ("--temperature", "1", "--rule", "match")):
        with pytest.raises(dx.ArgumentError, match="another event"):
            scheduler("--calibration", str(sts), *other)
