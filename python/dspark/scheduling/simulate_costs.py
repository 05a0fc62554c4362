# SPDX-License-Identifier: Apache-2.0
"""Cost curves of the simulator: measured tables, files of the user, and two built in.

The two built in are a roofline, not a measurement: a dense model of 8 billion parameters in bf16 on
one GPU of 4.3 TB/s and 790 TFLOP/s. A step reads 16 GB of weights, which takes 4 ms, and computes
for 0.02 ms a token; ``smooth`` joins the two bounds by a cubic mean, and ``staircase`` is the same
curve in steps, every batch padded to the next graph size. Each KV token costs 147 KB of traffic
(34 ns). The drafter of the paper (five layers and the LM head, a block of 7) reads 3.1 GB, 0.7 ms,
and computes for 0.028 ms a request.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.scheduling.simulate_limits import check_fields
from dspark_ext import ArgumentError, CostTable
from dspark_ext._arrays import Checker

__all__ = ["GRAPH_SIZES", "Curve", "read_csv", "roofline"]

#: Batch sizes of the steps of ``staircase``: a third to a half apart, as engines capture graphs.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
               3072, 4096, 6144, 8704)  # fmt: skip
TARGET_MS, TARGET_MS_PER_TOKEN, MS_PER_KV_TOKEN = 4.0, 0.02, 3.4e-5
DRAFT_MS, DRAFT_MS_PER_REQUEST = 0.7, 0.028


def roofline(n: ArrayLike, floor: float, slope: float) -> NDArray[np.float64]:
    """Cubic mean of a fixed time and one that grows: ``(floor^3 + (slope n)^3)^(1/3)``.

    Examples
    --------
    >>> roofline([0, 200], floor=4.0, slope=0.02).round(3).tolist()
    [4.0, 5.04]
    """
    x = np.asarray(n, dtype=np.float64)
    return np.asarray(np.cbrt(floor**3 + (slope * x) ** 3))


@dataclass(frozen=True)
class Curve:
    """What a round costs: the target's table, and the drafter's time by number of requests.

    Attributes
    ----------
    name : str
    target : CostTable
        Its ``draft_ms`` is not used.
    draft_ms, draft_ms_per_request : float
        The drafter takes ``roofline(requests, draft_ms, draft_ms_per_request)`` milliseconds.

    Examples
    --------
    >>> curve = Curve.named("smooth", most_tokens=64)
    >>> round(curve.at(8).ms(8), 3), round(curve.at(8).draft_ms, 3)
    (4.0, 0.708)
    """

    name: str
    target: CostTable
    draft_ms: float = 0.0
    draft_ms_per_request: float = 0.0

    def __post_init__(self) -> None:
        check = Checker("Curve")
        check_fields(check, vars(self))
        check.done()

    def draft(self, requests: int) -> float:
        """Milliseconds of one draft of ``requests`` requests."""
        return float(roofline(requests, self.draft_ms, self.draft_ms_per_request))

    def at(self, requests: int, draft_share: float = 1.0) -> CostTable:
        """Return the table of this many requests, the drafter's time times ``draft_share`` in."""
        return self.target.with_draft_ms(draft_share * self.draft(requests))

    def scaled(self, factor: float) -> Curve:
        """Return the curve of a target that is slower by ``factor``, with the same drafter."""
        t = self.target
        slower = CostTable.from_points(
            t.tokens, factor * t.points_ms, t.plateaus, t.draft_ms, factor * t.ms_per_kv_token
        )
        return replace(self, target=slower)

    @classmethod
    def named(
        cls, name: str, most_tokens: int, changes: Mapping[str, float | None] | None = None
    ) -> Curve:
        """Return ``smooth``, ``staircase``, a cost table (``.json``) or points (``.csv``).

        Parameters
        ----------
        name : str
            Of a curve, or a path.
        most_tokens : int
            Largest batch of the two built in.
        changes : mapping, optional
            ``draft_ms``, ``draft_ms_per_request``, ``ms_per_kv_token``: values to use instead;
            ``None`` changes nothing.

        Raises
        ------
        ArgumentError
            For a name that is neither, or a file that is not what it should be.
        OSError
            When a file cannot be read.
        """
        new = {k: v for k, v in (changes or {}).items() if v is not None}
        drafter: dict[str, Any] = {}
        if name in ("smooth", "staircase"):
            sizes = [g for g in GRAPH_SIZES if g < most_tokens]
            last = next((g for g in GRAPH_SIZES if g >= most_tokens), most_tokens)
            tokens = np.arange(1, last + 1)
            target = CostTable.from_points(
                tokens,
                roofline(tokens, TARGET_MS, TARGET_MS_PER_TOKEN),
                plateaus=[*sizes, last] if name == "staircase" else (),
                ms_per_kv_token=new.get("ms_per_kv_token", MS_PER_KV_TOKEN),
            )
            drafter = {"draft_ms": DRAFT_MS, "draft_ms_per_request": DRAFT_MS_PER_REQUEST}
        elif name.endswith(".json"):
            known = CostTable.load(name)
            target, drafter = known, {"draft_ms": known.draft_ms}
        elif name.endswith(".csv"):
            target = read_csv(Path(name))
        else:
            raise ArgumentError(f"cost: got {name!r}, expected smooth, staircase, *.json or *.csv")
        if "ms_per_kv_token" in new:
            target = CostTable.from_points(
                target.tokens, target.points_ms, target.plateaus, 0.0, new.pop("ms_per_kv_token")
            )
        return cls(Path(name).stem, target, **(drafter | new))


def read_csv(path: Path) -> CostTable:
    r"""Read points of a cost curve: columns ``tokens`` and ``ms``, rising, a header on top.

    Raises
    ------
    ArgumentError
        When the file is something else, or empty; the message names it.
    OSError
        When it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "cost.csv")
    ...     _ = file.write_text("tokens,ms\n1,4.0\n8,4.5\n")
    ...     read_csv(file).ms([1, 8]).tolist()
    [4.0, 4.5]
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        tokens = [int(row["tokens"]) for row in rows]
        ms = [float(row["ms"]) for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ArgumentError(f"{path}: got {error}, expected columns tokens and ms") from error
    try:
        return CostTable.from_points(tokens, ms)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from error
