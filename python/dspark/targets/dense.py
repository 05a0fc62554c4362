# SPDX-License-Identifier: Apache-2.0
"""Dense attention for plain generation: one contiguous stretch of cache per slot, torch's SDPA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.targets.llama import LlamaConfig


class SlotCache:
    """Keys and values of `slots` sequences of at most `length` tokens, for every layer.

    Parameters
    ----------
    config
        Sizes of the model.
    slots, length
        Number of sequences and capacity of each in tokens.

    Examples
    --------
    >>> cache = SlotCache(config, slots=4, length=256)                    # doctest: +SKIP
    >>> llama.hidden(ids, positions, PrefillAttention(cache, slot=0))     # doctest: +SKIP
    """

    def __init__(
        self, config: LlamaConfig, slots: int, length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (slots, config.num_key_value_heads, length, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.k = [torch.zeros(shape, dtype=dtype) for _ in layers]
        self.v = [torch.zeros(shape, dtype=dtype) for _ in layers]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        for cache in (*self.k, *self.v):
            cache[target, :, :length] = cache[source, :, :length]


class PrefillAttention:
    """Causal attention of consecutive new tokens of one slot, `start` of them cached before."""

    def __init__(self, cache: SlotCache, slot: int, start: int = 0) -> None:
        self._cache, self._slot, self._start = cache, slot, start
        self._mask: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [N, Hq, D]`` at positions ``start .. start + N - 1``; returns ``[N, Hq, D]``."""
        count, heads, dim = q.shape
        end = self._start + count
        keys, values = self._cache.k[layer][self._slot], self._cache.v[layer][self._slot]
        keys[:, self._start : end] = k.transpose(0, 1)
        values[:, self._start : end] = v.transpose(0, 1)
        group = heads // keys.shape[0]
        if self._mask is None:
            mask = torch.ones(count, end, dtype=torch.bool).tril(self._start)
            # Query heads of a KV head are stacked along the rows, hence the repetition.
            self._mask = mask.repeat(group, 1)
        rows = q.transpose(0, 1).reshape(1, keys.shape[0], group * count, dim)
        out = F.scaled_dot_product_attention(
            rows, keys[None, :, :end], values[None, :, :end], attn_mask=self._mask
        )
        return out.view(heads, count, dim).transpose(0, 1)


class DecodeAttention:
    """One new token for each slot ``0 .. N-1`` at its own position."""

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        self._cache, self._positions = cache, positions
        self._slots = torch.arange(len(positions))
        self._length = int(positions.max()) + 1
        reach = torch.arange(self._length)[None, :] <= positions[:, None]
        self._bias = torch.zeros(reach.shape).masked_fill_(~reach, -torch.inf)[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [N, Hq, D]``; returns ``[N, Hq, D]``."""
        keys, values = self._cache.k[layer], self._cache.v[layer]
        keys[self._slots, :, self._positions] = k
        values[self._slots, :, self._positions] = v
        count, heads, dim = q.shape
        kv_heads = keys.shape[1]
        rows = q.reshape(count, kv_heads, heads // kv_heads, dim)
        bias = self._bias.to(q.dtype).expand(count, kv_heads, heads // kv_heads, self._length)
        out = F.scaled_dot_product_attention(
            rows, keys[:count, :, : self._length], values[:count, :, : self._length], attn_mask=bias
        )
        return out.reshape(count, heads, dim)
