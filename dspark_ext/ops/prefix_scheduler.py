# SPDX-License-Identifier: Apache-2.0
"""How many drafts of each request the target verifies, and the layout of its batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dspark_ext import _C, _backend
from dspark_ext._arrays import (
    ArgumentError,
    Checker,
    View,
    empty,
    is_integer,
    on_device,
    to_numpy,
    view,
)
from dspark_ext.ops._prepared import Prepared, all_as_given
from dspark_ext.results import Plan
from dspark_ext.scheduling import CostTable, LaggedSurvival

__all__ = ["prefix_schedule"]

Mode = Literal["causal", "two_phase", "threshold", "fixed", "off"]
MODES = ("causal", "two_phase", "threshold", "fixed", "off")
_INTS = ("int32", "int64")


def prefix_schedule(
    survival: Any,
    cost: Any = None,
    mode: Mode = "causal",
    lagged: LaggedSurvival | None = None,
    budget: int | None = None,
    conditional: Any = None,
    threshold: float | None = None,
    fixed_len: int | None = None,
    min_len: Any = None,
    max_len: Any = None,
    weight: Any = None,
    active: Any = None,
    request_slots: Any = None,
    kv_len: Any = None,
    capacity: int | None = None,
    anchor: Any = None,
    draft_tokens: Any = None,
    position: Any = None,
    padded_tokens: int | None = None,
    *,
    out: Plan | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> Plan:
    """Choose how many drafts of each request go to the target (DSpark section 3.2.2).

    With ``B = sum (1 + l_r)`` tokens in the target step and ``tau = sum w_r (1 + sum_j a_{r,j})``
    expected tokens, the scheduler maximises ``Theta = tau * SPS(B)``, where ``SPS = 1000 /
    (ms(B) + draft_ms + ms_per_kv_token * sum kv_len)``.

    Parameters
    ----------
    survival : array, shape (R, gamma), float32
        Live survivals ``a_{r,j}``, as :func:`dspark_ext.confidence` returns them. May be ``None``
        in the modes threshold, fixed and off; Theta is NaN then.
    cost : CostTable or array of float, shape (B_max + 1,), optional
        Milliseconds of a target step by its tokens (entry 0 is not read; a raw array is taken as it
        is). Needed by causal, and by two_phase without ``budget``; elsewhere it only prices Theta.
    mode : {"causal", "two_phase", "threshold", "fixed", "off"}
        * causal: Algorithm 1. Admit by ``weight * a`` descending while Theta rises strictly.
        * two_phase: admit the K best, K from a full search over ``lagged``, or ``budget``
          (section 5.2). Right for stepwise costs, where causal stops at the first step.
        * threshold: up to the first ``conditional < threshold``.
        * fixed: ``fixed_len`` drafts. off: ``max_len`` drafts, no scheduling.
    lagged : LaggedSurvival
        For two_phase. Arrays are refused: a full search over live survivals is not lossless.
    budget : int
        For two_phase: draft tokens to admit over all requests, floors included, decided without a
        look at this round's drafts. Replaces ``cost`` and ``lagged``.
    conditional : array, shape (R, gamma), float32
        Conditional acceptance ``c``, for threshold.
    threshold : float
        In [0, 1], for threshold.
    fixed_len : int
        In 0..gamma, for fixed.
    min_len, max_len : int or array, shape (R,), int32, optional
        Floors, admitted first in every mode, and caps. They must not depend on this round's
        drafts. A cap above gamma means gamma, a floor above the cap means the cap.
    weight : float or array, shape (R,), float32, optional
        Objective weights ``w_r`` in [0, 128]; 1 when absent.
    active : array, shape (R,), bool or uint8, optional
        0 marks padded rows: length 0, no token, nothing of theirs is read.
    request_slots : array, shape (R,), int, optional
        Slot of each request in ``lagged``; 0 .. R - 1 when absent. Only read with ``lagged``.
    kv_len : array, shape (R,), int32, optional
        KV lengths; needed when the cost table has ``ms_per_kv_token > 0``.
    capacity : int, optional
        Upper bound on B, anchors included.
    anchor : array, shape (R,), int32
    draft_tokens : array, shape (R, gamma), int32 or int64
    position : array, shape (R,), int64
        Anchor ids, draft ids, and absolute positions of the anchors. Give all three or none.
    padded_tokens : int, optional
        Length of the flattened arrays; by default the largest B that the arguments allow, which is
        also the least that is accepted.
    out : Plan, optional
        Preallocated results.
    strict : bool
        Synchronise and raise :class:`dspark_ext.StatusError` when a status bit reports trouble.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.

    Returns
    -------
    Plan
        ``length`` (R,), ``cu_seqlens`` (R + 1,), ``total_tokens`` (), ``theta`` () in tokens per
        second, ``row_to_request``, ``row_offset``, ``token_ids``, ``positions`` (padded_tokens,),
        ``work`` for :func:`dspark_ext.verify_attention`, and ``status`` (R,).

    Raises
    ------
    ArgumentError
        Lists every wrong argument; nothing has been written. A missing cost table, lagged
        survivals of another type and too few ``padded_tokens`` are among them.

    Notes
    -----
    Lossless by construction: whether draft j of a request is verified never depends on draft j or
    later ones of that request. It needs a confidence that does not look at the draft it rates, and
    distinct seeds among the requests of one scheduler and its history.

    The order is total (key descending, position, request), sums are exact on a grid of 2^-40, and
    Theta is one fixed sequence of float64 operations, so every backend and rank chooses alike.

    A NaN survival counts as 0 (``Status.NAN_CONFIDENCE``). A negative floor, cap or KV length
    counts as 0, a weight outside [0, 128] as 0, and more active requests than ``capacity`` admit
    nothing: ``Status.BAD_PARAM`` each. A table that ends before the active requests admits nothing
    and gives Theta NaN. Without active requests Theta is 0.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.cumprod(np.array([[0.95, 0.92, 0.85, 0.30]], dtype=np.float32), axis=1)
    >>> sps = np.array([1.0, 1000, 520, 400, 340, 280])  # [0] is not read
    >>> plan = prefix_schedule(a, 1000 / sps)
    >>> plan.length.tolist(), int(plan.total_tokens), round(float(plan.theta), 2)
    ([3], 4, 1212.75)
    """
    given = locals()
    key = _key(given)
    kept = None if key is None else _prepared.find(key)
    result = None if kept is None else _again(kept, given)
    if result is None:
        result = _first_call(given, key)
    _backend.raise_on_trouble("prefix_schedule", result.status, strict)
    return result


def _first_call(given: dict[str, Any], key: Any) -> Plan:
    """Check everything, run, and keep the params object when later calls may reuse it."""
    check = Checker("prefix_schedule")
    a = _read_arguments(check, given)
    backend = _backend.resolve(check, given["backend"])
    result, outputs = _outputs(check, a, given["padded_tokens"], given["out"])
    check.done()
    if backend == "reference":
        _run_reference(a, outputs)
        return result
    _fill(a.params, outputs)
    _backend.run("prefix_scheduler", a.params, backend, check.like)
    as_given = all_as_given(tuple((v, given[name]) for name, v in a.views.items()))
    if key is not None and backend == "cpu" and as_given:
        like = next(n for n in a.views if given[n] is check.like)
        shapes = {n: (v.shape, v.dtype) for n, v in outputs.items() if v is not None}
        _prepared.keep(key, _Kept(a.params, like, shapes))
    return result


# --- calls that repeat ---------------------------------------------------------------------------

_prepared = Prepared()
_SCALARS = ("mode", "budget", "threshold", "fixed_len", "capacity", "padded_tokens", "backend")
_ARRAYS = ("survival", "conditional", "draft_tokens", "min_len", "max_len", "weight", "active",
           "kv_len", "anchor", "position")  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Kept:
    params: Any
    like: str  # the argument whose kind the results have
    shapes: dict[str, tuple[tuple[int, ...], str]]  # of the results


def _key(given: dict[str, Any]) -> Any:
    """What the checks look at, or ``None`` when a call has to go through them."""
    cost, lagged = given["cost"], given["lagged"]
    if given["backend"] not in (None, "cpu") or not isinstance(cost, CostTable | None):
        return None
    if not isinstance(lagged, LaggedSurvival | None):
        return None
    try:
        arrays = tuple([_seen(given[name]) for name in _ARRAYS])
        out = given["out"] and tuple([_seen(x) for x in vars(given["out"]).values()])
    except (AttributeError, TypeError):  # a list, a scalar: converted at each call
        return None
    priced = cost and (cost.max_tokens, cost.ms_per_kv_token > 0)
    scalars = tuple([(type(given[name]), given[name]) for name in _SCALARS])
    key = (arrays, out, priced, lagged is None, scalars)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _seen(x: Any) -> Any:
    if x is None:
        return None
    if isinstance(x, np.ndarray):
        return x.shape, x.strides, x.dtype, x.flags.writeable
    return x.shape, x.stride(), x.dtype, x.device


def _address(x: Any) -> int:
    address: int = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    return address


def _again(kept: _Kept, given: dict[str, Any]) -> Plan | None:
    """Run a call that looks like an earlier one: only addresses and the table's values change."""
    p, cost, values = kept.params, given["cost"], None
    if given["lagged"] is not None:
        try:
            values = given["lagged"].survival(given["request_slots"], p.gamma, p.num_requests)
        except ArgumentError:
            return None  # the checks report it with whatever else is wrong
        p.lagged = _address(values)
    for name in _ARRAYS:
        if given[name] is not None:
            setattr(p, name, _address(given[name]))
    if cost is not None:
        p.cost_ms = _address(cost.array)
        p.draft_ms, p.ms_per_kv_token = cost.draft_ms, cost.ms_per_kv_token
    out: Plan | None = given["out"]
    if out is None:
        like = given[kept.like]
        arrays = {n: empty(shape, dtype, like) for n, (shape, dtype) in kept.shapes.items()}
        out = Plan(**{"token_ids": None, "positions": None, **arrays})
    for name in kept.shapes:
        setattr(p, name, _address(getattr(out, name)))
    p.num_threads = _backend.num_threads()
    _backend.run("prefix_scheduler", p)
    return out


