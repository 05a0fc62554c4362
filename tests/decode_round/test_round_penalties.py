# SPDX-License-Identifier: Apache-2.0
"""Penalties and min-tokens through whole rounds: what plain decoding of the same request emits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.toy import ToyDrafter, ToyTarget

V, GAMMA, PROMPT = 6, 3, [1, 3, 3]
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5}


def generate(drafter: Any, target: ToyTarget, batch: list[dx.SamplingParams]) -> list[list[int]]:
    state = dx.RoundState.create(len(batch), GAMMA, page_size=2, max_len=64)
    slots = [state.add(PROMPT, params) for params in batch]
    result = dx.prefill(target, state)
    tokens: dict[int, list[int]] = {slot: [] for slot in slots}
    while True:
        for slot in slots:
            tokens[slot] += result.tokens[slot, : result.num_emitted[slot]].tolist()
        if not state.active_slots():
            return [tokens[slot] for slot in slots]
        result = dx.decode_round(target, drafter, state)


def greedy(target: ToyTarget, length: int, stops: tuple[int, ...] = (), least: int = 0) -> Any:
    """Plain decoding, the penalties written apart."""
    out: list[int] = []
    while len(out) < length:
        z = target.table[(PROMPT + out)[-2], (PROMPT + out)[-1]].copy()
        for token in range(V):
            count = out.count(token)
            if count or token in PROMPT:
                z[token] = (
                    z[token] / np.float32(1.4) if z[token] > 0 else z[token] * np.float32(1.4)
                )
            if count:
                z[token] -= np.float32(0.5) * np.float32(count) + np.float32(0.3)
        if len(out) < least:
            z[list(stops)] = -np.inf
        out.append(int(np.argmax(z)))
        if out[-1] in stops:
            break
    return out


@pytest.mark.parametrize("seed", range(4))
def test_greedy_rounds_equal_plain_decoding(seed: int) -> None:
    target = ToyTarget(V, seed=seed)
    drafter = ToyDrafter(V, GAMMA, seed=seed, like=target)
    plain = dx.SamplingParams(max_new_tokens=12)
    params = dx.SamplingParams(max_new_tokens=20, **PENALTIES)
    got = generate(drafter, target, [plain, params])
    assert got[0] == target.greedy(PROMPT, 12)  # a neighbour without penalties is untouched
    assert got[1] == greedy(target, 20)
    assert got[1] != target.greedy(PROMPT, 20)


@pytest.mark.parametrize("seed", range(3))
def test_match_equals_plain_decoding(seed: int) -> None:
    target = ToyTarget(V, seed=seed, spread=1.0)
    drafter = ToyDrafter(V, GAMMA, seed=seed, like=target)
    params = dx.SamplingParams(
        temperature=1.0, rule="match", seed=9, max_new_tokens=20, **PENALTIES
    )
    assert generate(drafter, target, [params]) == generate(None, target, [params])


def test_min_tokens_hold_over_rounds() -> None:
    target = ToyTarget(V, seed=1)
    drafter = ToyDrafter(V, GAMMA, seed=1, like=target)
    stops = (target.greedy(PROMPT, 3)[2],)
    params = dx.SamplingParams(max_new_tokens=20, stop_ids=stops, min_tokens=7, **PENALTIES)
    got = generate(drafter, target, [params])[0]
    assert got == greedy(target, 20, stops, 7) and not set(got[:7]) & set(stops)


def test_a_slot_starts_without_the_counts_of_the_last_request() -> None:
    target = ToyTarget(V, seed=2)
    state = dx.RoundState.create(1, GAMMA, page_size=2, max_len=64)
    answers = []
    for _ in range(2):
        slot = state.add(PROMPT, dx.SamplingParams(max_new_tokens=8, **PENALTIES))
        result = dx.prefill(target, state)
        tokens = result.tokens[slot, :1].tolist()
        while state.active_slots():
            result = dx.decode_round(target, None, state)
            tokens += result.tokens[slot, :1].tolist()
        answers.append(tokens)
        state.remove(slot)
    assert answers[0] == answers[1] == greedy(target, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty: got 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty: got inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: got nan"),
        ({"min_tokens": -1}, "min_tokens: got -1"),
    ],
)
def test_illegal_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(dx.ArgumentError, match=message):
        dx.SamplingParams(**changes)
