# SPDX-License-Identifier: Apache-2.0
"""Generate ``dspark_ext/_C.pyi`` from the built extension.

``python _build/stub.py`` prints it, ``python _build/stub.py --write`` puts it into the tree.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "dspark_ext" / "_C.pyi"
HEADER = "# Generated from the built extension by `make stub`; a test compares the two.\n"


def generate() -> str:
    """Return the stub of the extension that this interpreter imports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "dspark_ext._C", "-o", folder]
        answer = subprocess.run(
            [*command, "--exit-code"], capture_output=True, text=True, check=False
        )
        if answer.returncode != 0:
            raise SystemExit(answer.stdout + answer.stderr)
        # A package, since the module has a submodule; that one is for the tests and gets no stub.
        text = Path(folder, "dspark_ext", "_C", "__init__.pyi").read_text("utf-8")
    # The version is a property of the build, not of the interface.
    lines = [
        line.split(" = ")[0] if line.startswith("__version__") else line.rstrip()
        for line in text.replace(", '_testing'", "").splitlines()
        if line != "from . import _testing"
    ]
    text = HEADER + "\n".join(lines) + "\n"
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "typing.SupportsInt")
    # pybind11 says of a dictionary only that it is one; ours all have names as keys.
    text = text.replace("-> dict:", "-> dict[str, typing.Any]:")
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", TARGET.name, "-"]
    done = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        TARGET.write_text(generate(), "utf-8")
    else:
        print(generate(), end="")
