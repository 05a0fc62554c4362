# SPDX-License-Identifier: Apache-2.0
"""Reports of a bench: tables for people, or one JSON object with the machine it ran on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["arguments", "gpu", "machine", "machine_name", "publish", "table"]

ROOT = Path(__file__).resolve().parents[2]
Rows = Sequence[dict[str, Any]]


def _answer(*command: str) -> str:
    """Return a command's first line, or nothing where there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip().split("\n")[0]


def gpu() -> dict[str, Any] | None:
    """Describe the current CUDA device and its driver, or say that there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    query = (
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,clocks.mem",
        "--format=csv,noheader",
    )
    driver, *clocks = (*_answer(*query).split(", "), "", "")[:3]
    about = torch.cuda.get_device_properties(0)
    return {
        "gpu": about.name,
        "multiprocessors": about.multi_processor_count,
        "l2_bytes": about.L2_cache_size,
        "driver": driver,
        "clocks": clocks,
        "cuda": torch.version.cuda,
    }


def machine() -> dict[str, Any]:
    """What a number cannot be read without: processor, SIMD level, threads, device, versions."""
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
        **(gpu() or {}),
        "torch": torch.__version__,
        "dspark": __version__,
        "commit": _answer("git", "rev-parse", "--short", "HEAD"),
    }


def machine_name(about: dict[str, Any]) -> str:
    """Name the folder of a machine's results: ``nvidia-h200``, ``xeon-avx512-2cores``.

    Examples
    --------
    >>> machine_name({"gpu": "NVIDIA H200"})
    'nvidia-h200'
    """
    if "gpu" in about:
        return re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    family = re.search(r"Xeon|EPYC|Ryzen|Core|Neoverse|Graviton", about["cpu"])
    level = {"x86-64-v4": "avx512", "x86-64-v3": "avx2"}.get(about["simd"], "baseline")
    word = family[0].lower() if family else platform.machine()
    return f"{word}-{level}-{os.cpu_count()}cores"


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


def publish(
    rows: Rows,
    *,
    as_json: bool,
    note: str = "",
    more: Mapping[str, Rows] | None = None,
    save: str | None = None,
) -> None:
    """Print rows with equal keys as JSON, or as an aligned table under the machine's line.

    ``more`` holds further tables by title. With ``save`` the JSON also goes to a file: a path that
    ends in ``.json``, or a name, for ``bench/results/<machine>/<name>.json``.
    """
    about = machine()
    whole = {"machine": about, "rows": list(rows), **{k: list(v) for k, v in (more or {}).items()}}
    text = json.dumps(whole, indent=2)
    if save is not None:
        kept = ROOT / "bench" / "results" / machine_name(about)
        path = Path(save) if save.endswith(".json") else kept / f"{save}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", "utf-8")
    if as_json:
        print(text)
        return
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    if note:
        print(note)
    print(table(rows))
    for title, other in (more or {}).items():
        print(f"\n{title}\n{table(other)}")


def table(rows: Rows) -> str:
    """Align rows with equal keys under their names."""
    cells = [[_text(value) for value in row.values()] for row in rows]
    head = list(rows[0]) if rows else []
    width = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    return "\n".join(
        "  ".join(text.rjust(n) for text, n in zip(line, width, strict=True))
        for line in [head, *cells]
    )


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
