# SPDX-License-Identifier: Apache-2.0
"""Timing on a GPU: every contender is a CUDA graph, replayed in turns between two events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["GraphTime", "capture", "replay_in_turns"]


@dataclass(frozen=True)
class GraphTime:
    """Microseconds of one contender.

    ``warm``: replays one after the other, L2 holds what the last one left. ``cold``: L2 was filled
    with other data before each.
    """

    warm: float
    warm_p95: float
    cold: float


def capture(call: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a call; it runs a few times first, so that nothing is set up inside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def replay_in_turns(
    replays: Mapping[str, Callable[[], None]], rounds: int = 60
) -> dict[str, GraphTime]:
    """Time replays in rotating order; medians over the rounds."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sweep = torch.empty(4 * l2, dtype=torch.uint8, device="cuda")
    names = list(replays)
    found: dict[str, dict[bool, list[float]]] = {n: {True: [], False: []} for n in names}
    for done in range(rounds):
        for i in range(len(names)):
            name = names[(i + done) % len(names)]
            for cold in (True, False):
                if cold:
                    sweep.fill_(done & 1)
                else:
                    replays[name]()  # what the timed one then finds in L2 is its own
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                replays[name]()
                end.record()
                end.synchronize()
                found[name][cold].append(1e3 * start.elapsed_time(end))
    return {
        name: GraphTime(
            warm=float(np.median(times[False])),
            warm_p95=float(np.quantile(times[False], 0.95)),
            cold=float(np.median(times[True])),
        )
        for name, times in found.items()
    }
