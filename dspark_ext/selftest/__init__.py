# SPDX-License-Identifier: Apache-2.0
"""Compare the cpu backend of every family with the float64 reference, on small random problems.

For a machine, not for the project: does this build compute the right thing on this processor? The
test suite asks far more. ``python -m dspark_ext selftest`` prints one line a family.

Examples
--------
>>> run_family("confidence").ok
True
"""

from __future__ import annotations

import time
import zlib

import numpy as np

from dspark_ext import _C
from dspark_ext.selftest.families import FAMILIES
from dspark_ext.selftest.tally import Result, Tally

__all__ = ["FAMILIES", "Result", "probe_devices", "run_family"]


def run_family(name: str, seed: int = 0) -> Result:
    """Run the comparisons of one family.

    Parameters
    ----------
    name : str
        A key of ``FAMILIES``.
    seed : int
        Seed of the random problems; equal seeds give equal problems.

    Returns
    -------
    Result
        Counts, the largest error and the failures, if any. An exception is a failure too.

    Examples
    --------
    >>> run_family("confidence", seed=3).failures
    []
    """
    tally = Tally()
    start = time.perf_counter()
    try:
        FAMILIES[name](tally, np.random.default_rng([seed, zlib.crc32(name.encode())]))
    except Exception as problem:  # a crash of one family must not hide the others' results
        tally.failures.append(f"{type(problem).__name__}: {problem}")
    return tally.result(name, time.perf_counter() - start)


def probe_devices() -> list[Result]:
    """Run the installation probe on every usable CUDA device.

    Returns
    -------
    list of Result
        One entry a device; empty without CUDA.

    Examples
    --------
    >>> all(result.ok for result in probe_devices())
    True
    """
    results = []
    cuda = _C.cuda_info()
    for index in range(cuda["num_devices"] if cuda["usable"] else 0):
        tally = Tally()
        start = time.perf_counter()
        tally.cases += 1
        try:
            _C.cuda_probe(index)
            tally.values += 1000
        except RuntimeError as problem:
            tally.failures.append(str(problem))
        results.append(tally.result(f"cuda:{index} probe", time.perf_counter() - start))
    return results
