# SPDX-License-Identifier: Apache-2.0
"""Matrix products of few rows on a CPU, with the weight layout chosen by row count.

A verification step multiplies 1 to 64 rows by every weight of the model, where plain
`torch.nn.functional.linear` is slow: 3 to 12 rows cost three times one row in float32. Measured on
one AVX-512 core over the 30 layers of SmolLM2-135M, in ms at 1 / 4 / 8 / 16 / 64 rows: linear
30/86/83/88/186, oneDNN-packed bfloat16 20/28/36/62/186, ``x @ W.T`` with a stored transpose
28/58/56/88/108.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _pack(weight: Tensor) -> Tensor | None:
    """Return oneDNN's packed copy of a weight, or None where this torch cannot do it."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        probe = weight.new_zeros(1, weight.shape[1])
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        # The operators are private to torch and differ between releases and builds.
        return None
    return packed


# From this many rows on float32 products are faster than packed bfloat16 ones (table above): on a
# core without matrix instructions for bfloat16 its only gain is memory traffic.
_WIDE_ROWS = 32


class Linear:
    """``y = x Wᵀ`` without bias for inference on a CPU or a GPU.

    On a CPU a float32 weight is stored transposed. A bfloat16 weight is stored twice: packed by
    oneDNN for few rows, and as a float32 transpose for 32 rows and more (prompts, large batches),
    whose products are accumulated in float32 and rounded once. Elsewhere, and where packing is not
    available, `torch.nn.functional.linear` is used.

    Parameters
    ----------
    weight
        ``[out, in]``, float32 or bfloat16.

    Examples
    --------
    >>> layer = Linear(torch.eye(3))
    >>> layer(torch.ones(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = tuple(weight.shape)
        self._dtype = weight.dtype
        self._packed = self._transposed = None
        on_cpu = weight.device.type == "cpu"
        if on_cpu and weight.dtype == torch.bfloat16:
            self._packed = _pack(weight)
        if on_cpu and (weight.dtype == torch.float32 or self._packed is not None):
            self._transposed = weight.t().float().contiguous()
        self._weight = weight if self._transposed is None else None

    @property
    def weight(self) -> Tensor:
        """The weight ``[out, in]`` in its own dtype; a view of the stored one where possible."""
        if self._weight is not None:
            return self._weight
        assert self._transposed is not None
        return self._transposed.t().to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x [..., in]``; returns ``[..., out]`` in the weight's dtype."""
        rows = x.numel() // self.shape[1]
        if self._packed is not None and rows < _WIDE_ROWS:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.contiguous(), self._packed, None, "none", [], ""
            )
            return y
        if self._transposed is not None:
            flat = x.reshape(rows, self.shape[1]).float()
            product = torch.mm(flat, self._transposed).to(self._dtype)
            return product.view(*x.shape[:-1], self.shape[0])
        return F.linear(x, self.weight)
