# SPDX-License-Identifier: Apache-2.0
"""The runner itself: each fault of must_fail.cu is reported, and its repaired twin is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

SEEDS = ["0", "1", "7", "123456789"]

#: What both builds report.
REPORTED = {
    "divergent_barrier": r"divergent barrier.*\n.*threads 0-31.*must_fail.cu:\d+\n.*threads 32-63",
    "dead_lock": r"no thread can go on\n.*threads 0-31: __syncthreads.*\n.*named barrier 2",
    "live_lock": r"every thread waits\n.*threads 0-63: spin-wait at tests/simt/must_fail.cu:\d+",
    "exited_lane": r"names lane 5, which has exited",
    "lane_outside_mask": r"reads lane 17, which is not in mask 0x0000ffff",
    "caller_outside_mask": r"the calling lane \d+ is not in its mask 0x0000ffff",
    "different_collectives": r"meet in different operations",
    "copy_leave": r"must_fail.cu:\d+: the thread exits without having waited for its cp.async",
    "stack": r"the thread's stack has overflowed",
    "too_many_blocks": r"cooperative launch too large: 1000 blocks, 192 can be resident",
}
#: What the fast build shows as NaN in the result, since shared memory starts as garbage.
GARBAGE = {"uninitialised", "copy_wait", "copy_barrier", "block_barrier", "warp_sync"}

LINE = r"tests/simt/must_fail.cu:\d+"
SHARED = rf"race on shared memory: an? [a-z ]+ by block 0 .* at {LINE} is not ordered behind"
GLOBAL = rf"race on global memory: a read by block 1 .* at {LINE} is not ordered behind a write by "
EARLY = rf"{{}} by block 0 .* at {LINE} is not ordered behind a write by a launch before"
#: What only the checked build sees.
CHECKED = {
    "block_barrier": SHARED,
    "second_barrier": SHARED,
    "warp_sync": SHARED,
    "shuffle_is_no_barrier": SHARED,
    "named_barrier": SHARED,
    "release": GLOBAL + "block 0",
    "acquire": GLOBAL + "block 0",
    "writer_barrier": GLOBAL + "block 0",
    "reader_barrier": GLOBAL + "block 0",
    "writer_fence": GLOBAL + "block 0",
    "reader_fence": GLOBAL + "block 0",
    "two_blocks_write": r"race on global memory: a write by block \d .* behind a write by block \d",
    "plain_and_atomic": r"race on global memory: .*atomic write",
    "global_bounds": rf"{LINE}: write of 4 bytes out of bounds, 4 bytes past the end of data",
    "shared_bounds": r"out of bounds, past the end of the block's dynamic shared memory",
    "alignment": rf"{LINE}: misaligned access of 16 bytes",
    "uninitialised": rf"read of uninitialised shared memory: block 0 thread \d+ at {LINE}",
    "copy_wait": r"that an asynchronous copy has yet to fill",
    "copy_barrier": SHARED,
    "copy_over_readers": SHARED,
    "local_memory": r"access to another thread's local memory",
    "early_read": EARLY.format("a read"),
    "early_write": EARLY.format("a write"),
}


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DSPARK_SIMT_SEED", str(request.param))
    return str(request.param)


@pytest.fixture(params=["fast", "checked"])
def library(request: pytest.FixtureRequest, open_library: Callable[[str], Any]) -> Any:
    return open_library(request.param)


def run(library: Any, name: str, right: bool) -> tuple[str, np.ndarray]:
    """Report (empty: none) and data of one case."""
    data, words = np.zeros(256, np.float32), np.zeros(16, np.uint32)
    library.dspark_simt_forget()
    library.register(data=data, words=words)
    status = library.dspark_simt_case(
        name.encode(), int(right), data.ctypes.data, words.ctypes.data
    )
    assert status.code in (0, 2, 3)  # 2: a cooperative launch that does not fit
    return status.message.decode(), data


def test_every_case_is_expected_somewhere(checked: Any) -> None:
    names = [checked.dspark_simt_case_name(i) for i in range(200)]
    found = {name.decode() for name in names if name is not None}
    assert found == set(REPORTED) | set(CHECKED) | {"early_exit"}


@pytest.mark.parametrize("name", [*REPORTED, *CHECKED, "early_exit"])
def test_without_its_fault_a_case_is_not_reported(library: Any, seed: str, name: str) -> None:
    report, data = run(library, name, right=True)
    assert report == ""
    assert not np.isnan(data).any()


@pytest.mark.parametrize("name", REPORTED)
def test_both_builds_report(library: Any, seed: str, name: str) -> None:
    report, _ = run(library, name, right=False)
    assert_matches(report, name, REPORTED[name])


@pytest.mark.parametrize("name", CHECKED)
def test_the_checked_build_reports(checked: Any, seed: str, name: str) -> None:
    report, _ = run(checked, name, right=False)
    assert_matches(report, name, CHECKED[name])


def assert_matches(report: str, name: str, pattern: str) -> None:
    assert report.startswith(name + ": ")  # the kernel's name
    assert pytest.raises(AssertionError, match=pattern).matches(AssertionError(report)), report


@pytest.mark.parametrize("name", sorted(GARBAGE))
def test_the_fast_build_reads_garbage(fast: Any, seed: str, name: str) -> None:
    _, data = run(fast, name, right=False)
    assert np.isnan(data).any()


def test_a_seed_decides_everything(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {}
    for seed in ("3", "4", "5", "6"):
        monkeypatch.setenv("DSPARK_SIMT_SEED", seed)
        first, again = (run(checked, "second_barrier", right=False)[0] for _ in range(2))
        assert first == again
        reports[seed] = first
    assert len(set(reports.values())) > 1


def test_asynchronous_copies_may_be_early(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_SIMT_ASYNC", "early")
    _, data = run(fast, "copy_wait", right=True)
    assert not np.isnan(data).any()
