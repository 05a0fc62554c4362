# SPDX-License-Identifier: Apache-2.0
"""Leave out one piece of the kernels' synchronisation: does a test notice?

``make mutation`` does this for every barrier, fence, wait, acquire and release of csrc/cuda and
writes mutation_report.md. What no case of test_checked_kernels.py notices is either a gap in the
tests or a piece that is not needed; those that are kept anyway stand in ``ALLOWED`` with the
reason.

Nothing is compiled: the emulated primitives know the source line that called them, and the checked
library leaves out the one it is told (``dspark_simt_leave_out``). An acquire or release becomes
relaxed. The cases that pass there run in a child process, until one fails.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"
LIBRARY = ROOT / "build" / "simt" / "libdspark_simt_checked.so"
REPORT = Path(__file__).with_name("mutation_report.md")
CASES = "test_checked_kernels"
SECONDS = 300  # for all cases of one change on a busy machine; a dead-lock is reported long before

NAMES = (
    "__syncthreads",
    "__syncwarp",
    "__threadfence",
    "prim::barrier_arrive",
    "prim::barrier_sync",
    "prim::cluster_arrive",
    "prim::cluster_wait",
    "prim::cp_async_wait",
    "prim::fence_gpu",
    "prim::fence_proxy_async",
    "prim::grid_dependency_wait",
    "prim::ld_acquire",
    "prim::mbarrier_arrive",
    "prim::mbarrier_init_fence",
    "prim::mbarrier_wait",
    "prim::red_release_add",
    "prim::st_release",
    "prim::wgmma_fence",
    "prim::wgmma_wait",
)
CALL = re.compile(r"(?<![\w:])(" + "|".join(map(re.escape, NAMES)) + r")(<[^<>()]*>)?\(")

#: family -> "name file:line" -> the cases and devices that pass there.
PASSES: dict[str, dict[str, list[tuple[str, str]]]] = {}

#: A device function: its name stands before the first bracket that is not an attribute's.
FUNCTION = re.compile(r"__(?:device|global)__[^;{}]*?\b(?!__launch_bounds__)(\w+)\(")

#: "file function: line of the source without blanks around", " #2" for the second equal line of the
#: function -> why no test can notice.
ALLOWED: dict[str, str] = {
    "markov_loop/kernel.cuh run_launch: prim::grid_dependency_wait();": (
        "no launch of it asks to start early; kept so that one may"
    ),
    "markov_loop/kernel.cuh run_launch: __syncthreads();": (
        "a thread flushes the words that it wrote itself; kept because nothing else says so"
    ),
    "markov_loop/shared.cuh read_requests: __syncthreads(); #2": (
        "run_step has a barrier before anybody reads another's words; kept as a promise"
    ),
    "markov_loop/tile_wgmma.cuh free: __syncwarp();": (
        "brings the lanes together for wgmma, which wants it; orders no memory"
    ),
    "markov_loop/topk_select.cuh keep_largest: "
    "__syncthreads();  // nobody adds a candidate before everybody has read the count": (
        "fewer candidates than wanted are found in the last pass alone; kept as a promise"
    ),
    "rejection_sampler/kernel.cuh rejection_sampler_kernel: "
    "if (decides) prim::grid_dependency_wait();  // it must not end before the one ahead": (
        "a request without a part touches nothing; the emulation runs launches one after another"
    ),
    "rejection_sampler/team.cuh barrier: __syncwarp();  // whole warps arrive": (
        "brings the lanes together for barrier.cluster.arrive.aligned; orders no memory"
    ),
    "verify_attention/cluster.cuh merge_cluster: __syncwarp();  // whole warps arrive": (
        "brings the lanes together for barrier.cluster.arrive.aligned; orders no memory"
    ),
    "verify_attention/cluster.cuh merge_cluster: __syncwarp();": (
        "brings the lanes together for barrier.cluster.arrive.aligned; orders no memory"
    ),
    "verify_attention/exchange.cuh ask: prim::fence_gpu();  "
    "// whatever this thread answers from now on, the zeros are before it": (
        "zeros and counts are atomics, which the emulation has in one order"
    ),
    "verify_attention/exchange.cuh admit: "
    "while (prim::ld_acquire(work_.echo + blockIdx.x) != s_.ticket) {": (
        "zeros and counts are atomics, which the emulation has in one order"
    ),
}


@dataclass(frozen=True)
class Change:
    """One call, or several of one name in one line."""

    file: str
    first: int
    last: int
    name: str
    function: str
    text: str
    nth: int  # of the equal lines of the function, from 1

    @property
    def place(self) -> str:
        """File and function, which most changes of the file leave as they are."""
        return f"{self.file.removeprefix('csrc/cuda/')} {self.function}"

    @property
    def what(self) -> str:
        """The line, told from equal ones."""
        return self.text + (f" #{self.nth}" if self.nth > 1 else "")

    @property
    def reason(self) -> str:
        """Why nothing can notice it, or ''."""
        return ALLOWED.get(f"{self.place}: {self.what}", "")

    @property
    def family(self) -> str:
        return self.file.split("/")[2]


def closing(text: str, opening: int) -> int:
    """The index behind the bracket that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced brackets")


