# SPDX-License-Identifier: Apache-2.0
"""Drafters that come with the package."""

from __future__ import annotations

from pathlib import Path

NAMES = ("smollm2-135m-dspark",)


def shipped(name: str = NAMES[0]) -> Path:
    """Folder of a shipped drafter, for :meth:`dspark.drafters.dspark.DSparkDrafter.load`.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> shipped().name
    'smollm2-135m-dspark'
    """
    if name not in NAMES:
        raise ValueError(f"checkpoint: got {name!r}, expected one of {NAMES}")
    return Path(__file__).resolve().parent / name