@dataclass(eq=False)
class _Arguments:
    """Checked arguments: the C params, and what the reference gets instead of pointers."""

    params: Any
    requests: int
    gamma: int
    with_tokens: bool
    views: dict[str, View | None]
    keep: list[Any]  # what the params point into beside the views
    reference: dict[str, Any]


def _read_arguments(check: Checker, given: dict[str, Any]) -> _Arguments:
    p = _C.PrefixSchedulerParams()
    known = check.choice("mode", given["mode"], MODES)
    mode = given["mode"] if known else None
    given = {**given, "mode": mode}
    p.mode = MODES.index(mode) if known else 0
    views: dict[str, View | None] = {}
    for name in ("survival", "conditional"):
        needed = mode in (("causal", "two_phase") if name == "survival" else ("threshold",))
        shape = ("R", "gamma")
        views[name] = check.array(name, given[name], shape, ("float32",), optional=not needed)
    views["draft_tokens"] = _draft_tokens(check, given["draft_tokens"])
    sized = "R" in check.sizes
    check.require(sized, "survival", "no array to size the batch", "survival or draft_tokens")
    requests, gamma = check.sizes.get("R", 0), check.sizes.get("gamma", 1)
    check.require(1 <= gamma <= 16, "gamma", str(gamma), "1..16")
    p.num_requests, p.gamma, p.num_threads = requests, gamma, _backend.num_threads()
    for name, dtype in _PER_REQUEST.items():
        views[name] = check.per_request(name, given[name], requests, dtype)
    for name, v in views.items():
        if v is not None:
            setattr(p, name, v.ptr)
            if len(v.shape) == 2:
                setattr(p, name + "_stride", v.strides[0])
    tokens = [given[name] is not None for name in ("anchor", "draft_tokens", "position")]
    what = "anchor, draft_tokens, position"
    check.require(len(set(tokens)) == 1, what, f"{sum(tokens)} of the three", "all or none")
    a = _Arguments(p, requests, gamma, all(tokens), views, [], {})
    _read_policy(check, given, a)
    _read_cost(check, given, a)
    return a


