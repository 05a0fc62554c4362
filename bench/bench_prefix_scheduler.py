# SPDX-License-Identifier: Apache-2.0
"""Time prefix_scheduler against the same schedule composed of NumPy and of torch operations.

    python bench/bench_prefix_scheduler.py [--device cpu|cuda] [--seconds S] [--limit S] [--check]
                                           [--json] [--seed N] [--save [FILE]]

All contenders solve the same problem in the same run, in turns: lengths, cu_seqlens, Theta and the
marker tensor. Their lengths are compared before anything is timed. Microseconds, medians. --save
keeps the JSON in FILE, or in bench/results/<machine>/; with --check the exit code is 1 when a goal
is missed.

    c             the C call alone, parameters filled in (what an engine in C++ pays)
    op            the Python function, with a CostTable
    numpy, torch  a stable sort of all candidates, cumulative sums, the first Theta that does not
                  rise (causal) or the best one (search), and the layout by repeat
    model         on a GPU: bench/lib/roofline.py, which is a model of latencies

On a CPU a turn calls a contender twice. The first call finds caches and branch predictors as the
others left them, as behind a model's forward ("cold"); the second finds its own ("warm"). The goals
and ratios are of warm calls. On a GPU every contender is a CUDA graph; its goals are of warm
replays, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from lib import contest, roofline

import dspark_ext as dx
from dspark_ext import _C

SHAPES = ((1, 7), (8, 7), (64, 7), (128, 7), (64, 16), (512, 16))
GOAL_CPU = 5.0  # NumPy over the C call at R = 128, gamma = 7
GOALS_GPU = ((1024, 4.0), (8192, 8.0))  # candidates, microseconds
Schedule = tuple[Any, Any, Any, Any, Any]


def numpy_schedule(a: np.ndarray, live: np.ndarray, ms: np.ndarray, search: bool) -> Schedule:
    requests = len(a)
    key = a.T.ravel()  # position-major: a stable sort then breaks ties by position, request
    order = np.argsort(-key, kind="stable")
    order = order[: np.count_nonzero(key > 0)]
    tau = requests + np.concatenate([[0.0], np.cumsum(key[order], dtype=np.float64)])
    theta = tau * (1000.0 / ms[requests : requests + len(tau)])
    if search:
        n = int(np.argmax(theta))
        order = np.argsort(-live.T.ravel(), kind="stable")
    else:
        falls = theta[1:] <= theta[:-1]
        n = int(np.argmax(falls)) if falls.any() else len(falls)
    length = np.bincount(order[:n] % requests, minlength=requests)
    cu = np.concatenate([[0], np.cumsum(1 + length)]).astype(np.int32)
    row = np.repeat(np.arange(requests, dtype=np.int32), 1 + length)
    return length, cu, theta[n], row, np.arange(cu[-1], dtype=np.int32) - cu[row]


def torch_schedule(a: torch.Tensor, live: torch.Tensor, ms: torch.Tensor, search: bool) -> Schedule:
    """Return the schedule; without a host's look at the data, so that a graph can hold it."""
    requests, tokens = len(a), a.numel() + len(a)
    key, order = torch.sort(a.t().reshape(-1), descending=True, stable=True)
    tau = requests + torch.nn.functional.pad(key.double().cumsum(0), (1, 0))
    theta = tau * (1000.0 / ms[requests : requests + len(tau)])
    if search:
        n = theta.argmax()
        order = torch.sort(live.t().reshape(-1), descending=True, stable=True)[1]
    else:
        rises = (theta[1:] > theta[:-1]).int()
        n = rises.cumprod(0).sum()
    taken = torch.arange(len(key), device=a.device) < n
    length = torch.zeros(requests, dtype=torch.int64, device=a.device)
    length = length.scatter_add(0, order % requests, taken.long())
    cu = torch.nn.functional.pad((1 + length).cumsum(0), (1, 0))
    place = torch.arange(tokens, device=a.device)
    row = torch.searchsorted(cu, place, right=True) - 1  # padded: the batch may be any size
    return length, cu, theta[n], row, place - cu[row.clamp(max=requests)]


def c_call(a: np.ndarray, old: np.ndarray, table: dx.CostTable, search: bool) -> Any:
    plan = dx.prefix_schedule(a, table)
    p = _C.PrefixSchedulerParams()
    p.num_requests, p.gamma = a.shape
    p.mode, p.budget, p.capacity = int(search), -1, -1
    p.survival, p.survival_stride = a.ctypes.data, a.shape[1]
    if search:
        p.lagged, p.lagged_stride = old.ctypes.data, a.shape[1]
    p.cost_ms, p.cost_size = table.array.ctypes.data, len(table.array)
    for name in ("length", "cu_seqlens", "total_tokens", "theta", "row_to_request", "row_offset",
                 "work", "status"):  # fmt: skip
        setattr(p, name, getattr(plan, name).ctypes.data)
    p.padded_tokens, p.work_size = len(plan.row_offset), len(plan.work)
    scratch = np.empty(_C.prefix_scheduler_workspace(_C.CPU, p), np.uint8)

    def call() -> Any:
        _C.prefix_scheduler(_C.CPU, p, scratch.ctypes.data, scratch.size)
        return plan.length, a, old, table

    return call


def problem(requests: int, gamma: int, seed: int) -> tuple[np.ndarray, np.ndarray, dx.CostTable]:
    """Live and old survivals, and a step whose fixed part is worth 40 % of the drafts."""
    rng = np.random.default_rng([seed, requests, gamma])
    live, old = (
        np.ascontiguousarray(
            np.cumprod(rng.beta(5, 1, (requests, gamma)).astype(np.float32), axis=1)
        )
        for _ in range(2)
    )
    tokens = np.arange(1, requests * (gamma + 1) + 1)
    return live, old, dx.CostTable.from_points(tokens, 1 + tokens / (0.4 * requests * gamma))


