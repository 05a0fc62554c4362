# SPDX-License-Identifier: Apache-2.0
"""Append keys and values to a paged cache, and commit a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_ext import _C, _backend
from dspark_ext._arrays import FLOATS, Checker, View, empty, on_device, to_numpy, view
from dspark_ext.ops._paging import check_caches, check_scale, check_writable, scale_stride
from dspark_ext.ops._prepared import Prepared, addresses, all_as_given, signature
from dspark_ext.ops.rope import Rope

__all__ = ["paged_kv_append", "paged_kv_commit"]

_prepared = Prepared()


def paged_kv_append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    page_table: Any,
    kv_len: Any,
    cu_seqlens: Any,
    rope: Rope | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_new: Any = None,
    out: Any = None,
    strict: bool = False,
    backend: str | None = None,
) -> Any:
    """Write the keys and values of new tokens behind what each request already holds.

    Token ``i`` of request ``r`` goes to logical position ``p = kv_len[r] + i``: page
    ``page_table[r, p // page_size]``, row ``p % page_size``. ``kv_len`` itself does not change (see
    :func:`paged_kv_commit`); entries past it are dead and may be overwritten (contract, section 2).

    Parameters
    ----------
    k, v : array, shape (B, Hkv, D), float32 | bfloat16 | float16
        New rows, in the order of ``cu_seqlens``. Token and head strides are free. Rows past
        ``cu_seqlens[R]`` are padding and never read.
    k_cache, v_cache : array, shape (pages, page_size, Hkv, D)
        float32, bfloat16, float16 or float8_e4m3fn. Written in place; any strides with a contiguous
        last dimension, the same for both. The dtype may differ from that of ``k``: a value is
        rounded once, after the rotation. float8_e4m3fn takes the nearest element to ``x / scale``;
        what is beyond 448 becomes 448, NaN stays NaN.
    page_table : array, shape (R, max_pages), int32
        Page ids; -1 = none. Rows may be strided.
    kv_len : array, shape (R,), int
        Lengths before the append.
    cu_seqlens : array, shape (R + 1,), int
        Rows ``cu_seqlens[r] .. cu_seqlens[r + 1]`` belong to request ``r``.
    rope : Rope, optional
        Rotate ``k`` at its position; angles in float64, their cosine and sine in float32.
    k_scale, v_scale : float or array, shape () | (1,) | (Hkv,), float32, optional
        Scales of a float8_e4m3fn cache, one or one a KV head: a key is ``k_scale * element``. 1
        when absent. Not taken with other caches. Anything but an array of (1,) or (Hkv,) is
        converted at each call.
    num_new : array, shape (R,), int, optional
        Append only the first ``num_new[r]`` rows of each request: a drafter that keeps the context
        features of a round passes the plan's ``cu_seqlens`` and the round's ``num_emitted``, with
        its own length before those tokens as ``kv_len``. 0 for a request that stands still.
    out : array, shape (R,), int32, optional
        Preallocated status.
    strict : bool
        Synchronise and raise :class:`dspark_ext.StatusError` when a status bit reports trouble.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.

    Returns
    -------
    array, shape (R,), int32
        Status bits. ``KV_OVERFLOW`` (position beyond the page table) and ``BAD_PAGE`` (page id
        negative or >= pages): that token is not written, the request's other tokens are.
        ``BAD_PARAM`` (negative ``kv_len``, bounds that decrease or leave [0, B], ``num_new``
        outside 0..rows): nothing of the request is written; a scale on a device that is not a
        positive finite number: nothing is written at all.

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype, device or (scales) value is wrong; nothing has been
        written.

    Notes
    -----
    Requests may share pages that are read only; no page may be written for two of them.

    Examples
    --------
    >>> import numpy as np
    >>> cache = np.zeros((2, 2, 2, 1, 4), np.float32)  # k and v, 2 pages of 2 rows, 1 head
    >>> k = np.ones((3, 1, 4), np.float32)
    >>> status = paged_kv_append(k, k, *cache, page_table=np.array([[1, 0]], np.int32),
    ...                          kv_len=[1], cu_seqlens=[0, 3])
    >>> cache[0, :, :, 0, 0].tolist(), status.tolist()  # positions 1, 2, 3; page 1 comes first
    ([[1.0, 1.0], [0.0, 1.0]], [0])
    """
    arrays = (
        k,
        v,
        k_cache,
        v_cache,
        page_table,
        kv_len,
        cu_seqlens,
        k_scale,
        v_scale,
        num_new,
        out,
    )
    key = None
    if backend in (None, "cpu") and (rope is None or isinstance(rope, Rope)):
        seen = signature(arrays)
        key = None if seen is None else (seen, rope)
    params = None if key is None else _prepared.find(key)
    if params is not None:
        status = empty(page_table.shape[:1], "int32", k) if out is None else out
        params.set_arrays(*addresses((*arrays[:-1], status)))
        params.num_threads = _backend.num_threads()
        _backend.run("paged_kv", params)
    else:
        status = _first_call(arrays, rope, backend, key)
    _backend.raise_on_trouble("paged_kv_append", status, strict)
    return status


def _first_call(arrays: tuple[Any, ...], rope: Rope | None, backend: str | None, key: Any) -> Any:
    """Check everything, run, and keep the params object when later calls may reuse it."""
    check = Checker("paged_kv_append")
    k, v, k_cache, v_cache, page_table, kv_len, cu_seqlens, k_scale, v_scale, num_new, out = arrays
    v_k = check.array("k", k, ("B", "Hkv", "D"))
    v_v = check.array("v", v, ("B", "Hkv", "D"), FLOATS if v_k is None else (v_k.dtype,))
    caches = check_caches(check, k_cache, v_cache)
    check_writable(check, "k_cache", k_cache)
    check_writable(check, "v_cache", v_cache)
    v_table = check.array("page_table", page_table, ("R", "max_pages"), ("int32",))
    requests = check.sizes.get("R", 0)
    v_len = check.per_request("kv_len", kv_len, requests, "int32", optional=False)
    v_cu = check.per_request("cu_seqlens", cu_seqlens, requests + 1, "int32", optional=False)
    scales = (
        check_scale(check, "k_scale", k_scale, caches[0]),
        check_scale(check, "v_scale", v_scale, caches[1]),
    )
    v_new = check.per_request("num_new", num_new, requests, "int32")
    o_status = check.output("out", out, (requests,), "int32")
    if rope is not None and check.require(isinstance(rope, Rope), "rope", rope, "a dx.Rope"):
        d = check.sizes.get("D", 2)
        if rope.dim is None:
            check.require(d % 2 == 0, "k", f"head size {d}", "an even one with rope")
        else:
            expected = f"at least rope.dim = {rope.dim}"
            check.require(d >= rope.dim, "k", f"head size {d}", expected)
    backend = _backend.resolve(check, backend)
    check.done()
    views = (v_k, v_v, *caches, v_table, v_len, v_cu, *scales, v_new, o_status)
    assert o_status is not None
    if backend == "reference":
        _run_reference(views, rope)
        return o_status.array
    params = _params(views, rope)
    params.set_arrays(*(_backend.ptr(x) for x in views))
    frequencies = None
    if rope is not None and v_k is not None:
        # On the host they live in the Rope, which is part of the key of kept params.
        values = rope.inv_freq(v_k.shape[2])
        frequencies = view(check.like_kind(values.copy()) if on_device(k) else values)
        params.rope_inv_freq = frequencies.ptr
    _backend.run("paged_kv", params, backend, check.like)
    assert v_len is not None and v_cu is not None
    small = (
        (v_len, kv_len),
        (v_cu, cu_seqlens),
        (scales[0], k_scale),
        (scales[1], v_scale),
        (v_new, num_new),
    )
    if key is not None and backend == "cpu" and all_as_given(small):
        _prepared.keep(key, params)
    return o_status.array


def _params(views: tuple[View | None, ...], rope: Rope | None) -> Any:
    k, v, k_cache, _, table, _, _, k_scale, v_scale, _, _ = views
    assert k is not None and v is not None and k_cache is not None and table is not None
    p = _C.PagedKvParams()
    p.num_tokens, p.num_kv_heads, p.head_dim = k.shape
    p.num_pages, p.page_size = k_cache.shape[:2]
    p.num_requests, p.max_pages = table.shape
    p.num_threads = _backend.num_threads()
    p.dtype, p.cache_dtype = k.code, k_cache.code
    p.k_token_stride, p.k_head_stride = k.strides[:2]
    p.v_token_stride, p.v_head_stride = v.strides[:2]
    p.page_stride, p.row_stride, p.head_stride = k_cache.strides[:3]
    p.page_table_stride = table.strides[0]
    p.k_scale_stride, p.v_scale_stride = scale_stride(k_scale), scale_stride(v_scale)
    if rope is not None:
        p.rope_theta, p.rope_amplitude = rope.theta, rope.amplitude
        p.rope_dim, p.rope_interleaved = rope.turning(k.shape[2]), int(rope.interleaved)
    return p


def _run_reference(views: tuple[View | None, ...], rope: Rope | None) -> None:
    arrays = [None if x is None else to_numpy(x.array) for x in views]
    k, v, k_cache, v_cache, table, kv_len, cu, k_scale, v_scale, num_new, _ = arrays
    new_k, new_v = np.array(k_cache), np.array(v_cache)
    cache = views[2]
    answer = _backend.reference("paged_kv", "paged_kv_append")(
        k, v, new_k, new_v, page_table=table, kv_len=kv_len, cu_seqlens=cu, rope=rope,
        k_scale=k_scale, v_scale=v_scale, num_new=num_new,
        dtype="f8_e4m3" if cache is not None and cache.dtype == "float8_e4m3fn" else None,
    )  # fmt: skip
    for target, values in zip((*views[2:4], views[-1]), (new_k, new_v, answer), strict=True):
        assert target is not None
        _backend.copy_into(target, values)


def paged_kv_commit(
    kv_len: Any,
    position: Any,
    num_emitted: Any,
    active: Any = None,
    *,
    backend: str | None = None,
) -> None:
    """After a round: ``kv_len += num_emitted`` and ``position += num_emitted``, in place.

    Both stay equal to the position of the next anchor (contract, section 2). A request with
    ``num_emitted <= 0`` is left alone.

    Parameters
    ----------
    kv_len : array, shape (R,), int32
        Written in place.
    position : array, shape (R,), int64
        Written in place.
    num_emitted : array, shape (R,), int
        Tokens the round emitted, ``Verification.num_emitted``.
    active : array, shape (R,), bool or uint8, optional
        0 marks padded rows, which are neither read nor written.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype or device is wrong; nothing has been written.

    Examples
    --------
    >>> import numpy as np
    >>> kv_len, position = np.array([7, 9], np.int32), np.array([7, 9], np.int64)
    >>> paged_kv_commit(kv_len, position, [3, 1], active=[True, False])
    >>> kv_len.tolist(), position.tolist()
    ([10, 9], [10, 9])
    """
    check = Checker("paged_kv_commit")
    v_len = check.array("kv_len", kv_len, ("R",), ("int32",), contiguous=True)
    v_position = check.array("position", position, ("R",), ("int64",), contiguous=True)
    check_writable(check, "kv_len", kv_len)
    check_writable(check, "position", position)
    requests = check.sizes.get("R", 0)
    v_emitted = check.per_request("num_emitted", num_emitted, requests, "int32", optional=False)
    v_active = check.per_request("active", active, requests, "uint8")
    backend = _backend.resolve(check, backend)
    check.done()
    assert v_len is not None and v_position is not None and v_emitted is not None
    if backend == "reference":
        lengths, positions = np.array(to_numpy(kv_len)), np.array(to_numpy(position))
        flags = None if v_active is None else to_numpy(v_active.array)
        _backend.reference("paged_kv", "paged_kv_commit")(
            lengths, positions, to_numpy(v_emitted.array), flags
        )
        _backend.copy_into(v_len, lengths)
        _backend.copy_into(v_position, positions)
        return
    p = _C.PagedKvCommitParams()
    p.num_requests = requests
    p.kv_len, p.position, p.num_emitted = v_len.ptr, v_position.ptr, v_emitted.ptr
    p.active = _backend.ptr(v_active)
    _backend.launch("paged_kv_commit", p, backend, v_len.array)
