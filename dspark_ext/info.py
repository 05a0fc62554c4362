# SPDX-License-Identifier: Apache-2.0
"""What this build and this machine can do."""

from __future__ import annotations

import os
import sys
from typing import Any

from dspark_ext import _C
from dspark_ext._backend import num_threads

__all__ = ["format_info", "info"]


def _version(number: int) -> str | None:
    """Spell CUDA's version numbers: 13000 is "13.0"; 0 stands for none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _threads() -> int:
    """Threads of an operator call: torch's setting, else what the process may use."""
    wanted = num_threads() or int(os.environ.get("OMP_NUM_THREADS", "0").split(",")[0] or 0)
    return wanted or len(os.sched_getaffinity(0))


def info() -> dict[str, Any]:
    """Describe the build, the processor and the CUDA devices.

    Returns
    -------
    dict
        ``version``; ``python`` and ``platform``; ``backends`` (names that the ``backend=`` argument
        of an operator accepts here); ``cpu`` with ``level`` (the SIMD level in use: "baseline",
        "x86-64-v3" or "x86-64-v4") and ``threads``; ``cuda`` with ``compiled``, ``usable``,
        ``archs``, ``runtime``, ``driver``, ``devices`` and ``reason`` (why CUDA is off, or None).
        Everything in it can be written as JSON.

    Notes
    -----
    No context is created on a device, and torch is not imported. ``cuda`` is about the build and
    the machine, ``backends`` about the operators.

    Examples
    --------
    >>> answer = info()
    >>> answer["backends"]
    ['cpu', 'reference']
    >>> answer["cuda"]["compiled"] or answer["cuda"]["reason"].startswith("dspark was built")
    True
    """
    import platform  # costs milliseconds, and this module is imported with the package

    cuda = _C.cuda_info()
    return {
        "version": _C.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "backends": ["cpu", "reference"],
        "cpu": {"level": _C.cpu_level(), "threads": _threads()},
        "cuda": {
            "compiled": cuda["compiled"],
            "usable": cuda["usable"],
            "archs": cuda["archs"].split(),
            "runtime": _version(cuda["runtime_version"]),
            "driver": _version(cuda["driver_version"]),
            "devices": [_C.cuda_device(i) for i in range(cuda["num_devices"])],
            "reason": cuda["reason"] or None,
        },
    }


def format_info(answer: dict[str, Any]) -> str:
    """Return the text of ``python -m dspark_ext info``.

    Parameters
    ----------
    answer : dict
        A result of :func:`info`.

    Returns
    -------
    str
        Several lines, without a final newline.

    Examples
    --------
    >>> format_info(info()).splitlines()[0].startswith("dspark ")
    True
    """
    cpu, cuda = answer["cpu"], answer["cuda"]
    lines = [
        f"dspark {answer['version']}, Python {answer['python']}, {answer['platform']}",
        f"backends  {', '.join(answer['backends'])}",
        f"cpu       {cpu['level']}, {cpu['threads']} threads",
    ]
    if cuda["compiled"]:
        lines.append(f"cuda      compiled for {' '.join(cuda['archs'])}")
        lines.append(f"          runtime {cuda['runtime']}, driver {cuda['driver'] or 'none'}")
    for device in cuda["devices"]:
        major, minor = device["compute_capability"]
        gib = device["memory_bytes"] / 2**30
        lines.append(
            f"device {device['index']}  {device['name']}, compute capability {major}.{minor}, "
            f"{device['num_multiprocessors']} multiprocessors, {gib:.0f} GiB"
        )
    if not cuda["usable"]:
        lines.append(f"cuda off  {cuda['reason']}")
    return "\n".join(lines)
