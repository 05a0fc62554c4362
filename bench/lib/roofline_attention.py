# SPDX-License-Identifier: Apache-2.0
"""Floor and prediction of verify_attention on a GPU; constants are those of roofline.py.

    python bench/lib/roofline_attention.py        the table for an H200

A prediction is a model, not a measurement. The kernel reads each key and value of a request once
per KV head, whatever the number of query rows; the rows are padded to tiles of 16 and multiplied
with mma.sync, many rows on Hopper to tiles of 64 and with wgmma. The largest of the terms decides
(:func:`busy`), and what does not overlap is added (:func:`edges`): the launch, lengths, pages, the
first bytes, and at the end the merge of the tiles that blocks share. Nothing is taken off for what
the terms do to each other, so this is the best to hope for.

Few tiles are shared by the blocks of a cluster, which merge in their shared memory. Whether, and by
how many, is :func:`cluster_size`, the rule of csrc/cuda/verify_attention/config.h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from lib.roofline import H200, Device
else:
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from lib.roofline import H200, Device

__all__ = ["Shape", "busy", "cluster_size", "edges", "floor", "predicted", "terms"]

MMA_CLOCK = 2000.0  # operations a clock and multiprocessor that mma.sync sustains; assumed
OPERATIONS = 10  # fp32 operations a score: scale, maximum, difference, sum, packing; counted
STEP_BYTES = 32  # keys of a step times bytes of an element
WARPGROUP_ROWS = 64
BLOCK_KEYS = 64  # of a product with wgmma
MANY = ((32, 4096, 8, 128, 8), (8, 4096, 32, 32, 8), (1, 4096, 512, 32, 8), (32, 4096, 8, 32, 1))
TILE_SECONDS = (
    0.7e-6  # of a tile beside its keys: queries, filling the ring, merging warps; assumed
)
BLOCKS = 2  # blocks of a multiprocessor, which hide half of that from each other
SPLIT_ROWS = 256  # keys of a split in the batch-invariant mode
RUN_ROWS = 1024  # and of a run of splits, of which one part is handed over where there are many
FINE_UNITS = 2  # splits a block up to which they are shared out one by one
SHOWN = ((1, 1024), (1, 4096), (2, 4096), (4, 2048), (8, 4096), (32, 4096), (128, 2048), (8, 32768))
CLUSTERS = (16, 8, 4, 2)  # blocks that share a tile
CLUSTER_BYTES = 65536  # config.h: that a multiprocessor reads while a grid exchanges parts
UNIT_ROWS = 64  # keys that one block reads at least
EARLY = 0.5  # of a launch, left where a kernel may start before the one ahead ends; assumed


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
    wgmma: bool = True  # where it serves

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.tokens * self.heads // self.kv_heads

    @property
    def many(self) -> bool:
        """Whether there are so many rows that wgmma multiplies them."""
        return self.wgmma and self.width == 2 and self.rows > (32 if self.d == 256 else 64)

    @property
    def group_rows(self) -> int:
        """Rows of a warp, at most, or of a warpgroup."""
        if self.many:
            return WARPGROUP_ROWS
        return 32 if self.d * self.width == 64 else 16 * max(1, 256 // self.d)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile, at most: those of two warps, or warpgroups."""
        return 2 * self.group_rows

    @property
    def passes(self) -> int:
        """Tiles of a request and KV head: passes over the cache; beyond the first it is in L2."""
        return -(-self.rows // self.tile_rows)

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
    unit = WARPGROUP_ROWS if shape.many else 16
    padded = -(-shape.rows // unit) * unit
    scores = float(shape.requests * shape.length * shape.kv_heads * padded)
    readers = min(2, -(-shape.rows // shape.group_rows))  # warps that read the same slot of a ring
    step = BLOCK_KEYS if shape.many else STEP_BYTES / shape.width
    queries = scores * 2 * shape.d / step  # read anew for each step
    return {
        "memory": floor(shape, device),
        "l2": shape.passes * shape.cache_bytes / device.l2,
        "tensor": 4 * scores * shape.d / (device.tensor if shape.many else MMA_CLOCK * cycles),
        "shared": (shape.passes * (1 + readers) * shape.cache_bytes + queries) / device.shared,
        "alu": OPERATIONS * scores / (device.lanes * cycles),
        "special": scores / (device.special * cycles),
    }


def busy(shape: Shape, blocks: int, device: Device = H200) -> float:
    """Return the seconds of the largest term, with ``blocks`` equal blocks at work.

    Multiprocessors without a block leave everything but the memory's speed unused.
    """
    t = terms(shape, device)
    idle = device.multiprocessors / min(blocks, device.multiprocessors)
    return max(t.pop("memory"), max(t.values()) * idle)


def edges(cluster: int = 0, device: Device = H200) -> dict[str, float]:
    """Return the seconds that nothing hides, ``cluster`` blocks to a tile, or 0 for equal shares.

    A cluster's kernel may start before the one ahead of it ends, and asks for lengths and pages
    meanwhile: they come out of L2, which is half of ``Device.latency``.
    """
    if cluster:
        return {
            "launch": EARLY * device.launch,
            "lengths": device.latency / 2,
            "pages": device.latency / 2,
            "first bytes": device.latency,
            "merge": device.cluster,
        }
    return {
        "launch": device.launch,
        "lengths": device.latency,
        "pages": device.latency,
        "first bytes": device.latency,
        "arrival": device.latency,
        "merge": device.latency,
    }


def cluster_size(
    shape: Shape, requests: int | None = None, capacity: int | None = None, device: Device = H200
) -> int:
    """Return how many blocks share a tile, 0 for equal shares: what the host chooses.

    It sees ``requests`` (default: those of ``shape``), some of which may have nothing to do, and
    the ``capacity`` of a request's page table in keys (default: their length).
    """
    requests = shape.requests if requests is None else requests
    keys = shape.length if capacity is None else capacity
    resident = device.multiprocessors * (
        BLOCKS if shape.rows <= shape.group_rows and not shape.many else 1
    )
    for size in CLUSTERS:
        blocks = requests * shape.kv_heads * shape.passes * size
        if keys <= size // 2 * UNIT_ROWS or blocks > resident:
            continue
        missing = 3 * device.multiprocessors - 4 * size * shape.kv_heads
        bytes_of_tile = keys * 2 * shape.d * shape.width
        if missing <= 0 or (
            bytes_of_tile * missing <= CLUSTER_BYTES * 3 * device.multiprocessors * size
        ):
            return size
    return 0


def predicted(
    shape: Shape, invariant: bool = False, device: Device = H200, cluster: int | None = None
) -> float:
    """Return the seconds of the kernel in the tree; ``cluster`` as the host chooses, or given."""
    if invariant:
        shape = replace(shape, wgmma=False)
    tiles = shape.requests * shape.kv_heads
    if cluster is None:
        cluster = 0 if invariant else cluster_size(shape, device=device)
    fixed = sum(edges(cluster, device).values())
    if cluster:
        blocks = tiles * shape.passes * cluster
        beside = max(1.0, min(BLOCKS, blocks / device.multiprocessors))
        return fixed + TILE_SECONDS / beside + busy(shape, blocks, device)
    blocks = BLOCKS * device.multiprocessors
    if invariant:
        return fixed + _splits(shape, blocks, device)
    edge = TILE_SECONDS * max(1.0, tiles / blocks) / BLOCKS  # tiles of a block
    return fixed + edge + busy(shape, blocks, device)


def _splits(shape: Shape, blocks: int, device: Device) -> float:
    """Return the seconds of whole splits, or runs of them, on ``blocks``: rounds, the last of few.

    Each split costs a tile's edge; the parts are written and read through L2.
    """
    tiles = shape.requests * shape.kv_heads
    splits = tiles * -(-shape.length // SPLIT_ROWS)
    units = splits
    if splits > FINE_UNITS * blocks:
        units = tiles * -(-shape.length // RUN_ROWS)
    rest = (units - 1) % blocks + 1
    time = sum(
        max(
            busy(shape, at_work, device) * count / units,
            (terms(shape, device)["l2"] / units + 8 * shape.rows * shape.d / device.l2) * count,
        )
        for count, at_work in ((units - rest, blocks), (rest, rest))
    )
    beside = max(1.0, min(BLOCKS, units / device.multiprocessors))
    return time + TILE_SECONDS * max(1.0, splits / blocks) / beside


def main() -> None:
    """Print the table."""
    print("8 query tokens, 32 / 8 heads of 128; microseconds")
    print("   R       L  cache  floor  tensor  shared  cluster  predicted   %  invariant   %")
    for width, name in ((2, "bf16"), (1, "fp8")):
        for r, length in SHOWN:
            shape = Shape(r, length, width=width)
            t, low = terms(shape), floor(shape)
            both = [predicted(shape, mode) for mode in (False, True)]
            cells = "  ".join(f"{1e6 * x:7.1f} {100 * low / x:4.0f}" for x in both)
            parts = "  ".join(f"{1e6 * x:6.1f}" for x in (low, t["tensor"], t["shared"]))
            size = cluster_size(shape)
            print(f"{r:4} {length:7}  {name:5} {parts}  {size:7}   {cells}")
    print("many rows, bf16")
    print("   R       L  tokens  heads   rows  floor  tensor  predicted   %  mma.sync")
    for r, length, tokens, heads, kv_heads in MANY:
        shape = Shape(r, length, tokens, heads, kv_heads)
        low, x = floor(shape), predicted(shape)
        slow = predicted(replace(shape, wgmma=False))
        tensor = terms(shape)["tensor"]
        print(
            f"{r:4} {length:7} {tokens:7} {heads:4}/{kv_heads} {shape.rows:6} {1e6 * low:6.1f} "
            f"{1e6 * tensor:7.1f}    {1e6 * x:7.1f} {100 * low / x:3.0f}   {1e6 * slow:7.1f}"
        )
    for size in (0, 16):
        parts = ", ".join(f"{name} {1e6 * x:.1f}" for name, x in edges(size).items())
        print(f"edges with {size or 'no'} blocks a cluster: {parts}")


if __name__ == "__main__":
    main()
