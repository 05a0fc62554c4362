# SPDX-License-Identifier: Apache-2.0
"""Stops, joins, aborts, hooks and accounting of whole rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext.toy import ToyDrafter, ToyTarget

GAMMA = 3


class Script:
    """A target that always continues a fixed text, whatever it is fed; features = positions."""

    vocab_size = 12

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.forwards: list[int] = []

    def forward(
        self, token_ids: Any, positions: Any, *_: Any, logit_rows: Any = None
    ) -> tuple[Any, Any]:
        self.forwards.append(len(token_ids))
        where = positions if logit_rows is None else positions[logit_rows]
        logits = np.zeros((len(where), self.vocab_size), np.float32)
        logits[np.arange(len(where)), [self.text[p + 1] for p in where]] = 9.0
        return logits, np.zeros((len(token_ids), 1), np.float32)


class ScriptDrafter:
    """Proposes slot k of the text of the round, with one confidence for all."""

    def __init__(self, blocks: dict[int, list[int]], confidence: bool = True) -> None:
        self.blocks, self.calls = blocks, 0
        self.head = dx.DraftHead(
            w1=np.zeros((12, 1), np.float32),
            w2=np.zeros((12, 1), np.float32),
            confidence_weight=np.zeros(2, np.float32) if confidence else None,
            confidence_bias=2.0,
        )

    def draft(self, _: Any, position: Any, new_features: Any, state: Any) -> Any:
        self.seen = new_features
        self.calls += 1
        base = np.zeros((state.max_requests, state.gamma, 12), np.float32)
        for r in state.active_slots():
            for k, token in enumerate(self.blocks[int(position[r])]):
                base[r, k, token] = 5.0
        return base, np.zeros((state.max_requests, state.gamma, 1), np.float32)


def start(target: Any, gamma: int = GAMMA, **params: Any) -> tuple[dx.RoundState, int, dx.Round]:
    state = dx.RoundState.create(2, gamma, page_size=4, max_len=300)
    slot = state.add([0], dx.SamplingParams(**params))
    return state, slot, dx.prefill(target, state)


def test_stop_inside_accepted_drafts(backend: str) -> None:
    """V18: drafts (7, EOS, 9) all match: 7 and EOS come out, nothing after."""
    target = Script([0, 5, 7, 2, 9, 4])
    state, slot, first = start(target, stop_ids=(2,), max_new_tokens=20)
    assert first.tokens[slot, 0] == 5
    got = dx.decode_round(target, ScriptDrafter({1: [7, 2, 9]}), state, backend=backend)
    assert got.tokens[slot].tolist() == [7, 2, -1, -1]
    assert (got.num_accepted[slot], got.num_emitted[slot], got.finish[slot]) == (2, 2, 1)
    assert got.accepted[slot].tolist() == [1, 1, -2]
    assert got.status[slot] & dx.Status.STOPPED
    assert state.active_slots() == [] and state.finish[slot] == 1 and state.waiting() == []


def test_length_caps_the_drafts_not_the_law(backend: str) -> None:
    target = Script(list(range(12)))
    state, slot, _ = start(target, max_new_tokens=4)
    drafter = ScriptDrafter({1: [2, 3, 4], 4: [5, 6, 7]})
    got = dx.decode_round(target, drafter, state, backend=backend)
    assert got.length[slot] == 2, "three tokens are left and one of them is the target's own"
    assert got.tokens[slot].tolist() == [2, 3, 4, -1]
    assert got.finish[slot] == 2 and state.active_slots() == []


def test_last_token_needs_no_draft() -> None:
    target, drafter = Script(list(range(12))), ScriptDrafter({})
    state, slot, _ = start(target, max_new_tokens=2)
    got = dx.decode_round(target, drafter, state)
    assert drafter.calls == 0 and not got.drafted
    assert got.tokens[slot].tolist() == [2, -1, -1, -1]


@pytest.mark.parametrize("params", [{"max_new_tokens": 1}, {"stop_ids": (1,)}])
def test_request_may_end_with_its_first_token(params: dict[str, Any]) -> None:
    target = Script(list(range(12)))
    state, slot, first = start(target, **params)
    assert first.num_emitted[slot] == 1 and first.finish[slot] != 0
    assert dx.decode_round(target, None, state).slots == ()
    assert target.forwards == [1], "an empty round runs nothing"


def test_lengths_and_positions_move_by_what_was_emitted() -> None:
    """Eq. of CONTRACT 2: kv_len == position of the anchor, after accepts and rejections alike."""
    target = Script(list(range(12)))
    state, slot, _ = start(target)
    host = state.host
    assert (host.kv_len[slot], host.position[slot], host.anchor[slot]) == (1, 1, 1)
    dx.decode_round(target, ScriptDrafter({1: [2, 9, 9]}), state)
    assert (host.kv_len[slot], host.position[slot], host.anchor[slot]) == (3, 3, 3)
    dx.decode_round(target, ScriptDrafter({3: [9, 9, 9]}), state)
    assert (host.kv_len[slot], host.position[slot], host.anchor[slot]) == (4, 4, 4)


def test_features_of_accepted_rows_are_handed_over() -> None:
    target = Script(list(range(12)))
    state, _, _ = start(target)
    drafter = ScriptDrafter({1: [2, 9, 9], 3: [4, 5, 6]})
    dx.decode_round(target, drafter, state)
    assert drafter.seen.num_new.tolist() == [1, 0]
    dx.decode_round(target, drafter, state)
    rows, cu_seqlens, num_new = drafter.seen
    assert num_new.tolist() == [2, 0], "the anchor and one accepted draft"
    assert cu_seqlens.tolist() == [0, 4, 4] and len(rows) == 4, "plan order, rejected rows included"


def test_features_of_undrafted_rounds_pile_up_in_order() -> None:
    target = ToyTarget(6, seed=1)
    drafter = ToyDrafter(6, GAMMA, like=target)  # asserts that its context has no hole
    state = dx.RoundState.create(2, GAMMA, page_size=2, max_len=64)
    slot = state.add([1, 2, 3], dx.SamplingParams(max_new_tokens=20))
    dx.prefill(target, state)
    plain = dx.Scheduler("fixed", fixed_len=0)
    tokens = []
    for step in range(4):
        late = state.add([4], dx.SamplingParams(max_new_tokens=20)) if step == 1 else None
        dx.prefill(target, state)
        for scheduler in (plain, plain, dx.Scheduler()):
            got = dx.decode_round(target, drafter, state, scheduler)
            tokens += got.tokens[slot, : got.num_emitted[slot]].tolist()
        if late is not None:
            state.remove(late)
            assert state.add([5, 5], dx.SamplingParams(max_new_tokens=9)) == late
            dx.prefill(target, state)
    assert tokens == target.greedy([1, 2, 3], len(tokens) + 1)[1:]


class Boom(RuntimeError):
    pass


def boom(*_: Any, **__: Any) -> Any:
    raise Boom


def test_abort_commits_nothing_and_repeats_alike(rng: np.random.Generator) -> None:
    """A target that fails after the draft: the repeated round equals the undisturbed one."""
    cost = dx.CostTable.from_points([1, 40], [1.0, 1.2])

    def run(fail_at: int | None) -> list[list[int]]:
        target = ToyTarget(8, seed=3)
        drafter = ToyDrafter(8, GAMMA, seed=4, like=target)
        scheduler = dx.Scheduler("two_phase", cost=cost)
        state = dx.RoundState.create(2, GAMMA, page_size=2, max_len=64)
        slots = [state.add([r], dx.SamplingParams(1.0, seed=r, max_new_tokens=30)) for r in (1, 2)]
        dx.prefill(target, state)
        forward = target.forward
        answers: list[list[int]] = [[], []]
        for step in range(8):
            if step == fail_at:
                target.forward = boom
                before = state.host.kv_len.copy(), state.host.anchor.copy()
                with pytest.raises(Boom):
                    dx.decode_round(target, drafter, state, scheduler)
                np.testing.assert_array_equal(before, (state.host.kv_len, state.host.anchor))
                target.forward = forward
            got = dx.decode_round(target, drafter, state, scheduler)
            for r in slots:
                answers[r] += got.tokens[r, : got.num_emitted[r]].tolist()
        return answers

    undisturbed = run(None)
    for step in rng.choice(np.arange(1, 8), 3, replace=False):
        assert run(int(step)) == undisturbed


def test_two_phase_reads_what_is_two_rounds_old() -> None:
    """The budget of round t is that of the survivals of round t - 2; before, of the prior."""
    cost = dx.CostTable.from_points([1, 2, 3, 4], [1.0, 1.2, 1.4, 1.6])
    target = Script(list(range(12)) * 9)
    drafter = ScriptDrafter({p: [9, 9, 9] for p in range(99)})  # always rejected
    scheduler = dx.Scheduler("two_phase", cost=cost, skip=False)
    state, slot, _ = start(target, max_new_tokens=40)
    lengths = []
    for bias in (-9.0, 9.0, 9.0, -9.0, -9.0, -9.0):  # confidences of rounds 0..5: no, yes, yes, no
        drafter.head = dx.DraftHead(
            drafter.head.w1, drafter.head.w2, confidence_weight=np.zeros(2, np.float32),
            confidence_bias=bias,
        )  # fmt: skip
        lengths.append(int(dx.decode_round(target, drafter, state, scheduler).length[slot]))
    prior = lengths[0]
    assert prior > 0 and lengths[1] == prior
    assert lengths[2:] == [0, 3, 3, 0]


def test_skipping_reads_the_table_and_old_survivals_only() -> None:
    target = Script(list(range(12)) * 9)
    drafter = ScriptDrafter({p: [9, 9, 9] for p in range(99)})
    state, _, _ = start(target, max_new_tokens=60)
    hopeless = dx.CostTable.from_points([1, 2, 4], [1.0, 3.0, 9.0], draft_ms=5.0)
    scheduler = dx.Scheduler("causal", cost=hopeless, probe_every=2)
    for _ in range(6):
        assert not dx.decode_round(target, drafter, state, scheduler).drafted
    assert drafter.calls == 0, "no acceptance could pay: no probe either"

    cheap = dx.CostTable.from_points([1, 2, 4], [1.0, 1.1, 1.3], draft_ms=0.2)
    scheduler = dx.Scheduler("causal", cost=cheap, probe_every=3)
    drafter.head = dx.DraftHead(
        drafter.head.w1, drafter.head.w2, confidence_weight=np.zeros(2, np.float32),
        confidence_bias=-9.0,
    )  # fmt: skip
    drafted = [dx.decode_round(target, drafter, state, scheduler).drafted for _ in range(14)]
    # rounds 0-2 go by the prior: the survivals of round 0 become readable in round 3
    assert drafted == [True] * 3 + [False] * 3 + [True] + [False] * 6 + [True]


def test_skipping_knows_where_each_mode_would_stop() -> None:
    """S9: on a staircase Algorithm 1 stops at the first step, the full search looks over it."""
    stairs = dx.CostTable.from_points([1, 2, 3, 4], [1.0, 1.9, 1.9, 1.9])
    drafted = {}
    for mode in ("causal", "two_phase"):
        target = Script(list(range(12)))
        state, _, _ = start(target, max_new_tokens=20)
        scheduler = dx.Scheduler(mode, cost=stairs)
        drafter = ScriptDrafter({1: [9, 9, 9]})
        drafted[mode] = dx.decode_round(target, drafter, state, scheduler).drafted
    assert drafted == {"causal": False, "two_phase": True}


def test_mask_hook_forbids_without_shortening(backend: str) -> None:
    """V19 and L4: a forbidden draft stays in the batch and is rejected."""
    target = Script([0, 1, 3, 3, 3, 3])
    state, slot, _ = start(target)
    seen = {}

    def mask(plan: Any, drafts: Any) -> Any:
        seen["lengths"] = np.array(plan.length)
        seen["drafts"] = np.array(drafts)
        allowed = np.full((int(plan.total_tokens), 1), 0xFFF, dtype=np.uint32)
        allowed[1] = 0xFFF & ~(1 << 3)  # row 1 decides the second token
        return allowed.view(np.int32)

    drafter = ScriptDrafter({1: [3, 3, 3]})
    got = dx.decode_round(target, drafter, state, mask=mask, backend=backend)
    assert seen["lengths"][slot] == 3 and seen["drafts"][slot].tolist() == [3, 3, 3]
    assert got.num_accepted[slot] == 1 and got.tokens[slot, :2].tolist() == [3, 0]


def test_rollback_hook_gets_the_emitted_counts() -> None:
    target, calls = Script(list(range(12))), []
    state, slot, _ = start(target)
    dx.decode_round(
        target, ScriptDrafter({1: [2, 9, 9]}), state, rollback=lambda n: calls.append(n.tolist())
    )
    assert calls == [[2, 0]] and slot == 0


def test_confidence_is_required_where_it_is_read() -> None:
    target = Script(list(range(12)))
    state, _, _ = start(target)
    drafter = ScriptDrafter({1: [2, 3, 4]}, confidence=False)
    with pytest.raises(dx.ArgumentError, match="without confidence head"):
        dx.decode_round(target, drafter, state, dx.Scheduler("threshold", threshold=0.5))
    assert dx.decode_round(target, drafter, state).num_emitted.tolist() == [4, 0]


def test_no_features_is_an_error_not_a_guess() -> None:
    class Blind(Script):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)[0], None

    state, _, _ = start(Blind(list(range(12))))
    with pytest.raises(RuntimeError, match="no features"):
        dx.decode_round(Blind(list(range(12))), ScriptDrafter({1: [2]}), state)
