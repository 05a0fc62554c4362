# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests, and the backends that a test of an operator runs on."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark_ext as dx

# Property tests draw the same examples on every run; HYPOTHESIS_PROFILE=fresh draws new ones.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, deadline=None)
    settings.register_profile("fresh", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

#: Folders of the families that have CUDA kernels, with the operators that run them.
KERNELS = {
    "confidence": ["confidence"],
    "markov_loop": ["markov_loop"],
    "paged_kv": ["paged_kv_append", "paged_kv_commit"],
    "prefix_scheduler": ["prefix_schedule"],
    "rejection_sampler": ["rejection_sample"],
    "verify_attention": ["verify_attention"],
}


def _backends(family: str) -> list[str]:
    """Every backend that exists for a family here. The device itself only where there is one."""
    names = ["reference", "cpu"]
    if family in KERNELS:
        names.append("simt")
        if dx.info()["cuda"]["usable"]:
            names.append("cuda")
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``backend`` runs on each one, unless it lists its own."""
    marks = metafunc.definition.iter_markers("parametrize")
    named = [name for mark in marks for name in str(mark.args[0]).replace(" ", "").split(",")]
    if "backend" in metafunc.fixturenames and "backend" not in named:
        metafunc.parametrize(
            "backend", _backends(metafunc.definition.path.parent.name), indirect=True
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first, so that no process has a long one left at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


#: What the CUDA side refuses by design. Any other refusal fails its test.
REFUSED = ("top_k: got an array; the CUDA backend", "top_p: got an array; the CUDA backend")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A request that the CUDA side refuses by design skips its test, with the reason."""
    try:
        return (yield)
    except NotImplementedError as error:
        arguments = getattr(getattr(item, "callspec", None), "params", {})
        known = any(text in str(error) for text in REFUSED)
        if arguments.get("backend") not in ("simt", "cuda") or not known:
            raise
        pytest.skip(" ".join(str(error).split()))


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of this test. Its arrays are NumPy's; for CUDA they are moved there and back."""
    name = str(request.param)
    if name == "simt":
        from dspark_ext import _simt

        if not _simt.load():
            pytest.skip("the SIMT library is not built: run `make simt`")
    if name == "cuda":
        family = Path(str(request.node.path)).parent.name
        for function in KERNELS[family]:
            monkeypatch.setattr(dx, function, _on_device(getattr(dx, function)))
    return name


#: Arguments that an operator writes to, beside ``out``.
WRITTEN = ("k_cache", "v_cache", "kv_len", "position", "status")


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` of an array, or of those in a tuple or a result object; the rest as it is."""
    if isinstance(x, tuple):
        return tuple(_each(y, change) for y in x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{k: _each(v, change) for k, v in vars(x).items()})
    return change(x)


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator for arrays of the host: to the device and back, with ``backend="cuda"`` only.

    A call that has tensors on a device already is left alone.
    """
    torch = pytest.importorskip("torch")

    def there(x: Any) -> Any:
        x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        return x.cuda() if isinstance(x, torch.Tensor) else x

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
        tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
        if given.get("backend") != "cuda" or any(x.is_cuda for x in tensors):
            return function(*args, **kwargs)

        def back(x: Any) -> Any:
            return x if x is None else x.cpu() if tensors else x.cpu().numpy()

        def copy_back(mine: Any, other: Any) -> None:
            if isinstance(mine, tuple):
                for x, y in zip(mine, other, strict=True):
                    copy_back(x, y)
            elif dataclasses.is_dataclass(mine):
                copy_back(tuple(vars(mine).values()), tuple(vars(other).values()))
            elif isinstance(mine, (torch.Tensor, np.ndarray)):
                mine[...] = back(other)

        moved = {k: _each(v, there) for k, v in given.items()}
        answer = function(**moved)
        for name in (*WRITTEN, "out"):
            writes = name == "out" or function.__name__ != "verify_attention" or name == "status"
            if writes and name in given:
                copy_back(given[name], moved[name])
        out = given.get("out")
        return _each(answer, back) if out is None else out

    return call


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name: fresh per test, the same on every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
