# SPDX-License-Identifier: Apache-2.0
"""Time prefix_scheduler against the same schedule composed of NumPy and of torch operations.

    python bench/bench_prefix_scheduler.py [--json] [--rounds N] [--seed S]

All contenders solve the same problem in the same run, in alternating order: lengths, cu_seqlens,
Theta and the marker tensor. Their lengths are compared before anything is timed. Medians.

* c: the C call alone, parameters filled in (what an engine in C++ pays)
* op: the Python function with preallocated results
* numpy, torch: a stable sort of all candidates, cumulative sums, the first Theta that does not rise
  (causal) or the best one (search), and the layout by repeat

One round of a 512 x 16 batch has 8192 candidates. The compositions always sort all of them; the
operator merges the requests' rows, which are sorted already, and stops where Theta stops rising.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import dspark_ext as dx
from dspark_ext import _C

SHAPES = ((1, 7), (8, 7), (64, 7), (64, 16), (512, 16))
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
    requests = len(a)
    key, order = torch.sort(a.t().reshape(-1), descending=True, stable=True)
    tau = requests + torch.cat([torch.zeros(1, dtype=torch.float64), key.double().cumsum(0)])
    theta = tau * (1000.0 / ms[requests : requests + len(tau)])
    if search:
        n = int(torch.argmax(theta))
        order = torch.sort(live.t().reshape(-1), descending=True, stable=True)[1]
    else:
        falls = (theta[1:] <= theta[:-1]).nonzero()
        n = int(falls[0]) if len(falls) else len(key)
    length = torch.bincount(order[:n] % requests, minlength=requests)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), (1 + length).cumsum(0)])
    row = torch.repeat_interleave(torch.arange(requests), 1 + length)
    return length, cu, theta[n], row, torch.arange(int(cu[-1])) - cu[row]


def c_call(a: np.ndarray, old: np.ndarray, ms: np.ndarray, search: bool, plan: dx.Plan) -> Any:
    p = _C.PrefixSchedulerParams()
    p.num_requests, p.gamma = a.shape
    p.mode, p.budget, p.capacity = int(search), -1, -1
    p.survival, p.survival_stride = a.ctypes.data, a.shape[1]
    if search:
        p.lagged, p.lagged_stride = old.ctypes.data, a.shape[1]
    p.cost_ms, p.cost_size = ms.ctypes.data, len(ms)
    for name in ("length", "cu_seqlens", "total_tokens", "theta", "row_to_request", "row_offset",
                 "work", "status"):  # fmt: skip
        setattr(p, name, getattr(plan, name).ctypes.data)
    p.padded_tokens, p.work_size = len(plan.row_offset), len(plan.work)
    scratch = np.empty(_C.prefix_scheduler_workspace(_C.CPU, p), np.uint8)
    keep = (a, old, ms, plan, scratch)
    return lambda: (_C.prefix_scheduler(_C.CPU, p, scratch.ctypes.data, scratch.size), keep)[0]


def contenders(
    requests: int, gamma: int, search: bool, rng: np.random.Generator
) -> tuple[dict[str, Callable[[], Any]], dx.Plan]:
    a, old = (
        np.ascontiguousarray(
            np.cumprod(rng.beta(5, 1, (requests, gamma)).astype(np.float32), axis=1)
        )
        for _ in range(2)
    )
    # A step that costs as much for 40 % of the batch's drafts as for none: both modes stop inside.
    ms = 1 + np.arange(requests * (gamma + 1) + 1) / (0.4 * requests * gamma)
    lagged = dx.LaggedSurvival()
    for _ in range(2):
        lagged.push(old)
    k: dict[str, Any] = {"mode": "two_phase", "lagged": lagged} if search else {}
    plan = dx.prefix_schedule(a, ms, **k)
    ranked = old if search else a
    ta, tl, tms = torch.from_numpy(ranked), torch.from_numpy(a), torch.from_numpy(ms)
    runs: dict[str, Callable[[], Any]] = {
        "c": c_call(a, old, ms, search, dx.prefix_schedule(a, ms, **k)),
        "op": lambda: dx.prefix_schedule(a, ms, out=plan, **k),
        "numpy": lambda: numpy_schedule(ranked, a, ms, search),
        "torch": lambda: torch_schedule(ta, tl, tms, search),
    }
    for name in ("numpy", "torch"):
        if runs[name]()[0].tolist() != plan.length.tolist():
            raise SystemExit(f"{name} disagrees with the operator at R={requests} gamma={gamma}")
    return runs, plan


def time_all(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if i >= 2:
                taken[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(us) for name, us in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the prefix scheduler.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=200, help="timed repetitions (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the survivals (default 0)")
    args = parser.parse_args()
    rows = []
    for requests, gamma in SHAPES:
        for search in (False, True):
            rng = np.random.default_rng([args.seed, requests, gamma])
            runs, plan = contenders(requests, gamma, search, rng)
            us = time_all(runs, args.rounds)
            row: dict[str, Any] = {
                "mode": "two_phase" if search else "causal",
                "requests": requests,
                "gamma": gamma,
                "admitted": int(plan.length.sum()),
                **{f"{name}_us": round(t, 2) for name, t in us.items()},
                "numpy_over_c": round(us["numpy"] / us["c"], 2),
                "numpy_over_op": round(us["numpy"] / us["op"], 2),
                "torch_over_op": round(us["torch"] / us["op"], 2),
            }
            rows.append(row)
            if not args.json:
                if len(rows) == 1:
                    print("  ".join(f"{name:>13}" for name in row))
                print("  ".join(f"{value!s:>13}" for value in row.values()))
    if args.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "level": _C.cpu_level(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "dspark": dx.__version__,
        }
        print(json.dumps({"bench": "prefix_scheduler", "machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
