# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV caches: who owns which, between rounds only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CapacityError", "PageTable"]


class CapacityError(RuntimeError):
    """No free slot or not enough free pages; nothing has been changed."""


class PageTable:
    """Page ids of every slot, and the pages nobody owns.

    One table serves every layer and both models: each cache is an array of ``num_pages`` pages.

    Parameters
    ----------
    rows, columns : int
        Slots, and most pages a slot can own.
    num_pages, page_size : int
        Pages in the caches, tokens in a page.

    Examples
    --------
    >>> pages = PageTable(rows=2, columns=4, num_pages=5, page_size=16)
    >>> pages.reserve({0: 17, 1: 40})
    >>> pages.table.tolist()
    [[0, 1, -1, -1], [2, 3, 4, -1]]
    >>> pages.release(0)
    >>> pages.num_free
    2
    """

    def __init__(self, rows: int, columns: int, num_pages: int, page_size: int) -> None:
        self.table: NDArray[np.int32] = np.full((rows, columns), -1, dtype=np.int32)
        self.page_size = page_size
        self.num_pages = num_pages
        self.owned: NDArray[np.int32] = np.zeros(rows, dtype=np.int32)
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: lowest id first

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def row_capacity(self) -> int:
        """Most tokens a slot can hold."""
        return int(self.table.shape[1]) * self.page_size

    def fits(self, tokens: int) -> bool:
        """Whether a new slot of so many tokens could be served now."""
        return -(-tokens // self.page_size) <= len(self._free)

    def missing(self, tokens: Mapping[int, int]) -> int:
        """Return how many more pages these slots need to hold so many tokens."""
        return sum(max(0, -(-n // self.page_size) - int(self.owned[r])) for r, n in tokens.items())

    def reserve(self, tokens: Mapping[int, int]) -> None:
        """Make room for ``tokens[slot]`` tokens in every slot named.

        Raises
        ------
        CapacityError
            When too few pages are free; then no slot has got any.
        """
        missing = self.missing(tokens)
        if missing > len(self._free):
            raise CapacityError(
                f"{missing} more KV pages of {self.page_size} tokens are needed for requests "
                f"{sorted(tokens)}, {len(self._free)} of {self.num_pages} are free"
            )
        for slot, count in tokens.items():
            for column in range(int(self.owned[slot]), -(-count // self.page_size)):
                self.table[slot, column] = self._free.pop()
                self.owned[slot] += 1

    def release(self, slot: int) -> None:
        """Give all pages of a slot back."""
        owned: list[Any] = self.table[slot, : self.owned[slot]].tolist()
        self._free.extend(reversed(owned))
        self.table[slot] = -1
        self.owned[slot] = 0
