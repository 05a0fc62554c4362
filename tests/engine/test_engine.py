# SPDX-License-Identifier: Apache-2.0
"""The generation loop: streaming, continuous batching, capacity; both array kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark.engine import Engine
from dspark_ext.toy import ToyDrafter, ToyTarget

V, GAMMA = 9, 3


class TorchToy:
    """The toy models behind torch tensors, as a real model is."""

    def __init__(self, target: ToyTarget, drafter: ToyDrafter) -> None:
        self._target, self._drafter, self.gamma = target, drafter, drafter.gamma
        head = drafter.head
        self.head = dx.DraftHead(
            w1=torch.from_numpy(head.w1),
            w2=torch.from_numpy(head.w2),
            confidence_weight=torch.from_numpy(head.confidence_weight),
            confidence_bias=head.confidence_bias,
        )
        self.new_cache = target.new_cache

    def forward(self, *args: Any, logit_rows: Any = None) -> Any:
        assert isinstance(args[0], torch.Tensor)
        assert isinstance(args[3].page_table, torch.Tensor)
        logits, features = self._target.forward(*args, logit_rows=logit_rows)
        return torch.from_numpy(logits), torch.from_numpy(features)

    def draft(self, anchor: Any, position: Any, features: Any, state: Any) -> Any:
        assert isinstance(anchor, torch.Tensor)
        assert isinstance(features.rows, torch.Tensor)
        base, hidden = self._drafter.draft(anchor, position, features, state)
        return torch.from_numpy(base), torch.from_numpy(hidden)


def toys(framework: str, seed: int = 0) -> tuple[Any, Any, ToyTarget]:
    target = ToyTarget(V, seed=seed)
    drafter = ToyDrafter(V, GAMMA, seed=seed, like=target)
    if framework == "torch":
        both = TorchToy(target, drafter)
        return both, both, target
    return target, drafter, target


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_requests_join_and_leave(framework: str, slots: int, rng: np.random.Generator) -> None:
    """More prompts than slots, of different lengths: each answer is its own greedy text."""
    target, drafter, toy = toys(framework)
    prompts = [rng.integers(0, V, int(n)).tolist() for n in rng.integers(1, 9, 7)]
    params = [dx.SamplingParams(max_new_tokens=int(n)) for n in rng.integers(1, 15, 7)]
    engine = Engine(target, drafter, max_requests=slots, max_len=32, page_size=2,
                    framework=framework)  # fmt: skip
    answers = engine.complete(prompts, params)
    assert answers == [
        toy.greedy(p, q.max_new_tokens) for p, q in zip(prompts, params, strict=True)
    ]
    assert engine.state.pages.num_free == engine.state.num_pages
    assert engine.metrics.emitted == sum(len(a) for a in answers) - len(prompts)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_both_array_kinds_emit_the_same(framework: str) -> None:
    params = [dx.SamplingParams(t, seed=i, max_new_tokens=12) for i, t in enumerate((0.0, 1.0))]
    texts = []
    for kind in (framework, "numpy"):
        target, drafter, _ = toys(kind, seed=4)
        cost = dx.CostTable.from_points([1, 20], [1.0, 1.5])
        scheduler = dx.Scheduler("two_phase", cost=cost, temperature=[1.2] * GAMMA)
        engine = Engine(target, drafter, scheduler=scheduler, max_len=32, framework=kind)
        texts.append(engine.complete([[1, 2], [3]], params))
    assert texts[0] == texts[1]


def test_streams_what_each_round_emits() -> None:
    target, drafter, toy = toys("numpy")
    engine = Engine(target, drafter, max_requests=2, max_len=32, framework="numpy")
    chunks = list(engine.generate([[1], [2, 2]], dx.SamplingParams(max_new_tokens=6)))
    assert [c.request for c in chunks[:2]] == [0, 1]
    for request, prompt in enumerate(([1], [2, 2])):
        mine = [c for c in chunks if c.request == request]
        assert sum((c.tokens for c in mine), ()) == tuple(toy.greedy(prompt, 6))
        assert [c.finish for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert all(c.num_accepted in (len(c.tokens) - 1, len(c.tokens)) for c in mine)


def test_closing_the_stream_drops_the_requests() -> None:
    target, drafter, _ = toys("numpy")
    engine = Engine(target, drafter, max_requests=2, max_len=32, framework="numpy")
    stream = engine.generate([[1], [2], [3]], dx.SamplingParams(max_new_tokens=9))
    next(stream)
    assert len(engine.state.free_slots()) == 0
    stream.close()
    assert len(engine.state.free_slots()) == 2
    assert engine.state.pages.num_free == engine.state.num_pages


def test_few_pages_only_make_prompts_wait() -> None:
    target, drafter, toy = toys("numpy")
    engine = Engine(target, drafter, max_requests=3, max_len=16, page_size=4, num_pages=6,
                    framework="numpy")  # fmt: skip
    prompts = [[1] * 5, [2] * 5, [3] * 5]
    answers = engine.complete(prompts, dx.SamplingParams(max_new_tokens=8))
    assert answers == [toy.greedy(p, 8) for p in prompts]
    small = Engine(target, drafter, max_requests=1, max_len=16, page_size=4, num_pages=2,
                   framework="numpy")  # fmt: skip
    with pytest.raises(dx.CapacityError, match="prompt 0"):
        small.complete([[1] * 8], dx.SamplingParams(max_new_tokens=8))


def test_bad_prompts_leave_the_engine_usable() -> None:
    target, drafter, toy = toys("numpy")
    engine = Engine(target, drafter, max_requests=2, max_len=32, framework="numpy")
    with pytest.raises(dx.ArgumentError, match="prompt"):
        engine.complete([[1], []], dx.SamplingParams(max_new_tokens=4))
    with pytest.raises(dx.ArgumentError, match="params: got 1, expected 1 or 2"):
        engine.complete([[1], [2]], [dx.SamplingParams()])
    assert engine.complete([[4]], dx.SamplingParams(max_new_tokens=4)) == [toy.greedy([4], 4)]


def test_metrics_split_the_time_and_count_rates_over_their_own_base() -> None:
    target, drafter, _ = toys("numpy")
    engine = Engine(target, drafter, max_len=64, framework="numpy")
    engine.complete([[1], [2]], dx.SamplingParams(max_new_tokens=40))
    m = engine.metrics
    assert m.emitted == m.accepted + m.rounds - m.cut
    assert all(m.seconds[p] > 0 for p in ("draft", "schedule", "verify", "other"))
    record = m.to_dict()
    assert abs(sum(record["time_share"].values()) - 1) < 1e-9
    assert record["observed"][0] == m.scheduled_at[0], "draft 1 is always observed"
    assert all(a <= o <= s for a, o, s in zip(m.accepted_at, m.observed_at, m.scheduled_at,
                                             strict=True))  # fmt: skip
