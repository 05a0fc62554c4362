# SPDX-License-Identifier: Apache-2.0
"""A target and a drafter so small that their laws are known exactly: first steps, tests, selftest.

The target is a Markov chain of order two over a few tokens. It keeps the tokens of every request in
a paged cache, as a real model keeps keys and values, and reads its context from there alone: a
wrong page, length or position shows in the output. The drafter is a table, too; it keeps the
target's features in pages of its own and checks what it is handed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_ext.interfaces import Cache, DraftHead, NewFeatures
from dspark_ext.results import Plan
from dspark_ext.state import RoundState

__all__ = ["ToyDrafter", "ToyTarget"]

F32 = NDArray[np.float32]


class ToyTarget:
    """Markov chain of order two; logits depend on the last two tokens of the sequence.

    Parameters
    ----------
    vocab_size : int
        V.
    seed : int
        Of the random table of logits.
    spread : float
        Standard deviation of the logits: the larger, the more predictable.

    Examples
    --------
    >>> import dspark_ext as dx
    >>> target, drafter = ToyTarget(vocab_size=6), ToyDrafter(vocab_size=6, gamma=3)
    >>> state = dx.RoundState.create(1, gamma=3)
    >>> slot = state.add([2, 4], dx.SamplingParams(max_new_tokens=8))
    >>> tokens = dx.prefill(target, state).tokens[slot, :1].tolist()
    >>> while state.active_slots():
    ...     r = dx.decode_round(target, drafter, state)
    ...     tokens += r.tokens[slot, : r.num_emitted[slot]].tolist()
    >>> tokens == target.greedy([2, 4], 8)
    True
    """

    def __init__(self, vocab_size: int = 5, seed: int = 0, spread: float = 1.5) -> None:
        rng = np.random.default_rng([seed, 1])
        shape = (vocab_size, vocab_size, vocab_size)
        self.vocab_size = vocab_size
        self.table: F32 = (rng.normal(size=shape) * spread).astype(np.float32)

    def new_cache(self, num_pages: int, page_size: int) -> NDArray[np.int64]:
        """Tokens by page and row; -1 where nothing was written."""
        return np.full((num_pages, page_size), -1, dtype=np.int64)

    def forward(
        self,
        token_ids: Any,
        positions: Any,
        plan: Plan,
        cache: Cache,
        *,
        logit_rows: Any = None,
    ) -> tuple[F32, F32]:
        """See :class:`dspark_ext.interfaces.Target`; features are (token, position)."""
        ids, where = np.asarray(token_ids), np.asarray(positions)
        owner = np.asarray(plan.row_to_request)[: len(ids)]
        starts = np.asarray(plan.cu_seqlens)
        offset = np.arange(len(ids)) - starts[owner]
        if not np.array_equal(where, np.asarray(cache.kv_len)[owner] + offset):
            raise AssertionError("positions do not continue the cache")
        page, row = where // cache.page_size, where % cache.page_size
        table = np.asarray(cache.page_table)
        cache.pages[table[owner, page], row] = ids
        before = np.maximum(where - 1, 0)
        previous = cache.pages[table[owner, before // cache.page_size], before % cache.page_size]
        if np.any(previous < 0):
            raise AssertionError("a context token was never written to the cache")
        logits = self.table[previous, ids]
        features = np.stack([ids, where], axis=1).astype(np.float32)
        return (logits if logit_rows is None else logits[np.asarray(logit_rows)]), features

    def law(self, context: tuple[int, int], temperature: float = 1.0) -> NDArray[np.float64]:
        """Probabilities (V,) of the token behind the last two tokens.

        Examples
        --------
        >>> round(float(ToyTarget().law((0, 1)).sum()), 12)
        1.0
        """
        z = self.table[context].astype(np.float64) / temperature
        p: NDArray[np.float64] = np.exp(z - z.max())
        p /= p.sum()
        return p

    def joint(self, prompt: list[int], length: int, temperature: float = 1.0) -> Any:
        """Law of the first ``length`` tokens, shape (V,) * length.

        Examples
        --------
        >>> ToyTarget(vocab_size=3).joint([0], 2).shape
        (3, 3)
        """
        start = (prompt[-2] if len(prompt) > 1 else prompt[-1], prompt[-1])
        if length == 0:
            return np.ones(())
        p = self.law(start, temperature)
        return np.stack(
            [p[x] * self.joint([start[1], x], length - 1, temperature) for x in range(len(p))]
        )

    def greedy(self, prompt: list[int], length: int) -> list[int]:
        """Greedy continuation, computed without any operator.

        Examples
        --------
        >>> len(ToyTarget().greedy([1], 4))
        4
        """
        tokens = [prompt[-2] if len(prompt) > 1 else prompt[-1], prompt[-1]]
        for _ in range(length):
            tokens.append(int(np.argmax(self.table[tokens[-2], tokens[-1]])))
        return tokens[2:]


class ToyDrafter:
    """Random tables with a vanilla Markov head and a confidence head.

    Parameters
    ----------
    vocab_size, gamma : int
        V and the draft length.
    seed : int
        Of the tables.
    like : ToyTarget, optional
        Mix this target's laws in, so that drafts are often accepted.
    draft_to_target : array, shape (V_d,), optional
        Reduced draft vocabulary.
    confidence : bool
        Whether there is a confidence head.
    topk_support : int
        Restrict the draft law to this many ids; 0 = all.

    Examples
    --------
    >>> ToyDrafter(vocab_size=6, gamma=3).head.w1.shape
    (6, 4)
    """

    rank, hidden_size = 4, 3

    def __init__(
        self,
        vocab_size: int,
        gamma: int,
        seed: int = 0,
        like: ToyTarget | None = None,
        draft_to_target: NDArray[np.int32] | None = None,
        confidence: bool = True,
        topk_support: int = 0,
    ) -> None:
        rng = np.random.default_rng([seed, 2])
        columns = vocab_size if draft_to_target is None else len(draft_to_target)
        ids = np.arange(vocab_size) if draft_to_target is None else draft_to_target
        self.gamma = gamma
        self.base = rng.normal(size=(vocab_size, gamma, columns)).astype(np.float32)
        w1 = rng.normal(size=(vocab_size, self.rank)).astype(np.float32)
        w2 = (rng.normal(size=(columns, self.rank)) * 0.7).astype(np.float32)
        if like is not None:
            # The best head of this rank that knows the previous token alone.
            u, s, vt = np.linalg.svd(like.table.mean(axis=0)[:, ids], full_matrices=False)
            rank = min(self.rank, len(s))
            w1[...] = w2[...] = 0.0
            w1[:, :rank], w2[:, :rank] = u[:, :rank] * s[:rank], vt[:rank].T
            self.base *= 0.3
        self.hidden = rng.normal(size=(vocab_size, gamma, self.hidden_size)).astype(np.float32)
        size = self.hidden_size + self.rank
        self.head = DraftHead(
            w1=w1,
            w2=w2,
            confidence_weight=rng.normal(size=size).astype(np.float32) if confidence else None,
            confidence_bias=0.5,
            draft_to_target=draft_to_target,
            topk_support=topk_support,
        )

    def new_cache(self, num_pages: int, page_size: int) -> NDArray[np.int64]:
        """Context tokens by page and row; -1 where nothing was written."""
        return np.full((num_pages, page_size), -1, dtype=np.int64)

    def draft(
        self, anchor: Any, position: Any, new_features: NewFeatures, state: RoundState
    ) -> tuple[F32, F32]:
        """See :class:`dspark_ext.interfaces.Drafter`."""
        rows, cu_seqlens, num_new = new_features
        pages = state.drafter_pages
        for r in state.active_slots():
            end = int(position[r])
            new = np.asarray(rows[cu_seqlens[r] : cu_seqlens[r] + num_new[r]])
            where = np.arange(end - num_new[r], end)
            if not np.array_equal(new[:, 1], where):
                raise AssertionError("features do not continue the drafter's context")
            table = state.pages.table[r]
            pages[table[where // state.page_size], where % state.page_size] = new[:, 0]
            whole = np.arange(end)
            if np.any(pages[table[whole // state.page_size], whole % state.page_size] < 0):
                raise AssertionError("the drafter's context has a hole")
        ids = np.where(np.asarray(state.host.active) != 0, np.asarray(anchor), 0)
        return self.base[ids], self.hidden[ids]
