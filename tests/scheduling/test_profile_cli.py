# SPDX-License-Identifier: Apache-2.0
"""dspark profile: options, the file it writes, exit codes. The models are stand-ins."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.engine import costs, loading
from dspark.scheduling import cli


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.main(parser.parse_args(list(argv)))


class StandIn:
    """A target that only counts rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.lengths: list[int] = []

    def new_cache(self, num_pages: int, page_size: int) -> tuple[int, int]:
        return num_pages, page_size

    def forward(self, token_ids: Any, positions: Any, plan: Any, cache: Any) -> None:
        assert len(token_ids) == len(positions) == int(plan.total_tokens)
        self.rows.append(len(token_ids))
        self.lengths.append(int(cache.kv_len[0]))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()

    def load(dtype: str, *_: Any, **__: Any) -> loading.Models:
        return loading.Models("stand-in", dtype, made, None, None, (), Path("."), None)

    monkeypatch.setattr(loading, "load", load)
    return made


def test_target_alone(target: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    options = ("--no-drafter", "--requests", "2", "--gamma", "3", "--repeats", "3", "--quiet")
    assert run(*options, "--output", str(path), "--json", "--dtype", "float32") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == list(range(1, 9))
    assert set(target.rows) == set(range(1, 9))
    table = dx.CostTable.load(path, expect=result["fingerprint"])
    assert table.fingerprint["model"] == "stand-in"
    assert table.fingerprint["dtype"] == "float32"
    assert np.all(np.diff(table.array) >= 0)
    assert table.ms_per_kv_token == 0.0


def test_kv_slope_is_measured_at_several_contexts(
    target: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--no-drafter", "--kv", "--requests", "2", "--context", "64", "--repeats", "2")
    assert run(*options, "--quiet") == 0
    assert {8, 32, 64} <= set(target.lengths)
    assert "ms a token" in capsys.readouterr().out


def test_graph_sizes_become_steps(target: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    options = ("--no-drafter", "--requests", "4", "--gamma", "7", "--repeats", "2", "--quiet")
    assert run(*options, "--output", str(path), "--graph-sizes", "4", "11", "32") == 0
    table = dx.CostTable.load(path)
    assert table.plateaus == (4, 11, 32)
    assert 11 in table.tokens and table.fingerprint["graph_sizes"] == [4, 11, 32]
    assert table.ms(5) == table.ms(11) and table.ms(12) == table.ms(32)
    for wrong in (("5", "4"), ("0",), ("33",)):
        assert run(*options, "--graph-sizes", *wrong) == 2


def test_with_a_drafter_it_is_the_engine_s_table(
    target: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = {}

    def table(models: Any, requests: int, context: int, repeats: int, **k: Any) -> dx.CostTable:
        seen.update(k, models=models.name, requests=requests, context=context, repeats=repeats)
        return dx.CostTable.from_points([1, 8], [2.0, 3.0], draft_ms=0.5)

    monkeypatch.setattr(costs, "table", table)
    assert run("--requests", "4", "--context", "99", "--repeats", "3", "--seed", "7") == 0
    assert seen == {
        "models": "stand-in",
        "requests": 4,
        "context": 99,
        "repeats": 3,
        "progress": True,
        "seed": 7,
        "kv": False,
        "graph_sizes": [],
    }
    assert "draft: 0.5 ms" in capsys.readouterr().out


def test_wrong_options_are_listed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--requests", "0", "--context", "1", "--no-drafter", "--drafter", "x") == 2
    text = capsys.readouterr().err
    for part in ("--requests: got 0", "--context: got 1", "--drafter: got a folder"):
        assert part in text


def test_files_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, target: StandIn, tmp_path: Path
) -> None:
    options = ("--no-drafter", "--requests", "1", "--repeats", "1", "--quiet")
    assert run(*options, "--output", str(tmp_path / "none" / "cost.json")) == 1
    assert not target.rows  # said before minutes of timing, not behind them

    def load(*_: Any, **__: Any) -> loading.Models:
        raise FileNotFoundError("no checkpoint")

    monkeypatch.setattr(loading, "load", load)
    assert run(*options) == 1
