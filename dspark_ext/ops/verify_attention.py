# SPDX-License-Identifier: Apache-2.0
"""Attention of a few query rows per request over a paged cache."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from dspark_ext import _C, _backend
from dspark_ext._arrays import Checker, View, dtype_name, full, is_integer, to_numpy
from dspark_ext.ops._paging import check_caches, check_scale, scale_stride
from dspark_ext.ops._prepared import Prepared, addresses, all_as_given, signature, zeros_like
from dspark_ext.results import Plan

__all__ = ["verify_attention"]

_prepared = Prepared()
#: Types whose equality is meant in a key: a 0-d array would compare by identity.
_PLAIN = frozenset((int, float, bool, type(None)))


def verify_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    page_table: Any,
    kv_len: Any,
    cu_seqlens: Any,
    max_q_len: int,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    batch_invariant: bool = False,
    plan: Any = None,
    return_lse: bool = False,
    out: Any = None,
    status: Any = None,
    strict: bool = False,
    backend: str | None = None,
) -> Any:
    """Attend from ragged query rows to the paged keys and values of their requests.

    Request ``r`` has ``q_len = cu_seqlens[r + 1] - cu_seqlens[r]`` rows, any number including 0;
    row ``i`` sits at position ``kv_len[r] - q_len + i`` (contract, section 2). Query head ``h``
    reads KV head ``h // (Hq // Hkv)``.

    Parameters
    ----------
    q : array, shape (B, Hq, D), float32 | bfloat16 | float16
        Query rows; token and head strides are free. Rows past ``cu_seqlens[R]`` are padding.
    k_cache, v_cache : array, shape (pages, page_size, Hkv, D)
        float32, bfloat16, float16 or float8_e4m3fn, as filled by :func:`paged_kv_append`; the dtype
        may differ from that of ``q``.
    page_table : array, shape (R, max_pages), int32
        Page ids; -1 = none.
    kv_len : array, shape (R,), int
        Lengths including the rows of this call.
    cu_seqlens : array, shape (R + 1,), int
        Rows ``cu_seqlens[r] .. cu_seqlens[r + 1]`` belong to request ``r``.
    max_q_len : int
        Upper bound on the rows of a request: the host does not read ``cu_seqlens``.
    causal : bool
        A row sees keys up to its own position. False: all rows see all ``kv_len`` keys.
    window : int
        w > 0: a row at position p sees keys at positions > p - w only. 0: all.
    soft_cap : float
        s > 0: a score x becomes s tanh(x / s).
    scale : float, optional
        Factor of the scores; 1 / sqrt(D) when absent.
    k_scale, v_scale : float or array, shape () | (1,) | (Hkv,), float32, optional
        Scales of a float8_e4m3fn cache, one or one a KV head: a key is ``k_scale * element``. 1
        when absent. Not taken with other caches. Anything but an array of (1,) or (Hkv,) is
        converted at each call.
    batch_invariant : bool
        A row's bytes depend on its own request only, and not on later keys, so they are the same
        in any batch and for any draft length. The CPU backend always works so.
    plan : Plan or array, optional
        ``Plan`` of :func:`prefix_schedule`, or its ``work``. Speed only, never the result.
    return_lse : bool
        Also return the natural logarithm of the softmax denominator.
    out : array or (array, array), optional
        Preallocated result, contiguous; with ``return_lse`` a pair ``(out, lse)``.
    status : array, shape (R,), int32, optional
        Where to write the status bits.
    strict : bool
        Synchronise and raise :class:`dspark_ext.StatusError` when a status bit reports trouble.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.

    Returns
    -------
    array, shape (B, Hq, D), dtype of ``q``; with ``return_lse`` also (B, Hq) float32
        A row without keys gives 0 and -inf. Padding rows of a preallocated result stay as they
        are. A request with trouble gets NaN in its rows: ``BAD_PAGE`` (a page that its rows need
        is negative or >= pages), ``KV_OVERFLOW`` (``kv_len`` beyond the page table), ``BAD_PARAM``
        (negative ``kv_len``, more than ``max_q_len`` rows, a scale on a device that is not a
        positive finite number; bounds that decrease or leave [0, B],
        and then nothing is written for it).

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype, range or device is wrong; nothing was written.

    Notes
    -----
    Accumulation is float32. NaN and infinities in the cache follow IEEE arithmetic in the rows
    that see them and touch no other row.

    Examples
    --------
    >>> import numpy as np
    >>> k = np.zeros((1, 4, 1, 2), np.float32)  # equal scores: the mean of the visible values
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 4, 1, 2)
    >>> verify_attention(np.ones((2, 1, 2), np.float32), k, v, page_table=np.array([[0]], np.int32),
    ...                  kv_len=[3], cu_seqlens=[0, 2], max_q_len=2)[:, 0].tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    work = plan.work if isinstance(plan, Plan) else plan
    o, lse = out if return_lse and isinstance(out, tuple) and len(out) == 2 else (out, None)
    scales = k_scale, v_scale
    arrays = (q, k_cache, v_cache, page_table, kv_len, cu_seqlens, *scales, work, o, lse, status)
    options = (max_q_len, causal, window, soft_cap, scale, batch_invariant, return_lse)
    plain = backend in (None, "cpu") and _PLAIN.issuperset(map(type, options))
    key = (signature(arrays), options) if plain else None
    params = None if key is None else _prepared.find(key)
    if params is None:
        o, lse, status = _first_call(arrays, options, backend, key)
    else:
        params, spare_status = params
        o = zeros_like(q) if o is None else o
        lse = full(q.shape[:2], -math.inf, "float32", q) if return_lse and lse is None else lse
        status = spare_status if status is None else status
        params.set_arrays(*addresses((*arrays[:9], o, lse, status)))
        params.num_threads = _backend.num_threads()
        _backend.run("verify_attention", params)
    _backend.raise_on_trouble("verify_attention", status, strict)
    return (o, lse) if return_lse else o


