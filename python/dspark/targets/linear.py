# SPDX-License-Identifier: Apache-2.0
"""Matrix products of few rows on a CPU: what decides whether speculation pays there.

A round multiplies 1 to 64 rows by every weight of the model. The weights should be read once for
all of these rows; general libraries do not. Eight rows cost 1.5 times one row in the products of
:mod:`dspark_ext`, 3.4 times in torch's packed bfloat16 products (``bench/bench_linear.py``, one
AVX-512 core). In ours a row's bits do not depend on the other rows either, so that greedy output is
the same with and without speculation, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark_ext import _C

# dtype -> code of dspark_dtype
_CODES = {torch.float32: 0, torch.bfloat16: 1}


class Linear:
    """``y = x Wᵀ`` without bias for inference on a CPU or a GPU.

    On a CPU up to 64 rows go through the product of :mod:`dspark_ext`, summed in float32 in an
    order that does not depend on their number. More rows (prompts) go through torch in float32,
    on a float32 transpose of the weight that is made when it is first needed. Elsewhere
    `torch.nn.functional.linear` is used.

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
        self.weight = weight.contiguous()
        self.shape = tuple(weight.shape)
        self._code = _CODES.get(weight.dtype) if weight.device.type == "cpu" else None
        self._wide: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``x [..., in]``; returns ``[..., out]`` in the weight's dtype."""
        if self._code is None:
            return F.linear(x, self.weight)
        return self.float32(x).to(self.weight.dtype)

    def float32(self, x: Tensor) -> Tensor:
        """Multiply ``x [..., in]``; returns the float32 sums ``[..., out]``, not rounded again."""
        if self._code is None:
            return F.linear(x, self.weight).float()
        outputs, inputs = self.shape
        rows = x.numel() // inputs
        flat = x.reshape(rows, inputs).float().contiguous()
        if rows > _C.LINEAR_ROWS:
            if self._wide is None:
                self._wide = self.weight.t().float().contiguous()
            return torch.mm(flat, self._wide).view(*x.shape[:-1], outputs)
        y = torch.empty(*x.shape[:-1], outputs)
        _C.linear(
            self.weight.data_ptr(),
            self._code,
            outputs,
            inputs,
            flat.data_ptr(),
            rows,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y
