# SPDX-License-Identifier: Apache-2.0
"""Verification cases with known right answers: rule, ties, processors, stops, broken input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_ext.reference.enumeration import exact_law
from dspark_ext.reference.rejection_sampler import rejection_sample
from dspark_ext.status import Status

U53_MAX = 2**53 - 1


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, dtype=np.float64))


def verify(
    rows: Any, drafts: Any, q: Any = None, *, t: Any = 1.0, lens: Any = None, **more: Any
) -> Any:
    """One request, laws given as probabilities; q [gamma, V] becomes a stored full law."""
    drafts = np.atleast_2d(drafts)
    length = drafts.shape[1] if lens is None else lens
    arguments: dict[str, Any] = {
        "draft_len": [length],
        "cu_seqlens": [0, len(rows)],
        "seed": [7],
        "position": [40],
        "temperature": t,
    }
    if q is not None:
        stored = log(q)[None]
        columns = np.maximum(drafts, 0)[..., None]
        arguments |= {
            "draft_logits": stored,
            "draft_logit": np.take_along_axis(stored, columns, 2)[..., 0],
            "draft_lse": np.zeros(drafts.shape),
        }
    return rejection_sample(log(rows), drafts, **{**arguments, **more})


def first_token_law(rows: Any, drafts_law: Any, q: Any, **more: Any) -> np.ndarray:
    """Exact law of the first emitted token, over the draft's law and every decision."""
    rows = np.asarray(rows, dtype=np.float64)
    total = np.zeros(rows.shape[1])
    for draft, mass in enumerate(drafts_law):
        if mass:
            law = exact_law(
                lambda draws, d=draft: int(verify(rows, [d], q, draws=[draws], **more).tokens[0, 0])
            )
            for token, probability in law.items():
                total[token] += mass * probability
    return total


def test_v1_t1_the_rule_itself() -> None:
    p, q = [0.7, 0.3], [0.5, 0.5]
    rows = [p, p]
    for draft, accept in ((0, 1.0), (1, 0.6)):
        law = exact_law(
            lambda draws, d=draft: tuple(
                int(x) for x in verify(rows, [d], [q], draws=[draws]).accepted[0]
            )
        )
        assert law.get((1,), 0) == pytest.approx(accept, abs=1e-12)
    rejected = verify(rows, [1], [q], debug_uniform=[[U53_MAX, 0]])
    assert rejected.tokens[0].tolist() == [0, -1]  # the residual is (1, 0)
    np.testing.assert_allclose(first_token_law(rows, q, [q]), p, atol=1e-12)


def test_v2_nan_row_is_flagged_and_stays_in_range(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(6, 1000))
    where = {
        "draft_len": [1, 1, 1],
        "cu_seqlens": [0, 2, 4, 6],
        "seed": [1, 2, 3],
        "position": [9, 9, 9],
    }
    drafts = [[5], [5], [5]]
    for t in (0.0, 1.0):
        want = rejection_sample(logits, drafts, temperature=t, **where)
        broken = logits.copy()
        broken[2] = np.nan
        got = rejection_sample(broken, drafts, temperature=t, **where)
        assert 0 <= got.tokens[1, 0] < 1000
        assert got.num_emitted[1] == 1
        assert got.status[1] & Status.NAN_TARGET
        assert got.status[1] & Status.EMPTY_SUPPORT
        assert got.logprob[1, 0] == -np.inf
        for r in (0, 2):
            assert got.tokens[r].tolist() == want.tokens[r].tolist()
            assert got.status[r] == want.status[r]


def test_v3_nan_draft_law_rejects_and_emits_from_p() -> None:
    p = [1e-22, 0.97, 0.03]
    law = first_token_law([p, p], [1, 0, 0], [[np.nan] * 3])
    np.testing.assert_allclose(law, p, atol=1e-12)
    got = verify([p, p], [0], [[np.nan] * 3])
    assert got.status[0] == Status.NAN_DRAFT | Status.FORCED_REJECT
    assert got.accepted[0].tolist() == [0]


