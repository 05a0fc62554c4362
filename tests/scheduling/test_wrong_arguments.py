# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an argument is said by name, all at once, and never by a bare TypeError."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark.cli
import dspark_ext as dx
from dspark.scheduling import (
    Calibration,
    ConstantPrior,
    Monitor,
    OnlineAcceptance,
    calibrate_cli,
    fit,
)
from dspark.scheduling.calibration import evaluate_conditional, survivals
from dspark.scheduling.drift import CostDrift
from dspark.scheduling.monitor import bucket_of
from dspark_ext.toy import ToyDrafter, ToyTarget

TABLE = dx.CostTable.from_points([1, 8], [1.0, 2.0])
#: what to call -> arguments that are no numbers for any of the wrong values below
CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Gate": (dx.Gate, ("warmup", "probe_every", "smoothing")),
    "Ageing": (dx.Ageing, ("rounds", "floor", "weight")),
    "ConstantPrior": (ConstantPrior, ("acceptance",)),
    "OnlineAcceptance": (
        OnlineAcceptance,
        ("prior", "strength", "memory", "population_memory"),
    ),
    "Monitor": (
        lambda **given: Monitor(**{"gamma": 3, **given}),
        ("gamma", "window", "min_rounds", "explore_every", "drift", "sigmas", "refit_every"),
    ),
    "CostDrift": (CostDrift, ("factor", "min_count")),
    "LaggedSurvival": (dx.LaggedSurvival, ("rounds", "prior")),
    "fixed": (lambda **given: dx.Scheduler("fixed", **given), ("fixed_len",)),
    "threshold": (lambda **given: dx.Scheduler("threshold", **given), ("threshold",)),
    "Scheduler": (
        lambda **given: dx.Scheduler(**{"mode": "causal", "cost": TABLE, **given}),
        (
            "mode",
            "cost",
            "temperature",
            "capacity",
            "skip",
            "probe_every",
            "gate",
            "ageing",
            "confidence",
            "monitor",
        ),
    ),
    "CostTable": (
        lambda **given: dx.CostTable.from_points(**{"tokens": [1, 8], "ms": [1.0, 2.0], **given}),
        ("tokens", "ms", "plateaus", "draft_ms", "ms_per_kv_token", "fingerprint"),
    ),
    "bucket_of": (
        lambda **given: bucket_of(**{"rule": "token", "temperature": 1.0, **given}),
        ("rule", "temperature"),
    ),
}
WRONG = {"text": "x", "truth": True, "nan": float("nan"), "negative": -1, "nested": [[1, 2], [3]]}
#: these mean something there
LEGAL = {("skip", "truth")}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (_, names) in CALLS.items() for name in names]
)
def test_a_wrong_value_is_named(call: str, name: str, wrong: str) -> None:
    make = CALLS[call][0]
    if (name, wrong) in LEGAL:
        make(**{name: WRONG[wrong]})
        return
    with pytest.raises(dx.ArgumentError) as error:
        make(**{name: WRONG[wrong]})
    assert re.search(rf"{name}(: a key)?: got .*, expected ", str(error.value))


def test_everything_wrong_is_listed() -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.Scheduler(
            "fixed", cost={0: TABLE, 2: None}, temperature=[0.0], fixed_len=17, gate=dx.Gate  # type: ignore[arg-type,dict-item]
        )  # fmt: skip
    text = str(error.value)
    assert "5 problems" in text
    for name in ("cost: a key: got 0", "cost[2]: got None", "temperature: got [0.0]",
                 "fixed_len: got 17", "gate: got"):  # fmt: skip
        assert name in text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logit": np.zeros((4, 3))}, "logit"),
        ({"logit": np.zeros((3, 2))}, "logit"),
        ({"logit": [[1.0], [1.0, 2.0]]}, "logit"),
        ({"accepted": np.full((4, 2), 5)}, "accepted"),
        ({"accepted": None}, "accepted"),
        ({"due": [1, 1]}, "due"),
        ({"due": 1.5}, "due"),
        ({"ratio": np.full((4, 2), 2.0)}, "ratio"),
        ({"ratio": np.zeros((4, 1))}, "ratio"),
        ({"bucket": None}, "bucket"),
    ],
    ids=str,
)
def test_a_monitor_refuses_rounds_before_it_keeps_any(changes: dict[str, Any], name: str) -> None:
    monitor = Monitor(gamma=2, min_rounds=1)
    given: dict[str, Any] = {
        "bucket": "token@1",
        "logit": np.zeros((4, 2)),
        "accepted": np.ones((4, 2), dtype=int),
        "due": 2,
    }
    with pytest.raises(dx.ArgumentError, match=rf"Monitor.record: .*\n  {name}: got"):
        monitor.record(**{**given, **changes})
    assert not monitor.report()
    monitor.record(**given)
    assert monitor.report()["token@1"][0].scheduled == 4


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: survivals(np.zeros(3)), "logit"),
        (lambda: survivals([["a"]]), "logit"),
        (lambda: survivals([[1.0], [1.0, 2.0]]), "logit"),
        (lambda: survivals(np.zeros((2, 2)), [1.0]), "temperature"),
        (lambda: survivals(np.zeros((2, 2)), [1.0, -1.0]), "temperature"),
        (lambda: evaluate_conditional(np.zeros((2, 2)), np.ones((2, 3))), "logit"),
        (lambda: evaluate_conditional(np.zeros((2, 2)), np.full((2, 2), 7)), "accepted"),
        (lambda: fit(np.zeros((2, 2)), np.ones((2, 2)), grid=np.array([np.nan])), "grid"),
        (lambda: fit(np.zeros((2, 2)), np.ones((2, 2)), min_rounds=0), "min_rounds"),
        (lambda: fit(np.zeros((2, 2)), np.ones((2, 2)), bins=0), "bins"),
        (
            lambda: fit(np.zeros((2, 2)), np.ones((2, 2)), fingerprint={"a": object()}),
            "fingerprint",
        ),
    ],
)
def test_calibration_names_what_is_wrong(call: Any, name: str) -> None:
    with pytest.raises(dx.ArgumentError, match=f"{name}: got .*, expected"):
        call()


