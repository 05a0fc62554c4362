# SPDX-License-Identifier: Apache-2.0
"""`pip install .` on a machine without nvcc: the compiler comes from the package index.

Runs with `make test-cuda-pip` only: it downloads about 105 MB and compiles for every architecture.
The nvcc of this machine, if it has one, is hidden in a private mount namespace, which takes root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA_FOLDERS = ("/usr/local/cuda", "/opt/cuda", os.environ.get("CUDA_HOME"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(
        os.environ.get("DSPARK_TEST_CUDA_PIP") != "1",
        reason="downloads a compiler: run it with `make test-cuda-pip`",
    ),
]


def hide_nvcc(folder: Path) -> list[str]:
    """Return a command prefix under which no nvcc is to be found."""
    nvcc = shutil.which("nvcc")
    folders = {str(Path(f).resolve()) for f in CUDA_FOLDERS if f and Path(f).exists()}
    if nvcc is None and not folders:
        return []
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("hiding the nvcc of this machine takes root and unshare")
    # An empty file over the program on PATH, an empty folder over each toolkit.
    empty = folder / "empty"
    empty.touch(mode=0o644)
    commands = [f'mount -t tmpfs none "{f}"' for f in sorted(folders)]
    if nvcc is not None and not any(nvcc.startswith(f) for f in folders):
        commands.append(f'mount --bind "{empty}" "{nvcc}"')
    return ["unshare", "-m", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


@pytest.mark.parametrize("mode", ["pip", "auto"])
def test_install_without_nvcc(mode: str, tmp_path: Path) -> None:
    hidden = hide_nvcc(tmp_path)
    assert subprocess.run([*hidden, "sh", "-c", "command -v nvcc"], check=False).returncode != 0
    source = tmp_path / "a clone"
    ignore = shutil.ignore_patterns("build", ".venv*", ".git", "*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignore)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(target)]
    environment = {**os.environ, "DSPARK_CUDA": mode, "CCACHE_DISABLE": "1"}
    for name in ("PYTHONPATH", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    done = subprocess.run(
        [*hidden, *pip, str(source)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    environment["PYTHONPATH"] = os.pathsep.join([str(target), str(Path(numpy.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "dspark_ext", "info", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=True,
    )
    cuda = json.loads(done.stdout)["cuda"]
    assert cuda["compiled"]
    assert cuda["runtime"] == "13.0"
    assert "90a-real" in cuda["archs"]
    assert cuda["usable"] or cuda["reason"]