def changes(families: list[str]) -> list[Change]:
    """Every place where something can be left out."""
    found: dict[tuple[str, int, str], Change] = {}
    for path in sorted(CUDA.glob("*/*.cu*")):
        family = path.relative_to(CUDA).parts[0]
        if family == "prim" or (families and family not in families):
            continue
        text = path.read_text("utf-8")
        for match in CALL.finditer(text):
            line_start = text.rfind("\n", 0, match.start()) + 1
            if "//" in text[line_start : match.start()]:
                continue
            first = text.count("\n", 0, match.start()) + 1
            last = text.count("\n", 0, closing(text, match.end() - 1)) + 1
            line = text[line_start:].split("\n", 1)[0].strip()
            name = match[1].removeprefix("prim::").replace("__threadfence", "fence_gpu")
            file = str(path.relative_to(ROOT))
            function = [f[1] for f in FUNCTION.finditer(text, 0, match.start())][-1]
            new = Change(file, first, last, name, function, line, 1)
            equal = sum((c.place, c.text) == (new.place, line) for c in found.values())
            found.setdefault((file, first, name), replace(new, nth=equal + 1))
    return list(found.values())


def load_cases() -> None:
    """Import test_checked_kernels.py."""
    path = Path(__file__).with_name(CASES + ".py")
    spec = importlib.util.spec_from_file_location(CASES, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def runs(family: str) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Every case on every device."""
    cases = sys.modules[CASES]
    for name, case in cases.CASES[family].items():
        for where in cases.DEVICES:
            with cases.device(where):
                yield name, where, case


def record(family: str) -> dict[str, list[tuple[str, str]]]:
    """Which cases, on which devices, pass each place: "name file:line" -> (case, device)."""
    passes: dict[str, list[tuple[str, str]]] = {}
    library = ctypes.CDLL(str(LIBRARY))
    library.dspark_simt_record.restype = ctypes.c_char_p
    for name, where, case in runs(family):
        library.dspark_simt_record(1)
        case()
        for place in library.dspark_simt_record(0).decode().splitlines():
            passes.setdefault(place, []).append((name, where))
    return passes


def run_cases(change: Change) -> str:
    """What notices the change: "case on device: report". Empty when nothing does."""
    lines = range(change.first, change.last + 1)
    places = [f"{change.name} {change.file}:{line}" for line in lines]
    wanted = {pair for place in places for pair in PASSES[change.family].get(place, ())}
    ctypes.CDLL(str(LIBRARY)).dspark_simt_leave_out(
        change.name.encode(), change.file.encode(), change.first, change.last
    )
    for name, where, case in runs(change.family):
        if (name, where) not in wanted:
            continue
        try:
            case()
        except Exception as error:
            return f"{name} on {where}: {str(error).strip().splitlines()[0]}"
    return "" if wanted else "NEVER RUN"


def try_change(change: Change) -> tuple[Change, str, str]:
    """The change, whether something noticed it, and what or why not.

    The cases run in a child, which may crash or hang.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.close(reading)
        os.write(writing, (run_cases(change) or "nothing").encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        # An alarm says that the machine was slow, or that the runner did not see a dead-lock.
        late = os.WTERMSIG(status) == signal.SIGALRM
        return change, *(
            ("TIMEOUT", "") if late else ("noticed", f"ended by signal {os.WTERMSIG(status)}")
        )
    if answer == "NEVER RUN":
        return change, answer, change.reason
    if answer != "nothing":
        return change, "noticed" if answer else "NO ANSWER", answer
    return change, "SURVIVED", change.reason


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


def kept_lines(families: set[str]) -> list[str]:
    """Lines of the last report about families that this run leaves alone."""
    if not REPORT.exists():
        return []
    lines = re.findall(r"^\| (\w+)(/.*)$", REPORT.read_text("utf-8"), re.MULTILINE)
    return [f"| {family}{rest}" for family, rest in lines if family not in families]


def write_report(rows: list[tuple[Change, str, str]], kept: list[str]) -> None:
    """The table, survivors first; ``kept`` are lines of families that did not run."""
    table = list(kept)
    for change, verdict, reason in rows:
        reason = re.sub(r"csrc/cuda/(\S+?):\d+", r"\1", reason)  # lines go stale, files do not
        table.append(
            f"| {change.place} | `{cell(change.what)}` | {verdict} | {cell(reason)[:160]} |"
        )
    killed = sum("| noticed |" in line for line in table)
    covered = Counter(line[2:].split("/")[0] for line in table)
    places = Counter(change.family for change in changes([]))
    names = ", ".join(f"{family} {covered[family]} of {places[family]}" for family in places)
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "# Synchronisation that was left out",
        "",
        "Written by `make mutation` (mutation.py): each line is one barrier, fence, wait, acquire",
        "or release of csrc/cuda without which the checked kernels ran their cases.",
        "",
        "A run of single families replaces their lines alone. The second number of a family counts",
        "the places of its source today: where it differs, lines are missing or old.",
        "",
        f"{len(table)} changes: {killed} noticed, {len(table) - killed} not.",
        "",
        f"{names}.",
        "",
        "| place | left out | | by |",
        "| --- | --- | --- | --- |",
    ]
    lines += sorted(table, key=lambda line: ("| noticed |" in line, line[2:].split("/")[0]))
    REPORT.write_text("\n".join(lines) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--only", help="part of 'file:line function'; no report")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-report", action="store_true", help="leave mutation_report.md alone")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "python")]
    os.environ["DSPARK_SIMT"] = str(LIBRARY)
    load_cases()
    from dspark_ext import _simt

    _simt.load()  # from here on the arrays of calls are seen
    rows: list[tuple[Change, str, str]] = []
    wanted = [
        change
        for change in changes(arguments.families)
        if not arguments.only or arguments.only in f"{change.file}:{change.first} {change.function}"
    ]
    families = {change.family for change in wanted}
    if unknown := families - sys.modules[CASES].CASES.keys():
        parser.error(f"no checked cases of {', '.join(sorted(unknown))} in {CASES}.py")
    for family in families:
        PASSES[family] = record(family)
    kept = kept_lines(families)
    # Children of a process that has loaded everything: nothing is imported again for a change.
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for row in pool.imap(try_change, wanted):
            rows.append(row)
            change, verdict, reason = row
            print(
                f"{verdict:8} {change.file}:{change.first} {change.function}: {change.what}"
                f"\n    {reason}",
                flush=True,
            )
            if not (arguments.no_report or arguments.only):
                write_report(rows, kept)  # a long run that is stopped leaves what it knows
    return int(any(verdict != "noticed" and not reason for _, verdict, reason in rows))


if __name__ == "__main__":
    raise SystemExit(main())
