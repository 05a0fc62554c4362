# SPDX-License-Identifier: Apache-2.0
"""The compiled module: what it links, what it says about CUDA, and its stub."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dspark_ext as dx
from dspark_ext import _C

ROOT = Path(__file__).resolve().parents[2]
ARCHS = "80-real 90a-real 100a-real 120-real 100-virtual"


def test_links_no_framework_and_no_driver() -> None:
    if not shutil.which("readelf"):
        pytest.skip("no readelf on this machine")
    done = subprocess.run(
        ["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"NEEDED.*\[(.*)\]", done.stdout)
    assert any(name.startswith("libc.so") for name in needed)
    # OpenMP comes under its plain name, so that torch's copy and ours are one.
    allowed = r"(libc|libm|libstdc\+\+|libgcc_s|libgomp|libpthread|libdl|librt|ld-linux.*)\.so\.\d+"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []
    assert "RPATH" not in done.stdout
    assert "RUNPATH" not in done.stdout


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), False),  # older than everything compiled
        ((8, 0), True),
        ((8, 9), True),  # a cubin runs on later minor versions
        ((9, 0), True),
        ((10, 0), True),
        ((10, 3), True),  # the `a` cubin does not, the PTX does
        ((12, 1), True),
        ((13, 0), True),  # PTX alone
    ],
    ids=lambda value: "sm_{}{}".format(*value) if isinstance(value, tuple) else str(value),
)
def test_archs_serve(capability: tuple[int, int], expected: bool) -> None:
    assert _C.cuda_archs_serve(ARCHS, *capability) is expected


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        ("", (9, 0), False),
        ("90a-real", (9, 0), True),
        ("90a", (10, 0), False),  # code of an `a` architecture runs on no other
        ("80-virtual", (12, 0), True),
        ("90-real", (8, 9), False),
        ("garbage 80", (8, 6), True),
    ],
)
def test_archs_serve_other_lists(archs: str, capability: tuple[int, int], expected: bool) -> None:
    assert _C.cuda_archs_serve(archs, *capability) is expected


def test_info_is_consistent() -> None:
    cuda = dx.info()["cuda"]
    assert (cuda["reason"] is None) == cuda["usable"]
    assert bool(cuda["archs"]) == cuda["compiled"]
    assert bool(cuda["runtime"]) == cuda["compiled"]
    if not cuda["compiled"]:
        assert "DSPARK_CUDA" in cuda["reason"]
    if not cuda["devices"]:
        assert not cuda["usable"]


def test_probe_answers_in_words() -> None:
    cuda = dx.info()["cuda"]
    if cuda["usable"]:
        _C.cuda_probe(0)
        with pytest.raises(ValueError, match=r"index: got 99, expected 0 <= index < \d+"):
            _C.cuda_probe(99)
        return
    expected = RuntimeError if cuda["compiled"] else NotImplementedError
    for call in (_C.cuda_probe, _C.cuda_device):
        with pytest.raises(expected, match=re.escape(cuda["reason"])):
            call(0)


def test_operators_refuse_a_device_in_words() -> None:
    params = _C.ConfidenceParams()
    params.gamma = 1
    if not dx.info()["cuda"]["compiled"]:
        with pytest.raises(NotImplementedError, match="built without CUDA"):
            _C.confidence(_C.CUDA, params)
    with pytest.raises(ValueError, match="device: got 7"):
        _C.confidence(7, params)


def test_stub_is_current() -> None:
    if importlib.util.find_spec("pybind11_stubgen") is None:
        pytest.skip("pybind11-stubgen is not installed")
    generated = subprocess.run(
        [sys.executable, str(ROOT / "_build" / "stub.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    shipped = Path(dx.__file__).parent / "_C.pyi"
    assert shipped.read_text("utf-8") == generated, "the binding changed: run `make stub`"
