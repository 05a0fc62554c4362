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


class Linear:
    """``y = x Wᵀ`` without bias for inference on a CPU or a GPU.

    Parameters
    ----------
    weight
        ``[out, in]``, float32 or bfloat16. On a CPU bfloat16 weights are packed by oneDNN and
        float32 weights are stored transposed; elsewhere, or where packing is not available,
        `torch.nn.functional.linear` is used.

    Examples
    --------
    >>> layer = Linear(torch.eye(3))
    >>> layer(torch.ones(2, 3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = tuple(weight.shape)
        self._packed = self._transposed = None
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            self._packed = _pack(weight)
        elif weight.device.type == "cpu" and weight.dtype == torch.float32:
            self._transposed = weight.t().contiguous()
        self._weight = weight if self._transposed is None else None

    @property
    def weight(self) -> Tensor:
        """The weight ``[out, in]``; a view of the stored transpose for float32 on a CPU."""
        if self._transposed is not None:
            return self._transposed.t()
        assert self._weight is not None
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x [..., in]``; returns ``[..., out]`` in the weight's dtype."""
        if self._transposed is not None:
            rows = x.reshape(-1, self.shape[1])
            return torch.mm(rows, self._transposed).view(*x.shape[:-1], self.shape[0])
        if self._packed is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.contiguous(), self._packed, None, "none", [], ""
            )
            return y
        return F.linear(x, self.weight)
