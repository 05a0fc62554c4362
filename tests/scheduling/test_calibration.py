# SPDX-License-Identifier: Apache-2.0
"""Sequential temperature scaling and the measures behind it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.scheduling import calibration as cal

# Five rounds worked by hand: conditionals, and how far the drafts were accepted.
ROUNDS = [
    ((0.9, 0.8, 0.5), (1, 1, 0)),
    ((0.95, 0.6, 0.4), (1, 0, -1)),
    ((0.5, 0.9, 0.9), (0, -1, -1)),
    ((0.8, 0.7, 0.9), (1, 1, 1)),
    ((0.9, 0.85, 0.0), (1, 1, -2)),
]


def worked_example() -> tuple[np.ndarray, np.ndarray]:
    survival = np.cumprod([c for c, _ in ROUNDS], axis=1)
    return survival, np.array([flags for _, flags in ROUNDS])


def test_c1_measures_by_position() -> None:
    got = cal.evaluate(*worked_example())
    expected = [
        (5, 0.19, 1.0, 0.0625, 0.81, 0.8),
        (5, 0.219, 0.833333, 0.170925, 0.613, 0.6),
        (4, 0.37225, 1.0, 0.147906, 0.37425, 0.25),
    ]
    for r, e in zip(got, expected, strict=True):
        values = (r.count, r.ece, r.auc, r.brier, r.prediction_mean, r.label_mean)
        assert values == pytest.approx(e, abs=1e-6)
    whole = cal.summary(got)
    assert whole.count == 14
    assert (whole.ece, whole.auc, whole.brier) == pytest.approx(
        (0.252429, 0.940476, 0.125625), abs=1e-6
    )


def test_bin_edges() -> None:
    """1.0 belongs to the last bin; an edge belongs to the bin above it."""
    assert cal.reliability([1.0, 0.95], [1, 1]).ece == pytest.approx(0.025)
    assert cal.reliability([0.5, 0.45], [1, 0]).ece == pytest.approx((0.5 + 0.45) / 2)


def test_auc_counts_ties_by_half_and_needs_two_classes() -> None:
    assert cal.reliability([0.5, 0.5], [1, 0]).auc == 0.5
    assert cal.reliability([0.2, 0.9], [1, 0]).auc == 0.0
    assert math.isnan(cal.reliability([0.2, 0.9], [1, 1]).auc)
    empty = cal.reliability([], [])
    assert empty.count == 0 and math.isnan(empty.ece)


def test_auc_against_all_pairs(rng: np.random.Generator) -> None:
    p = rng.integers(0, 1000, 300) / 1000 + 0.0005  # one value a bin: the histogram is exact
    y = (rng.random(300) < p).astype(int)
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y == 1] for b in p[y == 0]]
    assert cal.reliability(p, y).auc == pytest.approx(np.mean(pairs), abs=1e-12)


def test_a_position_without_two_classes_does_not_spoil_the_summary() -> None:
    both = cal.reliability([0.2, 0.9], [0, 1])
    one = cal.reliability([0.2, 0.9], [1, 1])
    assert cal.summary([both, one]).auc == 1.0
    assert math.isnan(cal.summary([one]).auc)


def simulate(
    rng: np.random.Generator, rounds: int, gamma: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Logits z, and acceptance whose probability is exactly sigmoid(z / scale)."""
    z = rng.normal(1.0, 3.0, (rounds, gamma))
    accepted = rng.random((rounds, gamma)) < 1 / (1 + np.exp(-z / scale))
    alive = np.cumprod(np.concatenate([np.ones((rounds, 1)), accepted[:, :-1]], axis=1), axis=1)
    return z, np.where(alive == 0, -1, accepted.astype(int))


def test_c4_fit_recovers_the_temperature(rng: np.random.Generator) -> None:
    z, flags = simulate(rng, 200_000, 3, 2.0)
    found = cal.fit(z, flags)
    assert found.fitted == (True,) * 3
    assert np.abs(np.array(found.temperature) - 2.0).max() <= 0.05 + 1e-9
    for before, after in zip(found.before, found.after, strict=True):
        assert after.ece < before.ece / 4
    assert found.max_ece < 0.01
    # Dividing by a constant keeps the order of one position's conditionals. The AUC's histogram
    # has 1000 bins, and scaling moves values between them: twice the pairs of neighbours at most.
    for k in range(3):
        seen = flags[:, k] >= 0
        raw, scaled = (
            cal.reliability(1 / (1 + np.exp(-z[seen, k] / t)), flags[seen, k]).auc
            for t in (1.0, found.temperature[k])
        )
        assert raw == pytest.approx(scaled, abs=2e-3)


