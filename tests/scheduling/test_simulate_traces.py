# SPDX-License-Identifier: Apache-2.0
"""Traces and cost curves of the simulator."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import dspark_ext as dx
from dspark.scheduling.simulate_costs import Curve, read_csv
from dspark.scheduling.simulate_traces import Recorded, Synthetic, quality

ROUNDS = 40_000
#: ECE of a perfect head at this many rounds: 20 bins, each off by its binomial noise.
ECE_NOISE = 0.8 * 0.5 * np.sqrt(20 / ROUNDS) * 2


def test_defaults_are_the_papers_reliability_figure() -> None:
    head = quality(Synthetic(), ROUNDS)
    for k, survival, auc in ((0, 0.769, 0.818), (2, 0.418, 0.812), (4, 0.221, 0.864),
                             (6, 0.116, 0.907)):  # fmt: skip
        assert head[k].label_mean == pytest.approx(survival, abs=0.02)
        assert head[k].auc == pytest.approx(auc, abs=0.025)
    assert max(r.ece for r in head) < ECE_NOISE


@pytest.mark.parametrize("ece", [0.02, 0.08, -0.08])
def test_miscalibration_is_what_was_asked_for(ece: float) -> None:
    made = Synthetic().tuned(ece=ece)
    head = quality(made, ROUNDS)
    assert max(r.ece for r in head) == pytest.approx(abs(ece), abs=ECE_NOISE)
    assert np.sign(head[0].prediction_mean - head[0].label_mean) == np.sign(ece)


def test_a_blinder_head_ranks_worse_but_stays_calibrated() -> None:
    made = Synthetic().tuned(auroc=0.7)
    head, whole = quality(made, ROUNDS), quality(Synthetic(), ROUNDS)
    assert head[0].auc == pytest.approx(0.7, abs=0.01)
    for seen, all_seen in zip(head, whole, strict=True):
        assert seen.auc < all_seen.auc - 0.03
        assert seen.prediction_mean == pytest.approx(seen.label_mean, abs=0.012)
        assert seen.label_mean == pytest.approx(all_seen.label_mean, abs=0.012)
    with pytest.raises(dx.ArgumentError, match=r"auroc: got 0\.95, expected 0\.51\.\."):
        Synthetic().tuned(auroc=0.95)
    with pytest.raises(dx.ArgumentError, match=r"ece: got 0\.5"):
        Synthetic().tuned(ece=0.5)


@pytest.mark.parametrize("knob", [{"shift": 1.0}, {"intercept": (0.5,) * 7}, {"sight": 0.5}])
def test_outcomes_do_not_hear_of_the_head(knob: dict[str, float]) -> None:
    plain, worse = (
        Synthetic(**k).batch(50, np.random.default_rng(3)) for k in ({}, knob)
    )  # fmt: skip
    (c0, run0), (c1, run1) = plain.round(0.0), worse.round(0.0)
    assert run0.tolist() == run1.tolist()
    assert not np.allclose(c0, c1)


def test_the_head_does_not_hear_of_drift_nor_of_outcomes() -> None:
    a, b = (Synthetic(drift=d).batch(200, np.random.default_rng(3)) for d in (0.0, 2.0))
    for progress in (0.0, 0.5, 0.9):
        (c0, run0), (c1, run1) = a.round(progress), b.round(progress)
        assert np.array_equal(c0, c1)
        assert run1.sum() <= run0.sum() and (progress == 0) == (run0.tolist() == run1.tolist())


def test_difficulty_stays_with_the_request() -> None:
    """Confidences of one slot resemble each other over rounds, and a newcomer's do not."""
    batch = Synthetic().batch(2000, np.random.default_rng(0))
    first = np.log(batch.round(0.0)[0][:, 0])
    second = np.log(batch.round(0.0)[0][:, 0])
    batch.join(np.arange(2000))
    third = np.log(batch.round(0.0)[0][:, 0])
    noise = 4 / np.sqrt(2000)
    assert np.corrcoef(first, second)[0, 1] > 0.3
    assert abs(np.corrcoef(second, third)[0, 1]) < noise


def test_wrong_generators() -> None:
    for k in ({"gamma": 0}, {"gamma": 17}, {"sight": 1.5}, {"persistence": -0.1},
              {"base": np.nan}, {"request_spread": -1.0}):  # fmt: skip
        with pytest.raises(dx.ArgumentError, match=rf"Synthetic: .*\n  {next(iter(k))}: got"):
            Synthetic(**k)  # type: ignore[arg-type]


# --- recorded rounds -----------------------------------------------------------------------------


