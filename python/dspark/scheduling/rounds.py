# SPDX-License-Identifier: Apache-2.0
"""Files of ``dspark calibrate collect`` and ``fit``, as the commands read them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.scheduling.calibration import Calibration
from dspark_ext import ArgumentError

__all__ = ["calibration_for", "notes_of", "read_rounds"]

#: what NumPy raises for a file that is no archive of arrays, by its kind and Python's version
_BROKEN = (
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


def read_rounds(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read an ``.npz`` of recorded rounds.

    Returns
    -------
    arrays : dict
        ``logit`` and ``accepted`` [N, gamma], and ``request`` where the file has one.
    notes : dict
        ``rule`` and ``temperature``, where ``collect`` noted them.

    Raises
    ------
    ArgumentError
        When the file is something else; the message names it.
    OSError
        When it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "rounds.npz")
    ...     np.savez(file, logit=np.zeros((4, 2)), accepted=np.ones((4, 2), int), rule="greedy")
    ...     arrays, notes = read_rounds(file)
    >>> sorted(arrays), notes
    (['accepted', 'logit'], {'rule': 'greedy'})
    """
    try:
        # Opened here: NumPy leaves a broken archive open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            notes = {k: file[k].item() for k in ("rule", "temperature") if k in file}
            arrays = {k: file[k] for k in ("logit", "accepted")}
            if "request" in file:
                arrays["request"] = file["request"]
    except _BROKEN as error:
        raise ArgumentError(
            f"{path}: expected an .npz with logit and accepted [N, gamma] ({error})"
        ) from error
    shapes = [list(arrays[k].shape) for k in ("logit", "accepted")]
    if len(shapes[0]) != 2 or shapes[0] != shapes[1] or not shapes[0][1]:
        raise ArgumentError(
            f"{path}: logit, accepted: got shapes {shapes[0]} and {shapes[1]}, expected "
            "[N, gamma] twice, gamma >= 1"
        )
    return arrays, notes


def notes_of(rule: str, temperature: float) -> dict[str, Any]:
    """What ``collect`` notes beside rounds that were sampled so.

    Examples
    --------
    >>> notes_of("token", 0.0), notes_of("token", 1.0)
    ({'rule': 'greedy', 'temperature': 0.0}, {'rule': 'token', 'temperature': 1.0})
    """
    return {"rule": rule if temperature else "greedy", "temperature": temperature}


def calibration_for(path: Path, gamma: int, notes: Mapping[str, Any], whose: str) -> Calibration:
    """Read a calibration and refuse it where it was fitted for something else.

    Parameters
    ----------
    path : Path
        File of :meth:`Calibration.save`.
    gamma : int
        Positions that want a temperature.
    notes : mapping
        ``rule`` and ``temperature`` in use. What either side does not say is not compared.
    whose : str
        Whose notes and positions these are, for the message.

    Raises
    ------
    ArgumentError
        Names the file and everything that differs.
    """
    found = Calibration.load(path)
    was, problems = found.fingerprint, []
    other = {k: was[k] for k in notes if was.get(k, notes[k]) != notes[k]}
    if other:
        problems.append(
            f"got a calibration of {other}, expected one of {dict(notes)} as {whose}; acceptance "
            "under another rule or temperature is another event"
        )
    if len(found.temperature) != gamma:
        problems.append(
            f"got {len(found.temperature)} temperatures, expected {gamma} as {whose} have positions"
        )
    if problems:
        raise ArgumentError("\n  ".join(f"{path}: {text}" for text in problems))
    return found
