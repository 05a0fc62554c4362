# SPDX-License-Identifier: Apache-2.0
"""The checks of a paged cache that its writer and its reader share."""

from __future__ import annotations

from typing import Any

from dspark_ext._arrays import FLOATS, Checker, View

__all__ = ["check_caches", "check_writable"]

_SHAPE = ("pages", "page_size", "Hkv", "D")


def check_writable(check: Checker, name: str, x: Any) -> None:
    """Refuse a read-only NumPy array that the call would write to."""
    flags = getattr(x, "flags", None)
    if flags is not None:
        check.require(bool(flags.writeable), name, "a read-only array", "one that can be written")


def check_caches(check: Checker, k_cache: Any, v_cache: Any) -> tuple[View | None, View | None]:
    """Check a pair of caches: one shape, one dtype, the same strides, no element twice."""
    k = check.array("k_cache", k_cache, _SHAPE, FLOATS)
    v = check.array("v_cache", v_cache, _SHAPE, FLOATS if k is None else (k.dtype,))
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
