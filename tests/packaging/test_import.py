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
# Everything that would make the import heavy, or tie the operators to a framework or a model.
FORBIDDEN = ("torch", "dspark", "scipy", "safetensors", "tokenizers", "gguf", "tqdm", "argparse")

# Processor time, and a ratio: the clock of a busy machine would measure its other work.
PROBE = """
import json, sys, time
before = time.process_time()
import numpy
start = time.process_time()
import dspark_ext
end = time.process_time()
modules = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps([start - before, end - start, modules]))
"""


def import_once(cache: Path) -> tuple[float, float, list[str]]:
    """Import in a new process: seconds of NumPy, seconds beyond, and the modules loaded."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(cache)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules, as pip leaves them
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=env
    )
    numpy, beyond, modules = json.loads(done.stdout)
    return float(numpy), float(beyond), modules


def test_import_is_lean_and_fast(tmp_path: Path) -> None:
    runs = [import_once(tmp_path) for _ in range(7)]
    loaded = set(runs[0][2])
    assert "dspark_ext" in loaded
    assert not loaded & set(FORBIDDEN)
    # The first run compiles; what the others take beyond the least is other processes' doing.
    numpy, beyond = (min(run[i] for run in runs[1:]) for i in (0, 1))
    assert beyond <= BUDGET * numpy, f"{1e3 * beyond:.0f} ms beyond NumPy's {1e3 * numpy:.0f} ms"


def test_operators_do_not_import_torch() -> None:
    code = (
        "import sys, numpy as np, dspark_ext as dx;"
        "dx.confidence(np.zeros((1, 2), np.float32)); dx.info();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
