# SPDX-License-Identifier: Apache-2.0
"""The engine's own cost tables: what is timed, and which tables it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dspark_ext as dx
from dspark.engine import costs
from dspark.engine.loading import Models


class StandIn:
    """A target and its drafter that compute nothing; keeps the sizes that the target saw."""

    gamma = 3

    def __init__(self) -> None:
        self.head = dx.DraftHead(
            w1=torch.zeros(16, 4), w2=torch.zeros(16, 4), confidence_weight=torch.zeros(8)
        )
        self.config = SimpleNamespace(num_hidden_layers=1, columns=16, markov_rank=4)
        self.seen: list[tuple[int, int]] = []  # rows, KV tokens before them

    def forward(self, ids: Any, *others: Any, logit_rows: Any = None) -> Any:
        cache = others[-1]
        self.seen.append((len(ids), int(cache.kv_len.sum())))
        rows = len(ids) if logit_rows is None else len(logit_rows)
        return torch.zeros(rows, 16), torch.zeros(len(ids), 2)

    def draft(self, anchor: Any, *_: Any) -> Any:
        shape = (len(anchor), self.gamma)
        return torch.zeros(*shape, 16), torch.zeros(*shape, 4)


@pytest.fixture
def models() -> Models:
    both = StandIn()
    return Models("toy", "float32", both, both, None, (), Path("."), None)


def test_slope_in_kv_tokens_is_measured_at_three_contexts(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(costs, "measure", lambda *_, **k: given.update(k))
    costs.table(models, 2, context=32, kv=True)
    assert given["kv_tokens"] == [2 * 8, 2 * 16, 2 * 32]
    models.target.seen.clear()
    for total in given["kv_tokens"]:
        given["kv_step"](total)
    assert models.target.seen == [(8, 16), (8, 32), (8, 64)]
    assert [given["kv_of"](b) for b in (1, 2, 8)] == [32, 64, 64]


def test_table_with_everything(models: Models) -> None:
    table = costs.table(models, 2, context=16, repeats=1, kv=True, graph_sizes=(4, 8))
    assert table.plateaus == (4, 8) and table.max_tokens == 8
    assert table.draft_ms > 0 and table.ms_per_kv_token >= 0
    assert table.fingerprint["graph_sizes"] == [4, 8]
    assert table.array[1:].min() > 0
    with pytest.raises(dx.ArgumentError, match=r"graph sizes: got \[9\], expected rising ones"):
        costs.table(models, 2, context=16, repeats=1, graph_sizes=(9,))


def test_a_foreign_table_is_refused(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    costs.table(models, 1, context=16, repeats=1).save(path)
    assert costs.load_for(path, models).max_tokens == 4
    for change, field in (
        ({"dtype": "bfloat16"}, "dtype"),
        ({"name": "another"}, "model"),
    ):
        with pytest.raises(dx.FingerprintError, match=field) as error:
            costs.load_for(path, dataclasses.replace(models, **change))
        assert error.value.differing == [field]
    models.drafter.config.markov_rank = 8
    with pytest.raises(dx.FingerprintError, match="drafter"):
        costs.load_for(path, models)
    # A table that names nothing is the user's own statement.
    dx.CostTable.from_points([1, 4], [1.0, 2.0]).save(path)
    assert costs.load_for(path, models).fingerprint == {}
