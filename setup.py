# SPDX-License-Identifier: Apache-2.0
"""Drive CMake, nothing else: the source list is in CMake, the metadata in pyproject.toml."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "_build"))

import toolchain  # noqa: E402


class BuildPy(build_py):
    """Copy the Python files into an empty folder, so that a deleted module leaves the wheel."""

    def run(self) -> None:
        """Clear the staging folder, then copy."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    """Configure, build and install the `python` component of the CMake project."""

    def build_extension(self, ext: Extension) -> None:
        """Build `_C` and put it where setuptools expects it."""
        try:
            nvcc = toolchain.nvcc()
        except toolchain.BuildError as problem:
            raise SystemExit(f"\nerror: {problem}\n") from None
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = ROOT / "build" / f"wheel-{sysconfig.get_config_var('SOABI')}"
        configure = self._configure_command(folder, nvcc)
        self._forget_stale(folder, configure)
        cmake = configure[0]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(folder), "--parallel", jobs], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / "python" / target.name, target)

    def _configure_command(self, folder: Path, nvcc: str | None) -> list[str]:
        import pybind11

        cmake = toolchain.system_cmake()
        if cmake is None:
            raise SystemExit("\nerror: CMake >= 3.25 is needed: pip install 'cmake>=3.25'\n")
        ninja = shutil.which("ninja")
        command = [cmake, "-S", str(ROOT), "-B", str(folder)]
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        command += [
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DDSPARK_PYTHON=ON",
            f"-DDSPARK_CUDA={'off' if nvcc is None else toolchain.cuda_mode()}",
        ]
        command += [f"-DCMAKE_CUDA_COMPILER={nvcc}"] if nvcc else []
        for name in ("DSPARK_ARCHS", "DSPARK_WERROR"):
            if os.environ.get(name):
                command.append(f"-D{name}={os.environ[name]}")
        return command

    @staticmethod
    def _forget_stale(folder: Path, configure: list[str]) -> None:
        """Start afresh when the tools changed: CMake keeps paths of tools that are gone."""
        record = folder / "configure.json"
        now = json.dumps(configure)
        if folder.exists() and (not record.exists() or record.read_text("utf-8") != now):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(now, "utf-8")


# Machines without a registry build with the setuptools that they have (pip's option
# --no-build-isolation); before release 77 it did not know licence expressions.
MODERN = int(setuptools.__version__.split(".")[0]) >= 77

setup(
    **{"license_expression" if MODERN else "license": "Apache-2.0"},
    ext_modules=[Extension("dspark_ext._C", sources=[])],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
