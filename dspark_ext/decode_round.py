# SPDX-License-Identifier: Apache-2.0
"""One round of speculative decoding: draft, schedule, verify, commit.

The same code serves plain decoding (no drafter, or a scheduler that leaves it out): every length is
then 0 and a round emits one token per request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ext._arrays import ArgumentError, Checker, dtype_name, on_device, to_numpy
from dspark_ext.interfaces import Drafter, DraftHead, NewFeatures, Target
from dspark_ext.ops.confidence import confidence
from dspark_ext.ops.markov_loop import markov_loop
from dspark_ext.ops.paged_kv import paged_kv_commit
from dspark_ext.ops.rejection_sampler import rejection_sample
from dspark_ext.results import Confidence, Draft, Plan, Verification
from dspark_ext.scheduler import Scheduler
from dspark_ext.state import RoundState

__all__ = ["Round", "decode_round", "draft_block", "prefill"]

PHASES = ("draft", "schedule", "verify", "other")


@dataclass(frozen=True, eq=False)
class Round:
    """What a round (or a prefill) did. NumPy arrays, one row per slot of the state.

    Rows of slots that did not take part hold 0 (``tokens`` and ``accepted``: -1 and -2).
    """

    slots: tuple[int, ...]  # slots that took part
    drafted: bool  # whether the drafter ran
    proposed: NDArray[np.int32]  # [R] drafts proposed: gamma, or 0 for a slot that did not draft
    length: NDArray[np.int32]  # [R] drafts verified
    num_accepted: NDArray[np.int32]  # [R] drafts accepted and emitted
    num_emitted: NDArray[np.int32]  # [R]
    tokens: NDArray[np.int32]  # [R, gamma + 1] emitted ids, -1 padded
    accepted: NDArray[np.int8]  # [R, gamma] 1, 0, -1 unobserved, -2 not scheduled
    logprob: NDArray[np.float32]  # [R, gamma + 1] under the processed law
    finish: NDArray[np.int32]  # [R] 0 goes on, 1 stop id, 2 length
    status: NDArray[np.int32]  # [R] bits of every operator of the round
    confidence: Confidence | None  # c and a of the drafts
    draft: Draft | None
    plan: Plan | None  # None for a prefill
    seconds: dict[str, float]  # draft, schedule, verify, other


class _Clock:
    """Wall time by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


