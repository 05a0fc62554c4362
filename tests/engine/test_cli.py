# SPDX-License-Identifier: Apache-2.0
"""The ``dspark`` command: every sub-command parses, wrong use exits with 2, and nothing heavy is
imported for the help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dspark.cli import COMMANDS, main


@pytest.mark.parametrize("command", [*COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    if command not in ("train", "calibrate"):  # the options belong to their own sub-commands
        for option in ("--json", "--seed"):
            assert option in text


def test_help_names_all_commands_and_stays_light() -> None:
    code = (
        "import sys; from dspark.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["generate"], ["generate", "Hello", "--demo"], ["eval"]],
    ids=" ".join,
)
def test_wrong_use_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "dspark" in capsys.readouterr().err


def test_unknown_command_exits_with_2() -> None:
    with pytest.raises(SystemExit) as end:
        main(["fly"])
    assert end.value.code == 2
