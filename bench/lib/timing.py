# SPDX-License-Identifier: Apache-2.0
"""Timing of several contenders in one run, in turns, so that a noisy machine is fair to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Sample", "read_bandwidth", "time_in_turns"]


@dataclass(frozen=True)
class Sample:
    """Wall times of one contender.

    Attributes
    ----------
    median, p95, best : float
        Seconds.
    runs : int
    """

    median: float
    p95: float
    best: float
    runs: int


def time_in_turns(
    contenders: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, rounds: int = 5
) -> dict[str, Sample]:
    """Time every contender once per round, in rotating order, after one untimed round.

    Parameters
    ----------
    contenders : mapping of name to callable
    seconds : float
        Stop after about this much time in total, but not before ``rounds`` rounds.
    rounds : int
        Fewest rounds.

    Returns
    -------
    dict of name to Sample
    """
    names = list(contenders)
    for call in contenders.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for i in range(len(names)):
            name = names[(i + done) % len(names)]
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
        done += 1
    return {
        name: Sample(float(np.median(t)), float(np.quantile(t, 0.95)), min(t), len(t))
        for name, t in times.items()
    }


def read_bandwidth(megabytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second at which this process reads memory, all its threads together.

    The best of a few sums over an array far larger than the caches: the denominator of a floor.
    """
    import torch

    x = torch.ones(megabytes * 2**20 // 4)
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - start)
    return megabytes * 2**20 / best
