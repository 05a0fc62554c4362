# SPDX-License-Identifier: Apache-2.0
"""Products of few and many rows."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dspark.targets.linear import Linear  # noqa: E402
from dspark_ext import _C  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def problem(
    rng: np.random.Generator, rows: int, size: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.from_numpy(rng.normal(size=(width, size))).to(dtype)
    return weight, torch.from_numpy(rng.normal(size=(rows, size))).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 31, 64, 65, 70])
@pytest.mark.parametrize(("size", "width"), [(96, 40), (1, 1), (577, 203)])
@DTYPES
def test_product(
    rows: int, size: int, width: int, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    weight, x = problem(rng, rows, size, width, dtype)
    layer = Linear(weight)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (rows, width)
    exact = x.double() @ weight.double().T
    # Rounding of the result, and of a sum of `size` products accumulated in float32.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    sums = size * 2.0**-23 * (x.double().abs() @ weight.double().abs().T)
    assert bool(((y.double() - exact).abs() <= unit * exact.abs() + sums).all())
    assert bool(((layer.float32(x).double() - exact).abs() <= 2.0**-23 * exact.abs() + sums).all())
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(x.view(rows, 1, size)), y.view(rows, 1, width))


@DTYPES
def test_a_rows_bits_are_its_own(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Alone, in any company up to 64, at any place, on any number of threads: the same bits."""
    weight, x = problem(rng, 64, 576, 230, dtype)
    layer = Linear(weight)
    alone = torch.cat([layer.float32(row[None]) for row in x])
    threads = torch.get_num_threads()
    try:
        for count in (2, 3, 7, 8, 33, 64):
            torch.set_num_threads(1 + count % 2)
            order = torch.from_numpy(rng.permutation(64)[:count].copy())
            assert torch.equal(layer.float32(x[order]), alone[order])
    finally:
        torch.set_num_threads(threads)


def test_other_layouts_are_accepted(rng: np.random.Generator) -> None:
    weight, x = problem(rng, 6, 32, 16, torch.float32)
    transposed = weight.t().contiguous().t()
    assert torch.equal(Linear(transposed)(x[::2]), Linear(weight)(x[::2].contiguous()))


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 65}, {"rows": -1}, {"length": 0}, {"columns": -1}, {"dtype": 7}],
    ids=lambda w: next(iter(w)),
)
def test_bad_sizes_are_refused(wrong: dict[str, int]) -> None:
    good = {"dtype": 0, "columns": 1, "length": 1, "rows": 1} | wrong
    with pytest.raises(ValueError, match="out of range"):
        _C.linear(0, good["dtype"], good["columns"], good["length"], 0, good["rows"], 0, 1)
