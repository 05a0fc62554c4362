# SPDX-License-Identifier: Apache-2.0
"""What a simulation says: CSV, a comparison by load, and two plots.

The plots have the shape of the paper's figures 7 and 8: throughput against tokens per second of a
user (every policy a curve over the loads; the frontier is its upper right), and rows verified per
request, and throughput, against load. They need matplotlib, ``pip install 'dspark[plots]'``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dspark.scheduling.plotting import pyplot
from dspark.scheduling.simulate import Point
from dspark_ext import ArgumentError

__all__ = ["compare", "plot_frontier", "plot_load", "read_csv", "text", "write_csv"]

_STYLES = {"none": ("0.55", "-"), "mtp1": ("tab:orange", "-"), "causal": ("tab:green", "-"),
           "two_phase": ("tab:blue", "-"), "oracle": ("black", "--")}  # fmt: skip


def write_csv(path: Path, points: Iterable[Point]) -> None:
    """Write one line a point, six significant digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(Point)])
        for point in points:
            values = asdict(point).values()
            writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in values])


def read_csv(path: Path) -> list[Point]:
    """Read a file of :func:`write_csv`.

    Raises
    ------
    ArgumentError
        When it is none.
    """
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
    with path.open(newline="", encoding="utf-8") as file:
        try:
            return [
                Point(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(Point)})
                for row in csv.DictReader(file)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"{path}: not a simulation ({error})") from error


def _static(point: Point) -> bool:
    return point.policy == "none" or point.policy.startswith("static")


def compare(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Set the schedulers beside the best fixed length, and the oracle, at every load.

    Returns
    -------
    list of dict
        ``load``; ``best_static`` (a name: ``none`` or a ``staticN``) and its ``static_throughput``;
        for every scheduler ``<name>`` its throughput over the best static one and, where the oracle
        was simulated, ``<name>/oracle``.

    Examples
    --------
    >>> from dspark.scheduling.simulate import Workload, sweep
    >>> from dspark.scheduling.simulate_costs import Curve
    >>> from dspark.scheduling.simulate_policies import Policy
    >>> from dspark.scheduling.simulate_traces import Synthetic
    >>> names = ["none", "static7", "two_phase", "oracle"]
    >>> row, = compare(sweep([Policy.parse(n) for n in names], Synthetic(),
    ...                      Curve.named("smooth", 8), [1], Workload(tokens=1500)))
    >>> row["best_static"], row["two_phase"] > 0.9, row["two_phase/oracle"] <= 1.0
    ('static7', True, True)
    """
    rows = []
    for load in sorted({p.load for p in points}):
        here = {p.policy: p for p in points if p.load == load}
        row: dict[str, Any] = {"load": load}
        best = max((p for p in here.values() if _static(p)), key=lambda p: p.throughput,
                   default=None)  # fmt: skip
        if best is not None:
            row |= {"best_static": best.policy, "static_throughput": best.throughput}
        oracle = here.get("oracle")
        for name, point in here.items():
            if not name.startswith(("causal", "two_phase", "oracle")):
                continue
            if best is not None:
                row[name] = point.throughput / best.throughput
            if oracle is not None and name != "oracle":
                row[f"{name}/oracle"] = point.throughput / oracle.throughput
        rows.append(row)
    return rows


def text(points: Sequence[Point]) -> str:
    """Lay out points, then the comparison, as tables for people."""
    columns = ["policy", "load", "throughput", "user_p50", "user_p1", "budget", "acceptance"]
    lines = [f"{columns[0]:<24}" + "".join(f"{c:>12}" for c in columns[1:])]
    for p in points:
        values = [f"{p.load:>12}", *(f"{getattr(p, c):>12.5g}" for c in columns[2:])]
        lines.append(f"{p.policy:<24}" + "".join(values))
    rows = [r for r in compare(points) if "best_static" in r]
    names = [n for n in (rows[0] if rows else ()) if n.startswith(("causal", "two_phase", "oracle"))
             and "/" not in n]  # fmt: skip
    if rows and names:
        lines += ["", "throughput over the best fixed length:"]
        lines.append(f"{'load':>6}{'best':>10}" + "".join(f"{n:>24}" for n in names))
        for r in rows:
            cells = "".join(f"{r[n]:>24.3f}" if n in r else " " * 24 for n in names)
            lines.append(f"{r['load']:>6}{r['best_static']:>10}{cells}")
    return "\n".join(lines)


def _curves(points: Sequence[Point]) -> list[tuple[str, list[Point], dict[str, Any]]]:
    """Every policy with its points and looks; fixed lengths and thresholds stay in the back."""
    curves = []
    for name in dict.fromkeys(p.policy for p in points):
        line = [p for p in points if p.policy == name]
        if name in _STYLES:
            color, dash = _STYLES[name]
            looks = {"color": color, "linestyle": dash, "marker": "o", "markersize": 3}
        elif name.startswith("static"):
            looks = {"color": "tab:red", "alpha": 0.35, "linewidth": 0.8, "linestyle": "-"}
        elif name.startswith("threshold"):
            looks = {"color": "tab:purple", "alpha": 0.45, "linewidth": 0.8, "linestyle": "-."}
        else:
            looks = {"linewidth": 0.8, "linestyle": ":"}
        curves.append((name, line, looks))
    return curves


def _save(figure: Any, path: Path) -> None:
    # No version or date inside: the same points make the same file.
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot().close(figure)


def plot_frontier(path: Path, points: Sequence[Point], title: str = "") -> None:
    """Draw throughput against the median tokens per second of a user (the paper's figure 7)."""
    figure, axes = pyplot().subplots(figsize=(6.4, 4.4), layout="constrained")
    for name, line, looks in _curves(points):
        axes.plot([p.user_p50 for p in line], [p.throughput for p in line], label=name, **looks)
    axes.set_xlabel("tokens/s of a user (median)")
    axes.set_ylabel("tokens/s of the device")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6, ncols=2)
    _save(figure, path)


def plot_load(path: Path, points: Sequence[Point], title: str = "") -> None:
    """Draw rows verified per request, and throughput, against load (the paper's figure 8)."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    for name, line, looks in _curves(points):
        loads = [p.load for p in line]
        left.plot(loads, [p.budget for p in line], label=name, **looks)
        right.plot(loads, [p.throughput for p in line], label=name, **looks)
    left.set_ylabel("rows verified per request and round (1 + length)")
    right.set_ylabel("tokens/s of the device")
    right.legend(fontsize=6, ncols=2)
    for axes in (left, right):
        axes.set_xlabel("concurrent requests")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    _save(figure, path)
