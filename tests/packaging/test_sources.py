# SPDX-License-Identifier: Apache-2.0
"""Promises of the source tree: documented headers, licence lines, one version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark_ext as dx

ROOT = Path(__file__).resolve().parents[2]
HEADERS = sorted((ROOT / "csrc" / "include" / "dspark").glob("*.h"))
SOURCES = sorted(
    path
    for folder in ("_build", "bench", "cmake", "csrc", "dspark_ext", "python", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".h", ".c", ".cpp", ".cu", ".cuh", ".cmake"}
)
MAX_LINES = 600


def undocumented(text: str) -> Iterator[str]:
    """Yield every declaration, field and constant that has no ``///`` comment of its own.

    A comment counts on the lines directly above or, as ``///<``, on the lines of the declaration.
    """
    above = False  # the line before ended a documentation comment
    declaration: list[str] = []
    documented = False
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//")[0].strip()
        if line.strip().startswith("///"):
            above = True
            continue
        if not declaration:
            documented = above
        above = False
        documented = documented or "///<" in line
        skipped = ("#", 'extern "C"', "}", "enum {", "__attribute__")
        macro = re.match(r"#define (DSPARK_\w+)(?<!_H_) ", line)
        if macro and macro[1] != "DSPARK_API" and not documented:
            yield f"{number}: {code}"
        if not code or (not declaration and code.startswith(skipped)):
            continue
        declaration.append(code)
        if code.endswith((";", "{", ",")) or re.search(r"= [\w <]+$", code):
            joined = " ".join(declaration)
            if joined.count("(") == joined.count(")"):
                if not documented:
                    yield f"{number}: {joined}"
                declaration = []


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_every_public_symbol_is_documented(header: Path) -> None:
    assert list(undocumented(header.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "int32_t dspark_lonely(void);",
        "/// Fine.\ntypedef struct a {\n  int32_t bare;\n} a;",
        "/// Fine.\nint f(void);\nint g(int a,\n      int b);",
        "typedef enum e {\n  E_A = 0,  ///< fine\n} e;",
        "#define DSPARK_LIMIT 3\n",
    ],
    ids=["function", "field", "second-function", "enum", "macro"],
)
def test_the_check_itself_can_fail(text: str) -> None:
    assert len(list(undocumented(text))) == 1


def test_there_are_sources() -> None:
    assert len(HEADERS) >= 8
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_licence_line_and_length(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert "SPDX-License-Identifier: Apache-2.0" in (lines[0] if lines else "")
    assert len(lines) <= MAX_LINES


def test_one_version() -> None:
    cmake = re.search(r"project\(dspark VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    metadata = re.search(r'^version = "([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert cmake is not None
    assert metadata is not None
    assert cmake[1] == metadata[1] == dx.__version__


def test_requirements_are_exact() -> None:
    exact = re.compile(r"[\w.-]+==[\w.]+(; python_version [<>]=? \"3\.11\")?")
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text("utf-8").splitlines():
            assert not line or line.startswith("#") or exact.fullmatch(line), f"{path.name}: {line}"
