# SPDX-License-Identifier: Apache-2.0
"""Confidence logits to conditional acceptance and survival (paper eq. 7, section 3.2.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dspark_ext.results import Confidence
from dspark_ext.status import Status

__all__ = ["confidence"]


def confidence(
    logit: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    probability: ArrayLike | None = None,
    active: ArrayLike | None = None,
) -> Confidence:
    """``c_k = sigmoid(logit_k / tau_k)`` and ``a_j = prod_{i <= j} c_i``.

    Parameters
    ----------
    logit : array_like, shape (R, gamma)
        Raw logits; give either this or ``probability``.
    temperature : array_like, shape (gamma,), optional
        STS temperatures tau_k; 1 when absent.
    probability : array_like, shape (R, gamma)
        Conditional probabilities, clamped to [0, 1].
    active : array_like, shape (R,), optional
        0 marks padded rows: their results are 0 here.

    Returns
    -------
    Confidence
        float32 ``conditional`` and ``survival`` (R, gamma), int32 ``status`` (R,).

    Raises
    ------
    ValueError
        Unless exactly one of ``logit`` and ``probability`` is given.

    Notes
    -----
    A NaN counts as probability 0 (NAN_CONFIDENCE). A tau_k that is not positive and finite gives
    probability 0 as well (BAD_PARAM): the position is then never scheduled.

    Examples
    --------
    >>> confidence([[-2.0, 1.25]]).conditional.round(6).tolist()
    [[0.11920300126075745, 0.7773000001907349]]
    """
    if (logit is None) == (probability is None):
        raise ValueError("logit, probability: expected exactly one of them")
    x = np.asarray(logit if logit is not None else probability, dtype=np.float64)
    requests, gamma = x.shape
    on = np.ones(requests, bool) if active is None else np.asarray(active) != 0
    tau = np.ones(gamma) if temperature is None else np.asarray(temperature, dtype=np.float64)
    bad_tau = ~(np.isfinite(tau) & (tau > 0))
    if logit is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            c = 1.0 / (1.0 + np.exp(-x / np.where(bad_tau, 1.0, tau)))
    else:
        c = np.clip(x, 0.0, 1.0)
    nan = np.isnan(x)
    c = np.where(nan | bad_tau | ~on[:, None], 0.0, c)
    status = np.where(nan.any(axis=1), int(Status.NAN_CONFIDENCE), 0)
    if bad_tau.any():
        status = status | int(Status.BAD_PARAM)
    return Confidence(
        conditional=c.astype(np.float32),
        survival=np.cumprod(c, axis=1).astype(np.float32),
        status=np.where(on, status, 0).astype(np.int32),
    )
