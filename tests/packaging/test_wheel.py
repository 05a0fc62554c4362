# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that it works installed, away from the tree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest

import dspark_ext as dx

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check", "--quiet")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without isolation and without a registry."""
    for module in ("pip", "pybind11", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "-w", str(out)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*pip, str(ROOT)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return next(out.glob("dspark-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel, and NumPy from this one."""
    folder = tmp_path_factory.mktemp("new environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *OFFLINE]
    subprocess.run(
        [*install, str(wheel)], check=True, capture_output=True, env=without_pythonpath()
    )
    site = next(folder.glob("lib/python*/site-packages"))
    # The new environment's own folder comes first, so this one's dspark stays out of sight.
    (site / "numpy.pth").write_text(str(Path(numpy.__file__).parents[1]))
    return python


def without_pythonpath() -> dict[str, str]:
    """This process's environment, without the way to the tree that a developer may have set."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(python: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the new environment's interpreter away from the tree."""
    return subprocess.run(
        [str(python), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=without_pythonpath(),
    )


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"dspark", "dspark_ext"}
    assert len([name for name in names if name.endswith(".so")]) == 1
    for name in ("dspark/py.typed", "dspark_ext/py.typed", "dspark_ext/_C.pyi"):
        assert name in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    unwanted = (".pyc", ".cpp", ".cu", ".o", ".a", ".log")
    assert [n for n in names if n.endswith(unwanted) or "/test" in n or "/build/" in n] == []
    assert "License-Expression: Apache-2.0" in metadata
    requires = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in requires if "extra ==" not in line] == ["Requires-Dist: numpy>=1.24"]
    assert any("torch>=2.8" in line and "extra ==" in line for line in requires)


def test_every_module_of_the_tree_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for top, folder in (("dspark_ext", ROOT), ("dspark", ROOT / "python")):
        for path in (folder / top).rglob("*.py"):
            assert str(path.relative_to(folder)) in names, path
    assert len([name for name in names if name.endswith(".py")]) == sum(
        len(list(folder.rglob("*.py"))) for folder in (ROOT / "dspark_ext", ROOT / "python")
    )


def test_info(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "dspark_ext", "info", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["version"] == dx.__version__
    assert answer["cuda"]["compiled"] or answer["cuda"]["reason"]


def test_it_is_the_installed_one(python: Path, tmp_path: Path) -> None:
    code = "import dspark_ext, sys; print(dspark_ext.__file__); sys.exit('torch' in sys.modules)"
    done = run(python, "-c", code, cwd=tmp_path)
    assert done.returncode == 0
    assert str(python.parent.parent) in done.stdout


def test_selftest(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "dspark_ext", "selftest", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("selftest passed\n")


def test_source_distribution_is_complete(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, '_build'); import dspark_backend as backend;"
        "print(backend.build_sdist(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(next(tmp_path.glob("dspark-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = [ROOT / name for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "README.md")]
    for folder in ("_build", "cmake", "csrc", "dspark_ext", "python"):
        ignored = {".so", ".pyc"}
        needed += [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix not in ignored]
    assert [str(p.relative_to(ROOT)) for p in needed if str(p.relative_to(ROOT)) not in names] == []
    assert not any(name.startswith(("tests", "build/", ".venv")) for name in names)
