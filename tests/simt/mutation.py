# SPDX-License-Identifier: Apache-2.0
"""Take one piece of synchronisation out of the kernels, see whether a test notices, put it back.

``make mutation`` does this for every barrier, fence, wait, acquire and release of csrc/cuda and
writes mutation_report.md. A change that no case of test_checked_kernels.py notices is either a gap
in the tests or a piece that is not needed; those that are kept anyway stand in ``ALLOWED`` with the
reason.

The changed source lies in a folder that comes first on the include path, one translation unit is
compiled and linked with the other objects of the checked library, and the cases run in a child
process, quickest first, until one fails.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"
BUILD = ROOT / "build" / "simt"
WORK = ROOT / "build" / "mutation"
REPORT = Path(__file__).with_name("mutation_report.md")
CASES = "test_checked_kernels"
SECONDS = 120  # for all cases of one change; a dead-lock is reported long before

#: What is changed -> what it becomes; `{0}` stands for its arguments.
WEAKER = {
    "__syncthreads": "(void)0",
    "__syncwarp": "(void)0",
    "__threadfence": "(void)0",
    "prim::fence_gpu": "(void)0",
    "prim::fence_proxy_async": "(void)0",
    "prim::mbarrier_init_fence": "(void)0",
    "prim::mbarrier_wait": "(void)0",
    "prim::mbarrier_arrive": "(void)0",
    "prim::barrier_sync": "(void)0",
    "prim::barrier_arrive": "(void)0",
    "prim::cluster_arrive": "(void)0",
    "prim::cluster_wait": "(void)0",
    "prim::grid_dependency_wait": "(void)0",
    "prim::cp_async_wait": "(void)0",
    "prim::wgmma_wait": "(void)0",
    "prim::wgmma_fence": "(void)0",
    "prim::ld_acquire": "prim::ld_relaxed({0})",
    "prim::st_release": "prim::st_relaxed({0})",
    "prim::red_release_add": "atomicAdd({0})",
}
CALL = re.compile(
    r"(?<![\w:])(" + "|".join(re.escape(name) for name in WEAKER) + r")(<[^<>()]*>)?\("
)

#: (file, line of the source without blanks around) -> why no test can notice.
ALLOWED: dict[tuple[str, str], str] = {
    (
        "csrc/cuda/markov_loop/kernel.cuh",
        "prim::grid_dependency_wait();",
    ): "the emulation runs launches one after another: the kernel before has always ended",
    (
        "csrc/cuda/markov_loop/kernel.cuh",
        "__syncthreads();",
    ): "a thread flushes the words that it wrote itself; kept because nothing else says so",
    (
        "csrc/cuda/markov_loop/shared.cuh",
        "__syncthreads();",
    ): "run_step has a barrier before anybody reads another's words; kept as a promise",
    (
        "csrc/cuda/markov_loop/tile_wgmma.cuh",
        "__syncwarp();",
    ): "brings the lanes together for wgmma, which wants it; orders no memory",
}


@dataclass(frozen=True)
class Change:
    """One call in one file, by the offsets of its text."""

    path: Path
    start: int
    end: int
    name: str
    replacement: str

    @property
    def file(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def line(self) -> int:
        return self.path.read_text("utf-8")[: self.start].count("\n") + 1

    @property
    def text(self) -> str:
        return self.path.read_text("utf-8").splitlines()[self.line - 1].strip()

    @property
    def family(self) -> str:
        return self.path.relative_to(CUDA).parts[0]


def closing(text: str, opening: int) -> int:
    """The index behind the bracket that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced brackets")


def changes(families: list[str]) -> list[Change]:
    """Every place where something can be taken out."""
    found = []
    for path in sorted(CUDA.glob("*/*.cu*")):
        family = path.relative_to(CUDA).parts[0]
        if family == "prim" or (families and family not in families):
            continue
        text = path.read_text("utf-8")
        for match in CALL.finditer(text):
            line_start = text.rfind("\n", 0, match.start()) + 1
            if "//" in text[line_start : match.start()]:
                continue
            end = closing(text, match.end() - 1)
            weaker = WEAKER[match[1]].format(text[match.end() : end - 1])
            found.append(Change(path, match.start(), end, match[1], weaker))
    return found


def units(family: str) -> list[dict[str, str]]:
    """The compile commands of the family's translation units in the checked build."""
    commands = json.loads((BUILD / "compile_commands.json").read_text("utf-8"))
    folder = str(CUDA / family) + "/"
    return [
        entry
        for entry in commands
        if "checked_kernels" in entry["command"] and entry["file"].startswith(folder)
    ]


def link_command() -> str:
    """The command that links the checked library."""
    answer = subprocess.run(
        ["ninja", "-C", str(BUILD), "-t", "commands", "dspark_simt_checked"],
        capture_output=True,
        text=True,
        check=True,
    )
    line = answer.stdout.strip().splitlines()[-1]
    return line.removeprefix(": && ").removesuffix(" && :")


def includes(unit: dict[str, str], path: Path) -> bool:
    """Whether the unit's object depends on a file (ninja knows)."""
    target = shlex.split(unit["command"])[shlex.split(unit["command"]).index("-o") + 1]
    deps = subprocess.run(
        ["ninja", "-C", str(BUILD), "-t", "deps", target],
        capture_output=True,
        text=True,
        check=True,
    )
    names = (
        Path(unit["directory"], line.strip()).resolve() for line in deps.stdout.splitlines()[1:]
    )
    return path in names


