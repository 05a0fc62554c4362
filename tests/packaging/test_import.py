# SPDX-License-Identifier: Apache-2.0
"""Importing the operators is cheap and pulls in no framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Of the time that NumPy's own import takes in the same process: 45 ms where that takes 100 ms.
BUDGET = 0.45
# What NumPy and we load only when it is wanted. Each alone may fit into what the budget leaves.
LAZY = ("numpy.random", "numpy.fft", "numpy.testing", "pathlib", "subprocess", "hashlib")
# Everything that would make the import heavy, or tie the operators to a framework or a model.
FORBIDDEN = ("torch", "dspark", "scipy", "safetensors", "tokenizers", "gguf", "tqdm", "argparse")

# Processor time, and a ratio: the clock of a busy machine would measure its other work.
PROBE = """
import json, sys, time
before = time.process_time()
import numpy
start = time.process_time()
known = set(sys.modules)
import {what}
end = time.process_time()
print(json.dumps([start - before, end - start, sorted(set(sys.modules) - known)]))
"""


def import_once(cache: Path, what: str = "dspark_ext") -> tuple[float, float, list[str]]:
    """Import in a new process: seconds of NumPy, seconds beyond, and the modules beyond."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(cache)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules, as pip leaves them
    probe = [sys.executable, "-c", PROBE.format(what=what)]
    done = subprocess.run(probe, capture_output=True, text=True, check=True, env=env)
    numpy, beyond, modules = json.loads(done.stdout)
    return float(numpy), float(beyond), modules


def faults(runs: list[tuple[float, float, list[str]]]) -> list[str]:
    """What is wrong with imports, the first of which compiled."""
    loaded = set(runs[0][2])
    heavy = {name.split(".")[0] for name in loaded} & set(FORBIDDEN) | loaded & set(LAZY)
    # The least: what the others take beyond it is other processes' doing.
    numpy, beyond = (min(run[i] for run in runs[1:]) for i in (0, 1))
    slow = [f"{1e3 * beyond:.0f} ms beyond NumPy's {1e3 * numpy:.0f} ms"]
    return sorted(heavy) + slow * (beyond > BUDGET * numpy)


def test_import_is_lean_and_fast(tmp_path: Path) -> None:
    runs = [import_once(tmp_path) for _ in range(7)]
    assert "dspark_ext" in runs[0][2]
    assert not faults(runs)


def test_a_heavy_import_is_found_out(tmp_path: Path) -> None:
    """The controls: one module too many, and what takes far too long under any name."""
    first, second = (import_once(tmp_path, "dspark_ext, numpy.random") for _ in range(2))
    assert "numpy.random" in faults([first, second])
    first, second = (import_once(tmp_path, "dspark_ext, numpy.testing") for _ in range(2))
    assert any("beyond NumPy's" in fault for fault in faults([first, second]))


def test_operators_do_not_import_torch() -> None:
    code = (
        "import sys, numpy as np, dspark_ext as dx;"
        "dx.confidence(np.zeros((1, 2), np.float32)); dx.info();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
