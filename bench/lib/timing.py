# SPDX-License-Identifier: Apache-2.0
"""Timing of several contenders in one run, in turns, so that a noisy machine is fair to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["STREAM_BYTES", "Sample", "read_bandwidth", "stream", "time_in_turns"]

#: What one call of :func:`stream` reads: far more than the caches hold.
STREAM_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Sample:
    """Times of one contender.

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
    contenders: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Time every contender once per round, in rotating order, after one untimed round.

    Parameters
    ----------
    contenders : mapping of name to callable
    seconds : float
        Stop after about this much time in total, but not before ``rounds`` rounds.
    rounds : int
        Fewest rounds.
    clock : callable
        Seconds. ``time.process_time`` leaves out what others did on the processor meanwhile; it
        adds up threads, so it is for contenders of one thread.

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
            start = clock()
            contenders[name]()
            times[name].append(clock() - start)
        done += 1
    return {
        name: Sample(float(np.median(t)), float(np.quantile(t, 0.95)), min(t), len(t))
        for name, t in times.items()
    }


def stream() -> Callable[[], object]:
    """Return a call that reads STREAM_BYTES of memory with all threads and does next to nothing.

    As one more contender of :func:`time_in_turns` it meets the same disturbances as the others, so
    its median is the denominator of theirs.
    """
    import torch

    x = torch.ones(STREAM_BYTES // 4)
    return lambda: x.sum()


def read_bandwidth(repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second at which this process reads memory: the best of a few streams.

    ``clock`` as in :func:`time_in_turns`.
    """
    call = stream()
    best = np.inf
    for _ in range(repeats):
        start = clock()
        call()
        best = min(best, clock() - start)
    return STREAM_BYTES / best