_PER_REQUEST = {
    "min_len": "int32",
    "max_len": "int32",
    "weight": "float32",
    "active": "uint8",
    "kv_len": "int32",
    "anchor": "int32",
    "position": "int64",
}


def _draft_tokens(check: Checker, x: Any) -> View | None:
    v = check.array("draft_tokens", x, ("R", "gamma"), _INTS, optional=True)
    if v is None or v.dtype == "int32":
        return v
    if on_device(v.array):  # ids beyond 32 bits are the device's to find: no row of any table
        return view(v.array.clamp(-1, 2**31 - 1).to(sys.modules["torch"].int32))
    ids = to_numpy(v.array)
    fits = ids.size == 0 or (ids.min() >= -(2**31) and ids.max() < 2**31)
    check.require(bool(fits), "draft_tokens", "ids beyond 32 bits", "ids that fit int32")
    return view(np.ascontiguousarray(ids.astype(np.int32)))


def _read_policy(check: Checker, given: dict[str, Any], a: _Arguments) -> None:
    """Read the arguments of one mode; those of other modes are refused, not ignored."""
    p, mode = a.params, given["mode"]
    owners = {
        "lagged": "two_phase",
        "budget": "two_phase",
        "conditional": "threshold",
        "threshold": "threshold",
        "fixed_len": "fixed",
    }
    for name, owner in owners.items():
        if given[name] is not None and mode not in (None, owner):
            check.fail(name, f"a value in mode {mode!r}", f"it only in mode {owner!r}")
    p.budget = p.capacity = -1
    if given["budget"] is not None:
        p.budget = _integer(check, "budget", given["budget"], 0, 2**31 - 1)
    if given["capacity"] is not None:
        least = a.requests if given["active"] is None else 0
        p.capacity = _integer(check, "capacity", given["capacity"], least, 2**31 - 1)
    if mode == "threshold":
        t = given["threshold"]
        good = isinstance(t, (int, float, np.floating)) and bool(0 <= t <= 1)
        check.require(good, "threshold", t, "a number in 0..1")
        p.threshold = float(t) if good else 0.0
    if mode == "fixed":
        p.fixed_len = _integer(check, "fixed_len", given["fixed_len"], 0, a.gamma)
    a.reference.update(
        mode=mode,
        budget=given["budget"],
        capacity=given["capacity"],
        threshold=given["threshold"],
        fixed_len=given["fixed_len"],
        lagged=_read_lagged(check, given, a),
    )


