# SPDX-License-Identifier: Apache-2.0
"""Property test: random shapes, tables and options, compiled backend against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dspark_ext as dx


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of one call; a page may be shared, missing or out of range."""
    requests = draw(st.integers(0, 4))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d, page_size = draw(st.sampled_from([1, 2, 7, 16, 24])), draw(st.sampled_from([1, 3, 16]))
    max_pages = draw(st.integers(1, 6))
    q_len = draw(st.lists(st.integers(0, 5), min_size=requests, max_size=requests))
    longest = max_pages * page_size + 1
    kv_len = draw(st.lists(st.integers(-1, longest), min_size=requests, max_size=requests))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pages = draw(st.integers(1, 8))
    table = rng.integers(0, pages, (requests, max_pages))
    if draw(st.booleans()):
        table[rng.random(table.shape) < 0.1] = draw(st.sampled_from([-1, pages, 2**31 - 1]))
    tokens = sum(q_len) + draw(st.integers(0, 2))
    kinds = [np.float32, np.float16]
    dtype, cache_dtype = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    shape = (pages, page_size, kv_heads, d)
    return {
        "q": rng.standard_normal((tokens, group * kv_heads, d)).astype(dtype),
        "k_cache": rng.standard_normal(shape).astype(cache_dtype),
        "v_cache": rng.standard_normal(shape).astype(cache_dtype),
        "page_table": table.astype(np.int32),
        "kv_len": kv_len,
        "cu_seqlens": np.concatenate([[0], np.cumsum(q_len)]).astype(np.int32),
        "max_q_len": draw(st.integers(0, 5)),
        "causal": draw(st.booleans()),
        "window": draw(st.sampled_from([0, 0, 1, 5, 1000])),
        "soft_cap": draw(st.sampled_from([0.0, 0.0, 1.5])),
        "scale": draw(st.sampled_from([None, 0.0, -0.5, 2.0])),
        "return_lse": True,
    }


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(calls())
def test_compiled_equals_reference(arguments: dict[str, Any]) -> None:
    requests = len(arguments["kv_len"])
    got_status, want_status = np.empty(requests, np.int32), np.empty(requests, np.int32)
    got = dx.verify_attention(**arguments, status=got_status, backend="cpu")
    want = dx.verify_attention(**arguments, status=want_status, backend="reference")
    np.testing.assert_array_equal(got_status, want_status)
    # |score| <= 2 * 24 * 4.5^2 at worst here; errors stay below a thousand roundings of it.
    half = arguments["q"].dtype == np.float16
    np.testing.assert_allclose(got[0], want[0], rtol=2**-10 if half else 0, atol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-4)
