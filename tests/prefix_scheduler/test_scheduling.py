# SPDX-License-Identifier: Apache-2.0
"""CostTable and LaggedSurvival."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.reference.prefix_scheduler import cost_table_ms

FINGERPRINT = {"device": "cpu 2 cores", "dtype": "bfloat16", "model": "m", "graph_sizes": [8, 16]}


def table(**changes: Any) -> dx.CostTable:
    k: dict[str, Any] = {
        "tokens": [1, 4, 8, 16],
        "ms": [2.0, 1.5, 3.0, 5.0],
        "plateaus": [4, 8],
        "draft_ms": 0.75,
        "ms_per_kv_token": 1e-4,
        "fingerprint": FINGERPRINT,
    }
    return dx.CostTable.from_points(**{**k, **changes})


def test_interpolation_running_maximum_plateaus() -> None:
    t = table()
    assert t.array[1:].tolist() == [2.0] * 4 + [3.0] * 4 + [3.25 + 0.25 * i for i in range(8)]
    assert (t.repaired, t.max_tokens) == (1, 16)
    assert t.ms(5) == 3.0 and isinstance(t.ms(5), float)
    assert np.isnan(t.ms(17))
    assert t.ms(np.array([1, 16, 17])).tolist()[:2] == [2.0, 5.0]
    assert table(plateaus=()).ms(6) == 2.5


def test_equals_the_reference(rng: np.random.Generator) -> None:
    for _ in range(20):
        tokens = np.cumsum(rng.integers(1, 6, 6))
        ms = rng.uniform(1, 9, 6)
        inner = np.arange(1, int(tokens[-1]) + 1)
        stairs = np.sort(rng.choice(inner, min(3, len(inner)), replace=False)).tolist()
        got = dx.CostTable.from_points(tokens, ms, stairs).array
        assert got[1:].tolist() == cost_table_ms(tokens, ms, stairs)[1:].tolist()
        assert np.all(np.diff(got) >= 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": []}, "tokens: got [], expected [n] with n >= 1"),
        ({"tokens": [0, 4, 8, 16]}, "tokens: got [0, 4, 8, 16], expected rising integers >= 1"),
        ({"tokens": [1, 4, 4, 16]}, "tokens: got [1, 4, 4, 16]"),
        ({"tokens": [1.5, 4, 8, 16]}, "tokens: got [1.5"),
        ({"ms": [1.0, 2.0]}, "ms: got shape [2], expected [4]"),
        ({"ms": [1, 2, 0, 3]}, "ms: got [1.0, 2.0, 0.0, 3.0], expected finite values > 0"),
        ({"ms": [1, 2, np.nan, 3]}, "ms: got"),
        ({"tokens": [1, 4, 8, 10**9]}, "tokens: got 1000000000, expected at most"),
        ({"plateaus": [8, 4]}, "plateaus: got [8, 4], expected rising"),
        ({"plateaus": [4.5]}, "plateaus: got [4.5], expected rising integers"),
        ({"plateaus": [8, 32]}, "plateaus: got [8, 32], expected none above the last point, 16"),
        ({"draft_ms": -1.0}, "draft_ms: got -1.0"),
        ({"ms_per_kv_token": np.inf}, "ms_per_kv_token: got inf"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_points(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(dx.ArgumentError) as error:
        table(**changes)
    assert text in str(error.value)


def test_another_draft_time() -> None:
    t = table().with_draft_ms(2.5)
    assert t.draft_ms == 2.5
    assert t.array.tolist() == table().array.tolist()
    assert (t.plateaus, t.fingerprint, t.repaired) == ((4, 8), FINGERPRINT, 1)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    table().save(path)
    again = dx.CostTable.load(path, expect=FINGERPRINT)
    assert again.array.tolist() == table().array.tolist()
    assert (again.draft_ms, again.ms_per_kv_token) == (0.75, 1e-4)
    assert again.fingerprint == FINGERPRINT
    assert again.plateaus == (4, 8)


def test_a_foreign_fingerprint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    table().save(path)
    other = {**FINGERPRINT, "dtype": "float32", "driver": "580"}
    with pytest.raises(dx.FingerprintError) as error:
        dx.CostTable.load(path, expect=other)
    assert error.value.differing == ["driver", "dtype"]
    assert "dtype: the table has 'bfloat16', expected 'float32'" in str(error.value)
    assert "driver: the table has nothing, expected '580'" in str(error.value)
    table(fingerprint=None).save(path)
    with pytest.raises(dx.FingerprintError):
        dx.CostTable.load(path, expect=FINGERPRINT)
    assert dx.CostTable.load(path).max_tokens == 16


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"format": "dspark-cost-table", "version": 2}'], ids=str
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(dx.ArgumentError, match=r"CostTable\.load"):
        dx.CostTable.load(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    table().save(path)
    body = json.loads(path.read_text())
    del body["ms"]
    path.write_text(json.dumps(body))
    with pytest.raises(dx.ArgumentError, match="missing ms"):
        dx.CostTable.load(path)


def rounds(n: int, slots: int = 2, gamma: int = 3) -> list[np.ndarray]:
    return [np.full((slots, gamma), 0.5 + t / 100, np.float32) for t in range(n)]


@pytest.mark.parametrize("age", [2, 3])
def test_round_t_reads_what_round_t_minus_two_produced(age: int) -> None:
    lagged = dx.LaggedSurvival(rounds=age, prior=0.5)
    values = rounds(9)
    for t, a in enumerate(values):
        seen = lagged.survival(None, 3, 2)
        if t < age:
            assert seen.tolist() == [[0.5, 0.25, 0.125]] * 2
        else:
            assert np.array_equal(seen, values[t - age])
        lagged.push(a)


def test_slots_keep_their_own_history() -> None:
    lagged = dx.LaggedSurvival(prior=0.0)
    a, b, c, d = rounds(4, 1)
    for slot, values in ((0, (a, b)), (100, (c, d))):
        for x in values:
            lagged.push(x, [slot])
    assert np.array_equal(lagged.survival([100, 0], 3), np.concatenate([c, a]))
    assert np.all(lagged.survival([5, -1, 10_000], 3) == 0.0)


def test_padded_rows_are_not_pushed() -> None:
    lagged = dx.LaggedSurvival()
    for a in rounds(2, 3):
        lagged.push(a, [-1, 4, -1])
    assert lagged.survival([4], 3)[0, 0] == np.float32(0.5)


def test_an_aborted_round_leaves_the_history() -> None:
    lagged = dx.LaggedSurvival()
    values = rounds(5)
    for a in values:
        lagged.push(a)
    lagged.push(np.full((2, 3), 0.99, np.float32))
    lagged.abort([1])
    assert np.array_equal(lagged.survival([1], 3), values[3][:1])  # as before the push
    assert np.array_equal(lagged.survival([0], 3), values[4][:1])
    lagged.abort()
    assert np.array_equal(lagged.survival([0], 3), values[3][:1])


def test_reset_forgets_only_its_slots() -> None:
    lagged = dx.LaggedSurvival(prior=0.1)
    for a in rounds(4):
        lagged.push(a)
    lagged.reset([0, 77])
    seen = lagged.survival([0, 1], 1 + 2)
    assert seen[0].tolist() == np.power(0.1, [1, 2, 3]).astype(np.float32).tolist()
    assert seen[1, 0] == np.float32(0.52)
    lagged.push(rounds(1)[0])
    assert lagged.survival([0], 3)[0, 0] == np.float32(0.1)  # one new round is not two
    lagged.reset()
    assert lagged.survival([1], 3)[0, 0] == np.float32(0.1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dx.LaggedSurvival(rounds=1), "rounds: got 1, expected an integer >= 2"),
        (lambda: dx.LaggedSurvival(prior=1.5), "prior: got 1.5"),
        (lambda: dx.LaggedSurvival().push(np.zeros(3)), r"survival: got shape \[3\]"),
        (lambda: dx.LaggedSurvival().push(np.zeros((2, 3)), [1, 1]), "distinct"),
        (lambda: dx.LaggedSurvival().push(np.zeros((2, 3)), [1]), "got 1 slots, expected 2"),
        (lambda: dx.LaggedSurvival().push(np.zeros((2, 3)), [0.5, 1]), "request_slots"),
        (lambda: dx.LaggedSurvival().push(np.zeros((1, 3)), [10**9]), "expected less than"),
    ],
    ids=["rounds", "prior", "shape", "twice", "count", "float", "large"],
)
def test_wrong_history_calls(call: Any, text: str) -> None:
    with pytest.raises(dx.ArgumentError, match=text):
        call()


def test_gamma_may_not_change() -> None:
    lagged = dx.LaggedSurvival()
    lagged.push(np.zeros((2, 3), np.float32))
    with pytest.raises(dx.ArgumentError, match="gamma: got 4, expected 3"):
        lagged.push(np.zeros((2, 4), np.float32))
    with pytest.raises(dx.ArgumentError, match="gamma: got 4, expected 3"):
        lagged.survival([0], 4)


def test_pushed_arrays_are_copied() -> None:
    lagged = dx.LaggedSurvival()
    buffer = np.full((1, 2), 0.75, np.float32)
    for _ in range(2):
        lagged.push(buffer)
    buffer[...] = 0.0  # an engine reuses its buffer every round
    assert lagged.survival(None, 2, 1).tolist() == [[0.75, 0.75]]