def _first_call(
    arrays: tuple[Any, ...], options: tuple[Any, ...], backend: str | None, key: Any
) -> tuple[Any, Any, Any]:
    """Check everything, run, and keep the params object when later calls may reuse it."""
    check = Checker("verify_attention")
    q, k_cache, v_cache, page_table, kv_len, cu_seqlens, k_scale, v_scale, work, _, _, status = (
        arrays
    )
    v_q = check.array("q", q, ("B", "Hq", "D"))
    caches = check_caches(check, k_cache, v_cache)
    v_table = check.array("page_table", page_table, ("R", "max_pages"), ("int32",))
    requests = check.sizes.get("R", 0)
    v_len = check.per_request("kv_len", kv_len, requests, "int32", optional=False)
    v_cu = check.per_request("cu_seqlens", cu_seqlens, requests + 1, "int32", optional=False)
    scales = (
        check_scale(check, "k_scale", k_scale, caches[0]),
        check_scale(check, "v_scale", v_scale, caches[1]),
    )
    v_work = check.array("plan", work, (None,), ("int32",), optional=True, contiguous=True)
    if v_work is not None:
        needed = 4 + 3 * requests
        check.require(v_work.shape[0] >= needed, "plan", work, f"work of at least {needed} entries")
    heads, kv_heads = check.sizes.get("Hq", 0), check.sizes.get("Hkv", 1)
    fits = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
    check.require(v_q is None or fits, "q", f"{heads} heads", f"a multiple of Hkv = {kv_heads}")
    options = _check_options(check, options, check.sizes.get("D", 1))
    shape = () if v_q is None else v_q.shape
    inputs = (v_q, *caches, v_table, v_len, v_cu, *scales, v_work)
    views = (*inputs, *_outputs(check, shape, arrays, options))
    backend = _backend.resolve(check, backend)
    check.done()
    o_out, o_lse, o_status = views[-3:]
    assert o_out is not None and o_status is not None and v_len is not None and v_cu is not None
    result = o_out.array, None if o_lse is None else o_lse.array, o_status.array
    if backend == "reference":
        _run_reference(views, options)
        return result
    params = _params(views, options)
    params.set_arrays(*(_backend.ptr(x) for x in views))
    _backend.run("verify_attention", params, backend, check.like)
    kept = key is not None and key[0] is not None and backend == "cpu"
    small = ((v_len, kv_len), (v_cu, cu_seqlens), (scales[0], k_scale), (scales[1], v_scale))
    if kept and all_as_given(small):
        _prepared.keep(key, (params, o_status.array if status is None else None))
    return result