@pytest.mark.parametrize("value", [None, "x", [], {}, [None], [[1]], [{}], 1, True, [float("nan")]])
@pytest.mark.parametrize(
    "field", ["tokens", "ms", "plateaus", "draft_ms", "ms_per_kv_token", "fingerprint"]
)
def test_a_malformed_cost_table_names_the_file(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    TABLE.save(path)
    body = json.loads(path.read_text())
    legal = [
        ("plateaus", []),
        ("fingerprint", {}),
        ("fingerprint", None),
        ("draft_ms", 1),
        ("ms_per_kv_token", 1),
    ]
    path.write_text(json.dumps({**body, field: value}))
    if value is not True and (field, value) in legal:
        dx.CostTable.load(path)
        return
    with pytest.raises(dx.ArgumentError, match=f"cost.json: .*\n  {field}: got"):
        dx.CostTable.load(path)


@pytest.mark.parametrize(
    "change",
    [{"temperature": []}, {"temperature": [1.0] * 3}, {"fitted": [True]}, {"after": []}],
    ids=str,
)
def test_a_calibration_that_does_not_fit_itself(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    fit(np.zeros((4, 2)), np.ones((4, 2)), min_rounds=1).save(path)
    assert len(Calibration.load(path).temperature) == 2
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(dx.ArgumentError, match=r"sts.json: got \{'temperature'"):
        Calibration.load(path)


def test_files_that_are_no_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "array.npy", np.zeros((2, 2)))
    (tmp_path / "nothing.npz").touch()
    for name, shape in (("flat.npz", (4,)), ("none.npz", (0, 0))):
        np.savez(tmp_path / name, logit=np.zeros(shape), accepted=np.zeros(shape, int))
    for name in ("array.npy", "nothing.npz", "flat.npz", "none.npz"):
        out = str(tmp_path / "out.json")
        assert dspark.cli.main(
            ["calibrate", "fit", "--rounds", str(tmp_path / name), "--output", out]
        ) == 2  # fmt: skip
        assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "texts"),
    [
        (["calibrate", "check", "--rounds", "r", "--max-ece", "2", "--min-rounds", "0"], 2,
         ["--max-ece: got 2.0", "--min-rounds: got 0"]),
        (["calibrate", "collect", "p", "--output", "no/r.npz", "--limit", "0"], 2,
         ["--limit: got 0"]),
        (["calibrate", "collect", "p", "--output", "no/r.npz"], 1, ["no such folder"]),
        (["profile", "--gamma", "4", "--requests", "0"], 2, ["--gamma", "--requests"]),
    ],
    ids=["check", "limit", "folder", "profile"],
)  # fmt: skip
def test_commands_refuse_before_they_work(
    options: list[str], code: int, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dspark.cli.main(options) == code
    found = capsys.readouterr().err
    assert all(text in found for text in texts)


def test_threads_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        dspark.cli.main(["profile", "--threads", "0"])
    assert left.value.code == 2
    assert "--threads: got 0" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_cli, "main", interrupted)
    options = ["calibrate", "check", "--rounds", "r", "--max-ece", "1"]
    assert dspark.cli.main(options) == dspark.cli.INTERRUPTED == 130
    assert capsys.readouterr().err == "dspark calibrate: interrupted\n"


class Fixed:
    """A provider that answers what it was given."""

    safe_with_sampled_drafts = True

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def conditional(self, state: Any, draft: Any) -> Any:
        del state, draft
        return self.answer

    def observe(self, state: Any, result: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"temperature": [1.0, 1.0]}, "temperatures of 2 positions, expected 3"),
        ({"monitor": Monitor(5)}, "a monitor of 5 positions, expected 3"),
        ({"confidence": Fixed([[0.5] * 3])}, "Fixed.conditional: got list"),
        ({"confidence": Fixed(None)}, "Fixed.conditional: got None"),
        ({"confidence": Fixed(np.ones((1, 2)))}, r"Fixed.conditional: got float32 \[1, 2\]"),
        ({"confidence": Fixed(np.full((1, 3), "x"))}, "Fixed.conditional: got <U1"),
    ],
    ids=["temperature", "monitor", "list", "none", "shape", "text"],
)
def test_a_scheduler_for_another_state_changes_nothing(given: dict[str, Any], text: str) -> None:
    target = ToyTarget(6)
    drafter = ToyDrafter(6, gamma=3, like=target)
    state = dx.RoundState.create(1, gamma=3)
    state.add([1], dx.SamplingParams(max_new_tokens=8))
    dx.prefill(target, state)
    scheduler = dx.Scheduler("causal", cost=TABLE, skip=False, **given)
    before = int(state.host.position[0])
    with pytest.raises(dx.ArgumentError, match=text):
        dx.decode_round(target, drafter, state, scheduler)
    assert int(state.host.position[0]) == before
    assert int(dx.decode_round(target, drafter, state).num_emitted[0]) >= 1