def decode_round(
    target: Target,
    drafter: Drafter | None,
    state: RoundState,
    scheduler: Scheduler | None = None,
    mask: Callable[[Plan, Any], Any] | None = None,
    rollback: Callable[[NDArray[np.int32]], None] | None = None,
    *,
    backend: str | None = None,
) -> Round:
    """Run one round for every active request of the state.

    drafter -> ``markov_loop`` -> ``confidence`` -> ``prefix_schedule`` -> target ->
    ``rejection_sample`` -> ``paged_kv_commit``. Emitted tokens follow the target's law whatever the
    drafter proposes and whatever the scheduler chooses.

    Parameters
    ----------
    target : Target
        See :class:`dspark_ext.interfaces.Target`.
    drafter : Drafter or None
        ``None`` is plain decoding.
    state : RoundState
        Updated in place.
    scheduler : Scheduler, optional
        All drafts are verified when absent.
    mask : callable, optional
        ``mask(plan, draft_tokens) -> token_mask`` between draft and verification, for grammars: the
        packed mask of :func:`dspark_ext.rejection_sample`. A draft that the mask forbids stays in
        the batch and is rejected by p(x) = 0; nothing may shorten a prefix by its value.
    rollback : callable, optional
        ``rollback(num_emitted)`` after the commit, for model state that is not a KV cache.
    backend : {None, "cpu", "reference", "simt"}
        Forces the operators' backend.

    Returns
    -------
    Round
        Tokens, counts, times.

    Raises
    ------
    CapacityError
        Too few KV pages are free; nothing has happened. Remove or finish a request, repeat.
    ArgumentError
        The drafter lacks what the scheduler needs, or shapes disagree.

    Notes
    -----
    When the target (or a hook) raises, nothing is committed: the state is as before the call, and
    repeating the call draws the same random numbers.

    Examples
    --------
    A target of four tokens that always counts upwards, without a drafter:

    >>> import numpy as np
    >>> import dspark_ext as dx
    >>> class Counter:
    ...     def forward(self, token_ids, positions, plan, cache, *, logit_rows=None):
    ...         ids = token_ids if logit_rows is None else token_ids[logit_rows]
    ...         return np.eye(4, dtype=np.float32)[(ids + 1) % 4], None
    >>> state = dx.RoundState.create(1, gamma=2)
    >>> slot = state.add([0], dx.SamplingParams(max_new_tokens=3))
    >>> first = dx.prefill(Counter(), state)
    >>> rounds = [dx.decode_round(Counter(), None, state) for _ in range(2)]
    >>> [int(r.tokens[slot, 0]) for r in (first, *rounds)], int(rounds[-1].finish[slot])
    ([1, 2, 3], 2)
    """
    scheduler = Scheduler() if scheduler is None else scheduler
    clock = _Clock()
    slots = state.active_slots()
    if not slots:
        return _nothing(state, clock)
    scheduler.check_safe(state)
    state.reserve()
    draft = conf = None
    state.host.drafting[...] = 0
    if drafter is not None:
        state.host.drafting[...] = scheduler.drafting(state)
    if np.any(state.host.drafting):
        assert drafter is not None
        clock.lap("other")
        draft = draft_block(drafter, state, backend, state.host.drafting)
        clock.lap("draft")
        conf = _confidence(draft, scheduler, state, backend)
    plan = scheduler.plan(state, draft, conf, backend)
    clock.lap("schedule")

    drafts = state.no_drafts if draft is None else draft.tokens
    token_mask = None if mask is None else mask(plan, drafts)
    rows = int(plan.total_tokens)
    lengths = to_numpy(plan.length)
    per_slot = np.where(state.host.active != 0, 1 + lengths, 0)
    if state.target_pages is None and hasattr(target, "new_cache"):
        state.target_pages = target.new_cache(state.num_pages, state.page_size)
    cache = state.cache(state.target_pages, per_slot, int(per_slot.max()))
    assert plan.token_ids is not None and plan.positions is not None
    clock.lap("other")
    logits, features = target.forward(plan.token_ids[:rows], plan.positions[:rows], plan, cache)
    clock.lap("verify")
    _check_answer("decode_round", logits, rows, features, rows)
    law = _law(draft, drafter, state)
    result = _sample(logits, drafts, plan.length, plan.cu_seqlens, state, token_mask, law, backend)
    clock.lap("verify")
    answer = _commit(state, slots, result, lengths, draft, conf, plan, clock)
    if drafter is not None:
        _hand_over(state, features, plan.cu_seqlens, answer.num_emitted, taken=state.host.drafting)
    scheduler.observe(state, answer)
    if rollback is not None:
        rollback(answer.num_emitted)
    clock.lap("other")
    return answer


def prefill(
    target: Target,
    state: RoundState,
    slots: Sequence[int] | None = None,
    *,
    keep_features: bool = True,
    backend: str | None = None,
) -> Round:
    """Run whole prompts through the target and draw each request's first token.

    The first token is drawn like that of a round without drafts whose anchor is the prompt's last
    token, so that a seeded request continues as plain decoding would.

    Parameters
    ----------
    target : Target
        The model.
    state : RoundState
        Updated in place: the slots become active (unless the first token ends them).
    slots : sequence of int, optional
        Slots to prefill; all waiting ones when absent.
    keep_features : bool
        Hand the features to the drafter's next call. Plain decoding switches it off.
    backend : {None, "cpu", "reference", "simt"}
        Forces the operators' backend.

    Returns
    -------
    Round
        With one emitted token for each slot.

    Raises
    ------
    ArgumentError
        A slot that is not waiting.

    Examples
    --------
    See :func:`decode_round`.
    """
    clock = _Clock()
    chosen = state.waiting() if slots is None else list(slots)
    check = Checker("prefill")
    legal = set(chosen) <= set(state.waiting()) and len(set(chosen)) == len(chosen)
    check.require(legal, "slots", repr(chosen), f"distinct waiting slots of {state.waiting()}")
    check.done()
    if not chosen:
        return _nothing(state, clock)
    batch = sorted(chosen)
    plan, ids, positions, last = _prompt_plan(state, batch)
    if state.target_pages is None and hasattr(target, "new_cache"):
        state.target_pages = target.new_cache(state.num_pages, state.page_size)
    counts = np.diff(to_numpy(plan.cu_seqlens))
    cache = state.cache(state.target_pages, counts, int(counts.max()))
    clock.lap("other")
    logits, features = target.forward(ids, positions, plan, cache, logit_rows=last)
    clock.lap("verify")
    _check_answer("prefill", logits, len(batch), features, int(counts.sum()))
    state.start_counting(batch, logits.shape[1])
    taking_part = np.zeros(state.max_requests, dtype=np.uint8)
    taking_part[batch] = 1
    one_each = np.concatenate(([0], np.cumsum(taking_part))).astype(np.int32)
    no_length = np.zeros(state.max_requests, dtype=np.int32)
    result = _sample(
        logits, state.no_drafts, no_length, state.array(one_each), state, None, {}, backend,
        active=taking_part,
    )  # fmt: skip
    # From here on the prompt is history: the anchor is the drawn token, behind the whole prompt.
    state.host.active[batch] = 1
    state.host.kv_len[batch] = counts[batch] - 1
    answer = _commit(state, batch, result, no_length, None, None, None, clock)
    if keep_features:
        _hand_over(state, features, plan.cu_seqlens, counts)
    clock.lap("other")
    return answer


