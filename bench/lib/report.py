# SPDX-License-Identifier: Apache-2.0
"""Reports of a bench: a table for people, or one JSON object with the machine it ran on."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import Any

__all__ = ["arguments", "machine", "publish"]


def machine() -> dict[str, Any]:
    """What a number cannot be read without: processor, SIMD level, threads, versions."""
    import torch

    from dspark_ext import _C, __version__

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            model = next(line.split(":", 1)[1].strip() for line in f if "model name" in line)
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "simd": _C.cpu_level(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dspark": __version__,
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options every bench has: --json, --seed, --seconds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random problem")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time spent on every row (default 1)"
    )
    return parser


def publish(rows: Sequence[dict[str, Any]], *, as_json: bool, note: str = "") -> None:
    """Print rows with equal keys as JSON, or as an aligned table under the machine's line."""
    about = machine()
    if as_json:
        print(json.dumps({"machine": about, "rows": list(rows)}, indent=2))
        return
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    if note:
        print(note)
    cells = [[_text(value) for value in row.values()] for row in rows]
    head = list(rows[0]) if rows else []
    width = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    for line in [head, *cells]:
        print("  ".join(text.rjust(n) for text, n in zip(line, width, strict=True)))


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
