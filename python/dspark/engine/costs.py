# SPDX-License-Identifier: Apache-2.0
"""Measured cost tables for the engine, one per number of concurrent requests, kept on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import dspark_ext as dx
from dspark.engine.loading import Models
from dspark.scheduling.profile import fingerprint, measure
from dspark_ext.decode_round import draft_block
from dspark_ext.interfaces import NewFeatures


def sizes(requests: int, gamma: int) -> list[int]:
    """Batch sizes worth timing for a number of requests, from plain decoding to all drafts.

    Examples
    --------
    >>> sizes(1, 7)
    [1, 2, 3, 4, 5, 6, 7, 8]
    >>> sizes(8, 7)
    [8, 10, 12, 16, 20, 24, 32, 40, 48, 64]
    """
    last = requests * (1 + gamma)
    if last <= 16:
        return list(range(requests, last + 1))
    factors = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6)
    inside = {round(requests * f) for f in factors if requests * f < last}
    return sorted(inside | {last})


def table(
    models: Models,
    requests: int,
    context: int = 160,
    repeats: int = 5,
    progress: bool = False,
    seed: int = 0,
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
    """
    batch = _Batch(models, requests, context)
    return measure(
        batch.step,
        sizes(requests, models.drafter.gamma),
        draft=batch.draft,
        fingerprint=_fingerprint(models, requests, context),
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

    The file's fingerprint must agree in every field, otherwise a new table is measured.
    """
    wanted = _fingerprint(models, requests, context)
    if folder is None:
        return table(models, requests, context, repeats, progress), False
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"cost-{digest}.json"
    try:
        return dx.CostTable.load(path, expect=wanted), True
    except (OSError, dx.ArgumentError, dx.FingerprintError):
        made = table(models, requests, context, repeats, progress)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(path)
    return made, False


def _fingerprint(models: Models, requests: int, context: int) -> dict[str, Any]:
    drafter = models.drafter.config
    return fingerprint(
        models.name,
        models.dtype,
        requests=requests,
        context=context,
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
        """One target forward of ``tokens`` rows, spread evenly."""
        state = self.state
        base, extra = divmod(tokens, state.max_requests)
        lengths = np.array([base + (r < extra) - 1 for r in range(state.max_requests)], np.int32)
        plan = dx.prefix_schedule(
            state.no_survival,
            mode="off",
            max_len=lengths,
            anchor=state.anchor,
            draft_tokens=state.no_drafts,
            position=state.position,
        )
        cache = state.cache(state.target_pages, lengths + 1, int(lengths.max()) + 1)
        assert plan.token_ids is not None and plan.positions is not None
        self.models.target.forward(plan.token_ids[:tokens], plan.positions[:tokens], plan, cache)

    def draft(self) -> None:
        """What a round costs beside the target: the drafter, its head and the confidence."""
        draft = draft_block(self.models.drafter, self.state)
        dx.confidence(draft.confidence_logit)
