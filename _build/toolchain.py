# SPDX-License-Identifier: Apache-2.0
"""What a build needs beyond a C++ compiler, and whether this machine already has it.

Three callers share these answers: the PEP 517 backend (which build requirements to ask for),
``setup.py`` (which CMake and nvcc to run) and ``_build/environment.py`` (what to install into the
development environment, where pip does not ask the backend).

``DSPARK_CUDA`` decides about CUDA:

======  ==========================================================================================
auto    the nvcc of this machine; without one, the toolchain from PyPI (the default)
off     no CUDA: the CPU backend alone
pip     the toolchain from PyPI, even where an nvcc is installed
system  the nvcc of this machine, or an error
======  ==========================================================================================
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODES = ("auto", "off", "pip", "system")
MINIMUM_CMAKE = (3, 25)

CMAKE_REQUIREMENTS = ["cmake==4.2.3"]
NINJA_REQUIREMENTS = ["ninja==1.13.2"]

# The compiler, its back end, its host headers, the runtime and its headers come as five packages
# which do not pin each other: one left open would drift to a newer release, and PTX of a newer
# release is refused by a 13.0 driver. About 105 MB, needed for the build only.
CUDA_RELEASE = "13.0"
CUDA_REQUIREMENTS = [
    f"{name}=={CUDA_RELEASE}.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
]

HOW_TO_TURN_CUDA_OFF = (
    "To build the CPU backend alone, set DSPARK_CUDA=off in the environment, for example\n"
    "    DSPARK_CUDA=off pip install .\n"
    "    DSPARK_CUDA=off make test"
)


class BuildError(RuntimeError):
    """The build cannot go on; the message says what to do about it."""


def cuda_mode() -> str:
    """Return ``DSPARK_CUDA``, checked; an unset or empty variable means ``auto``."""
    mode = os.environ.get("DSPARK_CUDA", "").strip().lower() or "auto"
    if mode not in MODES:
        raise BuildError(f"DSPARK_CUDA={mode!r} is not known; expected one of {', '.join(MODES)}")
    return mode


def system_nvcc() -> str | None:
    """Return the nvcc that the machine itself offers, or None."""
    explicit = os.environ.get("CUDACXX")
    if explicit:
        return shutil.which(explicit)
    found = shutil.which("nvcc")
    if found:
        return found
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        candidate = Path(root or "", "bin", "nvcc")
        if root and os.access(candidate, os.X_OK):
            return str(candidate)
    return None


def pip_cuda_root() -> Path | None:
    """Return the folder of the PyPI toolchain if this interpreter can see it, or None."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if os.access(Path(folder, "bin", "nvcc"), os.X_OK):
            return Path(folder)
    return None


def pip_toolchain_exists_for_this_platform() -> bool:
    """Say whether PyPI has the toolchain for this operating system and processor."""
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")


def wants_pip_cuda() -> bool:
    """Say whether this build needs the CUDA toolchain from PyPI."""
    mode = cuda_mode()
    if mode == "pip":
        return True
    return mode == "auto" and system_nvcc() is None and pip_toolchain_exists_for_this_platform()


def nvcc() -> str | None:
    """Return the nvcc to build with, or None for a build without CUDA.

    Raises
    ------
    BuildError
        If the mode asks for CUDA and there is no compiler. ``auto`` is such a mode: a machine
        without CUDA that silently got a CPU-only build would be noticed much later.
    """
    mode = cuda_mode()
    if mode == "off":
        return None
    system, root = system_nvcc(), pip_cuda_root()
    if system and mode in ("auto", "system"):
        return system
    if root and mode in ("auto", "pip"):
        return str(root / "bin" / "nvcc")
    if mode == "auto" and not pip_toolchain_exists_for_this_platform():
        return None
    install = f"    pip install {' '.join(repr(r) for r in CUDA_REQUIREMENTS)}"
    missing = {
        "auto": f"this machine has no nvcc, and the CUDA toolchain from PyPI is not installed:\n"
        f"{install}",
        "pip": f"the CUDA toolchain from PyPI is not installed:\n{install}",
        "system": "this machine has no nvcc (CUDACXX, PATH, CUDA_HOME, CUDA_PATH and "
        "/usr/local/cuda were searched)",
    }[mode]
    raise BuildError(f"DSPARK_CUDA={mode}: {missing}\n{HOW_TO_TURN_CUDA_OFF}")


def system_cmake() -> str | None:
    """Return a CMake on PATH that is new enough, or None."""
    found = shutil.which("cmake")
    if not found:
        return None
    answer = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"version (\d+)\.(\d+)", answer.stdout)
    if match and (int(match[1]), int(match[2])) >= MINIMUM_CMAKE:
        return found
    return None


def build_requirements() -> list[str]:
    """Return the requirements of a build that this machine does not meet."""
    wanted = [] if system_cmake() else list(CMAKE_REQUIREMENTS)
    wanted += [] if shutil.which("ninja") else NINJA_REQUIREMENTS
    return wanted + (CUDA_REQUIREMENTS if wants_pip_cuda() else [])


def check_registry_reachable() -> None:
    """Raise a readable error if the toolchain is wanted and cannot be downloaded.

    pip's own words would be "no matching distribution found for nvidia-cuda-nvcc", which names
    neither the cause nor the way out. The probe is the smallest of the five packages. Front ends
    without pip are not probed: they report in their own words.
    """
    if not wants_pip_cuda() or pip_cuda_root():
        return
    # -I: pip itself lives outside the isolated environment that this process may run in.
    pip = [sys.executable, "-I", "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        return
    smallest = next(r for r in CUDA_REQUIREMENTS if "crt" in r)
    with tempfile.TemporaryDirectory() as folder:
        probe = [*pip, "download", "--quiet", "--no-deps", "--retries", "1", "--dest", folder]
        answer = subprocess.run([*probe, smallest], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BuildError(
            f"DSPARK_CUDA={cuda_mode()}: this machine's nvcc is not used or missing, and the CUDA "
            f"toolchain cannot be downloaded from the package registry:\n"
            f"{answer.stderr.strip()[-600:]}\n{HOW_TO_TURN_CUDA_OFF}"
        )
