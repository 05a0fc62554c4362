# SPDX-License-Identifier: Apache-2.0
"""The rules of DSPARK_CUDA: what is asked for, what is used, and what an error says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

PIP_ROOT = Path("somewhere", "nvidia", "cu13")


@pytest.fixture
def machine(toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The rules on an imagined machine: `system` and `pip` say which compilers exist."""

    def imagine(mode: str, *, system: bool, pip: bool, supported: bool = True) -> ModuleType:
        monkeypatch.setenv("DSPARK_CUDA", mode)
        for name, answer in (
            ("system_nvcc", "/opt/cuda/bin/nvcc" if system else None),
            ("pip_cuda_root", PIP_ROOT if pip else None),
            ("pip_toolchain_exists_for_this_platform", supported),
        ):
            monkeypatch.setattr(toolchain, name, lambda answer=answer: answer)
        return toolchain

    toolchain.imagine = imagine
    return toolchain


SYSTEM, PIP = "/opt/cuda/bin/nvcc", str(PIP_ROOT / "bin" / "nvcc")


@pytest.mark.parametrize(
    ("mode", "system", "pip", "nvcc", "download"),
    [
        ("auto", True, False, SYSTEM, False),
        ("auto", True, True, SYSTEM, False),
        ("auto", False, True, PIP, True),
        ("", False, True, PIP, True),  # unset or empty means auto
        ("AUTO", True, False, SYSTEM, False),
        ("pip", True, True, PIP, True),
        ("system", True, True, SYSTEM, False),
        ("off", True, True, None, False),
        ("off", False, False, None, False),
    ],
)
def test_choice(
    machine: ModuleType, mode: str, system: bool, pip: bool, nvcc: str | None, download: bool
) -> None:
    rules = machine.imagine(mode, system=system, pip=pip)
    assert rules.nvcc() == nvcc
    assert rules.wants_pip_cuda() is download
    wanted = [name for name in rules.build_requirements() if name.startswith("nvidia-")]
    assert bool(wanted) is download
    # All five, and to one release: they do not pin each other.
    assert not wanted or (len(wanted) == 5 and all(n.endswith("==13.0.*") for n in wanted))


@pytest.mark.parametrize(
    ("mode", "system", "pip"),
    [("auto", False, False), ("pip", True, False), ("system", False, True)],
)
def test_missing_compiler_says_how_to_use_off(
    machine: ModuleType, mode: str, system: bool, pip: bool
) -> None:
    rules = machine.imagine(mode, system=system, pip=pip)
    with pytest.raises(rules.BuildError) as error:
        rules.nvcc()
    assert f"DSPARK_CUDA={mode}" in str(error.value)
    assert "DSPARK_CUDA=off" in str(error.value)


def test_auto_on_a_platform_without_cuda_is_off(machine: ModuleType) -> None:
    rules = machine.imagine("auto", system=False, pip=False, supported=False)
    assert rules.nvcc() is None
    assert not rules.wants_pip_cuda()


def test_unknown_mode_lists_the_known_ones(
    toolchain: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CUDA", "on")
    with pytest.raises(toolchain.BuildError, match="auto, off, pip, system"):
        toolchain.nvcc()


def test_no_registry_says_how_to_use_off(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rules = machine.imagine("auto", system=False, pip=False)
    # The registry as it looks without a network: nothing is found.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(rules.BuildError) as error:
        rules.check_registry_reachable()
    assert "cannot be downloaded" in str(error.value)
    assert "DSPARK_CUDA=off" in str(error.value)


def test_no_question_to_the_registry_without_need(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(machine.subprocess, "run", never)
    for mode, system, pip in (("off", False, False), ("auto", True, False), ("pip", False, True)):
        machine.imagine(mode, system=system, pip=pip).check_registry_reachable()


@pytest.mark.parametrize(
    ("printed", "accepted"),
    [
        ("cmake version 3.25.0", True),
        ("cmake version 4.1.0", True),
        ("cmake version 3.24.9", False),
    ],
)
def test_old_cmake_is_replaced(
    toolchain: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    printed: str,
    accepted: bool,
) -> None:
    program = tmp_path / "cmake"
    program.write_text(f"#!/bin/sh\necho {printed}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DSPARK_CUDA", "off")
    assert (toolchain.system_cmake() == str(program)) is accepted
    missing = [name.split("==")[0] for name in toolchain.build_requirements()]
    assert missing == (["ninja"] if accepted else ["cmake", "ninja"])
