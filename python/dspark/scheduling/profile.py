# SPDX-License-Identifier: Apache-2.0
"""Measure what a target step costs on this machine, as the scheduler's cost table.

The table is T(B): milliseconds of one target step over its number of tokens. It decides how much a
scheduler admits, so it belongs to one device, model, dtype and set of graph sizes, and
:func:`fingerprint` writes that down.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dspark_ext as dx
from dspark_ext import ArgumentError, CostTable
from dspark_ext.interfaces import Cache

__all__ = ["default_tokens", "fingerprint", "measure", "target_step", "with_sizes"]


def default_tokens(most: int) -> list[int]:
    """Batch sizes worth measuring: all up to 16, then in steps of a twelfth to a sixth.

    Examples
    --------
    >>> default_tokens(40)[15:]
    [16, 18, 20, 22, 24, 28, 32, 36, 40]
    """
    sizes = set(range(1, min(most, 16) + 1)) | {most}
    step, at = 2, 16
    while at < most:
        sizes.add(at)
        at += step
        if at >= 12 * step:
            step *= 2
    return sorted(sizes)


def with_sizes(tokens: Sequence[int], graph_sizes: Sequence[int]) -> list[int]:
    """Add the batch sizes of graphs to those that are worth measuring.

    Raises
    ------
    ArgumentError
        When they do not rise, or reach beyond the largest batch.

    Examples
    --------
    >>> with_sizes([1, 2, 4, 8], [4, 6])
    [1, 2, 4, 6, 8]
    """
    sizes = [int(g) for g in graph_sizes]
    if sizes != sorted(set(sizes)) or not all(1 <= g <= tokens[-1] for g in sizes):
        raise ArgumentError(f"graph sizes: got {sizes}, expected rising ones in 1..{tokens[-1]}")
    return sorted({*tokens, *sizes})


class _Samples:
    """Timings of named points, taken in interleaved rounds so that drift hits all points alike."""

    def __init__(
        self, run: Mapping[Any, Callable[[], object]], clock: Callable[[], float], seed: int
    ) -> None:
        self._run, self._clock = run, clock
        self._rng = np.random.default_rng(seed)
        self.taken: dict[Any, list[float]] = {key: [] for key in run}

    def round(self, keys: Iterable[Any], keep: bool = True) -> None:
        order = list(keys)
        self._rng.shuffle(order)
        for key in order:
            start = self._clock()
            self._run[key]()
            elapsed = self._clock() - start
            if keep:
                self.taken[key].append(1e3 * elapsed)

    def median(self, key: Any) -> float:
        return float(np.median(self.taken[key]))


def _progress(total: int, label: str, show: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit="round", disable=not show, leave=False)


def measure(
    step: Callable[[int], object],
    tokens: Sequence[int],
    *,
    kv_step: Callable[[int], object] | None = None,
    kv_tokens: Sequence[int] = (),
    kv_of: Callable[[int], int] | None = None,
    draft: Callable[[], object] | None = None,
    plateaus: Sequence[int] = (),
    fingerprint: Mapping[str, Any] | None = None,
    repeats: int = 9,
    warmup: int = 2,
    seed: int = 0,
    progress: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time a target step at several batch sizes and return the cost table.

    Parameters
    ----------
    step : callable
        ``step(B)`` runs one target step of B tokens and returns when it is done (synchronise a
        GPU inside).
    tokens : sequence of int
        Batch sizes to time, rising, at least 1. Nothing is admitted beyond the last one.
    kv_step : callable, optional
        ``kv_step(n)`` runs one step with n KV tokens over all requests; its slope in n becomes
        ``ms_per_kv_token``. Use the batch size that is usual in service.
    kv_tokens : sequence of int
        At least two totals for ``kv_step``.
    kv_of : callable, optional
        KV tokens that ``step(B)`` runs with; their share is taken out of ms(B) again.
    draft : callable, optional
        Runs what a round needs beside the target step; its median becomes ``draft_ms``.
    plateaus : sequence of int
        Graph batch sizes, see :class:`dspark_ext.CostTable`.
    fingerprint : mapping, optional
        Of :func:`fingerprint`.
    repeats, warmup : int
        Rounds over all points that are kept, and that come before and are not. The median counts.
    seed : int
        Of the order of the points inside a round.
    progress : bool
        Show a progress bar on standard error.
    clock : callable
        Seconds.

    Returns
    -------
    CostTable

    Raises
    ------
    ArgumentError
        For illegal sizes or counts, or ``kv_step`` without two KV totals.

    Notes
    -----
    A larger batch cannot cost less, so the table takes a running maximum, and one slow outlier
    would be carried to every larger batch. Points that contradict their order are therefore timed
    again, together with the point above them, before the maximum is taken.

    Examples
    --------
    >>> now = [0.0]
    >>> def step(b):                      # a machine that needs 2 ms + 0.5 ms a token
    ...     now[0] += 2e-3 + 0.5e-3 * b
    >>> table = measure(step, [1, 4, 8], clock=lambda: now[0])
    >>> [round(table.ms(b), 6) for b in (1, 2, 8)]
    [2.5, 3.0, 6.0]
    """
    sizes = [int(b) for b in tokens]
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ArgumentError(f"measure: tokens: got {sizes[:8]}, expected rising integers >= 1")
    if repeats < 1 or warmup < 0:
        raise ArgumentError(
            f"measure: repeats, warmup: got {repeats}, {warmup}, expected >= 1 and >= 0"
        )
    if (kv_step is None) != (len(set(kv_tokens)) < 2):
        raise ArgumentError(
            f"measure: kv_step, kv_tokens: got {'no' if kv_step is None else 'a'} callable and "
            f"{list(kv_tokens)}, expected both, with at least two totals, or neither"
        )
    runs: dict[Any, Callable[[], object]] = {("step", b): _bind(step, b) for b in sizes}
    if kv_step is not None:
        runs |= {("kv", int(n)): _bind(kv_step, int(n)) for n in kv_tokens}
    if draft is not None:
        runs["draft"] = draft
    samples = _Samples(runs, clock, seed)
    with _progress(warmup + repeats + 1, "profile", progress) as bar:
        for i in range(warmup + repeats):
            samples.round(runs, keep=i >= warmup)
            bar.update()
        suspects = _out_of_order([samples.median(("step", b)) for b in sizes])
        for _ in range(repeats if suspects else 0):
            samples.round(("step", sizes[i]) for i in suspects)
        bar.update()
    slope = 0.0
    if kv_step is not None:
        totals = np.array(sorted({int(n) for n in kv_tokens}), dtype=np.float64)
        medians = np.array([samples.median(("kv", int(n))) for n in totals])
        slope = max(0.0, float(np.polyfit(totals, medians, 1)[0]))
    ms = np.array([samples.median(("step", b)) for b in sizes])
    if kv_of is not None:
        share = slope * np.array([kv_of(b) for b in sizes])
        ms = np.maximum(ms - share, 0.05 * ms)  # noise must not make a step free
    return CostTable.from_points(
        sizes,
        ms,
        plateaus=plateaus,
        draft_ms=samples.median("draft") if draft is not None else 0.0,
        ms_per_kv_token=slope,
        fingerprint=fingerprint,
    )