def _integer(check: Checker, name: str, x: Any, low: int, high: int) -> int:
    whole = is_integer(x)
    good = whole and bool(low <= x <= high)
    check.require(good, name, x, f"an integer in {low}..{high}")
    return int(x) if good else low


def _read_lagged(check: Checker, given: dict[str, Any], a: _Arguments) -> Any:
    lagged, budget = given["lagged"], given["budget"]
    if given["mode"] != "two_phase":
        return None
    if lagged is None:
        check.require(budget is not None, "lagged, budget", "neither", "one of them in two_phase")
        return None
    if budget is not None:
        check.fail("lagged, budget", "both", "one of them: a budget replaces the search")
    if not isinstance(lagged, LaggedSurvival):
        expected = "a dspark_ext.LaggedSurvival; live survivals must not decide the budget"
        check.require(False, "lagged", lagged, expected)
        return None
    try:
        values = lagged.survival(given["request_slots"], a.gamma, a.requests)
    except ArgumentError as error:
        check.problems.append(str(error))
        return None
    a.params.lagged, a.params.lagged_stride = _lend(check, a, values), a.gamma
    return values


def _lend(check: Checker, a: _Arguments, values: Any) -> int:
    """Address of an array of the host as the call will read it: on the device of the others."""
    v = view(check.like_kind(values))
    a.keep.append(v)
    return v.ptr


