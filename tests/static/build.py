# SPDX-License-Identifier: Apache-2.0
"""Build the CUDA objects alone, without a compiler cache, and note what it cost.

    python tests/static/build.py FOLDER

Writes FOLDER/cost.json, the processor time of the build in seconds and its architectures.
DSPARK_CUDA and DSPARK_ARCHS are read from the environment, as everywhere.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def processor_seconds() -> float:
    """Time of all finished child processes and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> int:
    """Configure, build from nothing, measure."""
    folder = Path(arguments[0]).resolve()
    mode = os.environ.get("DSPARK_CUDA") or "auto"
    configure = ["cmake", "--fresh", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    configure += ["-DDSPARK_PYTHON=OFF", "-DDSPARK_WERROR=ON", "-DDSPARK_CCACHE=OFF"]
    configure += [f"-DDSPARK_CUDA={mode}"]
    if mode in ("auto", "pip"):  # CMake asks this interpreter for a toolchain from PyPI
        configure += [f"-DPython_EXECUTABLE={sys.executable}", "--no-warn-unused-cli"]
    if os.environ.get("DSPARK_ARCHS"):
        configure.append(f"-DDSPARK_ARCHS={os.environ['DSPARK_ARCHS']}")
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    cache = (folder / "CMakeCache.txt").read_text("utf-8")
    archs = re.search(r"^DSPARK_ARCHS:\w+=(.*)$", cache, re.MULTILINE)
    if mode == "off" or archs is None:
        print("DSPARK_CUDA=off: there is no device code to build")
        return 1
    before = processor_seconds()
    build = ["cmake", "--build", str(folder), "--target", "dspark_cuda", "--clean-first"]
    code = subprocess.run([*build, "--parallel", "2", "--", "--quiet"], check=False).returncode
    cost = {"processor_seconds": round(processor_seconds() - before, 1), "archs": archs[1]}
    (folder / "cost.json").write_text(json.dumps(cost), "utf-8")
    print(f"{cost['processor_seconds']:.0f} s of processor time for {cost['archs']}")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
