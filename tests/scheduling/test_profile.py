# SPDX-License-Identifier: Apache-2.0
"""Measuring a cost table: on a simulated clock, and on a target of the round's protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark.scheduling import profile


class Machine:
    """A clock that moves only when work is done on it."""

    def __init__(self, ms: Callable[[int], float]) -> None:
        self.now, self.ms, self.seen = 0.0, ms, []

    def step(self, tokens: int) -> None:
        self.seen.append(tokens)
        self.now += 1e-3 * self.ms(tokens)

    def clock(self) -> float:
        return self.now


def test_the_table_is_the_machine() -> None:
    m = Machine(lambda b: 4 + 0.25 * b)
    table = profile.measure(m.step, [1, 2, 8, 16], clock=m.clock, plateaus=[4])
    assert [table.ms(b) for b in (1, 4, 5, 16)] == pytest.approx([5.0, 5.0, 5.25, 8.0])
    assert table.max_tokens == 16


def test_an_outlier_does_not_reach_the_larger_batches() -> None:
    """The median of nine ignores four slow ones, and a contradiction is measured again."""
    calls = {"n": 0}

    def ms(b: int) -> float:
        calls["n"] += b == 2
        return 100.0 if b == 2 and calls["n"] <= 7 else float(b)

    m = Machine(ms)
    table = profile.measure(m.step, [1, 2, 3, 4], clock=m.clock, warmup=0, repeats=9)
    assert [table.ms(b) for b in (1, 2, 3, 4)] == pytest.approx([1, 2, 3, 4])
    assert table.repaired == 0


def test_rounds_are_interleaved_and_warm() -> None:
    m = Machine(lambda b: float(b))
    profile.measure(m.step, [1, 2, 4], clock=m.clock, warmup=1, repeats=3)
    assert len(m.seen) == 12
    for i in range(4):
        assert sorted(m.seen[3 * i : 3 * i + 3]) == [1, 2, 4]
    assert len({tuple(m.seen[3 * i : 3 * i + 3]) for i in range(4)}) > 1


def test_kv_slope_and_draft_time() -> None:
    m = Machine(lambda b: 2.0 + 0.1 * b + 1e-3 * 100 * b)  # each token brings 100 KV tokens

    def kv_step(n: int) -> None:
        m.now += 1e-3 * (3.0 + 1e-3 * n)

    def draft() -> None:
        m.now += 0.75e-3

    table = profile.measure(
        m.step,
        [1, 10],
        kv_step=kv_step,
        kv_tokens=[500, 1000, 4000],
        kv_of=lambda b: 100 * b,
        draft=draft,
        clock=m.clock,
    )
    assert table.ms_per_kv_token == pytest.approx(1e-3)
    assert table.draft_ms == pytest.approx(0.75)
    assert [table.ms(1), table.ms(10)] == pytest.approx([2.1, 3.0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens": []}, "tokens: got"),
        ({"tokens": [2, 1]}, "tokens: got"),
        ({"tokens": [0, 1]}, "tokens: got"),
        ({"tokens": [1], "repeats": 0}, "repeats, warmup"),
        ({"tokens": [1], "kv_tokens": [1, 2]}, "kv_step, kv_tokens: got no callable"),
        ({"tokens": [1], "kv_step": print, "kv_tokens": [5, 5]}, "kv_step, kv_tokens: got a"),
    ],
    ids=range(6),
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(dx.ArgumentError, match=text):
        profile.measure(print, **arguments)


@pytest.mark.parametrize("most", [1, 5, 16, 17, 100, 512])
def test_default_tokens(most: int) -> None:
    sizes = profile.default_tokens(most)
    assert sizes[0] == 1 and sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 16 + 10 * max(1, int(np.log2(most)) - 3)


class RecordingTarget:
    """Checks what a target is handed in a step."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int], list[int]]] = []

    def new_cache(self, num_pages: int, page_size: int) -> tuple[int, int]:
        return num_pages, page_size

    def forward(self, token_ids: Any, positions: Any, plan: Any, cache: Any) -> None:
        rows = np.diff(plan.cu_seqlens.numpy())
        assert len(token_ids) == len(positions) == rows.sum()
        assert cache.page_table.shape[0] == len(rows)
        assert np.all(cache.kv_len_after.numpy() == cache.kv_len.numpy() + rows)
        assert rows.max() <= cache.max_q_len
        assert cache.page_table.max() < cache.pages[0]
        most = cache.page_table.shape[1] * cache.page_size
        assert np.all(cache.kv_len_after.numpy() <= most)
        first = positions.numpy()[plan.cu_seqlens.numpy()[:-1]]
        assert first.tolist() == cache.kv_len.tolist()
        self.calls.append((len(token_ids), rows.tolist(), cache.kv_len.tolist()))


def test_target_step_spreads_the_tokens() -> None:
    target = RecordingTarget()
    step, step_at = profile.target_step(target, most_tokens=20, context=40, rows=8)
    for b in (1, 8, 9, 20):
        step(b)
    step_at(4, 7)
    assert [c[:2] for c in target.calls] == [
        (1, [1]),
        (8, [8]),
        (9, [5, 4]),
        (20, [7, 7, 6]),
        (4, [4]),
    ]
    assert target.calls[-1][2] == [7]


def test_fingerprint_names_the_set_up() -> None:
    a = profile.fingerprint("m", "bfloat16", graph_sizes=[8], context=256)
    assert (a["model"], a["dtype"], a["graph_sizes"], a["context"]) == ("m", "bfloat16", [8], 256)
    assert a["device"] and a["threads"] >= 1
    table = dx.CostTable.from_points([1], [1.0], fingerprint=a)
    assert table.fingerprint == a