def _check_answer(function: str, logits: Any, rows: int, features: Any, tokens: int) -> None:
    """Refuse what a target returned when it does not fit the rows it was given."""
    check = Checker(function)
    ok = len(logits.shape) == 2 and logits.shape[0] == rows
    check.require(ok, "target.forward: logits", logits, f"[{rows}, V]")
    if features is not None:
        ok = len(features.shape) == 2 and features.shape[0] == tokens
        check.require(ok, "target.forward: features", features, f"[{tokens}, m * d] or None")
    check.done()


def _prompt_plan(state: RoundState, slots: list[int]) -> tuple[Plan, Any, Any, Any]:
    """Lay out whole prompts like a round's rows; also ids, positions, last row of each prompt."""
    prompts = [state.prompts[r] for r in slots]
    counts = np.zeros(state.max_requests, dtype=np.int32)
    counts[slots] = [0 if p is None else len(p) for p in prompts]
    cu_seqlens = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    ids = np.concatenate([p for p in prompts if p is not None])
    offsets = np.concatenate([np.arange(n, dtype=np.int32) for n in counts[slots]])
    owners = np.repeat(np.arange(state.max_requests, dtype=np.int32), counts)
    last = (cu_seqlens[np.asarray(slots) + 1] - 1).astype(np.int64)
    ids_array, positions = state.array(ids), state.array(offsets.astype(np.int64))
    zeros = np.zeros(state.max_requests, dtype=np.int32)
    plan = Plan(
        length=state.array(np.maximum(counts - 1, 0)),
        cu_seqlens=state.array(cu_seqlens),
        total_tokens=np.array(len(ids), dtype=np.int32),
        theta=np.array(np.nan),
        row_to_request=state.array(owners),
        row_offset=state.array(offsets),
        token_ids=ids_array,
        positions=positions,
        work=None,
        status=state.array(zeros),
    )
    return plan, ids_array, positions, state.array(last)


def draft_block(
    drafter: Drafter, state: RoundState, backend: str | None = None, slots: Any = None
) -> Draft:
    """Run the drafter and the sequential head: the proposals of one round.

    ``slots`` [R], when given, says which of the active slots draft; the others' rows hold anything.
    """
    with state.only(state.host.active if slots is None else slots):
        return _draft_block(drafter, state, backend)


