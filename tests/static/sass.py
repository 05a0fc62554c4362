# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of every kernel, read from the built library, against a budget.

    python tests/static/sass.py FILE...      the table, and exit code 1 when a budget is broken

A register too many halves the warps of a multiprocessor, a spill turns a register into memory, and
a matrix product that lost its tensor instruction still gives the right answer: nothing but the
machine code shows these. ``budgets.json`` beside this file says for every kernel and architecture
what is allowed and what must be there; no GPU is needed.

A budget has a ``kernel`` (a pattern of its name without parameters), ``arch`` (a pattern),
``registers`` (at most), optionally ``shared`` (bytes of static shared memory, at most; 0 without)
and ``uses`` (instruction groups that must occur, see GROUPS). Spills, stack and local memory are
never allowed, nor a wait behind each wgmma: the compiler puts one there where it cannot keep the
accumulators in place, and says so in a remark that is no warning. The first budget that fits a
kernel counts.
"""

from __future__ import annotations

import collections
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Budget", "Kernel", "check", "read", "read_budgets", "table", "tool"]

BUDGETS = Path(__file__).with_name("budgets.json")

#: Instruction groups that a budget may ask for: name -> pattern of the opcodes.
GROUPS = {
    "LDG.128": r"LDG\.(\w+\.)*128",  # 16 bytes a thread from global memory
    "LDG": r"LDG\b",
    "STG.128": r"STG\.(\w+\.)*128",
    "LDGSTS": r"LDGSTS\b",  # cp.async
    "LDSM": r"LDSM\b",  # ldmatrix
    "HMMA": r"HMMA\b",  # mma.sync, 16-bit floats
    "IMMA": r"IMMA\b",  # mma.sync, 8-bit integers
    "HGMMA": r"HGMMA\b",  # wgmma, 16-bit floats
    "IGMMA": r"IGMMA\b",  # wgmma, 8-bit integers
    "WARPGROUP.DEPBAR": r"WARPGROUP\.DEPBAR\b",  # waits for wgmma
    "UTMALDG": r"UTMALDG\b",  # tensor copies
    "UBLKCP": r"UBLKCP\b",  # bulk copies
    "REDUX": r"REDUX\b",  # warp-wide integer reductions
    "LDL": r"LDL\b",
    "STL": r"STL\b",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled for one architecture.

    Attributes
    ----------
    name, arch : str
    registers : int
        A thread's.
    stack, local, shared : int
        Bytes; shared is what is declared in the kernel, not what the launch adds.
    instructions : int
    uses : dict
        Count of each group in GROUPS.
    """

    name: str
    arch: str
    registers: int
    stack: int
    local: int
    shared: int
    instructions: int
    uses: dict[str, int]

    @property
    def spills(self) -> int:
        """Loads from and stores to local memory."""
        return self.uses.get("LDL", 0) + self.uses.get("STL", 0)


@dataclass(frozen=True)
class Budget:
    """What a kernel may take and must use; see the module."""

    kernel: str
    arch: str
    registers: int
    shared: int = 0
    uses: tuple[str, ...] = ()

    def fits(self, kernel: Kernel) -> bool:
        """Whether this budget is about that kernel."""
        return fnmatch.fnmatchcase(kernel.name, self.kernel) and fnmatch.fnmatchcase(
            kernel.arch, self.arch
        )


def tool(name: str) -> str | None:
    """Return the path of a CUDA binary utility: of the PyPI package, else the machine's own."""
    folders: list[str] = []
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
        folders += [str(Path(p, "bin")) for p in (spec and spec.submodule_search_locations) or ()]
    except ModuleNotFoundError:
        pass
    folders += os.environ.get("PATH", "").split(os.pathsep)
    folders += [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))]
    return shutil.which(name, path=os.pathsep.join(folders))


def _dump(option: str, path: Path) -> str:
    cuobjdump, nvdisasm = tool("cuobjdump"), tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        raise FileNotFoundError("cuobjdump and nvdisasm are needed")
    # cuobjdump starts the disassembler that it finds on PATH.
    folders = [str(Path(nvdisasm).parent), os.environ.get("PATH", "")]
    environment = os.environ | {"PATH": os.pathsep.join(folders)}
    answer = subprocess.run(
        [cuobjdump, option, str(path)], capture_output=True, text=True, env=environment, check=True
    )
    return answer.stdout


def _by_arch(text: str, start: str) -> list[tuple[str, str]]:
    """Cut a dump into the parts that belong to one architecture each."""
    parts = re.split(start, text)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def read(paths: Iterable[Path]) -> list[Kernel]:
    """Return every kernel of object files, libraries or cubins, per architecture."""
    found: list[Kernel] = []
    for path in paths:
        usage: dict[tuple[str, str], dict[str, int]] = {}
        for arch, part in _by_arch(_dump("--dump-resource-usage", path), r"arch = (sm_\w+)"):
            for name, line in re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", part):
                numbers = re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", line)
                usage[name, arch] = {key: int(value) for key, value in numbers}
        opcodes = _opcodes(path) if usage else {}
        names = _demangled([name for name, _ in usage])
        for (mangled, arch), numbers in usage.items():
            counts = opcodes.get((mangled, arch), collections.Counter())
            uses = {
                group: sum(n for code, n in counts.items() if re.match(pattern, code))
                for group, pattern in GROUPS.items()
            }
            sizes = (numbers.get(key, 0) for key in ("REG", "STACK", "LOCAL", "SHARED"))
            found.append(Kernel(names[mangled], arch, *sizes, counts.total(), uses))
    return sorted(found, key=lambda k: (k.name, k.arch))


