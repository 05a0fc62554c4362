# SPDX-License-Identifier: Apache-2.0
"""The checks of :class:`dspark_ext.vocab_parallel.ShardedVerification`.

All of it is on the host, so values are checked too: a rank that went on with a row that is not its
request's would leave the group with another token than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dspark_ext import _simt
from dspark_ext._arrays import (
    FLOATS,
    INTS,
    Checker,
    device_name,
    is_integer,
    is_torch,
    on_device,
    to_numpy,
)

__all__ = ["check_call", "check_shard", "orderly"]

MAX_POSITION = 2**32
_LAWS = {
    "draft_logits": ("draft_logit", "draft_lse", "draft_logits"),
    "support": ("draft_logit", "draft_lse", "support_ids", "support_logits"),
}


def check_shard(sizes: Any, rank: Any) -> None:
    """Raise ArgumentError unless every rank has ids and ``rank`` is one of them."""
    check = Checker("Shard")
    whole = isinstance(sizes, tuple) and all(is_integer(n) and n >= 1 for n in sizes)
    if check.require(whole and len(sizes) > 0, "sizes", str(sizes), "a tuple of integers >= 1"):
        good = is_integer(rank) and 0 <= rank < len(sizes)
        check.require(good, "rank", str(rank), f"0..{len(sizes) - 1}")
    check.done()


def _plain(x: Any) -> Any:
    """Lists as arrays; what NumPy cannot read stays what it is, for the check to name."""
    if x is None or is_torch(x) or isinstance(x, np.ndarray):
        return x
    try:
        return np.asarray(x)
    except (TypeError, ValueError):
        return x


def _ranged(
    check: Checker, given: Mapping[str, Any], name: str, dtype: str, good: Callable[[Any], Any],
    expected: str, optional: bool = False,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Values of a per-request argument, checked; zeros where there is nothing to use."""
    n = check.sizes.get("R", 0)
    v = check.per_request(name, _plain(given[name]), n, dtype, optional=optional)
    if v is None:
        return np.zeros(n, np.int64)
    values = to_numpy(v.array)
    bad = values[~good(values)]
    check.require(not bad.size, name, str(bad[:4].tolist()), expected)
    return values


def check_call(given: Mapping[str, Any], size: int, backend: str | None = None) -> None:
    """Raise ArgumentError with everything that is wrong with one rank's arguments."""
    check = Checker("ShardedVerification")
    served = backend is None or backend in ("cpu", "reference", "simt")
    check.require(served, "backend", repr(backend)[:80], "None, 'cpu', 'reference' or 'simt'")
    if backend == "simt" and not _simt.load():
        check.fail("backend", "'simt'", "a source tree in which `make simt` has run")
    check.array("target_logits", given["target_logits"], ("B", size))
    if check.like is not None and on_device(check.like):
        check.fail("target_logits", f"an array on {device_name(check.like)}", "arrays on the CPU")
    drafts = _plain(given["draft_tokens"])
    check.array("draft_tokens", drafts, ("R", "gamma"), INTS)
    gamma = check.sizes.get("gamma", 1)
    check.require(1 <= gamma <= 16, "gamma", str(gamma), "1..16")
    _ranged(check, given, "seed", "uint64", lambda x: x >= 0, "64-bit seeds")
    limit = MAX_POSITION - gamma - 1
    _ranged(check, given, "position", "int64", lambda x: (x >= 0) & (x < limit), f"0..{limit - 1}")
    if given["temperature"] is not None:
        _ranged(check, given, "temperature", "float32", lambda x: x == x, "numbers")
    _ranged(check, given, "max_new_tokens", "int32", lambda x: x >= 0, "values >= 0", optional=True)
    _check_rows(check, given, gamma)
    _check_processors(check, given, size)
    _check_law(check, given, size)
    check.done()


def _check_rows(check: Checker, given: Mapping[str, Any], gamma: int) -> None:
    """Every active request owns the 1 + l rows that it reads."""
    requests, rows = check.sizes.get("R", 0), check.sizes.get("B", 0)
    active = given["active"]
    on = np.ones(requests, bool)
    if active is not None:
        on = _ranged(check, given, "active", "uint8", lambda x: x >= 0, "0 or 1") != 0
    length = _ranged(
        check, given, "draft_len", "int32", lambda x: (x >= 0) & (x <= gamma), f"0..{gamma}"
    )
    v = check.per_request(
        "cu_seqlens", _plain(given["cu_seqlens"]), requests + 1, "int32", optional=False
    )
    if v is None or len(length) != requests:
        return
    first = to_numpy(v.array).astype(np.int64)
    fits = (first[:-1] >= 0) & (first[1:] <= rows) & (first[:-1] + length + 1 <= first[1:])
    bad = np.flatnonzero(on & ~fits)
    expected = f"1 + draft_len rows in [0, {rows}] for every active request"
    check.require(not bad.size, "cu_seqlens", f"{first[:9].tolist()} (request {bad[:4]})", expected)


def _check_processors(check: Checker, given: Mapping[str, Any], size: int) -> None:
    check.array("logit_bias", given["logit_bias"], ("R", size), ("float32",), optional=True)
    words = -(-size // 32)
    mask = check.array(
        "token_mask", given["token_mask"], ("B", None), ("int32", "uint32"), optional=True
    )
    if mask is not None and mask.shape[1] < words:
        check.fail("token_mask", f"{mask.shape[1]} words a row", f">= {words}")
    stops = _plain(given["stop_ids"])
    flat = isinstance(stops, np.ndarray) and stops.ndim == 1
    whole = flat and (stops.size == 0 or stops.dtype.kind in "iu")
    check.require(whole, "stop_ids", str(given["stop_ids"])[:80], "a flat sequence of ids")


def _check_law(check: Checker, given: Mapping[str, Any], size: int) -> None:
    both = given["draft_logits"] is not None and given["support_ids"] is not None
    check.require(not both, "draft_logits, support_ids", "both", "one law")
    listed = given["support_ids"] is not None or given["support_logits"] is not None
    names = _LAWS["support" if listed else "draft_logits"]
    present = [name for name in names if given[name] is not None]
    if present and len(present) < len(names):
        check.fail(", ".join(names), f"only {', '.join(present)}", "all of them or none")
    for name in names[:2]:
        check.array(name, given[name], ("R", "gamma"), ("float32",), optional=True)
    full = ("R", "gamma", size)
    check.array("draft_logits", given["draft_logits"], full, optional=True)
    for name, dtypes in (("support_ids", ("int32",)), ("support_logits", FLOATS)):
        check.array(name, given[name], ("R", "gamma", "M"), dtypes, optional=True)


def orderly(ids: np.ndarray[Any, Any], vocab: int) -> np.ndarray[Any, Any]:
    """Which lists [..., M] ascend strictly in [0, V), with nothing but -1 behind their ids."""
    ids = ids.astype(np.int64)
    listed = ids >= 0
    gap = (~listed[..., :-1] & listed[..., 1:]).any(axis=-1)
    falls = (listed[..., 1:] & (ids[..., 1:] <= ids[..., :-1])).any(axis=-1)
    return np.asarray(~(gap | falls | (ids >= vocab).any(axis=-1)))
