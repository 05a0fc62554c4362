# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_check.sh as a program: on a machine without a GPU, and with stand-ins for its tools."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu_check.sh"
PARTS = ["build", "wrappers", "conformance", "kernels", "constants", "markov_loop"]
PARTS += ["rejection_sampler", "verify_attention", "prefix_scheduler", "sanitizer"]


def run(tools: Path, results: Path, **variables: str) -> tuple[int, str, dict[str, Any]]:
    """Run the script with a PATH of its own in front; return code, output and its JSON."""
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHON": "python3", "CUDACXX": ""} | variables
    answer = subprocess.run(
        [SCRIPT, results], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    return answer.returncode, answer.stdout, json.loads((results / "gpu_check.json").read_text())


def tool(folder: Path, name: str, text: str) -> None:
    """Put a shell script with this name into a folder."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of stand-ins: a GPU, and a python3 that does what its arguments' words say."""
    folder = tmp_path / "tools"
    folder.mkdir()
    tool(folder, "nvidia-smi", "echo 'Imagined GPU, 9.0'")
    tool(folder, "nvcc", "exit 0")
    tool(
        folder, "compute-sanitizer", 'case "$*" in *racecheck*) echo "a \\"race\\""; exit 9;; esac'
    )
    return folder


def test_without_a_gpu_all_parts_are_named_as_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    tool(folder, "nvidia-smi", "echo 'no devices were found' >&2; exit 6")
    code, out, report = run(folder, tmp_path / "results")
    assert code == 0
    assert [p["part"] for p in report["parts"]] == PARTS
    assert {p["state"] for p in report["parts"]} == {"skipped"}
    assert all("no GPU" in p["note"] for p in report["parts"])
    assert out.count("no GPU") == len(PARTS)


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path, tools: Path) -> None:
    tool(
        tools,
        "python3",
        """case "$*" in
  *"pip install"*) echo "arch $DSPARK_ARCHS"; exit 0;;
  *pytest*markov_loop*) echo "3 failed"; exit 1;;
  *measure.py*) exec sleep 40;;
  *bench_markov_loop.py*) echo "rows";;
esac""",
    )
    begin = time.monotonic()
    code, _, report = run(tools, tmp_path / "results", GPU_CHECK_SECONDS="12")
    assert time.monotonic() - begin < 50
    assert code == 1
    found = {p["part"]: p for p in report["parts"]}
    assert report["gpu"] == "Imagined GPU"
    assert found["build"]["state"] == "ok"
    assert found["build"]["note"] == "arch 90a-real"
    assert found["kernels"]["state"] == "failed"
    assert "3 failed" in found["kernels"]["note"]
    assert found["constants"]["state"] == "timeout"
    assert found["markov_loop"]["state"] == "skipped"  # the hanging part used up the time
    assert "===== constants" in (tmp_path / "results" / "log.txt").read_text()


def test_the_sanitizer_is_heard(tmp_path: Path, tools: Path) -> None:
    tool(tools, "python3", "exit 0")
    code, _, report = run(tools, tmp_path / "results")
    found = {p["part"]: p for p in report["parts"]}
    assert code == 1
    assert [found[t]["state"] for t in ("memcheck", "racecheck", "synccheck")] == [
        "ok",
        "failed",
        "ok",
    ]
    assert found["racecheck"]["note"] == 'exit code 9: a "race"'
    assert found["markov_loop"]["state"] == "ok"


def test_nothing_is_tried_with_a_package_that_was_not_built(tmp_path: Path, tools: Path) -> None:
    tool(tools, "python3", "echo 'error: no compiler'; exit 1")
    code, out, report = run(tools, tmp_path / "results")
    assert code == 1
    assert report["parts"][0]["state"] == "failed"
    assert {p["state"] for p in report["parts"][1:]} == {"skipped"}
    assert "error: no compiler" in out