def test_nan_elsewhere_in_the_row_is_found_before_the_coin() -> None:
    # accepting first and meeting the NaN only in the residual would emit (.85, .15, 0)
    p, stored = [0.7, 0.3, 0.0], [[0.5, 0.5, np.nan]]
    np.testing.assert_allclose(first_token_law([p, p], [0.5, 0.5, 0], stored), p, atol=1e-12)


def test_v4_placeholders_end_the_prefix() -> None:
    rows = np.full((6, 3), 1 / 3)
    q = np.full((5, 3), 1 / 3)
    q[3:] = 0
    got = verify(rows, [1, 0, 1, -1, -1], q)
    assert got.num_accepted[0] == 3
    assert got.num_emitted[0] == 4
    assert got.accepted[0].tolist() == [1, 1, 1, -2, -2]
    assert got.status[0] == Status.BAD_DRAFT_ID


@pytest.mark.parametrize("draft", [-1, 3, 2**31 - 1])
@pytest.mark.parametrize("rule", ["greedy", "token", "match"])
def test_bad_ids_emit_from_p_under_every_rule(draft: int, rule: str) -> None:
    p = [0.2, 0.5, 0.3]

    def run(draws: Any) -> int:
        out = verify([p, p], [draft], rule=rule, draws=[draws])
        assert out.status[0] == Status.BAD_DRAFT_ID
        return int(out.tokens[0, 0])

    law = exact_law(run)
    want = {1: 1.0} if rule == "greedy" else dict(enumerate(p))
    assert law == pytest.approx(want, abs=1e-12)


def test_draft_with_q_zero_emits_from_p() -> None:
    p, q = [0.2, 0.5, 0.3], [[0.5, 0.5, 0.0]]
    law = exact_law(lambda draws: int(verify([p, p], [2], q, draws=[draws]).tokens[0, 0]))
    assert law == pytest.approx(dict(enumerate(p)), abs=1e-12)
    assert verify([p, p], [2], q).status[0] == Status.BAD_DRAFT_ID


def test_v5_zero_target_mass_is_never_accepted() -> None:
    p, q = [0.0, 0.4, 0.6], [[0.8, 0.1, 0.1]]
    got = verify([p, p], [0], q, debug_uniform=[[0, 0]])
    assert got.accepted[0].tolist() == [0]
    assert p[got.tokens[0, 0]] > 0
    assert got.status[0] == Status.FORCED_REJECT


def test_strictly_less_at_the_edge() -> None:
    p, q = [0.5, 0.5], [[1.0, 0.0]]
    at = verify([p, p], [0], q, debug_uniform=[[2**52, 0]])  # u = ratio = .5
    below = verify([p, p], [0], q, debug_uniform=[[2**52 - 1, 0]])
    assert at.accepted[0].tolist() == [0]
    assert below.accepted[0].tolist() == [1]


@pytest.mark.parametrize("garbage", [np.nan, 1e9, -np.inf])
def test_v6_one_hot_never_looks_at_the_law(garbage: float, rng: np.random.Generator) -> None:
    logits = rng.normal(size=(4, 9))
    base: dict[str, Any] = {
        "draft_len": [3],
        "cu_seqlens": [0, 4],
        "seed": [3],
        "position": [3],
        "temperature": 1.0,
        "draft_temperature": 0.0,
    }
    outputs = [
        rejection_sample(
            logits,
            [[1, 2, 3]],
            **base,
            draft_logit=np.full((1, 3), fill),
            draft_lse=np.full((1, 3), fill),
            draft_logits=np.full((1, 3, 9), fill),
        )
        for fill in (0.0, garbage)
    ]
    plain = rejection_sample(logits, [[1, 2, 3]], **{**base, "draft_temperature": None})
    for out in outputs:
        assert out.tokens.tolist() == plain.tokens.tolist()
        assert out.status.tolist() == plain.status.tolist()


def test_v7_a_greedy_drafts_law_is_one_hot() -> None:
    p = [0.6, 0.4]
    law = first_token_law([p, p], [1, 0], [[0.9, 0.1]], draft_temperature=0.0)
    np.testing.assert_allclose(law, p, atol=1e-12)
    wrong = first_token_law([p, p], [1, 0], [[0.9, 0.1]])
    np.testing.assert_allclose(wrong, [2 / 3, 1 / 3], atol=1e-12)


