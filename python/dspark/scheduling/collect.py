# SPDX-License-Identifier: Apache-2.0
"""Rounds to calibrate on: raw confidence logits beside what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dspark_ext as dx
from dspark.engine import Engine
from dspark.engine.metrics import Metrics
from dspark_ext._arrays import to_numpy

__all__ = ["Recorder", "Rounds", "collect"]

#: ``logit [N, gamma]``, ``accepted [N, gamma]`` and ``request [N]``.
Rounds = tuple[NDArray[np.float32], NDArray[np.int8], NDArray[np.int64]]


class Recorder(Metrics):
    """Engine metrics that also keep the logits and the acceptance flags of every drafted round.

    Parameters
    ----------
    state : RoundState
        The engine's: it knows which request has a slot.
    """

    def __init__(self, state: dx.RoundState) -> None:
        super().__init__()
        self._serial = state.serial
        self._logit: list[NDArray[np.float32]] = []
        self._accepted: list[NDArray[np.int8]] = []
        self._request: list[NDArray[np.int64]] = []

    def add(self, result: dx.Round) -> None:
        """Count the round and keep its rows."""
        super().add(result)
        if not result.drafted or result.draft is None:
            return
        if result.draft.confidence_logit is None:
            raise dx.ArgumentError("collect: drafter: got one without a confidence head")
        rows = [r for r in result.slots if result.proposed[r]]
        self._logit.append(to_numpy(result.draft.confidence_logit)[rows].astype(np.float32))
        self._accepted.append(np.asarray(result.accepted)[rows].astype(np.int8))
        self._request.append(self._serial[rows])

    def arrays(self) -> Rounds:
        """Return the N rounds kept; those of a request are neighbours, in their order."""
        if not self._logit:
            return np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int8), np.zeros(0, np.int64)
        _, request = np.unique(np.concatenate(self._request), return_inverse=True)
        order = np.argsort(request, kind="stable")
        kept = np.concatenate(self._logit), np.concatenate(self._accepted)
        return kept[0][order], kept[1][order], request[order].astype(np.int64)


def collect(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    params: Any = None,
    *,
    max_requests: int = 8,
    framework: str = "torch",
    progress: bool = False,
) -> Rounds:
    """Answer prompts with the scheduler off and keep what :func:`dspark.scheduling.fit` wants.

    Parameters
    ----------
    target, drafter
        See :mod:`dspark_ext.interfaces`; the drafter has a confidence head.
    prompts : sequence of token id sequences
        Held out from training.
    params : SamplingParams or a sequence of them, optional
        As in service: acceptance depends on the temperature.
    max_requests : int
        Concurrent requests.
    framework : {"torch", "numpy"}
        Kind of the arrays handed to the models.
    progress : bool
        Show a progress bar.

    Returns
    -------
    logit : ndarray, shape (N, gamma), float32
    accepted : ndarray, shape (N, gamma), int8
        Flags of :func:`dspark_ext.rejection_sample`; N rounds of single requests.
    request : ndarray, shape (N,), int64
        Which prompt a round belongs to; rounds of one are neighbours, in their order.

    Raises
    ------
    ArgumentError
        When the drafter has no confidence head.

    Examples
    --------
    >>> from dspark_ext.toy import ToyDrafter, ToyTarget
    >>> target = ToyTarget(6)
    >>> logit, accepted, request = collect(
    ...     target, ToyDrafter(6, gamma=3, like=target), [[1, 2]],
    ...     dx.SamplingParams(max_new_tokens=8), framework="numpy")
    >>> logit.shape == accepted.shape and logit.shape[1]
    3
    """
    from tqdm import tqdm

    longest = max((len(p) for p in prompts), default=1)
    given = [params] if isinstance(params, dx.SamplingParams) else list(params or ())
    most = max((p.max_new_tokens for p in given), default=dx.SamplingParams().max_new_tokens)
    engine = Engine(
        target,
        drafter,
        max_requests=min(max_requests, max(1, len(prompts))),
        scheduler=dx.Scheduler("off"),
        max_len=longest + most + 2 * 17,
        framework=framework,
    )
    recorder = engine.metrics = Recorder(engine.state)
    with tqdm(total=len(prompts), desc="collect", unit="prompt", disable=not progress) as bar:
        for chunk in engine.generate(prompts, params):
            bar.update(chunk.finish is not None)
    return recorder.arrays()
