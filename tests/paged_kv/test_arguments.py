# SPDX-License-Identifier: Apache-2.0
"""paged_kv_append and paged_kv_commit refuse wrong arguments before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx


def _arguments() -> dict[str, Any]:
    return {
        "k": torch.ones(3, 2, 4), "v": torch.ones(3, 2, 4),
        "k_cache": torch.zeros(5, 4, 2, 4), "v_cache": torch.zeros(5, 4, 2, 4),
        "page_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "kv_len": torch.tensor([3, 0], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32),
    }  # fmt: skip


BAD = {
    "k-dtype": ({"k": torch.ones(3, 2, 4, dtype=torch.int32)}, "k: got int32"),
    "v-other-dtype": ({"v": torch.ones(3, 2, 4).half()}, "v: got float16"),
    "v-shape": ({"v": torch.ones(4, 2, 4)}, "v: got shape"),
    "heads-differ": ({"k_cache": torch.zeros(5, 4, 3, 4)}, "k_cache: got shape"),
    "head-size-differs": ({"k_cache": torch.zeros(5, 4, 2, 8)}, "k_cache: got shape"),
    "caches-differ": ({"v_cache": torch.zeros(5, 4, 2, 4).half()}, "v_cache: got float16"),
    "cache-dims": ({"k_cache": torch.zeros(5, 8, 4)}, "k_cache: got shape"),
    "cache-repeats": ({"k_cache": torch.zeros(1, 4, 2, 4).expand(5, 4, 2, 4),
                       "v_cache": torch.zeros(1, 4, 2, 4).expand(5, 4, 2, 4)}, "repeated"),
    "last-dim": ({"k": torch.ones(3, 2, 8)[..., ::2]}, "k: got strides"),
    "table-int64": ({"page_table": torch.zeros(2, 2, dtype=torch.int64)}, "page_table: got int64"),
    "table-rows": ({"page_table": torch.zeros(3, 2, dtype=torch.int32)}, "kv_len: got shape"),
    "lengths": ({"kv_len": [1, 2, 3]}, "kv_len: got shape"),
    "bounds": ({"cu_seqlens": [0, 3]}, "cu_seqlens: got shape"),
    "bounds-float": ({"cu_seqlens": [0.0, 1.0, 2.0]}, "cu_seqlens: got float64"),
    "numpy": ({"v": np.ones((3, 2, 4), np.float32)}, "v: got NumPy"),
    "device": ({"k_cache": torch.zeros(5, 4, 2, 4, device="meta")}, "k_cache: got torch on meta"),
    "rope": ({"rope": {"theta": 1e4}}, "rope: got dict"),
    "rope-theta": ({"rope": 1e4}, "rope: got float"),
    "out": ({"out": torch.zeros(2)}, "out: got float32"),
    "backend": ({"backend": "fast"}, "backend: got 'fast'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_write_nothing(name: str) -> None:
    change, text = BAD[name]
    arguments = _arguments()
    dx.paged_kv_append(**_arguments())  # a kept params object must not hide the error
    with pytest.raises(dx.ArgumentError, match=text):
        dx.paged_kv_append(**(arguments | change))
    assert not arguments["k_cache"].any()
    assert not arguments["v_cache"].any()


def test_one_error_lists_everything() -> None:
    with pytest.raises(dx.ArgumentError) as error:
        dx.paged_kv_append(**(_arguments() | {
            "k": None, "page_table": None, "kv_len": "x", "rope": 3, "backend": "y"}))  # fmt: skip
    text = str(error.value)
    for name in ("k: got None", "page_table: got None", "kv_len: got", "rope: got", "backend: got"):
        assert name in text


def test_odd_head_size_with_rope() -> None:
    k = torch.ones(1, 1, 3)
    cache = torch.zeros(1, 4, 1, 3)
    with pytest.raises(dx.ArgumentError, match="head size 3"):
        dx.paged_kv_append(
            k, k, cache, cache.clone(), page_table=torch.zeros(1, 1, dtype=torch.int32), kv_len=[0],
            cu_seqlens=[0, 1], rope=dx.Rope(1e4),
        )  # fmt: skip


def _frozen(x: Any) -> Any:
    x = np.array(x)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_read_only_caches(name: str) -> None:
    arguments = {key: x.numpy() for key, x in _arguments().items()}
    dx.paged_kv_append(**arguments)  # the same shapes, writable
    arguments[name] = _frozen(arguments[name] * 0)
    with pytest.raises(dx.ArgumentError, match=f"{name}: got a read-only array"):
        dx.paged_kv_append(**arguments)
    assert not arguments[name].any()


def test_status_can_be_preallocated() -> None:
    out = torch.full((2,), 9, dtype=torch.int32)
    for _ in range(2):
        assert dx.paged_kv_append(**_arguments(), out=out) is out
        assert out.tolist() == [0, 0]


def test_calls_of_many_shapes_do_not_meet() -> None:
    for _ in range(2):
        for n in range(1, 300):  # more shapes than are kept
            cache = torch.zeros(2, 1, 512, 1, 2)
            k = torch.full((n, 1, 2), float(n))
            dx.paged_kv_append(
                k, k, *cache, page_table=torch.zeros(1, 1, dtype=torch.int32),
                kv_len=torch.zeros(1, dtype=torch.int32),
                cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
            )  # fmt: skip
            assert int(cache[0].sum()) == 2 * n * n


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_commit(backend: str, kind: str) -> None:
    kv_len, position = np.array([5, 0, 7, 9], np.int32), np.array([5, 0, 2**33, 9], np.int64)
    emitted, active = np.array([3, 1, 2, 8], np.int32), np.array([1, 1, 1, 0], np.uint8)
    arrays = [kv_len, position, emitted, active]
    if kind == "torch":
        arrays = [torch.from_numpy(x) for x in arrays]
    dx.paged_kv_commit(*arrays, backend=backend)
    assert kv_len.tolist() == [8, 1, 9, 9]
    assert position.tolist() == [8, 1, 2**33 + 2, 9]
    dx.paged_kv_commit(*arrays[:2], [0, 0, -4, 1], backend=backend)
    assert kv_len.tolist() == [8, 1, 9, 10]


def test_commit_refuses_and_writes_nothing() -> None:
    kv_len, position = np.array([5, 6], np.int32), np.array([5, 6], np.int64)
    with pytest.raises(dx.ArgumentError) as error:
        dx.paged_kv_commit(kv_len, position.astype(np.int32), [1, 2, 3], [1.5, 0])
    for name in ("position: got int32", "num_emitted: got shape", "active: got"):
        assert name in str(error.value)
    with pytest.raises(dx.ArgumentError, match="kv_len: got int64"):
        dx.paged_kv_commit(position, position, [1, 2])
    with pytest.raises(dx.ArgumentError, match="kv_len: got a read-only array"):
        dx.paged_kv_commit(_frozen(kv_len), position, [1, 2])
    assert kv_len.tolist() == position.tolist() == [5, 6]