def tensors(device: str, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays on a device."""
    return [torch.from_numpy(x).to(device) for x in arrays]


def contenders(requests: int, gamma: int, search: bool, seed: int, device: str) -> dict[str, Any]:
    live, old, table = problem(requests, gamma, seed)
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(old)
    k: dict[str, Any] = {"mode": "two_phase", "lagged": lagged} if search else {}
    ranked = old if search else live
    there = tensors(device, ranked, live, table.array)
    if device == "cuda":
        call = cuda_call(there[1], *tensors(device, old), there[2], search)
        runs: dict[str, Any] = {"op": call}
    else:
        runs = {
            "c": c_call(live, old, table, search),
            "op": lambda: (dx.prefix_schedule(live, table, **k).length,),
            "numpy": lambda: numpy_schedule(ranked, live, table.array, search),
        }
    runs["torch"] = lambda: torch_schedule(*there, search)
    want = dx.prefix_schedule(live, table, **k, backend="reference").length.tolist()
    for name, run in runs.items():
        if run()[0].tolist() != want:
            raise SystemExit(f"{name} disagrees with the reference at R={requests} gamma={gamma}")
    return runs


def cuda_call(live: torch.Tensor, old: torch.Tensor, ms: torch.Tensor, search: bool) -> Any:
    """Return a call whose budget comes from arrays of the device, as a captured engine has them."""
    plan = dx.prefix_schedule(live, ms)
    if not search:
        return lambda: (dx.prefix_schedule(live, ms, out=plan).length,)
    p = _C.PrefixSchedulerParams()
    p.num_requests, p.gamma = live.shape
    p.mode, p.budget, p.capacity = 1, -1, -1
    p.survival, p.survival_stride = live.data_ptr(), live.shape[1]
    p.lagged, p.lagged_stride = old.data_ptr(), live.shape[1]
    p.cost_ms, p.cost_size = ms.data_ptr(), len(ms)
    for name in ("length", "cu_seqlens", "total_tokens", "theta", "row_to_request", "row_offset",
                 "work", "status"):  # fmt: skip
        setattr(p, name, getattr(plan, name).data_ptr())
    p.padded_tokens, p.work_size = len(plan.row_offset), len(plan.work)
    bytes_needed = _C.prefix_scheduler_workspace(_C.CUDA, p)
    scratch = torch.empty(max(bytes_needed, 1), dtype=torch.uint8, device=live.device)

    def call() -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        _C.prefix_scheduler(_C.CUDA, p, scratch.data_ptr(), bytes_needed, stream)
        return plan.length, live, old, ms

    return call


def time_cpu(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, tuple[float, float]]:
    """Median (cold, warm) microseconds of each contender; at least 20 turns."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names, end, turn = list(runs), time.perf_counter() + seconds, 0
    while turn < 20 or time.perf_counter() < end:
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            pair = []
            for _ in range(2):
                start = time.perf_counter()
                runs[name]()
                pair.append(1e6 * (time.perf_counter() - start))
            if turn:
                taken[name].append((pair[0], pair[1]))
        turn += 1
    return {n: (float(np.median(t, axis=0)[0]), float(np.median(t, axis=0)[1]))
            for n, t in taken.items()}  # fmt: skip


def time_gpu(runs: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    from lib.graphs import capture, replay_in_turns

    times = replay_in_turns({name: capture(run) for name, run in runs.items()})
    return {name: (t.cold, t.warm) for name, t in times.items()}


def head(requests: int, gamma: int, search: bool) -> dict[str, Any]:
    """What a row of the table begins with."""
    return {"mode": "two_phase" if search else "causal", "R": requests, "gamma": gamma}


def measure(shape: tuple[int, int], search: bool, device: str, o: Any) -> dict[str, Any]:
    requests, gamma = shape
    runs = contenders(requests, gamma, search, o.seed, device)
    us = time_gpu(runs) if device == "cuda" else time_cpu(runs, o.seconds)
    first = "op" if device == "cuda" else "c"
    row = head(requests, gamma, search) | {"admitted": int(runs[first]()[0].sum())}
    for name, (cold, warm) in us.items():
        row |= {f"{name} us": round(warm, 2), f"{name} cold": round(cold, 2)}
    if device == "cuda":
        row["model us"] = round(1e6 * roofline.schedule(requests, gamma, search), 2)
    else:
        row["numpy/c"] = round(us["numpy"][1] / us["c"][1], 2)
        row["numpy/op"] = round(us["numpy"][1] / us["op"][1], 2)
    row[f"torch/{first}"] = round(us["torch"][1] / us[first][1], 2)
    return row


def goals(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        what = f"{row['mode']}, R = {row['R']}, gamma = {row['gamma']}"
        if device == "cpu" and (row["R"], row["gamma"]) == (128, 7):
            found.append(contest.goal(f"numpy/c, {what}", row["numpy/c"], least=GOAL_CPU))
        if device == "cuda":
            most = next(us for n, us in GOALS_GPU if row["R"] * row["gamma"] <= n)
            found.append(contest.goal(f"op us, {what}", row["op us"], most=most))
    return found


def main() -> None:
    given = contest.options(str(__doc__))
    problems: list[str] = []
    rows = contest.until(
        given.limit,
        [(*shape, search) for shape in SHAPES for search in (False, True)],
        lambda row: [measure(row[:2], row[2], given.device, given)],
        lambda row: head(*row),
        problems,
    )
    contest.finish(
        rows,
        goals(rows, given.device),
        given,
        name="prefix_scheduler",
        note="microseconds a call, warm; cold: see the head of the file",
        problems=problems,
    )


if __name__ == "__main__":
    main()