def test_recorded_rounds_are_played_in_the_order_of_their_request() -> None:
    logit = np.arange(12.0).reshape(6, 2) - 6
    flags = np.array([[1, 1], [0, -1], [1, 0], [1, -2], [1, 1], [0, -1]])
    trace = Recorded.of(logit, flags, request=[0, 1, 0, 0, 1, 1])
    assert trace.run.tolist() == [2, 1, 0, 2, 0]  # round 3 was cut; requests are adjacent
    batch = trace.batch(300, np.random.default_rng(0))
    rounds = [batch.round(0.0) for _ in range(4)]
    following: dict[float, set[float]] = {}
    for (c0, _), (c1, _) in itertools.pairwise(rounds):
        for here, there in zip(c0[:, 0], c1[:, 0], strict=True):
            following.setdefault(float(here), set()).add(float(there))
    assert sorted(len(x) for x in following.values()) == [1] * 5
    first = np.round(-np.log(1 / rounds[0][0][:, 0] - 1)).astype(int)
    assert set(first) == {-6, -4, -2, 2, 4}
    want = {-6: 2, -2: 1, -4: 0, 2: 2, 4: 0}
    assert rounds[0][1].tolist() == [want[x] for x in first]


def test_recorded_files(tmp_path: Path) -> None:
    path = tmp_path / "rounds.npz"
    np.savez(path, logit=np.zeros((2, 2)), accepted=np.array([[1, 0], [1, 1]]))
    trace = Recorded.load(path, temperature=[1.0, 2.0])
    assert (trace.gamma, trace.run.tolist()) == (2, [1, 2])
    np.savez(path, logit=np.zeros((2, 2)))
    with pytest.raises(dx.ArgumentError, match="with logit and accepted"):
        Recorded.load(path)
    with pytest.raises(dx.ArgumentError, match="no round with known outcomes"):
        Recorded.of(np.zeros((1, 2)), [[1, -2]])
    with pytest.raises(dx.ArgumentError, match="twice"):
        Recorded.of(np.zeros((1, 2)), [[1]])
    for name, wrong in (
        ("logit", {"logit": [["a", "b"]]}),
        ("accepted", {"accepted": [[7, 8]]}),
        ("accepted", {"accepted": [["a", "b"]]}),
        ("request", {"request": [0, 1]}),
        ("request", {"request": [0.5]}),
        ("temperature", {"temperature": [1.0]}),
    ):
        with pytest.raises(dx.ArgumentError, match=f"^{name}: got"):
            Recorded.of(**{"logit": np.zeros((1, 2)), "accepted": [[1, 1]], **wrong})


# --- cost curves ---------------------------------------------------------------------------------


def test_built_in_curves() -> None:
    smooth, steps = Curve.named("smooth", 4096), Curve.named("staircase", 4096)
    b = np.arange(1, 4097)
    a, c = smooth.target.ms(b), steps.target.ms(b)
    assert np.all(np.diff(a) > 0) and np.all(c >= a - 1e-12)
    assert len(np.unique(c)) == 21  # steps up to 4096
    assert c[8] == c[15] == a[15]  # 9 to 16 rows cost as much as 16
    # Far from the knee the two bounds of the roofline stand alone.
    assert a[0] == pytest.approx(4.0, rel=1e-3)
    assert a[4095] == pytest.approx(0.02 * 4096, rel=1e-3)
    assert smooth.draft(1) == pytest.approx(0.7, rel=1e-3)
    assert smooth.draft(512) == pytest.approx(0.028 * 512, rel=1e-3)
    assert smooth.at(512, 0.5).draft_ms == pytest.approx(0.5 * smooth.draft(512))
    assert smooth.scaled(2.0).target.ms(7) == pytest.approx(2 * smooth.target.ms(7))


def test_curves_from_files(tmp_path: Path) -> None:
    table = dx.CostTable.from_points([1, 8], [2.0, 3.0], draft_ms=0.5, ms_per_kv_token=0.001)
    table.save(tmp_path / "cost.json")
    curve = Curve.named(str(tmp_path / "cost.json"), 8)
    assert (curve.name, curve.draft(4), curve.target.ms_per_kv_token) == ("cost", 0.5, 0.001)
    changes = {"draft_ms": 0.25, "ms_per_kv_token": 0.0, "draft_ms_per_request": None}
    changed = Curve.named(str(tmp_path / "cost.json"), 8, changes)
    assert (changed.draft(4), changed.target.ms_per_kv_token) == (0.25, 0.0)
    csv = tmp_path / "points.csv"
    csv.write_text("tokens,ms\n1,4\n4,5\n")
    assert Curve.named(str(csv), 4).at(1).ms([1, 4]).tolist() == [4.0, 5.0]
    csv.write_text("rows,ms\n1,4\n")
    with pytest.raises(dx.ArgumentError, match="expected columns tokens and ms"):
        read_csv(csv)
    for content in (b"", b"tokens,ms\n", b"tokens,ms\n4,1\n1,2\n", b"\x00\xff", b"a\x00b\n\x00"):
        csv.write_bytes(content)
        with pytest.raises(dx.ArgumentError, match=r"points\.csv: "):
            read_csv(csv)
    with pytest.raises(dx.ArgumentError, match="draft_ms: got -1"):
        Curve("x", table, draft_ms=-1.0)
    with pytest.raises(dx.ArgumentError, match="expected smooth, staircase"):
        Curve.named("steep", 8)
