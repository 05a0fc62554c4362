# SPDX-License-Identifier: Apache-2.0
"""The installed library as an engine builder meets it: CMake package, pkg-config, C and C++.

Without CUDA the library is built here, without Python and for debugging, warnings as errors. With
CUDA it is installed from the build of the wheel where that is up to date, as in `make test`, and
else built for PTX alone. The build folders stay in build/, so that a second run compiles nothing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def nvcc_kind() -> str | None:
    """Where a CUDA compiler is: on this machine, in this environment, or nowhere."""
    sys.path.insert(0, str(ROOT / "_build"))
    try:
        toolchain = importlib.import_module("toolchain")
    finally:
        sys.path.pop(0)
    if toolchain.system_nvcc():
        return "system"
    return "pip" if toolchain.pip_cuda_root() else None


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    """CMake and ninja may have come as requirements of this environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.environ["PATH"] + os.pathsep + str(Path(sys.executable).parent))
        yield


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; a failure shows the end of it."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


def wheel_build() -> Path | None:
    """The folder in which setup.py has built this library with CUDA, if nothing changed since."""
    folder = ROOT / "build" / f"wheel-{sysconfig.get_config_var('SOABI')}"
    cache = folder / "CMakeCache.txt"
    if not cache.exists() or "DSPARK_CUDA:STRING=off" in cache.read_text("utf-8"):
        return None
    words = ["cmake", "--build", folder, "--target", "dspark", "--", "-n"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return folder if done.returncode == 0 and "no work to do" in done.stdout else None


def build_and_install(prefix: Path, options: Sequence[str], name: str) -> None:
    """Configure, build and install the library without its Python extension."""
    folder = ROOT / "build" / name
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(
        *("cmake", "-S", ROOT, "-B", folder, *ninja, "-DCMAKE_BUILD_TYPE=Debug"),
        *("-DDSPARK_PYTHON=OFF", "-DDSPARK_WERROR=ON", *options),
    )
    run("cmake", "--build", folder, "--parallel", str(os.cpu_count() or 1))
    install(folder, prefix)


def install(folder: Path, prefix: Path) -> None:
    """What an engine builder gets."""
    run("cmake", "--install", folder, "--prefix", prefix, "--component", "dev")


@pytest.fixture(scope="module", params=["off", "on"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation with or without CUDA; `WITH_CUDA` in it tells which."""
    cuda = request.param == "on"
    if not shutil.which("cmake"):
        pytest.skip("no cmake on this machine")
    if cuda and os.environ.get("DSPARK_CUDA") == "off":
        pytest.skip("DSPARK_CUDA=off in the environment")
    kind = nvcc_kind() if cuda else "off"
    if kind is None:
        pytest.skip("no nvcc on this machine or in this environment")
    prefix = tmp_path_factory.mktemp(f"prefix {kind}")  # a blank in the path
    built = wheel_build() if cuda else None
    if built is not None:
        install(built, prefix)
    else:
        options = [f"-DDSPARK_CUDA={kind}", f"-DPython_EXECUTABLE={sys.executable}"]
        options += ["-DDSPARK_ARCHS=80-virtual"] if cuda else []
        build_and_install(prefix, options, f"consumer-{kind}")
    if cuda:
        (prefix / "WITH_CUDA").touch()
    return prefix


@pytest.mark.slow
@pytest.mark.parametrize("language", ["consumer", "consumer_c"], ids=["cpp", "c11"])
def test_find_package(installed: Path, language: str, tmp_path: Path) -> None:
    run("cmake", "-S", HERE / language, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={installed}")
    run("cmake", "--build", tmp_path)
    words = ["cuda"] if (installed / "WITH_CUDA").exists() else []
    run(tmp_path / "consumer", *words)


@pytest.mark.slow
def test_pkg_config(installed: Path, tmp_path: Path) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config on this machine")
    where = next(installed.rglob("dspark.pc")).parent
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "dspark"],
        env={**os.environ, "PKG_CONFIG_PATH": str(where)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # A shell reads the flags, as in a Makefile: pkg-config escapes blanks for it.
    program = tmp_path / "consumer"
    source = HERE / "consumer_c" / "main.c"
    run("sh", "-c", f'cc -std=c11 "{source}" {flags.strip()} -o "{program}"')
    run(program)


def test_no_framework_in_the_headers() -> None:
    for header in (ROOT / "csrc" / "include").rglob("*.h"):
        for line in header.read_text("utf-8").splitlines():
            if line.startswith("#include <"):
                assert line in ("#include <stddef.h>", "#include <stdint.h>"), f"{header}: {line}"