def _draft_block(drafter: Drafter, state: RoundState, backend: str | None) -> Draft:
    if state.drafter_pages is None and hasattr(drafter, "new_cache"):
        state.drafter_pages = drafter.new_cache(state.num_pages, state.page_size)
    new = state.pending_features(state.host.active)
    base, hidden = drafter.draft(state.anchor, state.position, new, state)
    check = Checker("decode_round")
    expected = f"[{state.max_requests}, {state.gamma}, V_d], the state's requests and gamma"
    check.require(
        base.shape[:2] == (state.max_requests, state.gamma), "base_logits", base, expected
    )
    check.done()
    head: DraftHead = drafter.head
    host = state.host
    # The kernels draw from the full law: a truncated target then refuses some more drafts.
    full = backend in ("cuda", "simt") or (backend is None and on_device(base))
    return markov_loop(
        base,
        head.w1,
        head.w2,
        anchor=state.anchor,
        seed=host.seed,
        position=state.position,
        temperature=host.draft_temperature,
        head=head.kind,
        head_weight=head.weight,
        head_bias=head.bias,
        hidden=hidden if head.kind != "vanilla" or head.confidence_weight is not None else None,
        confidence_weight=head.confidence_weight,
        confidence_bias=head.confidence_bias if head.confidence_weight is not None else None,
        w2_scale=head.w2_scale,
        top_k=host.top_k if np.any(host.top_k) and not full else None,
        top_p=host.top_p if np.any(host.top_p < 1) and not full else None,
        draft_to_target=head.draft_to_target,
        active=host.active,
        topk_support=head.topk_support,
        store_logits=_needs_law(state) and not head.topk_support,
        backend=backend,
    )


def _needs_law(state: RoundState) -> bool:
    """Whether some request verifies against a law that is not one-hot."""
    return bool(np.any(state.sampled_drafts()))


def _law(draft: Draft | None, drafter: Drafter | None, state: RoundState) -> dict[str, Any]:
    """Arguments of ``rejection_sample`` that describe the draft's law; none of them = one-hot."""
    # A gate may leave out every sampled request: then no law was kept, and none is needed.
    sampled = state.sampled_drafts() & (state.host.drafting != 0)
    if draft is None or drafter is None or not sampled.any():
        return {}
    law = {
        "draft_logit": draft.logit,
        "draft_lse": draft.lse,
        "draft_temperature": state.host.draft_temperature,
    }
    if drafter.head.topk_support:
        return law | {"support_ids": draft.support_ids, "support_logits": draft.support_logits}
    return law | {
        "draft_logits": draft.logits,
        "draft_to_target": drafter.head.draft_to_target,
    }


def _confidence(
    draft: Draft, scheduler: Scheduler, state: RoundState, backend: str | None
) -> Confidence | None:
    drafting = state.host.drafting
    if scheduler.confidence is not None:
        given = scheduler.confidence.conditional(state, draft)
        if isinstance(given, np.ndarray) and given.dtype.kind in "biuf":
            given = state.array(np.ascontiguousarray(given, dtype=np.float32))
        check, shape = Checker("decode_round"), (state.max_requests, state.gamma)
        name = f"{type(scheduler.confidence).__name__}.conditional"
        fits = getattr(given, "shape", None) == shape and dtype_name(given) == "float32"
        check.require(fits, name, given, f"an array of numbers {list(shape)}, [R, gamma]")
        check.done()
        return _known_rows(confidence(probability=given, active=drafting, backend=backend), state)
    if draft.confidence_logit is None:
        if scheduler.needs_confidence:
            raise ArgumentError(
                "decode_round: 1 problem\n  scheduler: got mode "
                f"{scheduler.mode!r} with a drafter without confidence head, expected 'off' or "
                "'fixed'"
            )
        return None
    logit, tau = draft.confidence_logit, scheduler.temperatures(state)
    if tau is not None and tau.ndim == 2:  # one row a slot: by rule and temperature
        logit, tau = logit / state.array(tau), None
    return _known_rows(confidence(logit, tau, active=drafting, backend=backend), state)


def _known_rows(found: Confidence, state: RoundState) -> Confidence:
    """Zeros for slots without a draft: the operator leaves their rows as the memory was."""
    idle = np.flatnonzero(state.host.drafting == 0)
    for part in (found.conditional, found.survival) if idle.size else ():
        part[idle] = 0
    return found


def _sample(
    logits: Any, drafts: Any, length: Any, cu_seqlens: Any, state: RoundState, token_mask: Any,
    law: dict[str, Any], backend: str | None, active: Any = None,
) -> Verification:  # fmt: skip
    """Verify and emit, with the parameters of the state."""
    host = state.host
    return rejection_sample(
        logits,
        drafts,
        draft_len=length,
        cu_seqlens=cu_seqlens,
        seed=host.seed,
        position=state.position,
        temperature=host.temperature,
        top_k=host.top_k if np.any(host.top_k) else None,
        top_p=host.top_p if np.any(host.top_p < 1) else None,
        min_p=host.min_p if np.any(host.min_p) else None,
        token_mask=token_mask,
        rule=host.rule,
        synthetic_acceptance=host.synthetic_acceptance,
        stop_ids=state.stop_ids,
        max_new_tokens=host.left,
        active=host.active if active is None else active,
        backend=backend,
        **state.penalties(),
        **law,
    )


