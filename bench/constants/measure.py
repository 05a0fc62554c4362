# SPDX-License-Identifier: Apache-2.0
"""Measure the constants that bench/lib/roofline.py assumes, and say what they change.

    python bench/constants/measure.py [--json] [--save [FILE]] [--limit SECONDS]

Builds and runs the programs beside this file, which read a GPU's rates with the same primitives as
the kernels: l2_stream (what a multiprocessor reads again from L2), exchange (one exchange of the
Markov loop, alone and with the winner's row of W1), mma_stream (W2 from shared memory through the
tensor cores). Where there is no compiler or no device it says so and ends with exit code 0.
--save keeps the JSON in FILE, or in bench/results/<machine>/.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "_build")]

import toolchain  # noqa: E402
from lib import roofline  # noqa: E402
from lib.report import arguments, publish  # noqa: E402

PROGRAMS = ("l2_stream", "exchange", "mma_stream")
SOURCES = ("csrc/cuda/prim/launch.cu", "csrc/core/problems.cpp")
KEPT = 0.9  # of the rate of a small set: a set that is read at this much is still in L2

Row = dict[str, Any]


def nvcc() -> str | None:
    """The compiler of this machine, or of the PyPI packages."""
    root = toolchain.pip_cuda_root()
    return toolchain.system_nvcc() or (str(root / "bin" / "nvcc") if root else None)


def architecture() -> str:
    """``90a``, ``80``, ... of the first device, in nvcc's notation; 90a where there is none."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "90a"
    number = answer.split()[0].replace(".", "")
    return f"{number}a" if int(number) >= 90 else number


def build(compiler: str, name: str, folder: Path) -> Path:
    """Compile one program."""
    arch, program = architecture(), folder / name
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    include = [f"-I{ROOT / path}" for path in ("csrc", "csrc/include")]
    sources = [str(HERE / f"{name}.cu"), *(str(ROOT / path) for path in SOURCES)]
    command = [compiler, "-std=c++17", "-O3", target, *include, *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(program: Path, limit: float) -> tuple[list[Row], str]:
    """Return a program's rows, and what kept it from giving (all of) them."""
    process = subprocess.Popen([program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=max(limit, 1.0))
        trouble = errors.strip() if process.returncode != 0 else ""
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        trouble = "out of time"
    whole = [line for line in out.splitlines() if line.endswith("}")]
    return [json.loads(line) for line in whole], trouble


def measured_device(rows: list[Row]) -> roofline.Device:
    """The model's device with what was measured in place of what was assumed."""
    known: dict[str, float] = {}
    sets: dict[int, float] = {}
    for row in rows:
        if row["constant"] == "l2_stream":
            rate = row["again_bytes_per_second"]
            sets[row["megabytes"]] = max(sets.get(row["megabytes"], 0.0), rate)
    if 20 in sets:
        known["l2"] = sets[20]
        kept = [size for size, rate in sets.items() if rate >= KEPT * sets[20]]
        known["l2_resident"] = 1e6 * max(kept)
    for row in rows:
        if row["constant"] == "exchange" and row["rows"] == 1 and row["gather"] == "w1_prefetched":
            known["exchange"] = 1e-6 * row["step_us"]
        if row["constant"] == "mma_stream" and row["mode"] == "ldmatrix and mma":
            known["shared"] = row["bytes_per_second"]
    return dataclasses.replace(roofline.H200, **known)


def predictions(device: roofline.Device) -> list[Row]:
    """The design's times by the assumptions and by the measurements."""
    return [
        {
            "R": r,
            "V": v,
            "design us, assumed": 1e6 * roofline.loop(r, v),
            "measured": 1e6 * roofline.loop(r, v, device=device),
            "int8 us, assumed": 1e6 * roofline.loop(r, v, width=1),
            "int8, measured": 1e6 * roofline.loop(r, v, width=1, device=device),
        }
        for r in (1, 8, 32)
        for v in (49_152, 129_280, 151_936, 262_144)
    ]


def main() -> int:
    """Build, run, compare."""
    parser = arguments(str(__doc__))
    parser.add_argument("--save", nargs="?", const="", help="keep the JSON, see above")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for everything")
    options = parser.parse_args()
    end = time.monotonic() + options.limit
    compiler = nvcc()
    if compiler is None:
        print("skipped: no CUDA compiler")
        return 0
    rows: list[Row] = []
    troubles: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            try:
                found, trouble = run(build(compiler, name, Path(folder)), end - time.monotonic())
            except subprocess.CalledProcessError as error:
                found, trouble = [], error.stderr.strip()[-500:]
            rows += found
            troubles += [{"program": name, "trouble": trouble}] if trouble else []
    if not rows:
        print("\n".join(f"skipped {t['program']}: {t['trouble']}" for t in troubles))
        return 0 if all("no CUDA device" in t["trouble"] for t in troubles) else 1
    device = measured_device(rows)
    more = {
        "device": [dataclasses.asdict(device)],
        "predictions": predictions(device),
        **({"troubles": troubles} if troubles else {}),
    }
    kinds = {name: [r for r in rows if r["constant"] == name] for name in PROGRAMS}
    first, *others = [part for part in kinds.values() if part]
    publish(
        first,
        as_json=options.json,
        more={part[0]["constant"]: part for part in others} | more,
        save="constants" if options.save == "" else options.save,
    )
    return 1 if troubles else 0


if __name__ == "__main__":
    raise SystemExit(main())
