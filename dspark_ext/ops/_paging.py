# SPDX-License-Identifier: Apache-2.0
"""The checks of a paged cache that its writer and its reader share."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_ext._arrays import KV_FLOATS, Checker, View, is_torch

__all__ = ["check_caches", "check_scale", "check_writable", "scale_stride"]

_SHAPE = ("pages", "page_size", "Hkv", "D")


def check_writable(check: Checker, name: str, x: Any) -> None:
    """Refuse a read-only NumPy array that the call would write to."""
    flags = getattr(x, "flags", None)
    if flags is not None:
        check.require(bool(flags.writeable), name, "a read-only array", "one that can be written")


def check_caches(check: Checker, k_cache: Any, v_cache: Any) -> tuple[View | None, View | None]:
    """Check a pair of caches: one shape, one dtype, the same strides, no element twice."""
    k = check.array("k_cache", k_cache, _SHAPE, KV_FLOATS)
    v = check.array("v_cache", v_cache, _SHAPE, KV_FLOATS if k is None else (k.dtype,))
    if k is None or v is None:
        return k, v
    same = k.strides == v.strides or 0 in k.shape
    check.require(same, "v_cache", f"strides {list(v.strides)}", f"{list(k.strides)} like k_cache")
    repeated = any(s == 0 for n, s in zip(k.shape, k.strides, strict=True) if n > 1)
    check.require(not repeated, "k_cache", f"strides {list(k.strides)}", "no repeated elements")
    check.require(k.shape[1] > 0, "k_cache", "page_size 0", "at least 1 token in a page")
    check.require(k.shape[2] > 0, "k_cache", "no heads", "at least 1 head")
    check.require(k.shape[3] > 0, "k_cache", "head size 0", "at least 1")
    return k, v


def check_scale(check: Checker, name: str, x: Any, cache: View | None) -> View | None:
    """Check the scale of an FP8 cache: one value, or one a KV head; values the host can read."""
    if x is None:
        return None
    if cache is not None and cache.dtype != "float8_e4m3fn":
        check.fail(
            name, "a scale", f"None with a cache of {cache.dtype}: only float8_e4m3fn has one"
        )
        return None
    heads = 1 if cache is None else cache.shape[2]
    one = (is_torch(x) or isinstance(x, np.ndarray)) and tuple(x.shape) == (1,)
    v = check.per_request(name, x, 1 if one else heads, "float32", optional=False)
    values = check.values(v)
    good = bool(np.all(np.isfinite(values) & (values > 0)))
    check.require(good, name, f"{values.tolist()}"[:80], "positive finite numbers")
    return v if good else None


def scale_stride(scale: View | None) -> int:
    """Elements between the scales of two heads: 0 when all share one."""
    return 0 if scale is None or scale.shape == (1,) else 1
