# SPDX-License-Identifier: Apache-2.0
"""matplotlib, where it is wanted and installed: an extra of the package."""

from __future__ import annotations

from typing import Any

from dspark_ext import ArgumentError

__all__ = ["pyplot"]


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` drawing to files, without a display.

    Raises
    ------
    ArgumentError
        When matplotlib is not installed; the message says how to get it.

    Examples
    --------
    >>> figure, axis = pyplot().subplots(figsize=(3, 2))
    >>> figure.get_size_inches().tolist()
    [3.0, 2.0]
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ArgumentError("plots need matplotlib: pip install 'dspark[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