def _commit(
    state: RoundState, slots: list[int], result: Verification, lengths: NDArray[np.int32],
    draft: Draft | None, conf: Confidence | None, plan: Plan | None, clock: _Clock,
) -> Round:  # fmt: skip
    """Move the state forward by what was emitted."""
    host, index = state.host, np.asarray(slots)
    drafting = host.drafting != 0 if draft is not None else np.zeros(state.max_requests, bool)
    emitted = _rows(result.num_emitted, index, state, 0)
    finish = _rows(result.finish, index, state, 0)
    status = _rows(result.status, index, state, 0)
    for part in (draft, conf, plan):
        if part is not None:
            rows = index if part is plan else np.flatnonzero(drafting)
            status[rows] |= to_numpy(part.status)[rows]
    host.anchor[index] = to_numpy(result.next_anchor)[index]
    host.left[index] -= emitted[index]
    host.min_tokens[index] = np.maximum(host.min_tokens[index] - emitted[index], 0)
    state.count_output(index, to_numpy(result.tokens)[index])
    paged_kv_commit(host.kv_len, host.position, emitted, active=host.active)
    done = index[finish[index] != 0]
    host.active[done] = 0
    state.finish[done] = finish[done]
    if conf is not None:
        state.history.push(to_numpy(conf.survival), np.flatnonzero(drafting).tolist())
    passed_over = drafting & (host.max_draft > 0) & (lengths == 0)
    host.starved[...] = np.where(drafting, (host.starved + 1) * passed_over, host.starved)
    state.rounds += 1
    taken_part = np.zeros(state.max_requests, dtype=np.int32)
    taken_part[index] = lengths[index]
    clock.lap("other")
    return Round(
        slots=tuple(slots),
        drafted=draft is not None,
        proposed=(drafting * state.gamma).astype(np.int32),
        length=taken_part,
        num_accepted=_rows(result.num_accepted, index, state, 0),
        num_emitted=emitted,
        tokens=_rows(result.tokens, index, state, -1),
        accepted=_rows(result.accepted, index, state, -2),
        logprob=_rows(result.logprob, index, state, 0),
        finish=finish,
        status=status,
        confidence=conf,
        draft=draft,
        plan=plan,
        seconds=clock.seconds,
    )


def _rows(x: Any, index: NDArray[Any], state: RoundState, fill: int) -> NDArray[Any]:
    """Copy the rows of the slots that took part; the others hold ``fill``."""
    values = to_numpy(x)
    out = np.full((state.max_requests, *values.shape[1:]), fill, dtype=values.dtype)
    out[index] = values[index]
    return out


def _hand_over(
    state: RoundState, features: Any, cu_seqlens: Any, num_new: NDArray[Any],
    *, taken: NDArray[Any] | None = None,
) -> None:  # fmt: skip
    """Pass the features of committed rows to the next call; ``taken``: slots that just drafted."""
    if taken is not None:
        state.features_taken(taken)
    if features is None:
        return
    alive = np.where(state.host.active != 0, num_new, 0).astype(np.int32)
    state.hand_over(NewFeatures(features, np.array(to_numpy(cu_seqlens)), alive))


def _nothing(state: RoundState, clock: _Clock) -> Round:
    """Return the result of a round without active requests."""
    requests, gamma = state.max_requests, state.gamma
    zeros = np.zeros(requests, dtype=np.int32)
    return Round(
        slots=(),
        drafted=False,
        proposed=zeros,
        length=zeros,
        num_accepted=zeros,
        num_emitted=zeros,
        tokens=np.full((requests, gamma + 1), -1, dtype=np.int32),
        accepted=np.full((requests, gamma), -2, dtype=np.int8),
        logprob=np.zeros((requests, gamma + 1), dtype=np.float32),
        finish=zeros,
        status=zeros,
        confidence=None,
        draft=None,
        plan=None,
        seconds=clock.seconds,
    )
