# SPDX-License-Identifier: Apache-2.0
"""Measured cost tables for the engine, one per number of concurrent requests, kept on disk."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dspark_ext as dx
from dspark.engine.loading import Models
from dspark.scheduling.profile import fingerprint, measure, with_sizes
from dspark_ext.decode_round import draft_block
from dspark_ext.interfaces import NewFeatures


def sizes(requests: int, gamma: int) -> list[int]:
    """Batch sizes worth timing: plain decoding of one to all requests, then drafts on top.

    Examples
    --------
    >>> sizes(1, 7)
    [1, 2, 3, 4, 5, 6, 7, 8]
    >>> sizes(8, 7)
    [1, 2, 4, 8, 10, 12, 16, 20, 24, 32, 40, 64]
    """
    last = requests * (1 + gamma)
    if last <= 16:
        return list(range(1, last + 1))
    fewer = {1 << i for i in range(requests.bit_length()) if 1 << i < requests}
    factors = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5)
    return sorted(fewer | {round(requests * f) for f in factors if requests * f < last} | {last})


def table(
    models: Models,
    requests: int,
    context: int = 160,
    repeats: int = 5,
    progress: bool = False,
    seed: int = 0,
    *,
    kv: bool = False,
    graph_sizes: Sequence[int] = (),
) -> dx.CostTable:
    """Time the target on ``requests`` requests at all batch sizes, and one draft of them.

    Parameters
    ----------
    models : Models
        With a drafter.
    requests : int
        Active requests.
    context : int
        KV tokens of each.
    repeats : int
        Timings of each point; the median counts.
    progress : bool
        Show a progress bar.
    seed : int
        Of the order of the points inside a round.
    kv : bool
        Measure the slope in KV tokens, too, between a quarter of the context and all of it.
        Without it the table holds for contexts of about this length.
    graph_sizes : sequence of int
        Batch sizes that the target pads to: steps of the table.
    """
    batch, tokens = _Batch(models, requests, context), sizes(requests, models.drafter.gamma)
    slope: dict[str, Any] = {}
    if kv:
        lengths = sorted({max(1, context // 4), max(2, context // 2), context})
        at = {requests * n: batch if n == context else _Batch(models, requests, n) for n in lengths}
        slope = {
            "kv_step": lambda total: at[total].step(tokens[-1]),
            "kv_tokens": list(at),
            "kv_of": lambda b: min(b, requests) * context,
        }
    return measure(
        batch.step,
        with_sizes(tokens, graph_sizes),
        draft=batch.draft,
        plateaus=graph_sizes,
        fingerprint=_fingerprint(models, requests, context, graph_sizes),
        **slope,
        repeats=repeats,
        warmup=1,
        seed=seed,
        progress=progress,
    )


def cached(
    models: Models,
    requests: int,
    folder: Path | None,
    *,
    context: int = 160,
    repeats: int = 5,
    progress: bool = False,
) -> tuple[dx.CostTable, bool]:
    """Return the table of this set-up, measured now unless ``folder`` holds it; and whether it did.

    The file's fingerprint must agree in every field, and so must the time of a plain step with
    what the table says of it: a table that was measured on a busy machine is not kept.
    """
    wanted = _fingerprint(models, requests, context)
    if folder is None:
        return table(models, requests, context, repeats, progress), False
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"cost-{digest}.json"
    try:
        known = dx.CostTable.load(path, expect=wanted)
        if still_true(known, _Batch(models, requests, context).step, requests):
            return known, True
    except (OSError, dx.ArgumentError, dx.FingerprintError):
        pass
    made = table(models, requests, context, repeats, progress)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(path)
    return made, False


def still_true(
    known: dx.CostTable, step: Callable[[int], object], tokens: int, tolerance: float = 0.3
) -> bool:
    """Time a step of ``tokens`` rows and compare it with the table.

    Examples
    --------
    >>> slow = dx.CostTable.from_points([1, 2], [1e6, 2e6])
    >>> still_true(slow, lambda tokens: None, 1)
    False
    """
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        step(tokens)
        taken.append(1e3 * (time.perf_counter() - start))
    ratio = statistics.median(taken[1:]) / float(known.ms(tokens))
    return abs(ratio - 1) <= tolerance


def by_requests(one: dx.CostTable, many: dx.CostTable, requests: int) -> dict[int, dx.CostTable]:
    """Tables for 1 to ``requests`` active requests: the drafter's time grows in a straight line.

    Parameters
    ----------
    one, many : CostTable
        Of 1 and of ``requests`` requests.
    requests : int
        At least 2.

    Examples
    --------
    >>> t = [dx.CostTable.from_points([1, 8], [10.0, 20.0], draft_ms=d) for d in (2.0, 9.0)]
    >>> {n: x.draft_ms for n, x in by_requests(*t, 3).items()}
    {1: 2.0, 2: 5.5, 3: 9.0}
    """
    tables = {1: one}
    for n in range(2, requests + 1):
        ms = float(np.interp(n, [1, requests], [one.draft_ms, many.draft_ms]))
        tables[n] = many.with_draft_ms(ms)
    return tables


def load_for(path: Path, models: Models) -> dx.CostTable:
    """Read a table of ``dspark profile`` and refuse one of another set-up.

    The device, its driver and threads, the model, its dtype and parallelism and the drafter must
    agree. The number of requests and the context that it was measured with are the user's choice,
    and a table without a fingerprint is a statement of the user's own.

    Raises
    ------
    FingerprintError
        Lists the fields that differ.
    """
    table = dx.CostTable.load(path)
    if not table.fingerprint:
        return table
    free = ("requests", "context", "tokens", "graph_sizes")
    wanted = {k: v for k, v in _fingerprint(models, 1, 1).items() if k not in free}
    found = {k: v for k, v in table.fingerprint.items() if k not in free}
    wanted = json.loads(json.dumps(wanted))
    if found != wanted:
        raise dx.FingerprintError(found, wanted, str(path))
    return table


def _fingerprint(
    models: Models, requests: int, context: int, graph_sizes: Sequence[int] = ()
) -> dict[str, Any]:
    drafter = models.drafter.config
    return fingerprint(
        models.name,
        models.dtype,
        graph_sizes=graph_sizes,
        requests=requests,
        context=context,
        tokens=sizes(requests, models.drafter.gamma),
        drafter=[
            drafter.num_hidden_layers,
            drafter.columns,
            drafter.markov_rank,
            models.drafter.gamma,
        ],
    )


class _Batch:
    """A state full of requests at one context length, whose rounds are never committed."""

    def __init__(self, models: Models, requests: int, context: int) -> None:
        self.models, gamma = models, models.drafter.gamma
        self.state = dx.RoundState.create(
            requests, gamma, max_len=context + 2 * gamma + 8, framework="torch"
        )
        rng = np.random.default_rng(0)
        params = dx.SamplingParams(max_new_tokens=gamma + 2)
        for _ in range(requests):
            self.state.add(rng.integers(5, 1000, context), params)
        dx.prefill(models.target, self.state)
        self.state.reserve()
        self.draft()
        self._features = self.state.pending_features()
        # What a round in service hands over: a few rows a request, not a whole prompt.
        few = np.minimum(self._features.num_new, 2).astype(np.int32)
        starts = self._features.cu_seqlens[:-1]
        rows = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, few, strict=True)])
        cu = np.concatenate(([0], np.cumsum(few))).astype(np.int32)
        self.state.features_taken()
        self.state.hand_over(NewFeatures(self._features.rows[rows], cu, few))

    def step(self, tokens: int) -> None:
        """One target forward of ``tokens`` rows, spread evenly over as many requests as can be."""
        state = self.state
        base, extra = divmod(tokens, state.max_requests)
        counts = np.array([base + (r < extra) for r in range(state.max_requests)], np.int32)
        plan = dx.prefix_schedule(
            state.no_survival,
            mode="off",
            max_len=np.maximum(counts - 1, 0),
            active=counts > 0,
            anchor=state.anchor,
            draft_tokens=state.no_drafts,
            position=state.position,
        )
        cache = state.cache(state.target_pages, counts, int(counts.max()))
        assert plan.token_ids is not None and plan.positions is not None
        self.models.target.forward(plan.token_ids[:tokens], plan.positions[:tokens], plan, cache)

    def draft(self) -> None:
        """What a round costs beside the target: the drafter, its head and the confidence."""
        draft = draft_block(self.models.drafter, self.state)
        dx.confidence(draft.confidence_logit)