def test_v10_the_accept_uniform_is_not_reused() -> None:
    p, q = [0.4, 0.3, 0.3], [[1.0, 0.0, 0.0]]
    draws = 1500
    out = rejection_sample(
        np.tile(log(p), (2 * draws, 1)),
        np.zeros((draws, 1), int),
        draft_len=np.ones(draws, int),
        cu_seqlens=2 * np.arange(draws + 1),
        seed=np.arange(draws),
        position=np.zeros(draws, int),
        temperature=1.0,
        draft_logit=np.zeros((draws, 1)),
        draft_lse=np.zeros((draws, 1)),
        draft_logits=np.tile(log(q), (draws, 1, 1)),
    )
    share = np.bincount(out.tokens[:, 0], minlength=3) / draws
    np.testing.assert_allclose(share, p, atol=5 * np.sqrt(0.25 / draws))


def test_v11_top_k_keeps_k() -> None:
    rows = [[0.4, 0.3, 0.3, 0.0]] * 2
    law = first_token_law(rows, [0, 0, 1, 0], None, top_k=2)
    np.testing.assert_allclose(law, [4 / 7, 3 / 7, 0, 0], atol=1e-12)


def test_v12_min_p_acts_on_every_row() -> None:
    rows = np.exp([[3.0, 2.0, 0.0, -2.0]] * 2)
    got = verify(rows, [2], min_p=0.3, debug_uniform=[[0, 0]])
    assert got.accepted[0].tolist() == [0]
    law = first_token_law(rows, [0, 0, 1, 0], None, min_p=0.3)
    np.testing.assert_allclose(law, [0.731, 0.269, 0, 0], atol=1e-3)


def test_v13_truncation_enters_the_residual() -> None:
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.4, 0.4]
    law = first_token_law([p, p], q, [q], top_k=2)
    np.testing.assert_allclose(law, [4 / 7, 3 / 7, 0, 0], atol=1e-12)
    residual = exact_law(
        lambda draws: int(verify([p, p], [2], [q], top_k=2, draws=[draws]).tokens[0, 0])
    )
    assert residual == pytest.approx({0: 0.5893, 1: 0.4107}, abs=1e-4)


def test_v14_greedy_is_exact_and_does_not_change_a_neighbour() -> None:
    logits = np.array([[1.0, 1.0, 0.0]] * 4)
    both: dict[str, Any] = {"draft_len": [1, 1], "cu_seqlens": [0, 2, 4]}
    for seed in range(20):
        mixed = rejection_sample(
            logits, [[0], [1]], **both, seed=[seed, seed], position=[5, 5], temperature=[0.0, 1.0]
        )
        alone = rejection_sample(
            logits[:2],
            [[1]],
            draft_len=[1],
            cu_seqlens=[0, 2],
            seed=[seed],
            position=[5],
            temperature=1.0,
        )
        assert mixed.tokens[0].tolist() == [0, 0]
        assert mixed.tokens[1].tolist() == alone.tokens[0].tolist()


def test_v18_nothing_behind_a_stop() -> None:
    rows = np.zeros((4, 20))
    for i, token in enumerate((7, 2, 9, 4)):
        rows[i, token] = 1
    got = verify(rows, [7, 2, 9], t=0.0, stop_ids=[2])
    assert got.tokens[0].tolist() == [7, 2, -1, -1]
    assert (got.num_accepted[0], got.num_emitted[0], got.next_anchor[0]) == (2, 2, 2)
    assert got.accepted[0].tolist() == [1, 1, -2]
    assert got.status[0] == Status.STOPPED
    assert got.finish[0] == 1


