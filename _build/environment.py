# SPDX-License-Identifier: Apache-2.0
"""Make the development environment: ``.venv`` with the pinned requirements and this package.

What a build needs comes first. Then the package is compiled while everything else is installed,
which keeps one processor busy unpacking. Each step leaves a stamp that holds a digest of all that
it depends on, and a step whose digest is unchanged is skipped without starting pip. So the second
run needs no network, an edited source rebuilds the package alone (offline, from the requirements
already there), and an edited requirement file installs again. pip obeys the user's configuration
and ``PIP_*`` variables.

``python3 _build/environment.py`` makes everything; with the argument ``tools`` it stops behind what
a build needs, with ``requirements`` before the package.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import toolchain

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOGS = ROOT / "build" / "logs"
WHEELS = ROOT / "build" / "dist"
BUILD_REQUIREMENTS = "build.txt"
REQUIREMENTS = (BUILD_REQUIREMENTS, "dev.txt")
NO_DEPENDENCIES = "no-deps.txt"

# All that the wheel is made from. Tests, docs and benches are not in it.
SOURCES = ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
SOURCE_FOLDERS = ("_build", "cmake", "csrc", "dspark_ext", "python")
IGNORED_SUFFIXES = (".pyc", ".so")
# Variables that change what is built.
BUILD_VARIABLES = ("DSPARK_ARCHS", "DSPARK_WERROR", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")


def digest(parts: Iterable[bytes]) -> str:
    """Return one digest of a sequence of byte strings, boundaries included."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def environment_digest() -> str:
    """Return what the virtual environment depends on: the interpreter and the clone's place."""
    return digest(text.encode() for text in (sys.version, sys.base_prefix, str(ROOT)))


def requirements_digest(*names: str) -> str:
    """Return what the installed requirements of these files depend on."""
    files = [ROOT / "requirements" / name for name in names]
    wanted = toolchain.build_requirements()
    return digest([path.read_bytes() for path in files] + [text.encode() for text in wanted])


def source_files() -> list[Path]:
    """Return the files the package is made from, sorted."""
    found = [ROOT / name for name in SOURCES if (ROOT / name).exists()]
    for folder in SOURCE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            hidden = any(part.startswith((".", "__pycache__")) for part in path.parts[-3:])
            if path.is_file() and not hidden and path.suffix not in IGNORED_SUFFIXES:
                found.append(path)
    return sorted(found)


def package_digest() -> str:
    """Return what the installed package depends on."""
    parts = [os.environ.get(name, "").encode() for name in BUILD_VARIABLES]
    parts += [str(toolchain.cuda_mode()).encode(), str(toolchain.system_nvcc()).encode()]
    for path in source_files():
        parts += [str(path.relative_to(ROOT)).encode(), path.read_bytes()]
    return digest(parts)


def run(command: list[str], log: str, *, shown: bool = True) -> None:
    """Run a command; its output goes to the terminal, or else to a log shown on failure."""
    if shown and sys.stdout.isatty():
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            raise toolchain.BuildError(f"failed: {' '.join(command)}")
        return
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{log}.log"
    with path.open("wb") as out:
        code = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code != 0:
        tail = path.read_text("utf-8", "replace").splitlines()[-60:]
        raise toolchain.BuildError("\n".join([*tail, "", f"failed: {' '.join(command)}"]))


def create_environment() -> None:
    """Create an empty virtual environment in place of whatever is there."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise toolchain.BuildError(
            f"{header} is missing: install the headers of this Python "
            "(the package python3-dev on Debian and Ubuntu)"
        )
    try:
        run([sys.executable, "-m", "venv", "--clear", str(VENV)], "venv")
    except toolchain.BuildError as problem:
        raise toolchain.BuildError(
            f"{problem}\nIf ensurepip is missing, install venv "
            "(the package python3-venv on Debian and Ubuntu)"
        ) from None


def pip(command: str, *options: str) -> list[str]:
    """Return the words of a pip command of the environment."""
    return [str(PYTHON), "-m", "pip", command, "--disable-pip-version-check", *options]


def install_tools() -> None:
    """Install what the package is built with, and the parts of the toolchain that are missing."""
    toolchain.check_registry_reachable()
    file = f"--requirement=requirements/{BUILD_REQUIREMENTS}"
    run(pip("install", file, *toolchain.build_requirements()), "tools")


def install_requirements() -> None:
    """Install the pinned requirements.

    Python compiles what is imported; to compile all of it takes as long as to unpack it.
    """
    files = [f"--requirement=requirements/{name}" for name in REQUIREMENTS]
    run(pip("install", "--no-compile", *files, *toolchain.build_requirements()), "requirements")
    run(pip("install", "--no-deps", f"--requirement=requirements/{NO_DEPENDENCIES}"), "no-deps")


def build_package(*, shown: bool = True) -> None:
    """Build the wheel of this tree, without asking any registry."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    offline = ["--no-index", "--no-build-isolation", "--no-deps", f"--wheel-dir={WHEELS}"]
    run(pip("wheel", *offline, "."), "package", shown=shown)


def install_package() -> None:
    """Install the wheel that was built, without asking any registry."""
    (wheel,) = WHEELS.glob("*.whl")
    run(pip("install", "--no-index", "--no-deps", "--force-reinstall", str(wheel)), "install")


def fresh(name: str, key: str) -> bool:
    """Say whether a step was done with this key."""
    stamp = VENV / f"{name}.stamp"
    return stamp.exists() and stamp.read_text("utf-8") == key


def step(name: str, key: str, action: Callable[[], None]) -> None:
    """Run an action unless its stamp already holds `key`."""
    if fresh(name, key):
        return
    stamp = VENV / f"{name}.stamp"
    start = time.monotonic()
    print(f"{name}: installing ...", flush=True)
    stamp.unlink(missing_ok=True)
    action()
    stamp.write_text(key, "utf-8")
    print(f"{name}: done in {time.monotonic() - start:.0f} s", flush=True)


def requirements_and_package() -> None:
    """Install the requirements, while the package is compiled if that is needed as well."""
    wanted, sources = requirements_digest(*REQUIREMENTS, NO_DEPENDENCIES), package_digest()
    # The tools that came as requirements lie in the environment's own bin folder.
    os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with ThreadPoolExecutor() as pool:
        beside = not fresh("requirements", wanted) and not fresh("package", sources)
        built = pool.submit(build_package, shown=False) if beside else None
        step("requirements", wanted, install_requirements)

        def package() -> None:
            if built is None:
                build_package()
            else:
                built.result()
            install_package()

        step("package", sources, package)


def main(arguments: list[str]) -> int:
    """Bring the environment up to date."""
    try:
        if toolchain.cuda_mode() == "system":
            toolchain.nvcc()
        step("environment", environment_digest(), create_environment)
        step("tools", requirements_digest(BUILD_REQUIREMENTS), install_tools)
        if "requirements" in arguments:
            wanted = requirements_digest(*REQUIREMENTS, NO_DEPENDENCIES)
            step("requirements", wanted, install_requirements)
        elif "tools" not in arguments:
            requirements_and_package()
    except toolchain.BuildError as problem:
        print(f"\nerror: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
