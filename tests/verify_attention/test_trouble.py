# SPDX-License-Identifier: Apache-2.0
"""Wrong data sets status bits and gives NaN rows; wrong arguments raise one error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext import Status

TROUBLE = {
    "page-minus-one": (lambda b: b.page_table[1].fill_(-1), Status.BAD_PAGE),
    "page-too-large": (lambda b: b.page_table[1, 0].fill_(10**6), Status.BAD_PAGE),
    "page-int-min": (lambda b: b.page_table[1, 0].fill_(-(2**31)), Status.BAD_PAGE),
    "too-long": (lambda b: b.kv_len[1].fill_(10**4), Status.KV_OVERFLOW),
    "longest": (lambda b: b.kv_len[1].fill_(2**31 - 1), Status.KV_OVERFLOW),
    "negative-length": (lambda b: b.kv_len[1].fill_(-3), Status.BAD_PARAM),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_bad_data_gives_nan_rows_and_a_bit(backend: str, make_batch: Any, name: str) -> None:
    if (backend, name) == ("reference", "longest"):
        pytest.skip("the reference walks over every position, 2^31 of them here")
    batch = make_batch([2, 3, 1], [20, 30, 10])
    clean, clean_lse = batch.call(return_lse=True, backend=backend)
    change, bit = TROUBLE[name]
    change(batch)
    status = torch.full((3,), 99, dtype=torch.int32)
    out, lse = batch.call(return_lse=True, status=status, backend=backend)
    assert status[[0, 2]].tolist() == [0, 0]
    assert int(status[1]) & bit
    assert out[2:5].isnan().all()
    assert lse[2:5].isnan().all()
    for rows in (slice(0, 2), slice(5, 6)):
        assert torch.equal(out[rows], clean[rows])
        assert torch.equal(lse[rows], clean_lse[rows])
    with pytest.raises(dx.StatusError, match="request 1: "):
        batch.call(strict=True, backend=backend)


def test_more_rows_than_announced(backend: str, make_batch: Any) -> None:
    batch = make_batch([1, 3], [20, 30])
    status = torch.empty(2, dtype=torch.int32)
    out = batch.call(max_q_len=2, status=status, backend=backend)
    assert status.tolist() == [0, Status.BAD_PARAM]
    assert out[1:].isnan().all()
    assert out[:1].isfinite().all()


@pytest.mark.parametrize("bounds", [[0, 3, 1, 6], [0, 2, 9, 6], [0, -2, 2, 6]])
def test_bounds_out_of_order_write_nothing(
    backend: str, make_batch: Any, bounds: list[int]
) -> None:
    batch = make_batch([2, 2, 2], [20, 30, 10])
    batch.cu_seqlens[:] = torch.tensor(bounds)
    status, out = torch.empty(3, dtype=torch.int32), torch.full_like(batch.q, 7)
    batch.call(max_q_len=6, status=status, out=out, backend=backend)
    good = [r for r in range(3) if 0 <= bounds[r] <= bounds[r + 1] <= 6]
    assert status.tolist() == [0 if r in good else Status.BAD_PARAM for r in range(3)]
    claimed = {row for r in good for row in range(bounds[r], bounds[r + 1])}
    for row in range(6):
        assert (row in claimed) != bool((out[row] == 7).all())


def test_pages_behind_the_window_may_be_gone(backend: str, make_batch: Any) -> None:
    batch = make_batch([3], [60])
    want = batch.call(window=20, backend=backend)
    batch.page_table[0, :2] = -1  # positions 0..31; row 0 sits at 57 and sees 38..57
    assert torch.equal(batch.call(window=20, strict=True, backend=backend), want)
    batch.page_table[0, 2] = -1
    with pytest.raises(dx.StatusError, match="BAD_PAGE"):
        batch.call(window=20, strict=True, backend=backend)


def test_one_error_lists_everything(make_batch: Any) -> None:
    batch = make_batch([2], [9], heads=(4, 2))
    with pytest.raises(dx.ArgumentError) as error:
        dx.verify_attention(
            batch.q.double(), batch.k_cache[:, :, :, :8], batch.v_cache.int(),
            page_table=batch.page_table.long(), kv_len=[1, 2, 3], cu_seqlens=[0.5, 2],
            max_q_len=-1, window=-2, soft_cap=float("nan"), scale=float("inf"),
            status=torch.empty(9, dtype=torch.int32),
        )  # fmt: skip
    text = str(error.value)
    for name in ("q: got float64", "k_cache: got shape", "v_cache: got", "page_table: got int64",
                 "kv_len: got", "cu_seqlens: got", "max_q_len: got", "window: got",
                 "soft_cap: got", "scale: got", "status: got"):  # fmt: skip
        assert name in text


def _replaced(batch: Any, **change: Any) -> Any:
    names = ("q", "k_cache", "v_cache", "page_table", "kv_len", "cu_seqlens", "max_q_len")
    return dx.verify_attention(**({name: getattr(batch, name) for name in names} | change))


BAD_ARGUMENTS = {
    "heads-not-a-multiple": (lambda b: {"q": b.q[:, :3]}, "q: got 3 heads, expected a multiple"),
    "no-heads": (lambda b: {"q": b.q[:, :0]}, "q: got 0 heads"),
    "last-dim-strided": (lambda b: {"q": b.q.repeat_interleave(2, -1)[..., ::2]}, "contiguous"),
    "cache-strides-differ": (
        lambda b: {"v_cache": b.v_cache.transpose(1, 2).contiguous().transpose(1, 2)},
        "v_cache: got strides",
    ),
    "cache-repeats": (lambda b: {"k_cache": b.k_cache[:1].expand_as(b.k_cache),
                                 "v_cache": b.v_cache[:1].expand_as(b.v_cache)},
                      "no repeated elements"),
    "numpy-among-torch": (lambda b: {"page_table": b.page_table.numpy()}, "page_table: got NumPy"),
    "other-device": (lambda b: {"v_cache": b.v_cache.to("meta")}, "v_cache: got torch on meta"),
    "q-none": (lambda _: {"q": None}, "q: got None"),
    "lengths-too-large": (lambda _: {"kv_len": [2**31]}, "kv_len: got"),
    "window-float": (lambda _: {"window": 1.5}, "window: got"),
    "cap-negative": (lambda _: {"soft_cap": -1.0}, "soft_cap: got"),
    "cap-text": (lambda _: {"soft_cap": "x"}, "soft_cap: got"),
    "scale-nan": (lambda _: {"scale": float("nan")}, "scale: got"),
    "out-dtype": (lambda b: {"out": b.q.half()}, "out: got"),
    "out-shape": (lambda b: {"out": b.q[:1].clone()}, "out: got"),
    "out-strided": (lambda b: {"out": b.q.repeat(1, 2, 1)[:, ::2]}, "out: got strides"),
    "out-not-a-pair": (lambda b: {"out": b.q.clone(), "return_lse": True}, "a pair"),
    "plan-too-small": (lambda _: {"plan": torch.zeros(6, dtype=torch.int32)}, "at least 7"),
    "plan-not-a-plan": (lambda _: {"plan": "fast"}, "plan: got"),
    "backend-unknown": (lambda _: {"backend": "gpu"}, "backend: got 'gpu'"),
    "backend-cuda": (lambda _: {"backend": "cuda"}, "torch tensors on a CUDA device"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(make_batch: Any, name: str) -> None:
    batch = make_batch([2], [30], heads=(4, 2))
    change, text = BAD_ARGUMENTS[name]
    _replaced(batch)  # a kept params object must not hide the error
    out = torch.full_like(batch.q, 7)
    with pytest.raises(dx.ArgumentError, match=text):
        _replaced(batch, **({"out": out} | change(batch)))
    assert (out == 7).all()


def test_read_only_results(make_batch: Any) -> None:
    batch = make_batch([2], [9])
    names = ("q", "k_cache", "v_cache", "page_table", "kv_len", "cu_seqlens")
    arrays = {name: getattr(batch, name).numpy() for name in names}
    out = np.zeros_like(arrays["q"])
    dx.verify_attention(**arrays, max_q_len=2, out=out)
    frozen = np.zeros_like(out)
    frozen.flags.writeable = False
    for name in ("k_cache", "v_cache", "q"):  # only read: may be frozen
        arrays[name].flags.writeable = False
    np.testing.assert_array_equal(dx.verify_attention(**arrays, max_q_len=2), out)
    with pytest.raises(dx.ArgumentError, match="out: got a read-only array"):
        dx.verify_attention(**arrays, max_q_len=2, out=frozen)
    assert not frozen.any()


def test_int64_and_lists_are_accepted(make_batch: Any) -> None:
    batch = make_batch([2, 1], [9, 4])
    want = batch.call()
    for _ in range(2):
        assert torch.equal(
            batch.call(kv_len=batch.kv_len.long(), cu_seqlens=batch.cu_seqlens.tolist()), want
        )


def test_plan_is_accepted_and_changes_nothing(make_batch: Any) -> None:
    batch = make_batch([2, 3], [9, 20])
    survival = torch.tensor([[0.9, 0.5], [0.9, 0.8]])
    plan = dx.prefix_schedule(survival, mode="fixed", fixed_len=2)
    want = batch.call()
    assert torch.equal(batch.call(plan=plan), want)
    assert torch.equal(batch.call(plan=plan.work), want)


def test_a_kept_call_sees_other_shapes(make_batch: Any) -> None:
    # Calls that alternate between shapes, dtypes and options must not meet each other's params.
    batches = [make_batch([n, 1], [20 + n, 5], d=d) for n in (1, 2, 3) for d in (8, 16)]
    wants = [(b.call(), b.call(causal=False), b.call(scale=0.1)) for b in batches]
    for _ in range(3):
        for b, (plain, both, scaled) in zip(batches, wants, strict=True):
            assert torch.equal(b.call(), plain)
            assert torch.equal(b.call(causal=False), both)
            assert torch.equal(b.call(scale=0.1), scaled)


def test_tail_of_a_large_cache(make_batch: Any) -> None:
    # Offsets past 2^31 elements: a strided view over memory that is reserved but hardly touched.
    batch = make_batch([2], [40], heads=(2, 1), d=8, cache_dtype=torch.bfloat16)
    want = batch.call()
    stride = 2**31 // int(batch.page_table.max()) + 1
    flat = torch.empty(stride * len(batch.k_cache), dtype=torch.bfloat16)
    for i, name in enumerate(("k_cache", "v_cache")):
        wide = flat.as_strided(batch.k_cache.shape, (stride, 8, 8, 1), i * 1024)
        wide[:] = getattr(batch, name)
        setattr(batch, name, wide)
    assert torch.equal(batch.call(strict=True), want)


def test_random_garbage_never_crashes(rng: np.random.Generator) -> None:
    cache = rng.standard_normal((5, 4, 2, 8)).astype(np.float32)
    q = rng.standard_normal((12, 4, 8)).astype(np.float32)
    extremes = np.array([-(2**31), -1, 0, 1, 2, 3, 4, 5, 7, 12, 13, 100, 2**31 - 1])
    status = np.empty(4, np.int32)
    for _ in range(300):
        dx.verify_attention(
            q, cache, cache, page_table=rng.choice(extremes, (4, 6)).astype(np.int32),
            kv_len=rng.choice(extremes, 4).astype(np.int32),
            cu_seqlens=rng.choice(extremes, 5).astype(np.int32),
            max_q_len=int(rng.choice([0, 1, 12, 2**31 - 1])), causal=bool(rng.integers(2)),
            window=int(rng.choice([0, 3, 2**31 - 1])), status=status,
        )  # fmt: skip
        assert not np.any(status & ~(Status.BAD_PAGE | Status.KV_OVERFLOW | Status.BAD_PARAM))