def _bind(f: Callable[[int], object], n: int) -> Callable[[], object]:
    return lambda: f(n)


def _out_of_order(ms: Sequence[float]) -> list[int]:
    """Indices of points below an earlier one, and of the earlier ones above them."""
    found: set[int] = set()
    for i in range(len(ms)):
        above = [j for j in range(i) if ms[j] > ms[i]]
        found |= {i, *above} if above else set()
    return sorted(found)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def fingerprint(
    model: str,
    dtype: str,
    *,
    device: str = "cpu",
    parallelism: str = "tp1",
    graph_sizes: Sequence[int] = (),
    **more: Any,
) -> dict[str, Any]:
    """Describe the set-up that a cost table holds for.

    Parameters
    ----------
    model : str
        Name of the target.
    dtype : str
        Of its weights.
    device : str
        ``"cpu"`` or a torch CUDA device.
    parallelism : str
        How the target is split.
    graph_sizes : sequence of int
        Batch sizes of captured graphs.
    **more
        Anything else that changes a step's cost; JSON values.

    Examples
    --------
    >>> sorted(fingerprint("m", "bfloat16"))
    ['device', 'driver', 'dtype', 'graph_sizes', 'model', 'parallelism', 'threads']
    """
    import torch

    if device == "cpu":
        name, threads = _cpu_name(), torch.get_num_threads()
        driver = f"torch {torch.__version__}, {os.uname().machine}"
    else:
        name, threads = torch.cuda.get_device_name(device), 0
        driver = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    return {
        "device": name,
        "threads": threads,
        "driver": driver,
        "dtype": dtype,
        "model": model,
        "parallelism": parallelism,
        "graph_sizes": [int(g) for g in graph_sizes],
        **more,
    }


