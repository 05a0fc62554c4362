# SPDX-License-Identifier: Apache-2.0
"""Products of few and many rows in every weight layout."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dspark.targets import linear  # noqa: E402


@pytest.mark.parametrize("rows", [1, 5, 31, 32, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
def test_product(
    rows: int,
    dtype: torch.dtype,
    packing: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not packing:
        monkeypatch.setattr(linear, "_pack", lambda _: None)
    size, width = 96, 40
    weight = torch.from_numpy(rng.normal(size=(width, size))).to(dtype)
    x = torch.from_numpy(rng.normal(size=(rows, size))).to(dtype)
    layer = linear.Linear(weight)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (rows, width)
    exact = x.double() @ weight.double().T
    # Rounding of the result, and of a sum of 96 products accumulated in float32.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    bound = unit * exact.abs() + size * 2.0**-23 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((y.double() - exact).abs() <= bound).all())
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(x.view(rows, 1, size)), y.view(rows, 1, width))


def test_packing_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the private operators gives None, not an error."""

    class Missing:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Missing(), raising=False)
    assert linear._pack(torch.ones(4, 4, dtype=torch.bfloat16)) is None
