# SPDX-License-Identifier: Apache-2.0
"""On a device: a captured call, replayed with other lengths and tables, equals an eager one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

usable = bool(dx.info()["cuda"]["usable"])
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not usable, reason="no CUDA device that this build serves"),
]


@pytest.mark.parametrize("invariant", [False, True], ids=["balanced", "invariant"])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_a5_replay_equals_eager(
    make_batch: Any, rng: np.random.Generator, d: int, invariant: bool
) -> None:
    dtype = torch.float32 if d == 16 else torch.bfloat16
    kinds = {"heads": (4, 2), "d": d, "dtype": dtype, "cache_dtype": dtype}
    held = make_batch([3, 3, 3], [2000, 2000, 2000], **kinds)
    names = ("q", "k_cache", "v_cache", "page_table", "kv_len", "cu_seqlens")
    for name in names:
        setattr(held, name, getattr(held, name).cuda())
    out, status = torch.empty_like(held.q), torch.empty(3, dtype=torch.int32, device="cuda")
    given = {"status": status, "batch_invariant": invariant, "max_q_len": 9}
    held.call(out=out, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.call(out=out, **given)
    for _ in range(20):
        lengths = [int(n) for n in rng.integers(9, 2001, 3)]
        cut = sorted(int(n) for n in rng.integers(0, 10, 2))
        q_len = [cut[0], cut[1] - cut[0], 9 - cut[1]]
        other = make_batch(q_len, lengths, **kinds)
        held.page_table.fill_(-1)
        held.page_table[:, : other.page_table.shape[1]] = other.page_table
        held.k_cache[: len(other.k_cache)] = other.k_cache
        held.v_cache[: len(other.v_cache)] = other.v_cache
        for name in ("q", "kv_len", "cu_seqlens"):
            getattr(held, name).copy_(getattr(other, name))
        graph.replay()
        replayed = out.clone()
        held.call(out=out, **given)
        assert torch.equal(replayed, out)
        assert not status.any()