@pytest.mark.parametrize(("cap", "finish"), [(1, 2), (3, 2), (4, 2), (5, 0)])
def test_cap_cuts_in_position_order(cap: int, finish: int) -> None:
    rows = np.eye(4)
    got = verify(rows, [0, 1, 2], t=0.0, max_new_tokens=[cap])
    assert got.tokens[0].tolist() == [0, 1, 2, 3][:cap] + [-1] * (4 - cap)
    assert got.num_accepted[0] == min(cap, 3)
    assert got.finish[0] == finish
    assert bool(got.status[0] & Status.STOPPED) == (finish > 0)


def test_cap_of_zero_is_inactive() -> None:
    got = verify(np.eye(3), [0, 1], t=0.0, max_new_tokens=[0])
    assert got.num_emitted[0] == 0
    assert got.tokens[0].tolist() == [-1, -1, -1]
    assert got.accepted[0].tolist() == [-2, -2]


def test_v19_masks_go_by_row() -> None:
    mask = np.full((4, 1), 0xFF, np.uint32)
    mask[1] = 0xFF & ~(1 << 3)
    rows = np.full((4, 9), 0.01)
    rows[0, 8], rows[1, 3], rows[1, 5] = 1, 1, 0.5
    mask[0] |= 1 << 8
    got = verify(rows, [8, -1, -1], t=0.0, token_mask=mask.view(np.int32))
    assert got.tokens[0].tolist() == [8, 5, -1, -1]
    padded = np.zeros((1, 4, 1), np.uint32)
    padded[0] = mask
    same = verify(rows, [8, -1, -1], t=0.0, token_mask=padded.view(np.int32))
    assert same.tokens[0].tolist() == [8, 5, -1, -1]


@pytest.mark.parametrize("u", [0, U53_MAX])
def test_v20_one_finite_logit(u: int) -> None:
    rows = np.zeros((2, 300))
    rows[:, 200] = 1
    got = verify(rows, [200], debug_uniform=[[u, u]])
    assert got.tokens[0].tolist() == [200, 200]
    np.testing.assert_array_equal(got.logprob[0], 0)


def test_v23_no_token_with_q_above_p_comes_from_a_residual() -> None:
    q = np.full(6, 1 / 6)
    p = q.copy()
    p[3] += 5e-8
    p[:3] -= 5e-8 / 3
    p, q = p / p.sum(), q / q.sum()
    seen = {
        int(verify([p, p], [0], [q], debug_uniform=[[U53_MAX, u]]).tokens[0, 0])
        for u in (0, 2**52, U53_MAX)
    }
    assert seen == {3}


def test_v25_log_probabilities_come_from_their_own_rows() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(7, 6)) * 3
    drafts = np.argmax(logits[[[0, 0, 0], [1, 2, 3], [5, 0, 0]]], axis=2)
    drafts[1] = [np.argmax(logits[1]), np.argmin(logits[2]), 0]
    out = rejection_sample(
        logits,
        drafts,
        draft_len=[0, 3, 1],
        cu_seqlens=[0, 1, 5, 7],
        seed=[0] * 3,
        position=[0] * 3,
    )
    assert out.num_emitted.tolist() == [1, 2, 2]
    full = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for r, first in enumerate((0, 1, 5)):
        for j in range(out.num_emitted[r]):
            want = full[first + j, out.tokens[r, j]]
            assert out.logprob[r, j] == pytest.approx(want, rel=1e-6)
            assert out.logprob_raw[r, j] == pytest.approx(want, rel=1e-6)


def test_log_probabilities_under_p_and_raw() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    out = rejection_sample(
        logits,
        np.zeros((1, 1)),
        draft_len=[0],
        cu_seqlens=[0, 1],
        seed=[3],
        position=[0],
        temperature=0.5,
        top_k=2,
    )
    token = int(out.tokens[0, 0])
    p = np.exp(logits[0, :2] / 0.5)
    assert out.logprob[0, 0] == pytest.approx(np.log(p[token] / p.sum()), rel=1e-6)
    raw = np.exp(logits[0])
    assert out.logprob_raw[0, 0] == pytest.approx(np.log(raw[token] / raw.sum()), rel=1e-6)


