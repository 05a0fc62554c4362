# SPDX-License-Identifier: Apache-2.0
"""How fast one thread multiplies: the other half of a CPU's floor, beside its bandwidth."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["multiply_adds"]

SOURCE = """
#if defined(__AVX512F__)
enum { BYTES = 64, SUMS = 24 };
#elif defined(__AVX__)
enum { BYTES = 32, SUMS = 12 };
#else
enum { BYTES = 16, SUMS = 12 };
#endif
typedef float vec __attribute__((vector_size(BYTES)));

/* Fused (where the processor has it) multiply-adds on registers; returns floating-point operations
   of a turn. SUMS independent chains hide the latency of two units. */
long run(long turns, float* out) {
  vec sum[SUMS], factor, term;
  for (int l = 0; l < BYTES / 4; ++l) factor[l] = 0.999f, term[l] = 1e-3f;
  for (int i = 0; i < SUMS; ++i) sum[i] = term;
  for (long n = 0; n < turns; ++n) {
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; ++i) sum[i] = sum[i] * factor + term;
  }
  for (int i = 1; i < SUMS; ++i) sum[0] += sum[i];
  for (int l = 0; l < BYTES / 4; ++l) *out += sum[0][l];
  return 2L * SUMS * (BYTES / 4);
}
"""
TURNS = 20_000


def multiply_adds() -> tuple[Callable[[], object], int]:
    """Return a call that keeps the multiply-add units of one thread busy, and its operations.

    The loop is compiled here, for this processor, with the ``cc`` of the machine. As one more
    contender of :func:`lib.timing.time_in_turns` it meets the same disturbances as the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
        source.write_text(SOURCE, "utf-8")
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        if platform.machine() == "x86_64":
            flags.append("-mprefer-vector-width=512")
        subprocess.run(["cc", *flags, "-o", library, source], check=True)
        run = ctypes.CDLL(str(library)).run
    run.argtypes, run.restype = (ctypes.c_long, ctypes.POINTER(ctypes.c_float)), ctypes.c_long
    out = ctypes.c_float()
    return lambda: run(TURNS, out), TURNS * int(run(1, out))
