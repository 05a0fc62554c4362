# SPDX-License-Identifier: Apache-2.0
"""The problems: one function a family, in the order of a decoding round.

Sizes are small and awkward on purpose (vocabularies that are no multiple of a segment, pages that
end mid-request), so that a wrong tail shows. Bounds follow from float32 and the sums' lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dspark_ext.ops.confidence import confidence
from dspark_ext.ops.markov_loop import markov_loop
from dspark_ext.ops.paged_kv import paged_kv_append, paged_kv_commit
from dspark_ext.ops.prefix_scheduler import prefix_schedule
from dspark_ext.ops.rejection_sampler import rejection_sample
from dspark_ext.ops.rope import Rope
from dspark_ext.ops.verify_attention import verify_attention
from dspark_ext.scheduling import CostTable
from dspark_ext.selftest.tally import Tally

__all__ = ["FAMILIES"]

Rng = np.random.Generator

EPS = 2.0**-23  # spacing of float32 at 1
BACKENDS = ("cpu", "reference")


def check_markov_loop(tally: Tally, rng: Rng) -> None:
    """Three heads, greedy and sampled requests side by side, full and reduced vocabulary."""
    vocab, rank, hidden_size, requests, gamma = 401, 16, 24, 9, 5
    width = {"vanilla": None, "gated": (rank, hidden_size + rank)}
    width["rnn"] = (3 * rank, 2 * rank + hidden_size)
    for head, shape in width.items():
        for reduced in (False, True):
            columns = 150 if reduced else vocab
            problem: dict[str, Any] = {
                "base_logits": rng.normal(0, 3, (requests, gamma, columns)),
                "w1": rng.normal(0, 1, (vocab, rank)),
                "w2": rng.normal(0, 0.5, (columns, rank)),
                "hidden": rng.normal(0, 1, (requests, gamma, hidden_size)),
                "confidence_weight": rng.normal(0, 0.2, hidden_size + rank),
            }
            if shape is not None:
                problem["head_weight"] = rng.normal(0, 0.2, shape)
                problem["head_bias"] = rng.normal(0, 0.2, shape[0])
            problem = {name: x.astype(np.float32) for name, x in problem.items()}
            if reduced:
                ids = np.sort(rng.choice(vocab, columns, replace=False)).astype(np.int32)
                problem["draft_to_target"] = ids
            problem |= {
                "head": head,
                "confidence_bias": 0.1,
                "anchor": rng.integers(0, vocab, requests).astype(np.int32),
                "seed": rng.integers(0, 2**63, requests).astype(np.uint64),
                "position": rng.integers(0, 5000, requests).astype(np.int64),
                "temperature": np.where(np.arange(requests) % 3 == 0, 0, 0.8).astype(np.float32),
                "store_logits": True,
            }
            got, want = (markov_loop(**problem, backend=name) for name in BACKENDS)
            tally.cases += 1
            same = tally.drawn(got.tokens, want.tokens)
            bound = {"rtol": 8 * EPS, "atol": 4 * rank * EPS}
            for field in ("logit", "lse", "confidence_logit", "logits"):
                one, other = getattr(got, field)[same], getattr(want, field)[same]
                tally.close(f"{head} {field}", one, other, **bound)
            tally.equal(f"{head} status", got.status, want.status)


def check_confidence(tally: Tally, rng: Rng) -> None:
    """Logits with STS temperatures, probabilities, and NaN."""
    for requests, gamma in ((1, 1), (5, 7), (64, 16)):
        logit = rng.normal(0, 4, (requests, gamma)).astype(np.float32)
        logit[rng.random(logit.shape) < 0.02] = np.nan
        tau = rng.uniform(0.5, 3, gamma).astype(np.float32)
        probability = rng.uniform(-0.1, 1.1, (requests, gamma)).astype(np.float32)
        calls: tuple[dict[str, Any], ...] = (
            {"logit": logit, "temperature": tau},
            {"probability": probability},
        )
        for given in calls:
            got, want = (confidence(**given, backend=name) for name in BACKENDS)
            tally.cases += 1
            tally.close("conditional", got.conditional, want.conditional, rtol=2 * EPS)
            tally.close("survival", got.survival, want.survival, rtol=2 * gamma * EPS, atol=1e-37)
            tally.equal("status", got.status, want.status)


def check_prefix_scheduler(tally: Tally, rng: Rng) -> None:
    """Every mode; sums are exact on both sides, so every integer must agree."""
    for requests, gamma in ((1, 7), (6, 4), (40, 7)):
        conditional = rng.uniform(0, 1, (requests, gamma)).astype(np.float32)
        survival = np.cumprod(conditional, axis=1, dtype=np.float32)
        most = requests * (gamma + 1)
        points = np.array([1, max(2, most // 2), most + 1])
        cost = CostTable.from_points(points, 5.0 + 0.5 * points)
        limits = {
            "min_len": rng.integers(0, 2, requests).astype(np.int32),
            "max_len": rng.integers(1, gamma + 1, requests).astype(np.int32),
            "weight": rng.uniform(0.5, 2, requests).astype(np.float32),
            "active": (rng.random(requests) < 0.9) | (np.arange(requests) == 0),
        }
        for policy in (
            {"mode": "causal", "cost": cost},
            {"mode": "causal", "cost": cost, "capacity": requests + requests * gamma // 2},
            {"mode": "two_phase", "budget": requests * gamma // 3},
            {"mode": "threshold", "conditional": conditional, "threshold": 0.5},
            {"mode": "fixed", "fixed_len": 2},
            {"mode": "off"},
        ):
            got, want = (
                prefix_schedule(survival, **policy, **limits, backend=name) for name in BACKENDS
            )
            tally.cases += 1
            fields = ("length", "cu_seqlens", "total_tokens", "row_to_request", "row_offset")
            for field in (*fields, "status"):
                what = f"{policy['mode']} {field}"
                tally.equal(what, getattr(got, field), getattr(want, field))
            tally.close("theta", got.theta, want.theta, rtol=1e-12)


def paged_problem(rng: Rng, head_dim: int) -> dict[str, Any]:
    """Six requests over shuffled pages: lengths before, rows to add, empty caches."""
    requests, page_size, heads = 6, 16, 2
    rows = np.array([1, 4, 0, 8, 3, 1])
    before = np.array([0, 15, 7, 40, 16, 61])
    pages_each = 5
    table = rng.permutation(requests * pages_each).reshape(requests, pages_each).astype(np.int32)
    cache = (requests * pages_each, page_size, heads, head_dim)
    return {
        "rows": rows,
        "before": before.astype(np.int32),
        "cu_seqlens": np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        "page_table": table,
        "k": rng.normal(0, 1, (int(rows.sum()), heads, head_dim)).astype(np.float32),
        "v": rng.normal(0, 1, (int(rows.sum()), heads, head_dim)).astype(np.float32),
        "k_cache": rng.normal(0, 1, cache).astype(np.float32),
        "v_cache": rng.normal(0, 1, cache).astype(np.float32),
    }


def check_paged_kv(tally: Tally, rng: Rng) -> None:
    """Append with and without rotation, across page ends, then commit."""
    for head_dim in (8, 64):
        for rope in (None, Rope(10000.0)):
            p = paged_problem(rng, head_dim)
            caches = {}
            for name in BACKENDS:
                k_cache, v_cache = p["k_cache"].copy(), p["v_cache"].copy()
                status = paged_kv_append(
                    p["k"],
                    p["v"],
                    k_cache,
                    v_cache,
                    page_table=p["page_table"],
                    kv_len=p["before"],
                    cu_seqlens=p["cu_seqlens"],
                    rope=rope,
                    backend=name,
                )
                kv_len, position = p["before"].copy(), p["before"].astype(np.int64)
                emitted = p["rows"].astype(np.int32)
                paged_kv_commit(kv_len, position, emitted, backend=name)
                caches[name] = (k_cache, v_cache, status, kv_len, position)
            got, want = caches["cpu"], caches["reference"]
            tally.cases += 1
            tally.close("k_cache", got[0], want[0], rtol=4 * EPS, atol=8 * EPS)
            for what, index in (("v_cache", 1), ("status", 2), ("kv_len", 3), ("position", 4)):
                tally.equal(what, got[index], want[index])


def check_verify_attention(tally: Tally, rng: Rng) -> None:
    """Causal, bidirectional, windowed, capped and batch-invariant rows over grouped heads."""
    for head_dim in (8, 64):
        p = paged_problem(rng, head_dim)
        lengths = (p["before"] + p["rows"]).astype(np.int32)
        q = rng.normal(0, 1, (int(p["rows"].sum()), 6, head_dim)).astype(np.float32)
        for options in (
            {},
            {"causal": False},
            {"window": 9},
            {"soft_cap": 15.0, "scale": 0.3},
            {"batch_invariant": True},
        ):
            got, want = (
                verify_attention(
                    q,
                    p["k_cache"],
                    p["v_cache"],
                    page_table=p["page_table"],
                    kv_len=lengths,
                    cu_seqlens=p["cu_seqlens"],
                    max_q_len=int(p["rows"].max()),
                    return_lse=True,
                    backend=name,
                    **options,
                )
                for name in BACKENDS
            )
            tally.cases += 1
            bound = {"rtol": 48 * EPS, "atol": 48 * EPS}  # dot products of 64, up to 62 keys
            tally.close(f"out {options}", got[0], want[0], **bound)
            tally.close(f"lse {options}", got[1], want[1], **bound)


def check_rejection_sampler(tally: Tally, rng: Rng) -> None:
    """Rules side by side, truncated laws, stored, draft-vocabulary and one-hot draft laws."""
    vocab, requests, gamma = 389, 12, 4
    draft_len = rng.integers(0, gamma + 1, requests).astype(np.int32)
    cu_seqlens = np.concatenate([[0], np.cumsum(1 + draft_len)]).astype(np.int32)
    sampled = np.arange(requests) % 4 != 0
    for rule in ("token", "match", "greedy"):
        for law in ("stored", "one-hot"):
            for processors in ({}, {"top_k": 40, "top_p": 0.95}, {"min_p": 0.02}):
                # Drafts from a law close to the target's, so that all lengths are accepted.
                target = rng.normal(0, 3, (requests, gamma + 1, vocab)).astype(np.float32)
                draft = target[:, :gamma] + rng.normal(0, 0.7, (requests, gamma, vocab))
                z = draft.astype(np.float32)
                tokens = z.argmax(axis=2).astype(np.int32)
                rows = np.concatenate([target[r, : n + 1] for r, n in enumerate(draft_len)])
                temperature = np.where(sampled, 0.9, 0).astype(np.float32)
                problem: dict[str, Any] = {
                    "draft_len": draft_len,
                    "cu_seqlens": cu_seqlens,
                    "seed": rng.integers(0, 2**63, requests).astype(np.uint64),
                    "position": rng.integers(0, 5000, requests).astype(np.int64),
                    "temperature": temperature,
                    "rule": rule,
                    "max_new_tokens": rng.integers(2, 9, requests).astype(np.int32),
                    "stop_ids": [7, 11],
                    **processors,
                }
                if law == "stored":
                    t = np.where(sampled, 0.9, 1.0)[:, None, None]
                    problem["draft_logits"] = z
                    problem["draft_logit"] = np.take_along_axis(z, tokens[..., None], 2)[..., 0]
                    lse = np.log(np.exp(z.astype(np.float64) / t).sum(axis=2))
                    problem["draft_lse"] = lse.astype(np.float32)
                got, want = (
                    rejection_sample(rows, tokens, **problem, backend=name) for name in BACKENDS
                )
                tally.cases += 1
                same = tally.drawn(got.tokens, want.tokens)
                for field in ("num_accepted", "num_emitted", "next_anchor", "accepted", "finish"):
                    what = f"{rule} {field}"
                    tally.equal(what, getattr(got, field)[same], getattr(want, field)[same])
                tally.equal(f"{rule} status", got.status[same], want.status[same])
                emitted = np.arange(gamma + 1) < want.num_emitted[same, None]
                for field in ("logprob", "logprob_raw"):
                    one, other = getattr(got, field)[same], getattr(want, field)[same]
                    bound = {"rtol": 16 * EPS, "atol": 16 * EPS}
                    tally.close(f"{rule} {field}", one[emitted], other[emitted], **bound)


FAMILIES: dict[str, Callable[[Tally, Rng], None]] = {
    "markov_loop": check_markov_loop,
    "confidence": check_confidence,
    "prefix_scheduler": check_prefix_scheduler,
    "paged_kv": check_paged_kv,
    "verify_attention": check_verify_attention,
    "rejection_sampler": check_rejection_sampler,
}
