# SPDX-License-Identifier: Apache-2.0
"""Every rule with every processor in one batch, once for each law of the draft, by chi-square.

All requests have the same target rows, so the pairs of tokens they emit have a law that is written
down here without the operators. A processor's own law is the control of the others: tokens of a
group that was processed must not follow the law without its processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import dspark_ext as dx
from dspark_ext.results import Draft, Verification

LEVEL = 1e-6
EACH = {"cpu": 4000, "simt": 2, "cuda": 4000}  # requests in a group
# The reference is enumerated exactly: tests/reference/test_lossless_exact.py. The emulation is too
# slow for a law: it is held to the bits of the CPU's tokens, whose law is tested here.
DRAWN = ["cpu", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
RULES = {"token": 1, "block": 2, "match": 3}
V = 8
P = np.array([0.3, 0.22, 0.16, 0.12, 0.09, 0.06, 0.04, 0.01])
Q = np.array([0.1, 0.3, 0.05, 0.2, 0.05, 0.1, 0.1, 0.1])
BIAS = np.float32([0, 0, 0, 1, 0, 0, 0.5, 0])
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.7}
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "min-p": {"min_p": 0.25},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "bias": {"logit_bias": BIAS},
    "mask": {"token_mask": 0b10111110},
    "penalties": PENALTIES,
    "min-tokens": {"min_tokens_left": 1},
    "all": {
        "temperature": 0.8, "min_p": 0.05, "top_k": 5, "top_p": 0.9, "logit_bias": BIAS,
        "token_mask": 0b01111111, "min_tokens_left": 1, **PENALTIES,
    },
}  # fmt: skip
GROUPS = [(rule, name) for rule in RULES for name in PROCESSORS]


def log(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def law(processor: dict[str, Any], prefix: tuple[int, ...]) -> np.ndarray:
    """p behind a prefix, by the contract's order of processors. Token 0 is the stop id."""
    z = np.where([processor.get("token_mask", 255) >> i & 1 for i in range(V)], np.log(P), -np.inf)
    z = z + processor.get("logit_bias", np.zeros(V))
    if len(prefix) < processor.get("min_tokens_left", 0):
        z[0] = -np.inf
    for x in set(prefix):
        factor = processor.get("repetition_penalty", 1.0)
        z[x] = z[x] / factor if z[x] > 0 else z[x] * factor
        z[x] -= prefix.count(x) * processor.get("frequency_penalty", 0.0)
        z[x] -= processor.get("presence_penalty", 0.0)
    p = np.exp(z / processor.get("temperature", 1.0))
    p[p < processor.get("min_p", 0.0) * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    p[order[processor.get("top_k", V) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= processor.get("top_p", 2.0)]] = 0
    return p / p.sum()


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square over cells with five expected or more, the rest pooled; 0: an impossible one."""
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    expected = expected / expected.sum() * len(tokens)
    big = expected >= 5
    cells = np.append(expected[big], max(expected[~big].sum(), 1.0))
    off = np.append(counts[big], counts[~big].sum()) - cells
    return float(stats.chi2.sf((off**2 / cells).sum(), len(cells) - 1))


def batch(backend: str, each: int, draft: Draft, stored: dict[str, Any]) -> Verification:
    """``each`` requests of every group side by side, two drafts each."""
    count = each * len(GROUPS)
    words = np.full((count, 1), 255, np.int32)
    given: dict[str, Any] = {
        "temperature": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "top_p": np.ones(count, np.float32),
        "logit_bias": np.zeros((count, V), np.float32),
        "min_tokens_left": np.zeros(count, np.int32),
        "repetition_penalty": np.ones(count, np.float32),
        "frequency_penalty": np.zeros(count, np.float32),
        "presence_penalty": np.zeros(count, np.float32),
        "rule": np.repeat([RULES[rule] for rule, _ in GROUPS], each),
    }
    for g, (_, name) in enumerate(GROUPS):
        rows = slice(g * each, (g + 1) * each)
        for key, value in PROCESSORS[name].items():
            (words if key == "token_mask" else given[key])[rows] = value
    return dx.rejection_sample(
        np.broadcast_to(log(P), (3 * count, V)), draft.tokens, draft_len=2,
        cu_seqlens=3 * np.arange(count + 1), seed=np.arange(count, dtype=np.uint64), position=77,
        token_mask=np.repeat(words, 3, axis=0), stop_ids=[0], backend=backend,
        **({"draft_temperature": 1.0} | given | stored),
    )  # fmt: skip


LAWS: dict[str, dict[str, Any]] = {
    "full": {},
    "reduced-vocabulary": {"draft_to_target": np.array([1, 4, 6], np.int32)},
    "top-m": {"topk_support": 3},
    "greedy": {"temperature": 0.0},
}


def drafted(kind: str, count: int) -> tuple[Draft, dict[str, Any]]:
    """Drafts, and the law that they came from as verification is told it."""
    options = LAWS[kind]
    ids = options.get("draft_to_target", np.arange(V))
    q = log(Q)[ids]
    draft = dx.markov_loop(
        np.broadcast_to(q, (count, 2, len(ids))), np.zeros((V, 1), np.float32),
        np.zeros((len(ids), 1), np.float32), anchor=np.zeros(count, np.int32),
        seed=np.arange(count, dtype=np.uint64), position=77,
        **({"temperature": 1.0} | options),
    )  # fmt: skip
    stored: dict[str, Any] = {"draft_logit": draft.logit, "draft_lse": draft.lse}
    if kind == "greedy":
        return draft, {"draft_temperature": 0.0}
    if kind == "top-m":
        return draft, stored | {
            "support_ids": draft.support_ids, "support_logits": draft.support_logits
        }  # fmt: skip
    stored["draft_logits"] = np.broadcast_to(q, (count, 2, len(ids)))
    if kind == "reduced-vocabulary":
        stored["draft_to_target"] = ids
    return draft, stored


def pairs_of(got: Verification, rows: slice) -> np.ndarray:
    both = got.num_emitted[rows] > 1
    tokens = got.tokens[rows][both]
    return tokens[:, 0] * V + tokens[:, 1]


@pytest.mark.parametrize("backend", [*DRAWN, "simt"], indirect=True)
@pytest.mark.parametrize("kind", LAWS)
def test_every_rule_with_every_processor(backend: str, kind: str) -> None:
    each = EACH[backend]
    draft, stored = drafted(kind, each * len(GROUPS))
    got = batch(backend, each, draft, stored)
    if backend == "simt":
        want = batch("cpu", each, draft, stored)
        for field in ("tokens", "accepted", "logprob", "logprob_raw", "status"):
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)
        return
    trouble = got.status & ~np.int32(dx.Status.STOPPED)
    assert not trouble[:each].any()  # no processor, rule token
    for g, (rule, name) in enumerate(GROUPS):
        rows, processor = slice(g * each, (g + 1) * each), PROCESSORS[name]
        first = got.tokens[rows, 0]
        assert p_value(first, law(processor, ())) > LEVEL, (rule, name)
        pairs = pairs_of(got, rows)
        share = np.bincount(pairs // V, minlength=V) / max(len(pairs), 1)
        second = np.array([law(processor, (x,)) for x in range(V)])
        assert p_value(pairs, (share[:, None] * second).reshape(-1)) > LEVEL, (rule, name)
        if name == "none":
            continue
        plain = np.tile(law({}, ()), (V, 1))
        if name == "penalties":  # nothing was said before the first token
            assert p_value(pairs, (share[:, None] * plain).reshape(-1)) < LEVEL, (rule, name)
        else:
            assert p_value(first, plain[0]) < LEVEL, (rule, name)


@pytest.mark.parametrize("backend", DRAWN, indirect=True)
@pytest.mark.parametrize("kind", [kind for kind in LAWS if kind != "greedy"])
def test_another_law_than_the_drafts_is_found_out(backend: str, kind: str) -> None:
    """The control: drafts from Q, verified as if they had come from a law that is flatter."""
    each = EACH[backend]
    draft, stored = drafted(kind, each * len(GROUPS))
    name = "support_logits" if kind == "top-m" else "draft_logits"
    flat = np.asarray(stored[name]) * np.float32(0.2)
    lse = np.log(np.exp(flat.astype(np.float64)).sum(-1)).astype(np.float32)
    stored |= {name: flat, "draft_lse": lse, "draft_logit": draft.logit * np.float32(0.2)}
    got = batch(backend, each, draft, stored)
    wrong = [
        p_value(got.tokens[g * each : (g + 1) * each, 0], law({}, ())) < LEVEL
        for g, (rule, name) in enumerate(GROUPS)
        if name == "none" and rule != "match"
    ]
    assert wrong == [True, True]