def build(change: Change, link: str) -> tuple[Path | None, str]:
    """The checked library with the change, or why it cannot be built."""
    work = WORK / str(os.getpid())
    overlay = work / "overlay"
    subprocess.run(["rm", "-rf", str(overlay)], check=True)
    copy = overlay / change.path.relative_to(CUDA.parent)
    copy.parent.mkdir(parents=True)
    text = change.path.read_text("utf-8")
    copy.write_text(text[: change.start] + change.replacement + text[change.end :], "utf-8")
    library = work / f"{change.path.stem}-{change.line}-{change.start}.so"
    for unit in units(change.family):
        if not includes(unit, change.path):
            continue
        words = shlex.split(unit["command"])
        target = words[words.index("-o") + 1]
        changed = work / (unit["file"].replace("/", "_") + ".o")
        words[words.index("-o") + 1] = str(changed)
        if Path(unit["file"]) == change.path:
            words[words.index("-c") + 1] = str(copy)
        words.insert(words.index("-c"), f"-ffile-prefix-map={overlay}/=csrc/")
        words.remove("-Werror")  # what is left behind may be unused
        words[words.index("-g")] = "-g1"  # quicker, and enough for a line
        # The overlay must be found before csrc.
        words.insert(next(i for i, w in enumerate(words) if w.startswith("-I")), f"-I{overlay}")
        done = subprocess.run(words, cwd=unit["directory"], capture_output=True, text=True)
        if done.returncode != 0:
            return None, done.stderr.splitlines()[0]
        link = link.replace(target, str(changed))
    link = re.sub(r"-o \S+", f"-o {library}", link)
    subprocess.run(shlex.split(link), cwd=BUILD, check=True)
    return library, ""


def load_cases() -> None:
    """Import test_checked_kernels.py."""
    path = Path(__file__).with_name(CASES + ".py")
    spec = importlib.util.spec_from_file_location(CASES, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def run_cases(cases: Any, family: str, library: Path) -> str:
    """What notices the change: "case on device: report". Empty when nothing does."""
    os.environ["DSPARK_SIMT"] = str(library)
    from dspark_ext import _simt

    _simt.load()  # from here on the arrays of calls are seen
    for name, case in cases.CASES[family].items():
        for where in cases.DEVICES:
            with cases.device(where):
                try:
                    case()
                except Exception as error:
                    return f"{name} on {where}: {str(error).strip().splitlines()[0]}"
    return ""


def judge(cases: Any, family: str, library: Path) -> str:
    """:func:`run_cases` in a child, which may crash or hang."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        os.close(reading)
        answer = run_cases(cases, family, library)
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"the process ended with signal {os.WTERMSIG(status)}"
    return answer


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


def write_report(rows: list[tuple[Change, str, str]]) -> None:
    """The table, survivors first."""
    killed = sum(verdict == "noticed" for _, verdict, _ in rows)
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "# Synchronisation that was taken out",
        "",
        "Written by `make mutation` (mutation.py): each line is one barrier, fence, wait, acquire",
        "or release of csrc/cuda without which the checked kernels ran their cases.",
        "",
        f"{len(rows)} changes: {killed} noticed, {len(rows) - killed} not.",
        "",
        "| place | taken out | | by |",
        "| --- | --- | --- | --- |",
    ]
    for change, verdict, reason in sorted(rows, key=lambda row: row[1] == "noticed"):
        place = f"{change.file.removeprefix('csrc/cuda/')}:{change.line}"
        lines.append(f"| {place} | `{cell(change.text)}` | {verdict} | {cell(reason)[:160]} |")
    REPORT.write_text("\n".join(lines) + "\n", "utf-8")


def try_change(link: str, change: Change) -> tuple[Change, str, str]:
    """The change, whether something noticed it, and what or why not."""
    cases = sys.modules[CASES]  # loaded before this process was forked
    library, problem = build(change, link)
    reason = problem if library is None else judge(cases, change.family, library)
    if library is not None:
        library.unlink()
    if reason:
        return change, "noticed", reason
    return change, "SURVIVED", ALLOWED.get((change.file, change.text), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--only", help="part of the place, as in exchange.cuh:92")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-report", action="store_true", help="leave mutation_report.md alone")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "python")]
    WORK.mkdir(parents=True, exist_ok=True)
    load_cases()
    link, rows = link_command(), []
    wanted = [
        change
        for change in changes(arguments.families)
        if not arguments.only or arguments.only in f"{change.file}:{change.line}"
    ]
    # Children of a process that has loaded everything: nothing is imported again for a change.
    with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
        for row in pool.imap(functools.partial(try_change, link), wanted):
            rows.append(row)
            change, verdict, reason = row
            print(
                f"{verdict:8} {change.file}:{change.line}  {change.text}\n    {reason}", flush=True
            )
            if not arguments.no_report:
                write_report(rows)  # a long run that is stopped leaves what it knows
    return int(any(verdict == "SURVIVED" and not reason for _, verdict, reason in rows))


if __name__ == "__main__":
    raise SystemExit(main())