def _opcodes(path: Path) -> dict[tuple[str, str], collections.Counter[str]]:
    """Count the opcodes of every function; operands and predicates do not matter."""
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    line = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
    for arch, part in _by_arch(_dump("--dump-sass", path), r"code for (sm_\w+)"):
        for text in part.split("Function : ")[1:]:
            name = text.split("\n", 1)[0].strip()
            found[name, arch] = collections.Counter(line.findall(text))
    return found


def _demangled(names: Sequence[str]) -> dict[str, str]:
    """Readable names without return type, parameters and anonymous namespaces."""
    answer = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return {k: plain_name(v) for k, v in zip(names, answer.stdout.splitlines(), strict=True)}


def plain_name(demangled: str) -> str:
    """Cut a demangled signature down to the name with its template arguments."""
    name = demangled.replace("(anonymous namespace)::", "").replace("> >", ">>")
    name = name.removeprefix("void ").strip()
    depth = 0
    for i in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[i], 0)
        if name.endswith(")") and depth == 0:
            return name[:i]
    return name


def read_budgets(path: Path = BUDGETS) -> list[Budget]:
    """Return the budgets of a file, in its order."""
    entries: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["budgets"]
    budgets = [Budget(**(e | {"uses": tuple(e.get("uses", ()))})) for e in entries]
    for budget in budgets:
        unknown = set(budget.uses) - set(GROUPS)
        if unknown:
            raise ValueError(f"{budget.kernel}: unknown instruction groups {sorted(unknown)}")
    return budgets


def problems_of(kernel: Kernel, budget: Budget | None) -> list[str]:
    """Say what one kernel breaks."""
    found = []
    if budget is None:
        found.append("no budget")
    else:
        if kernel.registers > budget.registers:
            found.append(f"{kernel.registers} registers, budget {budget.registers}")
        if kernel.shared > budget.shared:
            found.append(f"{kernel.shared} bytes of shared memory, budget {budget.shared}")
        found += [f"no {group}" for group in budget.uses if kernel.uses.get(group, 0) == 0]
    if kernel.spills:
        found.append(f"{kernel.spills} accesses to local memory")
    products = kernel.uses.get("HGMMA", 0) + kernel.uses.get("IGMMA", 0)
    waits = kernel.uses.get("WARPGROUP.DEPBAR", 0)
    if 2 * waits > products:
        found.append(f"{waits} waits for {products} wgmma: they run one at a time")
    if kernel.stack or kernel.local:
        found.append(f"{kernel.stack + kernel.local} bytes of stack or local memory")
    return found


def check(kernels: Sequence[Kernel], budgets: Sequence[Budget]) -> list[str]:
    """Return all that is wrong: broken budgets, kernels without one, budgets without a kernel."""
    found, used = [], set()
    for kernel in kernels:
        budget = next((b for b in budgets if b.fits(kernel)), None)
        used.add(budget)
        found += [f"{kernel.name} {kernel.arch}: {text}" for text in problems_of(kernel, budget)]
    archs = {kernel.arch for kernel in kernels}
    for budget in budgets:
        built = any(fnmatch.fnmatchcase(arch, budget.arch) for arch in archs)
        if built and budget not in used:
            found.append(f"{budget.kernel} {budget.arch}: a budget that no kernel needs")
    return found


def table(kernels: Sequence[Kernel], budgets: Sequence[Budget]) -> str:
    """Lay the kernels out for people, each beside its budget."""
    head = ["", "arch", "registers", "budget", "shared", "stack", "spills", "instructions", "uses"]
    lines = [head]
    for k in kernels:
        budget = next((b for b in budgets if b.fits(k)), None)
        uses = " ".join(f"{g}:{n}" for g, n in k.uses.items() if n and g not in ("LDL", "STL"))
        numbers = [k.registers, budget and budget.registers, k.shared, k.stack + k.local, k.spills]
        mark = "x" if problems_of(k, budget) else ""
        lines.append([mark, k.arch, *map(str, numbers), str(k.instructions), f"{uses}  {k.name}"])
    width = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(t.rjust(n) for t, n in zip(line, width, strict=False)), line[-1]])
        for line in lines
    )


def main(arguments: list[str]) -> int:
    """Print the table of the given files; exit code 1 when a budget is broken."""
    kernels, budgets = read(Path(a) for a in arguments), read_budgets()
    print(table(kernels, budgets))
    problems = check(kernels, budgets)
    print("\n".join(["", *problems] if problems else ["every budget is kept"]))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
