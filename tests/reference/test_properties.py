# SPDX-License-Identifier: Apache-2.0
"""What must hold for any input: shapes of results, invariances, and agreement with brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_ext.reference.markov_loop import markov_loop
from dspark_ext.reference.prefix_scheduler import MODES, prefix_schedule
from dspark_ext.reference.rejection_sampler import rejection_sample
from dspark_ext.status import Status

SEEDS = st.integers(0, 2**32 - 1)
ANY = settings(max_examples=25, deadline=None, derandomize=True)


def _verification(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """A batch of anything: broken logits, bad ids, every rule, stops and caps."""
    requests, gamma = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    vocab = int(rng.choice([2, 5, 130]))
    lengths = rng.integers(0, gamma + 1, requests)
    logits = rng.normal(size=(int((lengths + 1).sum()), vocab)) * rng.choice([0.3, 2.0])
    logits[rng.random(logits.shape) < 0.05] = rng.choice([np.nan, np.inf, -np.inf])
    drafts = rng.integers(0, vocab, (requests, gamma))
    drafts[rng.random(drafts.shape) < 0.1] = rng.choice([-1, vocab])
    arguments: dict[str, Any] = {
        "draft_len": lengths,
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths + 1)]),
        "seed": rng.integers(0, 2**63, requests),
        "position": rng.integers(0, 999, requests),
        "temperature": rng.choice([0.0, 0.7, 1.0], requests),
        "rule": rng.choice([0, 1, 3], requests),
        "top_p": rng.uniform(0.2, 1.0, requests),
        "stop_ids": rng.integers(-1, vocab, (requests, 1)),
        "max_new_tokens": rng.integers(0, gamma + 3, requests),
    }
    if rng.random() < 0.5:
        law = rng.normal(size=(requests, gamma, vocab))
        law[rng.random(law.shape) < 0.1] = rng.choice([np.nan, -np.inf])
        picked = np.take_along_axis(law, np.clip(drafts, 0, vocab - 1)[..., None], 2)[..., 0]
        lse = np.log(np.exp(np.nan_to_num(law, nan=0.0)).sum(axis=2))
        arguments |= {"draft_logits": law, "draft_logit": picked, "draft_lse": lse}
    return logits, drafts, arguments


@ANY
@given(SEEDS)
def test_verification_results_are_consistent(seed: int) -> None:
    logits, drafts, arguments = _verification(np.random.default_rng(seed))
    out = rejection_sample(logits, drafts, **arguments)
    for r, length in enumerate(arguments["draft_len"]):
        n, accepted = int(out.num_emitted[r]), int(out.num_accepted[r])
        tokens, flags = out.tokens[r], out.accepted[r].tolist()
        cap = int(arguments["max_new_tokens"][r])
        assert (tokens[n:] == -1).all()
        assert ((tokens[:n] >= 0) & (tokens[:n] < logits.shape[1])).all()
        assert flags[:accepted] == [1] * accepted
        assert tokens[:accepted].tolist() == drafts[r, :accepted].tolist()
        assert 1 not in flags[accepted:]
        assert all(flag == -2 for flag in flags[length:])
        if 0 in flags:
            first = flags.index(0)
            assert first == accepted == n - 1
            assert flags[first + 1 : length] == [-1] * (length - first - 1)
        else:
            assert -1 not in flags
        if cap == 0:
            assert n == 0
            continue
        assert 1 <= n <= min(cap, length + 1)
        assert out.next_anchor[r] == tokens[n - 1]
        stop = int(arguments["stop_ids"][r, 0])
        assert stop not in tokens[: n - 1].tolist() or stop < 0
        want = 1 if tokens[n - 1] == stop else 2 if n == cap else 0
        assert out.finish[r] == want
        assert bool(out.status[r] & Status.STOPPED) == (want > 0)
        if not out.status[r] & Status.EMPTY_SUPPORT:
            assert np.isfinite(out.logprob[r, :n]).all()
            assert (out.logprob[r, :n] <= 1e-6).all()


@ANY
@given(SEEDS)
def test_verification_does_not_see_the_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, drafts, arguments = _verification(rng)
    whole = rejection_sample(logits, drafts, **arguments)
    first = arguments["cu_seqlens"]
    for r in range(len(drafts)):
        alone = {k: v[r : r + 1] for k, v in arguments.items() if k != "cu_seqlens"}
        rows = np.pad(logits[first[r] : first[r + 1]], ((1, 2), (0, 130)), constant_values=1e4)
        got = rejection_sample(
            rows,
            drafts[r : r + 1],
            **alone,
            cu_seqlens=[1, len(rows) - 2],
            vocab_size=logits.shape[1],
        )
        for name in ("tokens", "accepted", "status", "logprob", "logprob_raw", "finish"):
            np.testing.assert_array_equal(getattr(got, name)[0], getattr(whole, name)[r])


def _model_row(context: list[int], vocab: int) -> np.ndarray:
    """Logits of a made-up language model: a function of the last two tokens."""
    return np.random.default_rng([len(context) % 3, *context[-2:]]).normal(size=vocab) * 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_match_and_greedy_equal_plain_decoding_for_any_lengths(temperature: float) -> None:
    vocab, total, seed, prompt = 40, 60, 99, [3, 1]

    def decode(gammas: list[int]) -> list[int]:
        rng, tokens, n = np.random.default_rng(sum(gammas)), list(prompt), 0
        while len(tokens) < total:
            gamma = gammas[n % len(gammas)]
            drafts: list[int] = []
            rows = [_model_row(tokens, vocab)]
            for _ in range(gamma):  # a drafter that is right most of the time
                right = int(np.argmax(rows[-1]))
                drafts.append(right if rng.random() < 0.7 else int(rng.integers(vocab)))
                rows.append(_model_row(tokens + drafts, vocab))
            out = rejection_sample(
                np.array(rows),
                np.array([[*drafts, *[-1] * (4 - gamma)]]),
                draft_len=[gamma],
                cu_seqlens=[0, gamma + 1],
                seed=[seed],
                position=[len(tokens) - 1],
                temperature=temperature,
                rule="match",
            )
            tokens += out.tokens[0, : out.num_emitted[0]].tolist()
            n += 1
        return tokens[:total]

    plain = decode([0])
    assert decode([4]) == plain
    assert decode([1, 3, 0, 2]) == plain


@ANY
@given(SEEDS)
def test_draft_tokens_do_not_depend_on_what_comes_behind(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab, gamma = int(rng.choice([4, 129])), 5
    u = rng.normal(size=(1, gamma, vocab))
    where = {"anchor": [1], "seed": [seed], "position": [3], "temperature": 1.0}
    w1, w2 = rng.normal(size=(2, vocab, 3))
    whole = markov_loop(u, w1, w2, **where)
    for k in range(1, gamma):
        changed = u.copy()
        changed[:, k:] = rng.normal(size=changed[:, k:].shape)
        got = markov_loop(changed, w1, w2, **where)
        assert got.tokens[0, :k].tolist() == whole.tokens[0, :k].tolist()


def _schedule(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    requests, gamma = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    a = rng.choice([0.0, 0.3, 0.5, 0.5, 0.9, 1.0], (requests, gamma))
    if rng.random() < 0.5:
        a = rng.uniform(-0.1, 1.1, (requests, gamma))
    arguments: dict[str, Any] = {
        "min_len": rng.integers(0, 2, requests),
        "max_len": rng.integers(0, gamma + 1, requests),
        "weight": rng.choice([0.0, 0.5, 1.0, 3.0], requests),
        "active": rng.random(requests) < 0.8,
        "capacity": int(rng.integers(requests, requests * (gamma + 1) + 2)),
        "cost": np.cumsum(rng.uniform(0.01, 1.0, int(rng.integers(2, 30)))),
    }
    return a, arguments


@ANY
@given(SEEDS, st.sampled_from(MODES))
def test_schedules_are_prefixes_within_their_limits(seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    a, arguments = _schedule(rng)
    requests, gamma = a.shape
    extra: dict[str, Any] = {
        "two_phase": {"lagged": rng.uniform(0, 1, a.shape)},
        "threshold": {"conditional": rng.uniform(0, 1, a.shape), "threshold": 0.4},
        "fixed": {"fixed_len": int(rng.integers(0, gamma + 1))},
    }.get(mode, {})
    plan = prefix_schedule(a, mode=mode, **arguments, **extra)
    on, length = arguments["active"], plan.length
    assert (length[~on] == 0).all()
    assert (length <= arguments["max_len"]).all()
    assert int(plan.total_tokens) == int((1 + length)[on].sum()) == int(plan.cu_seqlens[-1])
    assert int(plan.total_tokens) <= max(arguments["capacity"], int(on.sum()))
    for r in range(requests):
        rows = np.flatnonzero(plan.row_to_request == r)
        assert plan.row_offset[rows].tolist() == (list(range(length[r] + 1)) if on[r] else [])
        assert rows.tolist() == list(range(plan.cu_seqlens[r], plan.cu_seqlens[r + 1]))


@ANY
@given(SEEDS)
def test_full_search_finds_the_best_batch(seed: int) -> None:
    """On equal weights, no schedule of any lengths beats the searched one."""
    rng = np.random.default_rng(seed)
    a = np.minimum.accumulate(rng.uniform(0, 1, (2, 3)), axis=1)
    cost = np.cumsum(rng.uniform(0.1, 1.0, 9))
    found = prefix_schedule(a, cost, mode="two_phase", lagged=a)
    best = 0.0
    for i in range(4):
        for j in range(4):
            tau = 2 + a[0, :i].sum() + a[1, :j].sum()
            best = max(best, tau * 1000 / cost[2 + i + j])
    assert float(found.theta) == pytest.approx(best, rel=1e-6)
    assert float(prefix_schedule(a, cost).theta) <= best * (1 + 1e-6)


@ANY
@given(SEEDS)
def test_causal_admission_ignores_what_is_ranked_behind(seed: int) -> None:
    """Changing survivals behind the admitted set's stop, downwards, never changes a length."""
    rng = np.random.default_rng(seed)
    a = np.minimum.accumulate(rng.uniform(0, 1, (3, 4)), axis=1)
    cost = np.cumsum(rng.uniform(0.1, 1.0, 16))
    plan = prefix_schedule(a, cost)
    lower = a.copy()
    for r, n in enumerate(plan.length):
        lower[r, n + 1 :] *= rng.uniform(0, 1)
    assert prefix_schedule(lower, cost).length.tolist() == plan.length.tolist()
