# SPDX-License-Identifier: Apache-2.0
"""Hopper's primitives in the runner: each fault of must_fail_hopper.cu is reported, and the kernels
without a fault compute what they should.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

SEEDS = ["0", "1", "7"]
LINE = r"tests/simt/must_fail_hopper.cu:\d+"

#: What both builds report, whenever copies land.
REPORTED = {
    "bytes_missing": rf"{LINE}: mbarrier at .*: copies brought 4096 bytes more than phase 0 expects"
    r"|phase 0 ended before its copies were complete",
    "bytes_too_many": r"every thread waits(.|\n)*phase 0 lacks 0 of 1 arrivals and 16 bytes",
    "init_fence": rf"{LINE}: copy: .* initialised it without mbarrier_init_fence",
    "next_parity": r"every thread waits(.|\n)*parity 1\): phase 3 lacks 1 of 1 arrivals",
    "arrives_too_often": r"every thread waits|more than \d arrivals in phase|yet to fill",
    "wgmma_fence": rf"{LINE}: wgmma without wgmma_fence",
    "read_early": rf"{LINE}: wgmma_hold: the accumulators are still under way",
    "wgmma_left": rf"a block ends with a wgmma that nobody waited for, issued at {LINE}",
    "wgmma_commit": rf"{LINE}: wgmma_hold: the accumulators are still under way",
    "barrier_stored": rf"{LINE}: arrival: the mbarrier at .* was overwritten",
    "cluster_barrier": rf"{LINE}: block \d, whose shared memory is asked for, does not run"
    r"|uninitialised|race on shared memory",
    "cluster_peer_left": rf"{LINE}: block \d, whose shared memory is asked for, does not run",
    "cluster_unpaired": rf"{LINE}: cluster_arrive: twice without cluster_wait",
}
#: What only the checked build reports in every order of the threads.
CHECKED = {
    "full_wait": r"uninitialised shared memory|yet to fill|race on shared memory",
    "empty_wait": r"more than 1 arrivals in phase|race on shared memory|yet to fill",
    "freed_early": r"race on shared memory: a write by block 0 \(asynchronous\) .* is not ordered "
    r"behind a read by block 0 \(asynchronous\)|yet to fill|every thread waits",
    "proxy_fence": rf"{LINE}: wgmma: .* was stored by thread \d+ without fence_proxy_async",
    "operand_barrier": r"race on shared memory: a read .* is not ordered behind a write"
    r"|uninitialised|without fence_proxy_async|a write .* is not ordered behind a read",
    "late_barrier": r"race on shared memory: a read by block 0 \(asynchronous\) .* is not ordered "
    r"behind a write|a write by block 0 thread .* is not ordered behind a read",
    "stale_parity": r"that an asynchronous copy has yet to fill|every thread waits",
    "init": r"uninitialised shared memory|is not initialised",
}
#: What is seen only while the copy is late.
LATE = {"copy_left": rf"block 0 ends before its tensor_load_2d \({LINE}\) has arrived"}
RIGHT = ["right", "cluster_right"]


@pytest.fixture(params=["fast", "checked"])
def library(request: pytest.FixtureRequest, open_library: Callable[[str], Any]) -> Any:
    return open_library(request.param)


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(request.param))
    return str(request.param)


@pytest.fixture(params=["late", "random", "early"])
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DSPARK_SIMT_ASYNC", str(request.param))
    return str(request.param)


def operands() -> tuple[np.ndarray, np.ndarray]:
    """A [64, 384] and B [8, 384] of small integers: all sums are exact."""
    a = np.random.default_rng(5).integers(-4, 5, (64, 384)).astype(np.float32)
    column, k = np.ogrid[:8, :384]
    return a, ((column * 5 + k * 3) % 7 - 3).astype(np.float32)


def run(library: Any, name: str) -> tuple[str, np.ndarray]:
    """Report (empty: none) and result of one case."""
    matrix = (operands()[0].view(np.uint32) >> 16).astype(np.uint16)
    out = np.zeros((64, 8), np.float32)
    library.dspark_simt_forget()
    library.register(matrix=matrix, out=out)
    call = library.dspark_simt_hopper_case
    call.restype = library.dspark_simt_case.restype
    call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    status = call(name.encode(), matrix.ctypes.data, out.ctypes.data)
    assert status.code in (0, 3)
    return status.message.decode(), out


def assert_reported(report: str, name: str, pattern: str) -> None:
    assert report.startswith(name + ": ")
    assert re.search(pattern, report) is not None, report


def test_every_case_is_expected_somewhere(checked: Any) -> None:
    name_of = checked.dspark_simt_hopper_case_name
    name_of.restype = ctypes.c_char_p
    names = {name.decode() for i in range(100) if (name := name_of(i)) is not None}
    assert names == {*REPORTED, *CHECKED, *LATE, *RIGHT}


def test_without_a_fault(library: Any, seed: str, lateness: str) -> None:
    report, out = run(library, "right")
    assert report == ""
    a, b = operands()
    np.testing.assert_array_equal(out, a @ b.T)


def test_cluster_without_a_fault(library: Any, seed: str) -> None:
    report, out = run(library, "cluster_right")
    assert report == ""
    i = np.arange(512)
    theirs = 159 - i % 160 + 1000 * (1 - i // 160 % 2)  # of the other block of the cluster
    np.testing.assert_array_equal(out.reshape(-1), theirs)


@pytest.mark.parametrize("name", REPORTED)
def test_both_builds_report(library: Any, seed: str, lateness: str, name: str) -> None:
    assert_reported(run(library, name)[0], name, REPORTED[name])


@pytest.mark.parametrize("name", CHECKED)
def test_the_checked_build_reports(checked: Any, seed: str, lateness: str, name: str) -> None:
    assert_reported(run(checked, name)[0], name, CHECKED[name])


@pytest.mark.parametrize("name", LATE)
def test_late_copies_are_reported(
    library: Any, seed: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_SIMT_ASYNC", "late")  # at random a copy may land in time
    assert_reported(run(library, name)[0], name, LATE[name])
