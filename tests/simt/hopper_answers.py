# SPDX-License-Identifier: Apache-2.0
"""What the cases of conformance_hopper.cu should answer, from the PTX manual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
U32 = np.uint32
COLUMNS = (8, 16, 32, 64, 128)


def values(kind: str, words: Array) -> Array:
    """Rows of 128 bytes as numbers."""
    if kind == "bf16":
        wide = (words.view(np.uint16).astype(U32) << 16).view(np.float32)
        return wide.astype(np.float64).reshape(-1, 64)
    if kind == "f16":
        return words.view(np.float16).astype(np.float64).reshape(-1, 64)
    return words.view(np.int8).astype(np.int64).reshape(-1, 128)


def operands(kind: str, words: Array) -> tuple[Array, Array]:
    """A [64, K] and B [K, N] of a product."""
    name, _, registers = kind.partition("-")
    rows = values(name, words)
    if not registers:
        return rows[:64], rows[64:].T
    return rows[:64], rows[64:].reshape(-1, 64, 64).transpose(1, 0, 2).reshape(64, -1)


def product(kind: str, words: Array) -> Array:
    a, b = operands(kind, words)
    return 2 * a @ b


def product_inputs(kind: str, rng: np.random.Generator, count: int) -> Array:
    if kind.startswith("bf16"):
        bits = rng.normal(0, 1, 2 * count).astype(np.float32).view(U32) >> 16
        return np.ascontiguousarray(bits.astype(np.uint16)).view(U32)
    if kind.startswith("f16"):
        return rng.normal(0, 1, 2 * count).astype(np.float16).view(U32)
    return rng.integers(0, 2**32, count, dtype=U32)


def check_product(kind: str, words: Array, out: Array) -> None:
    expected = product(kind, words)
    if kind == "s8":
        np.testing.assert_array_equal(out.view(np.int32).reshape(expected.shape), expected)
        return
    a, b = operands(kind, words)
    size = 2 * np.abs(a) @ np.abs(b)
    # 128 products; tensor cores may keep 2 bits less than float32 of the largest summand.
    got = out.view(np.float32).reshape(expected.shape)
    np.testing.assert_array_less(np.abs(got - expected), size * 128 * 2.0**-22)


def boxes(words: Array) -> Array:
    """Four boxes of 32 rows of 128 bytes; 16-byte piece p of row i lies at p ^ (i % 8)."""
    matrix = np.zeros((64, 256), np.uint8)  # zeros beyond the 50 rows and 144 bytes
    matrix[:50, :144] = words.view(np.uint8).reshape(50, 160)[:, :144]
    out = np.zeros((4, 32, 8, 16), np.uint8)
    for box in range(4):
        corner = matrix[box // 2 * 32 :, box % 2 * 128 :]
        for row in range(32):
            pieces = corner[row, :128].reshape(8, 16)
            out[box, row, np.arange(8) ^ row % 8] = pieces
    return out.reshape(-1).view(U32)


def pages(row_bytes: int, words: Array) -> Array:
    """Three boxes of 16 rows, all columns of each in turn: at row 12 i, head i, page 2 - i."""
    cache = np.zeros((3, 48, 3, row_bytes), np.uint8)  # page, row, head: zeros beyond 24 and 2
    flat = words.view(np.uint8).reshape(3, -1)[:, : 48 * row_bytes]
    cache[:, :24, :2] = flat.reshape(3, 24, 2, row_bytes)
    width = min(row_bytes, 128)
    out = np.zeros((3, row_bytes // width, 16, width // 16, 16), np.uint8)
    for box, column, row in np.ndindex(out.shape[:3]):
        bytes_ = cache[2 - box, 12 * box + row, box, column * width :][:width]
        order = np.arange(8) ^ row % 8 if width == 128 else np.arange(4) ^ row // 2 % 4
        out[box, column, row, order] = bytes_.reshape(-1, 16)
    return out.reshape(-1).view(U32)


def bulk_ring(words: Array) -> Array:
    return np.ascontiguousarray(words.reshape(8, 64)[:, ::-1]).reshape(-1)


def neighbours(words: Array) -> Array:
    mine = words.reshape(2, 4, 64)
    read = np.roll(mine, -1, axis=1)[:, :, ::-1]  # of the next rank
    out = np.zeros((2, 4, 68), U32)
    out[:, :, :64] = read
    # Rank r - 1 gets what rank r has read.
    out[:, :, 64] = np.roll(read.sum(axis=2, dtype=U32), -1, axis=1)
    out[:, :, 65] = np.arange(4)
    out[:, :, 66] = 4
    return out.reshape(-1)


PRODUCTS = {f"wgmma_{kind}_{n}": kind for kind in ("bf16", "f16", "s8") for n in COLUMNS} | {
    f"wgmma_registers_{kind}_{n}": f"{kind}-registers"
    for kind in ("bf16", "f16")
    for n in (64, 128, 256)
}
ANSWERS: dict[str, Callable[[Array], Array]] = {
    **{name: lambda words, kind=kind: product(kind, words) for name, kind in PRODUCTS.items()},
    **dict.fromkeys(("boxes_bf16", "boxes_f16", "boxes_i8"), boxes),
    **{
        f"pages_{kind}_{size}": lambda words, size=size: pages(size, words)
        for kind, size in (("bf16", 256), ("f16", 128), ("i8", 64))
    },
    "bulk_ring": bulk_ring,
    "neighbours": neighbours,
}
