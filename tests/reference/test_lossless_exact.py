# SPDX-License-Identifier: Apache-2.0
"""Losslessness as an equation: the exact law of a round's tokens equals the target's law.

Every way the drafts, coins and residuals can fall is run through the real operators; the emitted
tokens are completed by the target's own law and compared with it, to rounding. Controls with a
planted fault show that the comparison can fail.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dspark_ext.reference.enumeration import Branches, exact_law
from dspark_ext.reference.markov_loop import markov_loop
from dspark_ext.reference.rejection_sampler import rejection_sample

VOCAB = 3
GAMMA = 2


def softmax(z: np.ndarray, keep: np.ndarray | None = None) -> np.ndarray:
    w = np.exp(z - z.max()) * (1 if keep is None else keep)
    return w / w.sum()


@dataclass
class Round:
    """One request with random tables: a Markov drafter and a target keyed by its prefix."""

    seed: int
    t: float = 1.0
    t_draft: float | None = None
    rule: str = "token"
    length: int = GAMMA
    verify: dict[str, Any] = field(default_factory=dict)
    draft: dict[str, Any] = field(default_factory=dict)
    claimed_t_draft: float | None = None  # what verification is told; a lie in the controls
    columns: int = VOCAB
    told: bool = False  # the LM head says z of the draft and the lse of its row

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.u = rng.normal(size=(1, GAMMA, self.columns)) * 1.2
        self.w1 = rng.normal(size=(VOCAB, 2))
        self.w2 = rng.normal(size=(self.columns, 2))
        self.target = {
            prefix: (rng.normal(size=VOCAB) * 1.5).astype(np.float32)
            for n in range(GAMMA + 1)
            for prefix in itertools.product(range(VOCAB), repeat=n)
        }

    def p(self, prefix: tuple[int, ...]) -> np.ndarray:
        """The target's processed law, written apart from the operators."""
        z = self.target[prefix]
        if "logit_bias" in self.verify:
            z = z + self.verify["logit_bias"][0]  # float32, as the contract says
        z = self.penalised(z, prefix).astype(np.float64)
        keep = np.ones(VOCAB, bool)
        if len(prefix) < self.verify.get("min_tokens_left", 0):
            keep[self.stops] = False
        if "token_mask" in self.verify:
            words = self.verify["token_mask"][0][len(prefix)][0]
            keep &= np.array([(words >> i) & 1 for i in range(VOCAB)]).astype(bool)
        if self.t == 0 or self.rule == "greedy":
            return np.eye(VOCAB)[np.argmax(np.where(keep, z, -np.inf))]
        law = softmax(z / np.float64(np.float32(self.t)), keep)
        if "min_p" in self.verify:
            law = law * (law >= self.verify["min_p"] * law.max())
        order = np.argsort(-law, kind="stable")
        if "top_k" in self.verify:
            law[order[self.verify["top_k"] :]] = 0
        law /= law.sum()
        if "top_p" in self.verify:
            before = np.cumsum(law[order]) - law[order]
            law[order[before >= self.verify["top_p"]]] = 0
        return law / law.sum()

    def penalised(self, z: np.ndarray, prefix: tuple[int, ...]) -> np.ndarray:
        """Penalties count the anchor (token 1) and the prefix."""
        z, f32 = z.copy(), np.float32
        for token in range(VOCAB):
            count = (1, *prefix).count(token)
            if count and "repetition_penalty" in self.verify:
                factor = f32(self.verify["repetition_penalty"])
                z[token] = z[token] / factor if z[token] > 0 else z[token] * factor
            if count and "frequency_penalty" in self.verify:
                z[token] -= f32(self.verify["frequency_penalty"]) * f32(count)
            if count and "presence_penalty" in self.verify:
                z[token] -= f32(self.verify["presence_penalty"])
        return z

    def run(self, draws: Branches) -> tuple[int, ...]:
        t_draft = self.t if self.t_draft is None else self.t_draft
        where = {"seed": [0], "position": [10]}
        draft = markov_loop(
            self.u,
            self.w1,
            self.w2,
            anchor=[1],
            temperature=t_draft,
            store_logits="topk_support" not in self.draft,
            draws=[draws],
            **where,
            **self.draft,
        )
        drafted = tuple(int(x) for x in draft.tokens[0])
        claimed = t_draft if self.claimed_t_draft is None else self.claimed_t_draft
        # float64 lse, so that the equation is checked beyond float32
        z = draft.logits if draft.support_ids is None else draft.support_logits
        z = z / np.float64(np.float32(claimed or 1.0))
        lse = np.log(np.exp(z).sum(axis=2))
        rows = np.array([self.target[drafted[:i]] for i in range(self.length + 1)])
        out = rejection_sample(
            rows,
            draft.tokens,
            draft_len=[self.length],
            cu_seqlens=[0, self.length + 1],
            temperature=self.t,
            draft_temperature=claimed,
            rule=self.rule,
            draft_logit=draft.logit,
            draft_lse=lse,
            draws=[draws],
            **self.law(draft),
            **self.head(rows, drafted),
            **where,
            **self.verify,
        )
        return tuple(int(x) for x in out.tokens[0, : out.num_emitted[0]])

    def law(self, draft: Any) -> dict[str, Any]:
        """What verification is told about q."""
        if draft.support_ids is not None:
            return {"support_ids": draft.support_ids, "support_logits": draft.support_logits}
        ids = {k: v for k, v in self.draft.items() if k == "draft_to_target"}
        return {"draft_logits": draft.logits} | ids

    def head(self, rows: np.ndarray, drafted: tuple[int, ...]) -> dict[str, Any]:
        """Two numbers a row, where the LM head is said to know them."""
        if not self.told:
            return {}
        scaled = rows.astype(np.float64) / np.float64(np.float32(self.t))
        ids = [*drafted[: self.length], 0]
        return {
            "target_logit": rows[np.arange(len(rows)), ids],
            "target_lse": np.log(np.exp(scaled).sum(axis=1)),
        }

    def ends(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) == GAMMA + 1 or bool(tokens and tokens[-1] in self.stops)

    @property
    def stops(self) -> list[int]:
        return self.verify.get("stop_ids", [])

    def completed(self, law: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        """Continue every outcome with the target's law to gamma + 1 tokens or a stop."""
        done: dict[tuple[int, ...], float] = {}
        open_ = list(law.items())
        while open_:
            tokens, mass = open_.pop()
            if self.ends(tokens):
                done[tokens] = done.get(tokens, 0.0) + mass
                continue
            for token, share in enumerate(self.p(tokens)):
                if share > 0:
                    open_.append(((*tokens, token), mass * share))
        return done

    def distance(self) -> float:
        """Total variation between the round's law and the target's."""
        law = exact_law(self.run)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        got, want = self.completed(law), self.completed({(): 1.0})
        return sum(abs(got.get(y, 0) - want.get(y, 0)) for y in {*got, *want}) / 2


MASK = {"token_mask": np.array([[[0b101], [0b110], [0b011]]], np.int32)}
BIAS = {"logit_bias": np.array([[0.5, -0.25, 1.0]], np.float32)}

PENALTIES = {
    "anchor": [1],
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.75,
}
FLOOR = {"stop_ids": [2], "min_tokens_left": 2}
EVERYTHING = {**MASK, **BIAS, **PENALTIES, "stop_ids": [2], "min_tokens_left": 1, "min_p": 0.02}
EVERYTHING |= {"top_k": 2, "top_p": 0.95}

CASES = {
    "token-penalties": {"verify": PENALTIES},
    "token-penalties-filters": {"t": 0.8, "verify": {**PENALTIES, **BIAS, "top_p": 0.8}},
    "token-min-tokens": {"verify": FLOOR},
    "block-penalties": {"rule": "block", "verify": PENALTIES},
    "block-min-tokens": {"rule": "block", "verify": {**FLOOR, **PENALTIES}},
    "match-penalties": {"rule": "match", "verify": {**PENALTIES, **FLOOR}},
    "greedy-penalties": {"t": 0.0, "t_draft": 1.0, "verify": {**PENALTIES, **FLOOR}},
    "token-everything": {"t": 1.3, "verify": EVERYTHING},
    "token-everything-top-m": {
        "t": 1.3, "t_draft": 0.9, "draft": {"topk_support": 2}, "verify": EVERYTHING,
    },
    "block-everything": {"rule": "block", "t": 1.3, "verify": EVERYTHING},
    "block-everything-reduced-vocabulary": {
        "rule": "block", "t": 1.3, "columns": 2, "draft": {"draft_to_target": [0, 2]},
        "verify": EVERYTHING,
    },
    "match-everything": {"rule": "match", "t": 1.3, "verify": EVERYTHING},
    "greedy-everything": {"t": 0.0, "t_draft": 1.0, "verify": EVERYTHING},
    "token-told": {"told": True},
    "token-told-other-temperatures": {"told": True, "t": 0.7, "t_draft": 1.3},
    "token-told-greedy-draft": {"told": True, "t_draft": 0.0},
    "token-told-top-m": {"told": True, "t": 1.2, "draft": {"topk_support": 2}},
    "token": {},
    "token-other-temperatures": {"t": 0.7, "t_draft": 1.3},
    "token-top-k": {"verify": {"top_k": 2}},
    "token-top-p": {"verify": {"top_p": 0.6}},
    "token-min-p": {"verify": {"min_p": 0.4}},
    "token-all-filters": {"t": 1.4, "verify": {"min_p": 0.05, "top_k": 2, "top_p": 0.8}},
    "token-mask": {"verify": MASK},
    "token-bias": {"verify": BIAS},
    "token-mask-bias-top-p": {"verify": {**MASK, **BIAS, "top_p": 0.7}},
    "token-truncated-draft": {"draft": {"top_k": 2}},
    "token-nucleus-draft": {"draft": {"top_p": 0.5}},
    "token-reduced-vocabulary": {"columns": 2, "draft": {"draft_to_target": [0, 2]}},
    "token-top-m": {"draft": {"topk_support": 2}},
    "token-top-m-padded": {"t": 0.8, "draft": {"topk_support": 5}},
    "token-top-m-truncated": {"draft": {"topk_support": 2, "top_p": 0.7}, "verify": {"top_k": 2}},
    "token-top-m-reduced-vocabulary": {
        "columns": 2,
        "draft": {"draft_to_target": [0, 2], "topk_support": 1},
    },
    "token-greedy-draft": {"t_draft": 0.0},
    "token-sampled-draft-as-one-hot": {"t_draft": 1.0, "claimed_t_draft": 0.0},
    "token-short": {"length": 1},
    "token-none": {"length": 0},
    "token-stop": {"verify": {"stop_ids": [2]}},
    "block": {"rule": "block"},
    "block-other-temperatures": {"rule": "block", "t": 0.7, "t_draft": 1.3},
    "block-all-filters": {
        "rule": "block",
        "t": 1.4,
        "verify": {"min_p": 0.05, "top_k": 2, "top_p": 0.8},
    },
    "block-mask-bias": {"rule": "block", "verify": {**MASK, **BIAS}},
    "block-truncated-draft": {"rule": "block", "draft": {"top_k": 2}},
    "block-top-m": {"rule": "block", "draft": {"topk_support": 2}},
    "block-reduced-vocabulary": {
        "rule": "block",
        "columns": 2,
        "draft": {"draft_to_target": [0, 2]},
    },
    "block-greedy-draft": {"rule": "block", "t_draft": 0.0},
    "block-sampled-draft-as-one-hot": {"rule": "block", "t_draft": 1.0, "claimed_t_draft": 0.0},
    "block-top-m-reduced-vocabulary": {
        "rule": "block", "columns": 2, "draft": {"draft_to_target": [0, 2], "topk_support": 1},
    },
    "block-nucleus-draft": {"rule": "block", "draft": {"top_p": 0.5}},
    "block-top-k": {"rule": "block", "verify": {"top_k": 2}},
    "block-top-p": {"rule": "block", "verify": {"top_p": 0.6}},
    "block-min-p": {"rule": "block", "verify": {"min_p": 0.4}},
    "block-none": {"rule": "block", "length": 0},
    "block-short": {"rule": "block", "length": 1},
    "block-stop": {"rule": "block", "verify": {"stop_ids": [2]}},
    "match": {"rule": "match"},
    "match-greedy-draft": {"rule": "match", "t_draft": 0.0},
    "match-filters": {"rule": "match", "t": 0.8, "verify": {**MASK, "top_p": 0.7}},
    "match-top-m": {"rule": "match", "draft": {"topk_support": 2}},
    "match-reduced-vocabulary": {
        "rule": "match", "columns": 2, "draft": {"draft_to_target": [0, 2]},
    },
    "match-short": {"rule": "match", "length": 1},
    "match-stop": {"rule": "match", "verify": {"stop_ids": [0]}},
    "greedy": {"t": 0.0, "t_draft": 1.0},
    "greedy-reduced-vocabulary": {
        "t": 0.0, "t_draft": 1.0, "columns": 2, "draft": {"draft_to_target": [0, 2]},
    },
    "greedy-mask": {"rule": "greedy", "verify": {**MASK, **BIAS}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_law_is_the_targets(case: dict[str, Any]) -> None:
    assert Round(2, **case).distance() < 1e-12


CONTROLS = {
    "draft-drawn-at-another-temperature": {"t_draft": 1.0, "claimed_t_draft": 0.6},
    "greedy-draft-verified-as-sampled": {"t_draft": 0.0, "claimed_t_draft": 1.0},
    "block-with-the-wrong-law": {"rule": "block", "t_draft": 1.0, "claimed_t_draft": 0.6},
}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_penalties_counted_once_a_request_are_another_law(rule: str) -> None:
    """The control: the target counts the prefix, verification gets the anchor alone."""
    case = Round(2, rule=rule, verify={"anchor": [1], "frequency_penalty": 0.75})
    right = case.distance()
    case.verify = {"logit_bias": np.array([[0, -0.75, 0]], np.float32)}
    wrong = exact_law(case.run)
    case.verify = {"anchor": [1], "frequency_penalty": 0.75}
    got, want = case.completed(wrong), case.completed({(): 1.0})
    assert right < 1e-12
    assert sum(abs(got.get(y, 0) - want.get(y, 0)) for y in {*got, *want}) > 1e-2


@pytest.mark.parametrize("case", CONTROLS.values(), ids=CONTROLS.keys())
def test_controls_with_a_planted_fault_fail(case: dict[str, Any]) -> None:
    assert Round(1, **case).distance() > 1e-3


def test_acceptance_is_one_minus_total_variation() -> None:
    """Paper, eq. 8: the expected acceptance of slot 1 is sum min(p, q)."""
    case = Round(3)

    def accepted(draws: Branches) -> bool:
        tokens = case.run(draws)
        return len(tokens) > 1

    z = case.u[0, 0] + case.w2 @ case.w1[1]
    q = softmax(np.float32(z).astype(np.float64))
    want = np.minimum(q, case.p(())).sum()
    assert exact_law(accepted)[True] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_block_accepts_at_least_as_many_under_any_laws(seed: int) -> None:
    """Laws that depend on the prefix, and a draft restricted to two ids."""
    for draft in ({}, {"topk_support": 2}):
        emitted = {
            rule: sum(
                len(y) * m for y, m in exact_law(Round(seed, rule=rule, draft=draft).run).items()
            )
            for rule in ("token", "block", "match")
        }
        assert emitted["block"] >= emitted["token"] - 1e-12
        assert emitted["token"] >= emitted["match"] - 1e-12