def target_step(
    target: Any,
    *,
    most_tokens: int,
    context: int,
    rows: int = 8,
    vocab_size: int = 1000,
    page_size: int = 16,
    seed: int = 0,
) -> tuple[Callable[[int], None], Callable[[int, int], None]]:
    """Make steps of a target (see :mod:`dspark_ext.interfaces`) for :func:`measure`.

    Parameters
    ----------
    target : Target
        With ``new_cache``.
    most_tokens : int
        Largest B.
    context : int
        Most KV tokens of a request; the cache holds noise of that length.
    rows : int
        Tokens of a request in a step, gamma + 1 at the most.
    vocab_size : int
        Token ids are drawn below it.
    page_size : int
        Of the cache.
    seed : int
        Of ids.

    Returns
    -------
    step : callable
        ``step(B)`` with a context of ``context`` for each of the ``ceil(B / rows)`` requests.
    step_at : callable
        ``step_at(B, context)`` with another length.

    Examples
    --------
    >>> from dspark.targets.paged import PagedLlama                       # doctest: +SKIP
    >>> step, _ = target_step(PagedLlama.load(ensure()), most_tokens=64,  # doctest: +SKIP
    ...                       context=256)
    """
    import torch

    if not 1 <= rows <= 17 or most_tokens < 1 or context < 1:
        raise ArgumentError(
            f"target_step: rows, most_tokens, context: got {rows}, {most_tokens}, {context}, "
            "expected 1..17, >= 1 and >= 1"
        )
    rng = np.random.default_rng(seed)
    requests = -(-most_tokens // rows)
    pages_each = -(-(context + rows) // page_size)
    table = torch.arange(requests * pages_each, dtype=torch.int32).view(requests, pages_each)
    pages = target.new_cache(requests * pages_each, page_size)
    ids = rng.integers(0, vocab_size, (requests, rows)).astype(np.int32)

    def step_at(tokens: int, length: int) -> None:
        target.forward(*_inputs(tokens, length))

    def _inputs(tokens: int, length: int) -> tuple[Any, Any, Any, Any]:
        used = -(-tokens // rows)
        lengths = _spread(tokens, used) - 1
        plan = dx.prefix_schedule(
            torch.zeros(used, max(rows - 1, 1)),
            mode="off",
            max_len=lengths,
            anchor=torch.from_numpy(ids[:used, 0].copy()),
            draft_tokens=torch.from_numpy(ids[:used, 1:].copy())
            if rows > 1
            else torch.zeros(used, 1, dtype=torch.int32),
            position=torch.full((used,), length, dtype=torch.int64),
        )
        before = torch.full((used,), length, dtype=torch.int32)
        cache = Cache(
            pages=pages,
            page_table=table[:used],
            kv_len=before,
            kv_len_after=before + torch.from_numpy(lengths + 1),
            max_q_len=rows,
            page_size=page_size,
        )
        total = int(plan.total_tokens)
        assert plan.token_ids is not None and plan.positions is not None
        return plan.token_ids[:total], plan.positions[:total], plan, cache

    return lambda tokens: step_at(tokens, context), step_at


def _spread(tokens: int, requests: int) -> NDArray[np.int32]:
    """Split ``tokens`` over ``requests`` as evenly as possible."""
    base, extra = divmod(tokens, requests)
    return np.array([base + (r < extra) for r in range(requests)], dtype=np.int32)