def _read_cost(check: Checker, given: dict[str, Any], a: _Arguments) -> None:
    cost, p = given["cost"], a.params
    a.reference.update(cost=None, draft_ms=0.0, ms_per_kv_token=0.0)
    if cost is None:
        searches = given["mode"] == "two_phase" and given["budget"] is None
        if given["mode"] == "causal" or searches:
            expected = (
                "a CostTable or an array of milliseconds by B (`dspark profile` measures one; "
                "modes 'fixed' and 'off' are the policies without)"
            )
            check.fail("cost", "None", expected)
        return
    if isinstance(cost, CostTable):
        values = cost.array
        p.draft_ms, p.ms_per_kv_token = cost.draft_ms, cost.ms_per_kv_token
        missing = cost.ms_per_kv_token > 0 and given["kv_len"] is None and a.requests > 0
        check.require(not missing, "kv_len", "None", "lengths: the table prices KV tokens")
    elif on_device(cost):  # a table that the engine updates in place; its prices are not looked at
        v = check.array("cost", cost, (None,), ("float64",))
        if v is not None:
            a.keep.append(v)
            p.cost_ms, p.cost_size = v.ptr, v.shape[0]
        return
    else:
        try:
            values = to_numpy(cost).astype(np.float64, order="C", casting="same_kind")
        except (TypeError, ValueError):
            check.require(False, "cost", cost, "a CostTable or an array of milliseconds by B")
            return
        shaped = values.ndim == 1 and values.size >= 1  # a scalar is no table
        check.require(shaped, "cost", f"shape {list(values.shape)}", "[B_max + 1], B_max >= 0")
        if not shaped:
            return
        if len(values) > 1 and not (values[1:].min() > 0 and values[1:].max() < np.inf):
            bad = 1 + int(np.argmin(np.isfinite(values[1:]) & (values[1:] > 0)))
            check.fail("cost", f"{values[bad]} at B = {bad}", "milliseconds > 0")
    p.cost_ms, p.cost_size = _lend(check, a, values), len(values)
    a.reference.update(cost=values, draft_ms=p.draft_ms, ms_per_kv_token=p.ms_per_kv_token)


def _outputs(
    check: Checker, a: _Arguments, padded_tokens: int | None, out: Plan | None
) -> tuple[Plan, dict[str, View | None]]:
    least = int(_C.prefix_scheduler_max_tokens(a.params))
    padded = least
    if padded_tokens is not None:
        whole = is_integer(padded_tokens)
        good = whole and bool(least <= padded_tokens < 2**31)
        expected = f"at least {least}, the largest batch these arguments allow"
        check.require(good, "padded_tokens", padded_tokens, expected)
        padded = int(padded_tokens) if good else least
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "length": ((a.requests,), "int32"),
        "cu_seqlens": ((a.requests + 1,), "int32"),
        "total_tokens": ((), "int32"),
        "theta": ((), "float64"),
        "row_to_request": ((padded,), "int32"),
        "row_offset": ((padded,), "int32"),
        "token_ids": ((padded,), "int32"),
        "positions": ((padded,), "int64"),
        "work": ((4 + 3 * a.requests,), "int32"),
        "status": ((a.requests,), "int32"),
    }
    views: dict[str, View | None] = {}
    out = check.results(out, Plan)
    for name, (shape, dtype) in shapes.items():
        if name in ("token_ids", "positions") and not a.with_tokens:
            views[name] = None
            continue
        views[name] = check.output(f"out.{name}", out and getattr(out, name), shape, dtype)
    a.reference["padded_tokens"] = a.params.padded_tokens = padded
    arrays = {n: None if v is None else v.array for n, v in views.items()}
    return Plan(**arrays), views


def _fill(params: Any, outputs: dict[str, View | None]) -> None:
    for name, v in outputs.items():
        setattr(params, name, _backend.ptr(v))
    work = outputs["work"]
    params.work_size = 0 if work is None else work.shape[0]


def _run_reference(a: _Arguments, outputs: dict[str, View | None]) -> None:
    arrays = {n: None if v is None else to_numpy(v.array) for n, v in a.views.items()}
    answer = _backend.reference("prefix_scheduler", "prefix_schedule")(**arrays, **a.reference)
    for name, target in outputs.items():
        values = _work(answer) if name == "work" else getattr(answer, name)
        if target is None or values is None:
            continue
        if target.array.ndim == 0:
            target.array[...] = values.item()
        else:
            _backend.copy_into(target, values)


def _work(plan: Plan) -> np.ndarray[Any, Any]:
    """Write the plan as csrc/core/work_plan.h lays it out: header, then (request, row, rows)."""
    rows = np.diff(plan.cu_seqlens)
    active = np.flatnonzero(rows)
    work = np.zeros(4 + 3 * len(rows), dtype=np.int32)
    work[:4] = (0x44535031, len(rows), len(active), plan.cu_seqlens[-1])
    entries = np.stack([active, plan.cu_seqlens[active], rows[active]], axis=1)
    work[4 : 4 + entries.size] = entries.reshape(-1)
    return work
