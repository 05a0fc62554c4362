# SPDX-License-Identifier: Apache-2.0
"""What must hold for any call on any backend: random laws, masks, lengths, paddings and dtypes.

The calls of the fixture ``for_any_call`` mix rules, laws, processors and broken input in one batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx
from dspark_ext import Status
from dspark_ext.results import Verification

FIELDS = (
    "num_accepted", "num_emitted", "tokens", "next_anchor", "logprob", "logprob_raw", "accepted",
    "finish", "status",
)  # fmt: skip
LISTS = ("top_ids", "top_logprob", "top_ids_raw", "top_logprob_raw")
SHARED = ("vocab_size", "draft_to_target", "top_logprobs")
PER_SLOT = ("draft_logit", "draft_lse", "draft_logits", "support_ids", "support_logits")

Call = tuple[Any, Any, dict[str, Any]]


def run(call: Call, backend: str) -> Verification:
    with np.errstate(all="ignore"):  # the reference meets infinities on purpose
        return dx.rejection_sample(call[0], call[1], **call[2], backend=backend)


def active(call: Call) -> np.ndarray:
    return np.flatnonzero(np.asarray(call[2].get("active", np.ones(len(call[1])))))


def spans(call: Call) -> list[slice]:
    """Rows of each request; none where its offsets leave the array or fall."""
    first = np.asarray(call[2]["cu_seqlens"])
    return [
        slice(a, b) if 0 <= a <= b <= len(call[0]) else slice(0, 0)
        for a, b in itertools.pairwise(first.tolist())
    ]


def is_ragged(mask: Any) -> bool:
    return mask is not None and mask.ndim == 2


def select(call: Call, order: Any, *, lead: int = 0, columns: int = 0, slots: int = 0) -> Call:
    """The requests ``order`` of a call, in other surroundings.

    ``lead`` foreign rows stand in front, rows have ``columns`` more columns, and every array over
    drafts has ``slots`` more slots; all of it is filled with what would show.
    """
    target, drafts, given = call
    at = spans(call)
    rows = np.concatenate([np.arange(at[r].start, at[r].stop) for r in order])
    wide = np.full((lead + len(rows), target.shape[1] + columns), 1e4, target.dtype)
    wide[lead:, : target.shape[1]] = target[rows]
    counts = [at[r].stop - at[r].start for r in order]
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in SHARED or isinstance(value, str) or np.ndim(value) == 0:
            out[name] = value
        elif name == "cu_seqlens":
            out[name] = lead + np.concatenate([[0], np.cumsum(counts)])
        elif name == "token_mask" and is_ragged(value):
            out[name] = np.concatenate([np.zeros((lead, value.shape[1]), value.dtype), value[rows]])
        elif name == "stop_ids" and value.ndim == 1:
            out[name] = value
        else:
            out[name] = np.asarray(value)[order]
        if slots and (name in PER_SLOT or (name == "token_mask" and not is_ragged(value))):
            more = [(0, slots) if axis == 1 else (0, 0) for axis in range(value.ndim)]
            out[name] = np.pad(out[name], more, constant_values=0)
    return wide, np.pad(drafts[order], ((0, 0), (0, slots)), constant_values=0), out


def assert_same(got: Verification, want: Verification, of: Any, rows: Any) -> None:
    """Requests ``rows`` of one result are requests ``of`` of another, bit for bit."""
    for name in (*FIELDS, *LISTS):
        a, b = getattr(got, name), getattr(want, name)
        if b is None:
            continue
        a, b = np.asarray(a)[rows], np.asarray(b)[of]
        a = a[:, : b.shape[1]] if b.ndim > 1 else a
        np.testing.assert_array_equal(a, b, name)


def test_requests_do_not_see_their_surroundings(for_any_call: Any, backend: str) -> None:
    """Another order, other neighbours, other offsets, wider rows and more slots: the same bits."""

    def check(rng: np.random.Generator, call: Call) -> None:
        whole, on = run(call, backend), active(call)
        order = rng.permutation(on)[: int(rng.integers(1, len(on) + 1))] if len(on) else on
        if not len(order):
            return
        more = {
            "lead": int(rng.integers(0, 4)),
            "columns": int(rng.integers(0, 140)),
            "slots": int(rng.integers(0, 3)),
        }
        assert_same(run(select(call, order, **more), backend), whole, order, np.arange(len(order)))

    for_any_call(check)


def test_trouble_stays_with_its_request(for_any_call: Any, backend: str) -> None:
    """One request gets rows, a law and drafts that are all broken: the others keep their bits."""

    def check(rng: np.random.Generator, call: Call) -> None:
        target, drafts, given = select(call, np.arange(len(call[1])))
        bad, on = int(rng.integers(len(drafts))), active(call)
        broken = dict(given)
        rows = target.copy()
        value = rng.choice([np.nan, np.inf, -np.inf])
        rows[spans((target, drafts, given))[bad]] = value
        for name in ("draft_logit", "draft_lse", "draft_logits"):
            if name in given:
                broken[name] = given[name].copy()
                broken[name][bad] = value
        ids = drafts.copy()
        ids[bad] = rng.choice([-1, target.shape[1] + 5, 2**40])
        others = on[on != bad]
        want = run((target, drafts, given), backend)
        assert_same(run((rows, ids, broken), backend), want, others, others)

    for_any_call(check)


def test_results_are_consistent(for_any_call: Any, backend: str) -> None:
    """Counts, flags, padding, finish reasons and log-probabilities tell one story."""

    def check(rng: np.random.Generator, call: Call) -> None:
        got = run(call, backend)
        cap = np.broadcast_to(call[2].get("max_new_tokens", 99), len(call[1]))
        stops = call[2].get("stop_ids")
        for r in active(call):
            of_r = stops if stops is None or stops.ndim == 1 else stops[r]
            check_request(got, call, int(r), int(cap[r]), [] if of_r is None else of_r.tolist())

    for_any_call(check)


def check_request(got: Verification, call: Call, r: int, cap: int, stops: list[int]) -> None:
    n, accepted = int(got.num_emitted[r]), int(got.num_accepted[r])
    tokens, flags = got.tokens[r].tolist(), got.accepted[r].tolist()
    rows = spans(call)[r]
    assert tokens[n:] == [-1] * (len(tokens) - n)
    assert not got.logprob[r, n:].any() and not got.logprob_raw[r, n:].any()
    assert all(0 <= x < call[2]["vocab_size"] for x in tokens[:n])
    assert flags[:accepted] == [1] * accepted and 1 not in flags[accepted:]
    assert tokens[:accepted] == call[1][r, :accepted].tolist()
    if n == 0:
        assert cap == 0 or rows.stop == rows.start
        assert got.next_anchor[r] == -1 and got.finish[r] == 0
        return
    assert n <= min(cap, rows.stop - rows.start) and n - accepted in (0, 1)
    assert got.next_anchor[r] == tokens[n - 1]
    assert not set(tokens[: n - 1]) & (set(stops) - {-1})
    ended = 1 if tokens[n - 1] in stops else 2 if n == cap else 0
    assert got.finish[r] == ended and bool(got.status[r] & Status.STOPPED) == (ended > 0)
    if 0 in flags:
        assert flags.index(0) == accepted == n - 1
    else:
        assert -1 not in flags
    if not got.status[r] & (Status.EMPTY_SUPPORT | Status.SYNTHETIC):
        assert np.isfinite(got.logprob[r, :n]).all() and (got.logprob[r, :n] <= 1e-6).all()


def test_emitted_ids_are_allowed(for_any_call: Any, backend: str) -> None:
    """By the mask, by min-tokens, by the row itself and by top-k; not where nothing is allowed."""

    def check(rng: np.random.Generator, call: Call) -> None:
        got, given = run(call, backend), call[2]
        for r in active(call):
            if got.status[r] & (Status.EMPTY_SUPPORT | Status.SYNTHETIC):
                continue
            for i, token in enumerate(got.tokens[r, : got.num_emitted[r]]):
                assert_allowed(call, int(r), i, int(token))
                if "top_k" in given and got.num_emitted[r]:
                    assert rank_of(call, int(r), i, int(token)) < top_k_of(given, int(r))

    for_any_call(check)


def assert_allowed(call: Call, r: int, i: int, token: int) -> None:
    target, _, given = call
    row = int(given["cu_seqlens"][r]) + i
    x = float(target[row, token])
    assert x > -np.inf  # neither NaN nor -inf
    mask, floor = given.get("token_mask"), given.get("min_tokens_left")
    if mask is not None:
        words = mask[row] if is_ragged(mask) else mask[r, i]
        assert int(words[token >> 5]) >> (token & 31) & 1
    if floor is not None and i < floor[r] and "stop_ids" in given:
        stops = given["stop_ids"]
        assert token not in (stops if stops.ndim == 1 else stops[r])


def top_k_of(given: dict[str, Any], r: int) -> float:
    """No bound where another processor orders the row or the request is greedy."""
    ordered = any("penalty" in name or name == "logit_bias" for name in given)
    k = int(given["top_k"][r])
    return np.inf if ordered or k <= 0 or given["temperature"][r] == 0 else k


def rank_of(call: Call, r: int, i: int, token: int) -> int:
    """How many allowed ids stand before a token in the order (logit descending, id ascending)."""
    target, _, given = call
    row = int(given["cu_seqlens"][r]) + i
    x = np.minimum(target[row, : given["vocab_size"]], np.finfo(target.dtype).max)
    before = (x > x[token]) | ((x == x[token]) & (np.arange(len(x)) < token))
    mask, floor = given.get("token_mask"), given.get("min_tokens_left")
    if mask is not None:
        words = mask[row] if is_ragged(mask) else mask[r, i]
        ids = np.arange(len(x))
        before &= (words.view(np.uint32)[ids >> 5] >> (ids & 31).astype(np.uint32) & 1) == 1
    if floor is not None and i < floor[r] and "stop_ids" in given:
        stops = given["stop_ids"] if given["stop_ids"].ndim == 1 else given["stop_ids"][r]
        before &= ~np.isin(np.arange(len(x)), stops)
    return int(before.sum())


def test_padded_and_ragged_masks_are_one(for_any_call: Any, backend: str) -> None:
    def check(rng: np.random.Generator, call: Call) -> None:
        target, drafts, given = select(call, np.arange(len(call[1])))
        requests, gamma = drafts.shape
        words = -(-given["vocab_size"] // 32)
        padded = rng.integers(0, 2**32, (requests, gamma + 1, words), dtype=np.uint64)
        padded = padded.astype(np.uint32).view(np.int32)
        ragged = np.zeros((len(target), words + 1), np.int32)  # a stride of its own
        for r, rows in enumerate(spans((target, drafts, given))):
            n = min(rows.stop - rows.start, gamma + 1)
            ragged[rows.start : rows.start + n, :words] = padded[r, :n]
        want = run((target, drafts, given | {"token_mask": padded}), backend)
        got = run((target, drafts, given | {"token_mask": ragged}), backend)
        assert_same(got, want, active(call), active(call))

    for_any_call(check)


def test_processors_that_do_nothing_change_nothing(for_any_call: Any, backend: str) -> None:
    """A mask of ones, a bias of zeros, penalties and truncations that are off."""

    def check(rng: np.random.Generator, call: Call) -> None:
        target, drafts, given = call
        requests, vocab = len(drafts), given["vocab_size"]
        words = -(-vocab // 32)
        neutral: dict[str, Any] = {
            "token_mask": np.full((len(target), words), -1, np.int32),
            "logit_bias": np.zeros((requests, vocab), np.float32),
            "top_k": np.full(requests, rng.choice([0, -1])),
            "top_p": np.ones(requests, np.float32),
            "min_p": np.zeros(requests, np.float32),
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens_left": np.zeros(requests, np.int32),
        }
        added = {k: v for k, v in neutral.items() if k not in given and rng.random() < 0.7}
        got, want = run((target, drafts, given | added), backend), run(call, backend)
        for name in ("tokens", "accepted", "num_emitted", "status", "logprob", "logprob_raw"):
            a, b = getattr(got, name)[active(call)], getattr(want, name)[active(call)]
            if "logprob" in name:
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(a, b, name)

    for_any_call(check)


def test_dtypes_and_strides_hold_the_same_numbers(for_any_call: Any, backend: str) -> None:
    """bf16 and f16 rows decide like f32 rows of the same values, whatever lies between rows.

    But for infinities, which count as the largest finite value of their own dtype.
    """
    torch = pytest.importorskip("torch")

    def check(rng: np.random.Generator, call: Call) -> None:
        target, drafts, given = call
        kind = [torch.bfloat16, torch.float16][int(rng.integers(2))]

        def narrow(x: np.ndarray) -> Any:
            finite = np.where(x == np.inf, np.float32(99), x.astype(np.float32))
            return torch.from_numpy(finite).to(kind)

        def strided(x: Any, gap: int) -> Any:
            wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), float("nan"), dtype=x.dtype)
            wide[..., : x.shape[-1]] = x
            return wide[..., : x.shape[-1]]

        law = {k: narrow(given[k]) for k in ("draft_logits", "support_logits") if k in given}
        given = {
            k: torch.from_numpy(v) if isinstance(v, np.ndarray) and k != "seed" else v
            for k, v in given.items()
        }
        full = "draft_logits" in law
        small = {k: strided(v, int(rng.integers(0, 9))) if full else v for k, v in law.items()}
        rows = narrow(target)
        wide = {k: v.float() for k, v in law.items()}
        got = run((strided(rows, 3), torch.from_numpy(drafts), given | small), backend)
        want = run((rows.float(), torch.from_numpy(drafts), given | wide), backend)
        assert_same(got, want, active(call), active(call))

    for_any_call(check)


def test_kernels_and_the_reference_agree(
    for_any_call: Any, assert_like_reference: Any, backend: str
) -> None:
    for_any_call(lambda _, call: assert_like_reference(run(call, backend), call))