def test_earlier_positions_are_frozen(rng: np.random.Generator) -> None:
    """Position k is fitted on the product with the calibrated prefix, not on c_k alone."""
    z, flags = simulate(rng, 100_000, 2, 1.0)
    z[:, 0] *= 3.0  # position 0 needs 3, position 1 is right as it is
    found = cal.fit(z, flags)
    assert found.temperature == pytest.approx((3.0, 1.0), abs=0.06)
    alone = cal.fit(z, flags, grid=(1.0,))
    assert alone.after[1].ece > 2 * found.after[1].ece


def test_ties_go_to_the_temperature_nearest_one() -> None:
    z = np.zeros((300, 1))  # sigmoid(0 / t) is 1/2 for all t
    flags = np.tile([[1], [0]], (150, 1))
    assert cal.fit(z, flags, grid=(0.5, 0.8, 1.25, 2.0)).temperature == (1.25,)
    assert cal.fit(z, flags).temperature == (1.0,)


def test_thin_positions_keep_one() -> None:
    z = np.full((300, 2), 2.0)
    flags = np.full((300, 2), 1)
    flags[150:, 1] = -2
    found = cal.fit(z, flags, min_rounds=200)
    assert found.fitted == (True, False)
    assert found.temperature[1] == 1.0


def test_unscheduled_outcomes_are_unknown_but_rejected_prefixes_are_not() -> None:
    label, known = cal.survival_labels(np.array([[1, -2, -2], [0, -1, -1]]))
    assert known.tolist() == [[True, False, False], [True, True, True]]
    assert label.tolist() == [[1, 0, 0], [0, 0, 0]]


def test_apply_is_what_the_operator_does(rng: np.random.Generator) -> None:
    z, flags = simulate(rng, 2000, 4, 1.5)
    found = cal.fit(z, flags)
    op = dx.confidence(z.astype(np.float32), list(found.temperature))
    np.testing.assert_allclose(found.apply(z), op.survival, rtol=4 * 2**-23, atol=1e-6)


def test_file_round_trip(tmp_path: Path, rng: np.random.Generator) -> None:
    z, flags = simulate(rng, 500, 2, 2.0)
    flags[:, 1] = np.where(flags[:, 0] == 1, 1, -1)
    path = tmp_path / "sts.json"
    found = cal.fit(z, flags, fingerprint={"drafter": "d"})
    found.save(path)
    json.loads(path.read_text(), parse_constant=lambda x: pytest.fail(f"not JSON: {x}"))
    assert cal.Calibration.load(path, expect={"drafter": "d"}) == found
    with pytest.raises(
        dx.FingerprintError,
        match=r"calibration of another set-up, .*\n  drafter: the calibration has 'd'",
    ):
        cal.Calibration.load(path, expect={"drafter": "e"})


def test_nan_measures_survive_the_file(tmp_path: Path) -> None:
    found = cal.fit(np.zeros((4, 1)), np.ones((4, 1), int))
    assert math.isnan(found.before[0].auc)
    found.save(tmp_path / "sts.json")
    assert math.isnan(cal.Calibration.load(tmp_path / "sts.json").before[0].auc)
    assert math.isnan(found.max_ece)  # nothing was fitted: a check must not pass on it


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "x", "version": 1}'], ids=repr)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sts.json"
    path.write_text(text)
    with pytest.raises(dx.ArgumentError, match="not a calibration"):
        cal.Calibration.load(path)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cal.fit(np.zeros((2, 2)), np.zeros((2, 3), int)), r"logit: got shape \[2, 2\]"),
        (lambda: cal.fit(np.full((1, 1), np.nan), np.ones((1, 1), int)), "logit: got NaN"),
        (lambda: cal.fit(np.zeros((1, 1)), np.ones((1, 1), int), grid=[0.0]), "grid: got"),
        (lambda: cal.fit(np.zeros((1, 1)), np.ones((1, 1), int), grid=[]), "grid: got"),
        (lambda: cal.survival_labels([[2]]), "accepted: got"),
        (lambda: cal.survival_labels([1, 0]), "accepted: got"),
        (lambda: cal.reliability([1.5], [1]), "prediction: got values outside"),
        (lambda: cal.reliability([np.nan], [1]), "prediction: got values outside"),
        (lambda: cal.reliability([0.5], [0.5]), "label: got values other"),
        (lambda: cal.reliability([0.5], [1, 0]), "got shapes"),
        (lambda: cal.evaluate(np.zeros((1, 2)), [[1]]), r"survival: got shape \[1, 2\]"),
    ],
    ids=range(11),
)
def test_wrong_arguments(call: Any, text: str) -> None:
    with pytest.raises(dx.ArgumentError, match=text):
        call()