def _outputs(
    check: Checker, shape: tuple[int, ...], arrays: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[View | None, View | None, View | None]:
    """Check the preallocated results, or allocate them; rows of padding start as 0 and -inf."""
    q, *_, out, lse, status = arrays
    o_lse = None
    if options[-1]:
        pair = (out is None) == (lse is None)
        check.require(pair, "out", out, "a pair (out, lse) with return_lse=True")
        if pair:
            o_lse = check.output("out[1]", lse, shape[:2], "float32")
            if lse is None and o_lse is not None:
                o_lse.array[...] = -math.inf
    requests = check.sizes.get("R", 0)
    if check.problems:  # a wrong q says nothing about the shape of the results
        return None, o_lse, check.output("status", status, (requests,), "int32")
    o_out = check.output("out", out, shape, dtype_name(q))
    if out is None and o_out is not None:
        o_out.array[...] = 0
    return o_out, o_lse, check.output("status", status, (requests,), "int32")


def _check_options(check: Checker, options: tuple[Any, ...], head_dim: int) -> tuple[Any, ...]:
    """Check the scalar arguments; returns them with the default scale filled in."""
    max_q_len, causal, window, soft_cap, scale, batch_invariant, return_lse = options
    for name, x in (("max_q_len", max_q_len), ("window", window)):
        whole = is_integer(x) and bool(0 <= x < 2**31)
        check.require(whole, name, x, "an integer >= 0")
    soft_cap = _number(soft_cap)
    ok = soft_cap is not None and soft_cap >= 0
    check.require(ok, "soft_cap", options[3], "0 or a positive finite number")
    given = 1.0 / math.sqrt(max(head_dim, 1)) if scale is None else _number(scale)
    check.require(given is not None, "scale", scale, "a finite number")
    return max_q_len, bool(causal), window, soft_cap, given, bool(batch_invariant), bool(return_lse)


def _number(x: Any) -> float | None:
    """Return a finite float32-representable number, or ``None``."""
    try:
        value = float(x)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if abs(value) < 3.4e38 else None  # false for NaN


def _params(views: tuple[View | None, ...], options: tuple[Any, ...]) -> Any:
    q, k_cache, _, table, _, _, k_scale, v_scale, work, *_ = views
    assert q is not None and k_cache is not None and table is not None
    p = _C.VerifyAttentionParams()
    p.num_tokens, p.num_q_heads, p.head_dim = q.shape
    p.num_pages, p.page_size, p.num_kv_heads = k_cache.shape[:3]
    p.num_requests, p.max_pages = table.shape
    p.num_threads = _backend.num_threads()
    p.dtype, p.cache_dtype = q.code, k_cache.code
    p.q_token_stride, p.q_head_stride = q.strides[:2]
    p.page_stride, p.row_stride, p.head_stride = k_cache.strides[:3]
    p.page_table_stride = table.strides[0]
    p.k_scale_stride, p.v_scale_stride = scale_stride(k_scale), scale_stride(v_scale)
    p.work_size = 0 if work is None else work.shape[0]
    p.max_q_len, p.causal, p.window, p.soft_cap, p.scale, p.batch_invariant, _ = options
    return p


def _run_reference(views: tuple[View | None, ...], options: tuple[Any, ...]) -> None:
    arrays = [None if x is None else to_numpy(x.array) for x in views[:8]]
    q, k_cache, v_cache, table, kv_len, cu, k_scale, v_scale = arrays
    assert q is not None and cu is not None
    o_out, o_lse, o_status = views[-3:]
    assert o_out is not None and o_status is not None
    status = np.zeros(o_status.shape, np.int32)
    max_q_len, causal, window, soft_cap, scale, _, _ = options
    values, lse = _backend.reference("verify_attention", "verify_attention")(
        q,
        k_cache,
        v_cache,
        page_table=table,
        kv_len=kv_len,
        cu_seqlens=cu,
        max_q_len=max_q_len,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        status=status,
    )
    rows = np.zeros(len(q), bool)  # padding rows of a preallocated result stay as they are
    for begin, end in pairwise(cu):
        if 0 <= begin <= end <= len(q):
            rows[begin:end] = True
    _backend.copy_into(o_out, values, rows)
    if o_lse is not None:
        _backend.copy_into(o_lse, lse, rows)
    _backend.copy_into(o_status, status)
