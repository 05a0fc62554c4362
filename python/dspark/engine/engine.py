# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over ``decode_round``: requests join and leave between rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dspark_ext as dx
from dspark.engine.metrics import Metrics

FINISH = {0: None, 1: "stop", 2: "length"}


@dataclass(frozen=True)
class Chunk:
    """What one round emitted for one request."""

    request: int  # index into the prompts given to generate()
    tokens: tuple[int, ...]
    num_accepted: int  # the first so many of them were drafted
    finish: str | None  # None, "stop" or "length"


class Engine:
    """A target, perhaps a drafter, and the requests in flight.

    Parameters
    ----------
    target : Target
        See :mod:`dspark_ext.interfaces`.
    drafter : Drafter, optional
        Without one the same loop decodes plainly.
    gamma : int, optional
        Draft length; the drafter's when absent.
    max_requests : int
        Most requests in one batch; more prompts wait.
    scheduler : Scheduler, optional
        All drafts are verified when absent.
    page_size, max_len, num_pages
        See :meth:`dspark_ext.RoundState.create`.
    framework : {"torch", "numpy"}
        Kind of the arrays handed to the models.
    backend : str, optional
        Forces the operators' backend.
    monitor : Monitor, optional
        Watches the calibration (:class:`dspark.scheduling.Monitor`): put into the scheduler, and
        its report into the metrics. One that the scheduler has already is reported, too.

    Attributes
    ----------
    metrics : Metrics
        Of everything generated since the last :meth:`reset_metrics`.
    prefill_seconds : float
        Time spent in prefills, which ``metrics`` does not hold.

    Examples
    --------
    >>> from dspark_ext.toy import ToyDrafter, ToyTarget
    >>> target = ToyTarget(6)
    >>> engine = Engine(target, ToyDrafter(6, gamma=3, like=target), framework="numpy")
    >>> answers = engine.complete([[1, 2], [3]], dx.SamplingParams(max_new_tokens=5))
    >>> answers == [target.greedy([1, 2], 5), target.greedy([3], 5)]
    True
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        *,
        gamma: int | None = None,
        max_requests: int = 8,
        scheduler: dx.Scheduler | None = None,
        page_size: int = 16,
        max_len: int = 2048,
        num_pages: int | None = None,
        framework: str = "torch",
        backend: str | None = None,
        monitor: Any = None,
    ) -> None:
        if gamma is None:
            gamma = 1 if drafter is None else int(drafter.gamma)
        self.target, self.drafter = target, drafter
        self.scheduler = dx.Scheduler() if scheduler is None else scheduler
        if monitor is not None:
            self.scheduler.monitor = monitor
        self.backend = backend
        self.state = dx.RoundState.create(
            max_requests,
            gamma,
            page_size=page_size,
            max_len=max_len,
            num_pages=num_pages,
            framework=framework,
        )
        self.reset_metrics()

    def reset_metrics(self) -> None:
        """Start counting anew."""
        self.metrics = Metrics(monitor=self.scheduler.monitor)
        self.prefill_seconds = 0.0
        self.prefill_tokens = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: dx.SamplingParams | Sequence[dx.SamplingParams] | None = None,
    ) -> Iterator[Chunk]:
        """Stream the answers of all prompts, as many at a time as there are slots and pages.

        Parameters
        ----------
        prompts : sequence of token id sequences
            Prompts.
        params : SamplingParams or a sequence of them, optional
            One for all, or one a prompt; greedy when absent.

        Yields
        ------
        Chunk
            In the order of the rounds. Closing the iterator drops the requests still in flight.

        Raises
        ------
        ArgumentError
            When prompts and parameters do not fit each other or the state.
        CapacityError
            When a prompt cannot fit even with nothing else in flight.
        """
        if params is None or isinstance(params, dx.SamplingParams):
            each = [params or dx.SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise dx.ArgumentError(
                f"generate: 1 problem\n  params: got {len(each)}, expected 1 or {len(prompts)}"
            )
        self._check_safe(each)
        queue = deque(enumerate(zip(prompts, each, strict=True)))
        owner: dict[int, int] = {}
        try:
            while queue or owner:
                yield from self._admit(queue, owner)
                if owner:
                    result = dx.decode_round(
                        self.target, self.drafter, self.state, self.scheduler, backend=self.backend
                    )
                    self.metrics.add(result)
                    self.metrics.cost_drift.observe_round(self.scheduler, self.state, result)
                    yield from self._report(result, owner)
        finally:
            for slot in owner:
                self.metrics.close(slot)
                self.state.remove(slot)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: dx.SamplingParams | Sequence[dx.SamplingParams] | None = None,
    ) -> list[list[int]]:
        """Return the whole answers; see :meth:`generate`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for chunk in self.generate(prompts, params):
            answers[chunk.request] += chunk.tokens
        return answers

    def _check_safe(self, params: Sequence[dx.SamplingParams]) -> None:
        """Refuse requests whose sampled drafts the scheduler's confidence would look at."""
        provider = self.scheduler.confidence
        if provider is None or provider.safe_with_sampled_drafts or self.drafter is None:
            return
        found = [i for i, p in enumerate(params) if p.has_sampled_drafts]
        if found and self.scheduler.needs_confidence:
            raise dx.ArgumentError(
                f"generate: 1 problem\n  params: {type(provider).__name__} looks at the draft it "
                f"rates and prompts {found} sample their drafts, expected draft_temperature 0, the "
                "rule 'match', or a confidence that is safe with sampled drafts"
            )

    def _admit(self, queue: deque[Any], owner: dict[int, int]) -> Iterator[Chunk]:
        """Fill free slots from the queue and prefill them together."""
        state, new = self.state, []
        while queue and state.free_slots():
            index, (prompt, params) = queue[0]
            # Every request may grow to its end without a page missing: none is ever preempted.
            whole = len(prompt) + params.max_new_tokens + state.gamma
            whole = min(whole, state.pages.row_capacity)
            if not state.pages.fits(whole):
                if owner:
                    break
                raise dx.CapacityError(
                    f"generate: prompt {index} needs {whole} tokens of KV pages, the state has "
                    f"{state.pages.num_free * state.page_size}"
                )
            slot = state.add(prompt, params)
            state.pages.reserve({slot: whole})
            queue.popleft()
            owner[slot] = index
            new.append(slot)
            self.prefill_tokens += len(prompt)
        if new:
            result = dx.prefill(
                self.target,
                state,
                new,
                keep_features=self.drafter is not None,
                backend=self.backend,
            )
            self.prefill_seconds += sum(result.seconds.values())
            yield from self._report(result, owner)

    def _report(self, result: dx.Round, owner: dict[int, int]) -> Iterator[Chunk]:
        chunks = []
        for slot in result.slots:
            count, finish = int(result.num_emitted[slot]), int(result.finish[slot])
            tokens = tuple(int(t) for t in result.tokens[slot, :count])
            chunks.append(
                Chunk(owner[slot], tokens, int(result.num_accepted[slot]), FINISH[finish])
            )
            if finish:
                self.state.remove(slot)
                del owner[slot]
        yield from chunks
