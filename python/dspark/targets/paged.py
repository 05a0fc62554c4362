# SPDX-License-Identifier: Apache-2.0
"""A Llama as the target of :func:`dspark_ext.decode_round`: paged cache, ragged batches.

Keys and values live in pages that are written by :func:`dspark_ext.paged_kv_append` and read by
:func:`dspark_ext.verify_attention`; the projections run on the flattened rows of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import dspark_ext as dx
from dspark.targets.llama import Llama

if TYPE_CHECKING:
    from dspark_ext.interfaces import Cache
    from dspark_ext.results import Plan

Pages = list[tuple[Tensor, Tensor]]


def new_pages(
    layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Pages:
    """Zeroed k and v pages ``[pages, page_size, Hkv, D]`` for every layer.

    Examples
    --------
    >>> new_pages(1, 4, 16, 3, 64, torch.float32)[0][0].shape
    torch.Size([4, 16, 3, 64])
    """
    shape = (num_pages, page_size, kv_heads, head_dim)
    return [
        (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(layers)
    ]


class PagedAttention:
    """Append, then attend, in the pages of one layer after the other.

    Parameters
    ----------
    pages
        Result of :func:`new_pages`.
    page_table, kv_len, kv_len_after, cu_seqlens
        ``[R, max_pages]``, ``[R]``, ``[R]``, ``[R + 1]``: lengths before and including the new
        rows; any framework.
    max_q_len
        Most rows of one request.
    causal
        False lets the new rows of a request see each other freely (the drafter's block).
    """

    def __init__(
        self,
        pages: Pages,
        page_table: Any,
        kv_len: Any,
        kv_len_after: Any,
        cu_seqlens: Any,
        max_q_len: int,
        *,
        causal: bool = True,
    ) -> None:
        self._pages, self._causal, self._max_q_len = pages, causal, max_q_len
        self._table, self._before, self._after, self._cu = (
            torch.as_tensor(x) for x in (page_table, kv_len, kv_len_after, cu_seqlens)
        )

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write ``k``, ``v [B, Hkv, D]`` behind what each request holds."""
        dx.paged_kv_append(
            k,
            v,
            *self._pages[layer],
            page_table=self._table,
            kv_len=self._before,
            cu_seqlens=self._cu,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [B, Hq, D]`` (RoPE applied) to the attention output of the same shape."""
        self.append(layer, k, v)
        out: Tensor = dx.verify_attention(
            q,
            *self._pages[layer],
            page_table=self._table,
            kv_len=self._after,
            cu_seqlens=self._cu,
            max_q_len=self._max_q_len,
            causal=self._causal,
        )
        return out


class PagedLlama:
    """The target protocol of :mod:`dspark_ext.interfaces` for a :class:`Llama`.

    Parameters
    ----------
    llama
        Weights; its taps become the drafter's features.

    Examples
    --------
    >>> target = PagedLlama.load(ensure(), taps=(1, 14, 27))              # doctest: +SKIP
    >>> state = dx.RoundState.create(1, gamma=7, framework="torch")       # doctest: +SKIP
    >>> slot = state.add(prompt_ids)                                      # doctest: +SKIP
    >>> dx.prefill(target, state).tokens[slot, 0]                         # doctest: +SKIP
    """

    def __init__(self, llama: Llama) -> None:
        self.llama = llama

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype = torch.bfloat16, taps: Sequence[int] = ()
    ) -> PagedLlama:
        """Read a converted model, see :meth:`Llama.load`.

        Examples
        --------
        >>> PagedLlama.load(ensure()).llama.config.vocab_size             # doctest: +SKIP
        49152
        """
        return cls(Llama.load(folder, dtype, taps))

    def new_cache(self, num_pages: int, page_size: int) -> Pages:
        """Pages for all layers."""
        c = self.llama.config
        return new_pages(
            c.num_hidden_layers,
            num_pages,
            page_size,
            c.num_key_value_heads,
            c.head_dim,
            self.llama.dtype,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Any,
        positions: Any,
        plan: Plan,
        cache: Cache,
        *,
        logit_rows: Any = None,
    ) -> tuple[Any, Any]:
        """Run the rows of all requests.

        Parameters
        ----------
        token_ids, positions
            ``[B]`` in ``plan.cu_seqlens`` order, torch or NumPy.
        plan
            Its ``cu_seqlens`` say which rows belong together.
        cache
            Pages from :meth:`new_cache`, page table, lengths.
        logit_rows
            Rows whose logits are wanted; None = all.

        Returns
        -------
        tuple
            Logits, float32 ``[B, V]`` (or one row per entry of `logit_rows`), and features
            ``[B, m d]`` or None without taps; of the kind of `token_ids`.
        """
        attention = PagedAttention(
            cache.pages,
            cache.page_table,
            cache.kv_len,
            cache.kv_len_after,
            plan.cu_seqlens,
            cache.max_q_len,
        )
        ids, where = torch.as_tensor(token_ids).long(), torch.as_tensor(positions).long()
        hidden, features = self.llama.hidden(ids, where, attention)
        if logit_rows is not None:
            hidden = hidden[torch.as_tensor(logit_rows).long()]
        logits = self.llama.logits(hidden)
        if not self.llama.taps:
            return _like(logits, token_ids), None
        return _like(logits, token_ids), _like(features, token_ids)


def _like(tensor: Tensor, other: Any) -> Any:
    """The tensor as an array of the other's kind (NumPy has no bfloat16: float32 there)."""
    if isinstance(other, Tensor):
        return tensor
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
