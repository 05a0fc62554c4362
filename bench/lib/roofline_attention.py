# SPDX-License-Identifier: Apache-2.0
"""Floor and prediction of verify_attention on a GPU; constants are those of roofline.py.

    python bench/lib/roofline_attention.py        the table for an H200

A prediction is a model, not a measurement. The kernel reads each key and value of a request once
per KV head, whatever the number of query rows; the rows are padded to tiles of 16 and multiplied
with mma.sync. The largest of the terms decides, and what does not overlap is added: the launch, the
plan, the first bytes, and at the end the merge of the tiles that blocks share. Nothing is taken off
for what the terms do to each other, so this is the best to hope for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from lib.roofline import H200, Device
else:
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from lib.roofline import H200, Device

__all__ = ["Shape", "floor", "predicted", "terms"]

MMA_CLOCK = 2000.0  # operations a clock and multiprocessor that mma.sync sustains; assumed
OPERATIONS = 10  # fp32 operations a score: scale, maximum, difference, sum, packing; counted
STEP_BYTES = 32  # keys of a step times bytes of an element
EDGES = 5  # memory latencies that nothing hides: lengths, pages, first bytes; arrival, merge
TILE_SECONDS = (
    0.7e-6  # of a tile beside its keys: queries, filling the ring, merging warps; assumed
)
BLOCKS = 2  # blocks of a multiprocessor, which hide half of that from each other
SPLIT_ROWS = 1024  # keys of a split in the batch-invariant mode


@dataclass(frozen=True)
class Shape:
    """Requests of equal length; ``tokens`` query tokens each, ``width`` bytes of an element."""

    requests: int
    length: int
    tokens: int = 8
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    width: int = 2

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.tokens * self.heads // self.kv_heads

    @property
    def cache_bytes(self) -> float:
        """Keys and values of all requests."""
        return 2.0 * self.requests * self.length * self.kv_heads * self.d * self.width


def floor(shape: Shape, device: Device = H200) -> float:
    """Return the seconds of reading the cache once."""
    return shape.cache_bytes / device.memory


def terms(shape: Shape, device: Device = H200) -> dict[str, float]:
    """Return the seconds that each resource needs, if it had nothing to wait for."""
    cycles = device.multiprocessors * device.clock
    group = 32 if shape.d * shape.width == 64 else 16 * max(1, 256 // shape.d)  # rows of a warp
    passes = -(-shape.rows // (2 * group))  # over the cache; beyond the first it is in L2
    padded = -(-shape.rows // 16) * 16
    scores = float(shape.requests * shape.length * shape.kv_heads * padded)
    readers = min(2, -(-shape.rows // group))  # warps that read the same slot of a ring
    queries = scores * 2 * shape.d / (STEP_BYTES / shape.width)  # read anew for each step
    return {
        "memory": floor(shape, device),
        "l2": passes * shape.cache_bytes / device.l2,
        "tensor": 4 * scores * shape.d / (MMA_CLOCK * cycles),
        "shared": (passes * (1 + readers) * shape.cache_bytes + queries) / device.shared,
        "alu": OPERATIONS * scores / (device.lanes * cycles),
        "special": scores / (device.special * cycles),
    }


def predicted(shape: Shape, invariant: bool = False, device: Device = H200) -> float:
    """Return the seconds of the kernel in the tree."""
    tiles = shape.requests * shape.kv_heads
    blocks = BLOCKS * device.multiprocessors
    parts = -(-shape.length // SPLIT_ROWS) if invariant else 1
    each = tiles * parts / blocks  # tiles, or parts of tiles, of a block
    edge = TILE_SECONDS * max(1.0, each) / BLOCKS
    uneven = 1.0
    if invariant:  # whole splits: the last round may leave blocks without work
        uneven = -(-tiles * parts // blocks) * blocks / (tiles * parts)
    busy = max(terms(shape, device).values())
    return device.launch + EDGES * device.latency + edge + busy * uneven


def main() -> None:
    """Print the table."""
    print("8 query tokens, 32 / 8 heads of 128; microseconds")
    print("   R       L  cache  floor  tensor  shared  predicted   %  invariant   %")
    for width, name in ((2, "bf16"), (1, "fp8")):
        for r, length in ((1, 4096), (8, 4096), (32, 4096), (128, 2048), (8, 32768)):
            shape = Shape(r, length, width=width)
            t, low = terms(shape), floor(shape)
            both = [predicted(shape, mode) for mode in (False, True)]
            cells = "  ".join(f"{1e6 * x:7.1f} {100 * low / x:4.0f}" for x in both)
            parts = "  ".join(f"{1e6 * x:6.1f}" for x in (low, t["tensor"], t["shared"]))
            print(f"{r:4} {length:7}  {name:5} {parts}   {cells}")


if __name__ == "__main__":
    main()
