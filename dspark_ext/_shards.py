# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the vocabulary, and what ranks tell each other in the float64 definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_ext._shard_arguments import check_shard
from dspark_ext.reference.sampler import SEGMENT

__all__ = ["Shard", "ShardDraw", "ShardScan"]

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Shard:
    """One rank's part of the vocabulary.

    Attributes
    ----------
    sizes : tuple of int
        Ids of every rank, at least one each, in order; equal on all ranks.
    rank : int
        Whose shard this is.

    Raises
    ------
    ArgumentError
        A rank without ids, or one that is not there.

    Examples
    --------
    >>> shard = Shard((256, 256, 90), 2)
    >>> shard.first_id, shard.first_segment, shard.vocab
    (512, 4, 602)
    """

    sizes: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        check_shard(self.sizes, self.rank)

    @property
    def first_id(self) -> int:
        """The lowest id of the shard."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """Ids in the shard."""
        return self.sizes[self.rank]

    @property
    def vocab(self) -> int:
        """V."""
        return sum(self.sizes)

    @property
    def first_segment(self) -> int:
        """Number of its first segment: shards never share one, so their noise is independent."""
        return sum(-(-n // SEGMENT) for n in self.sizes[: self.rank])

    def local(self, token: int) -> int:
        """Column of a target id, or -1 when another rank holds it."""
        column = token - self.first_id
        return column if 0 <= column < self.size else -1


@dataclass(frozen=True)
class ShardScan:
    """What a rank sends first: arrays over the rows (B); -inf and -1 where it has nothing."""

    top: F64  # largest processed logit
    mass: F64  # sum of exp((z - top) / T)
    best: NDArray[np.int64]  # lowest id with z = top
    raw_best: F64  # its unprocessed logit
    raw_top: F64
    raw_mass: F64
    draft: F64  # z of the draft that the row verifies, if it is one of this shard's ids
    raw_draft: F64
    lowest: NDArray[np.int64]  # lowest allowed id
    raw_lowest: F64
    key: NDArray[np.uint64]  # rule match: candidate of the row
    token: NDArray[np.int64]
    logit: F64  # its processed and raw logit
    raw_logit: F64
    nan: NDArray[np.bool_]  # a target logit is NaN
    law_nan: NDArray[np.bool_]  # a stored draft logit is NaN


@dataclass(frozen=True)
class ShardDraw:
    """What a rank sends second: candidates of the last row, [R, 2]: of the residual, and of p."""

    key: NDArray[np.uint64]
    token: NDArray[np.int64]
    logit: F64
    raw_logit: F64