def test_zero_residual_samples_p() -> None:
    p = [0.25, 0.75]
    # a stored law that claims q(0) = .9 while its row equals p: rejected, and no mass is left
    out = rejection_sample(
        log([p, p]),
        [[0]],
        draft_len=[1],
        cu_seqlens=[0, 2],
        seed=[1],
        position=[0],
        temperature=1.0,
        draft_logit=log([[0.9]]),
        draft_lse=[[0.0]],
        draft_logits=log([[p]]),
        debug_uniform=[[U53_MAX, 0]],
    )
    assert out.status[0] == Status.ZERO_RESIDUAL
    assert out.tokens[0, 0] == 1


def test_fully_masked_row_emits_the_lowest_allowed_id() -> None:
    mask = np.array([[0b1100], [0b1100]], np.int32)
    logits = np.array([[0.0, 0.0, -np.inf, -np.inf, 5.0]] * 2)
    for rule in ("greedy", "token", "match"):
        out = rejection_sample(
            logits,
            [[2]],
            draft_len=[1],
            cu_seqlens=[0, 2],
            seed=[0],
            position=[0],
            temperature=1.0,
            rule=rule,
            token_mask=mask,
        )
        assert out.tokens[0].tolist() == [2, -1]
        assert out.accepted[0].tolist() == [0]
        assert out.status[0] & Status.EMPTY_SUPPORT
        assert out.logprob[0, 0] == -np.inf


def test_infinity_is_the_largest_finite_value_and_ties_go_low() -> None:
    logits = np.array([[0.0, np.inf, np.inf]])
    out = rejection_sample(
        logits, np.zeros((1, 1)), draft_len=[0], cu_seqlens=[0, 1], seed=[0], position=[0]
    )
    assert out.tokens[0, 0] == 1
    assert np.isfinite(out.logprob[0, 0])


def test_two_infinities_share_the_mass() -> None:
    rows = np.array([[np.inf, 0.0, np.inf]] * 2)

    def run(draws: Any) -> int:
        out = rejection_sample(
            rows,
            [[0]],
            draft_len=[1],
            cu_seqlens=[0, 2],
            seed=[0],
            position=[0],
            temperature=1.0,
            top_p=0.9,
            draws=[draws],
        )
        assert out.logprob[0, 0] == pytest.approx(np.log(0.5))
        return int(out.tokens[0, 0])

    assert exact_law(run) == pytest.approx({0: 0.5, 2: 0.5}, abs=1e-12)


def test_flags_behind_a_rejection() -> None:
    rows = np.eye(5)
    got = verify(rows, [0, 3, 2, 3], t=0.0, lens=3)
    assert got.accepted[0].tolist() == [1, 0, -1, -2]
    assert got.tokens[0].tolist() == [0, 1, -1, -1, -1]


def test_rows_that_do_not_exist_are_not_read() -> None:
    got = verify(np.eye(3)[:2], [0, 1], t=0.0, lens=2)
    assert got.status[0] == Status.BAD_PARAM
    assert got.tokens[0].tolist() == [0, 1, -1]
    none = rejection_sample(
        np.eye(3), [[0]], draft_len=[1], cu_seqlens=[2, 2], seed=[0], position=[0]
    )
    assert none.num_emitted[0] == 0
    assert none.status[0] == Status.BAD_PARAM


def test_empty_batch_and_inactive_rows() -> None:
    empty = rejection_sample(
        np.zeros((0, 3)), np.zeros((0, 2)), draft_len=[], cu_seqlens=[0], seed=[], position=[]
    )
    assert empty.tokens.shape == (0, 3)
    out = rejection_sample(
        np.eye(3)[[0]],
        [[5], [5]],
        draft_len=[9, 0],
        cu_seqlens=[0, 0, 1],
        seed=[0, 0],
        position=[0, 0],
        active=[0, 1],
        temperature=[np.nan, 0],
    )
    assert out.status.tolist() == [0, 0]
    assert out.tokens[:, 0].tolist() == [-1, 0]


def test_half_a_law_is_an_error() -> None:
    with pytest.raises(ValueError, match="all three"):
        verify(np.eye(2), [0], draft_logit=[[0.0]])
