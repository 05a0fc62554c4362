# SPDX-License-Identifier: Apache-2.0
"""Plain decoding against speculation: same kernels, same machine, alternating runs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspark_ext as dx
from dspark.engine.engine import Engine
from dspark.engine.loading import Models
from dspark.engine.metrics import Metrics

PHASES = ("draft", "schedule", "verify", "other")


@dataclass
class Variant:
    """One way to decode, and what its runs amounted to."""

    name: str
    scheduler: dx.Scheduler | None  # None: plain decoding, without the drafter
    metrics: Metrics = field(default_factory=Metrics)
    rates: list[float] = field(default_factory=list)  # tokens per second of each run
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median tokens per second over the runs."""
        return statistics.median(self.rates) if self.rates else 0.0


def run_once(
    models: Models,
    variant: Variant,
    prompts: Sequence[Sequence[int]],
    params: dx.SamplingParams,
    requests: int,
    *,
    keep: bool = True,
) -> None:
    """Answer all prompts, ``requests`` at a time, and add the run to the variant."""
    longest = max(len(p) for p in prompts) + params.max_new_tokens
    engine = Engine(
        models.target,
        None if variant.scheduler is None else models.drafter,
        gamma=models.drafter.gamma,
        max_requests=requests,
        scheduler=variant.scheduler,
        max_len=longest,
    )
    start = time.perf_counter()
    answers = engine.complete(prompts, params)
    seconds = time.perf_counter() - start - engine.prefill_seconds
    if keep:
        variant.rates.append(engine.metrics.emitted / seconds)
        variant.metrics.merge(engine.metrics)
        variant.answers = answers


def compare(
    models: Models,
    variants: Sequence[Variant],
    prompts: Sequence[Sequence[int]],
    params: dx.SamplingParams,
    requests: int,
    repeats: int,
    *,
    tick: Callable[[], None] = lambda: None,
    seconds: float = float("inf"),
) -> int:
    """Run the variants in turns, so that a machine that slows down slows all of them.

    Parameters
    ----------
    models : Models
        With a drafter.
    variants : sequence of Variant
        Filled in place.
    prompts : sequence of token id sequences
        Answered whole in every run.
    params : SamplingParams
        Of every request.
    requests : int
        Concurrent requests.
    repeats : int
        Runs of each variant that are kept; a short one comes before and is not.
    tick : callable
        Called behind each run, for a progress bar.
    seconds : float
        Begin no further turn that is not expected to end within this time.

    Returns
    -------
    int
        Turns that were made, at least 1.
    """
    short = dx.SamplingParams(temperature=params.temperature, max_new_tokens=4, seed=0)
    for variant in variants:
        run_once(models, variant, prompts[:requests], short, requests, keep=False)
    start = time.perf_counter()
    for turn in range(repeats):
        elapsed = time.perf_counter() - start
        if turn and elapsed * (turn + 1) / turn > seconds:
            return turn
        order = list(variants) if turn % 2 == 0 else list(reversed(variants))
        for variant in order:
            run_once(models, variant, prompts, params, requests)
            tick()
    return repeats


def rows(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """One record per variant; the first one is the baseline of the ratios."""
    base = variants[0].rate
    return [
        {
            "name": v.name,
            "tokens_per_second": v.rate,
            "runs": v.rates,
            "ratio": v.rate / base if base else 0.0,
            **{k: x for k, x in v.metrics.to_dict().items() if k != "tokens_per_second"},
        }
        for v in variants
    ]


def text_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table of :func:`rows`.

    Examples
    --------
    >>> from dspark.engine.compare import Variant, rows
    >>> text_table(rows([Variant("plain", None, rates=[20.0])]))[1].split()[:3]
    ['plain', '20.0', '1.00x']
    """
    head = (
        f"{'':<22}{'tok/s':>8}{'ratio':>8}{'length':>8}{'sched':>7}"
        f"{'draft':>8}{'plan':>7}{'verify':>8}{'other':>7}   acceptance by position"
    )
    lines = [head]
    for r in records:
        share = [f"{100 * r['time_share'][p]:.0f}%" for p in PHASES]
        positions = " ".join(f"{x:.2f}" for x in r["acceptance_given_prefix"][:7])
        lines.append(
            f"{r['name']:<22}{r['tokens_per_second']:>8.1f}{r['ratio']:>7.2f}x"
            f"{r['acceptance_length']:>8.2f}{r['mean_scheduled_length']:>7.2f}"
            f"{share[0]:>8}{share[1]:>7}{share[2]:>8}{share[3]:>7}   {positions}".rstrip()
        )
    return lines
