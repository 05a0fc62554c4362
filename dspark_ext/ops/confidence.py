# SPDX-License-Identifier: Apache-2.0
"""Confidence head outputs to conditional acceptance and survival."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark_ext import _C, _backend
from dspark_ext._arrays import Checker, to_numpy
from dspark_ext.results import Confidence

__all__ = ["confidence"]


def confidence(
    logit: Any = None,
    temperature: Any = None,
    probability: Any = None,
    active: Any = None,
    *,
    out: Confidence | None = None,
    strict: bool = False,
    backend: str | None = None,
) -> Confidence:
    """Turn raw confidence logits into conditional acceptance ``c`` and survival ``a``.

    ``c_k = sigmoid(logit_k / tau_k)`` and ``a_j = prod_{i <= j} c_i`` (DSpark eq. 7 with
    sequential temperature scaling, section 3.2.1).

    Parameters
    ----------
    logit : array, shape (R, gamma), float32
        Raw confidence logits. Give either this or ``probability``.
    temperature : array, shape (gamma,), float32, optional
        STS temperatures ``tau_k > 0``; 1 when absent. Only with ``logit``.
    probability : array, shape (R, gamma), float32
        Conditional probabilities of an engine's own head; clamped to [0, 1].
    active : array, shape (R,), bool or uint8, optional
        0 marks padded rows, which are neither read nor written.
    out : Confidence, optional
        Preallocated results.
    strict : bool
        Synchronise and raise :class:`dspark_ext.StatusError` when a status bit reports trouble.
    backend : {None, "cpu", "cuda", "reference", "simt"}
        Forces one; by default the device of the arrays decides.

    Returns
    -------
    Confidence
        ``conditional`` and ``survival`` (R, gamma) float32, ``status`` (R,) int32.

    Raises
    ------
    ArgumentError
        Lists every argument whose shape, dtype or range is wrong; nothing has been written.

    Notes
    -----
    A NaN counts as probability 0 and sets ``Status.NAN_CONFIDENCE``. A ``tau_k`` that is not
    positive and finite is an error here; on a device it sets ``Status.BAD_PARAM``.

    Examples
    --------
    >>> import numpy as np
    >>> c = confidence(np.array([[-2.0, 1.25]], dtype=np.float32))
    >>> c.conditional.round(6).tolist()
    [[0.11920300126075745, 0.7773000001907349]]
    """
    check = Checker("confidence")
    given = (logit is not None) + (probability is not None)
    names = ("neither", "one", "both")
    check.require(given == 1, "logit, probability", names[given], "exactly one of them")
    v_logit = check.array("logit", logit, ("R", "gamma"), ("float32",), optional=True)
    v_prob = check.array("probability", probability, ("R", "gamma"), ("float32",), optional=True)
    requests, gamma = check.sizes.get("R", 0), check.sizes.get("gamma", 1)
    check.require(1 <= gamma <= 16, "gamma", str(gamma), "1..16")
    v_temperature = check.per_request("temperature", temperature, gamma, "float32")
    tau = check.values(v_temperature)
    ok = bool(np.all(np.isfinite(tau) & (tau > 0)))
    check.require(ok, "temperature", str(tau.tolist()), "finite values > 0")
    if temperature is not None and logit is None:
        check.fail("temperature", "STS temperatures with probability", "them with logit")
    v_active = check.per_request("active", active, requests, "uint8")
    shape = (requests, gamma)
    out = check.results(out, Confidence)
    o_conditional = check.output("out.conditional", out and out.conditional, shape, "float32")
    o_survival = check.output("out.survival", out and out.survival, shape, "float32")
    o_status = check.output("out.status", out and out.status, (requests,), "int32")
    backend = _backend.resolve(check, backend)
    check.done()
    assert o_conditional is not None and o_survival is not None and o_status is not None
    result = Confidence(o_conditional.array, o_survival.array, o_status.array)

    if backend == "reference":
        answer = _backend.reference("confidence", "confidence")(
            logit=None if v_logit is None else to_numpy(v_logit.array),
            temperature=None if v_temperature is None else tau,
            probability=None if v_prob is None else to_numpy(v_prob.array),
            active=None if v_active is None else to_numpy(v_active.array),
        )
        keep = None if v_active is None else to_numpy(v_active.array) != 0
        _backend.copy_into(o_conditional, answer.conditional, keep)
        _backend.copy_into(o_survival, answer.survival, keep)
        _backend.copy_into(o_status, answer.status, keep)
    else:
        p = _C.ConfidenceParams()
        p.num_requests, p.gamma, p.num_threads = requests, gamma, _backend.num_threads()
        if v_logit is not None:
            p.logit, p.logit_stride = v_logit.ptr, v_logit.strides[0]
        if v_prob is not None:
            p.probability, p.probability_stride = v_prob.ptr, v_prob.strides[0]
        p.temperature, p.active = _backend.ptr(v_temperature), _backend.ptr(v_active)
        p.conditional, p.survival = o_conditional.ptr, o_survival.ptr
        p.status = o_status.ptr
        _backend.run("confidence", p, backend, check.like)
    _backend.raise_on_trouble("confidence", result.status, strict)
    return result
