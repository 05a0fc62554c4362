# SPDX-License-Identifier: Apache-2.0
"""Greedy speculative output against greedy plain output, token for token.

The rule is exact; bits are not: a matrix product may round differently for 1 row and for 8, so two
logits that nearly tie can change places. A request whose first difference sits on such a near tie
(the two largest logits closer than ``gap`` in both paths) is counted apart from a real difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dspark_ext as dx
from dspark.engine.engine import Engine

GAP = 1e-3


class GapRecorder:
    """A target that remembers, per request and position, how close its two best logits were.

    Later forwards overwrite earlier ones, so that what stays at a position is the row whose token
    was emitted.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self.gaps: dict[int, dict[int, float]] = {}
        if hasattr(target, "new_cache"):
            self.new_cache = target.new_cache

    def forward(
        self, token_ids: Any, positions: Any, plan: Any, cache: Any, *, logit_rows: Any = None
    ) -> Any:
        """See :class:`dspark_ext.interfaces.Target`."""
        logits, features = self._target.forward(
            token_ids, positions, plan, cache, logit_rows=logit_rows
        )
        rows = np.arange(len(token_ids)) if logit_rows is None else np.asarray(logit_rows)
        owners = np.asarray(plan.row_to_request)[rows]
        where = np.asarray(positions)[rows]
        for slot, position, gap in zip(owners, where, top_two_gap(logits), strict=True):
            self.gaps.setdefault(int(slot), {})[int(position)] = float(gap)
        return logits, features


def top_two_gap(logits: Any) -> NDArray[np.float64]:
    """Difference of the two largest logits of every row.

    Examples
    --------
    >>> top_two_gap(np.array([[1.0, 3.0, 2.5], [0.0, 0.0, -1.0]])).tolist()
    [0.5, 0.0]
    """
    if isinstance(logits, np.ndarray):
        best = np.partition(logits.astype(np.float64), -2, axis=1)[:, -2:]
        return np.asarray(best[:, 1] - best[:, 0])
    two = logits.float().topk(2, dim=-1).values.double().numpy()
    return np.asarray(two[:, 0] - two[:, 1])


@dataclass(frozen=True)
class Difference:
    """The first place where the two outputs of a prompt part."""

    prompt: int
    index: int  # of the emitted token
    plain: int  # token id; -1 = the output had ended
    speculative: int
    gap_plain: float
    gap_speculative: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap_plain < GAP and self.gap_speculative < GAP


@dataclass(frozen=True)
class LosslessReport:
    """Result of :func:`check_lossless`."""

    prompts: int
    tokens: int
    differences: tuple[Difference, ...]
    acceptance_length: float

    @property
    def near_ties(self) -> int:
        """Prompts whose first difference is a near tie."""
        return sum(d.near_tie for d in self.differences)

    @property
    def wrong(self) -> int:
        """Prompts with a difference that rounding does not explain."""
        return len(self.differences) - self.near_ties

    def passed(self, allowed: float = 0.01) -> bool:
        """No unexplained difference, and near ties at no more than this share of the tokens."""
        return self.wrong == 0 and self.near_ties <= allowed * max(self.tokens, 1)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "identical": self.prompts - len(self.differences),
            "near_ties": self.near_ties,
            "wrong": self.wrong,
            "acceptance_length": self.acceptance_length,
            "differences": [asdict(d) | {"near_tie": d.near_tie} for d in self.differences],
        }

    def __str__(self) -> str:
        """One line, and one for each difference."""
        same = self.prompts - len(self.differences)
        lines = [
            (
                f"{same} of {self.prompts} outputs identical ({self.tokens} tokens), "
                f"{self.near_ties} near ties, {self.wrong} wrong"
            )
        ]
        lines += [
            f"  prompt {d.prompt}, token {d.index}: {d.plain} became {d.speculative}, top-2 gap "
            f"{d.gap_plain:.2e} and {d.gap_speculative:.2e}"
            f"{' (near tie)' if d.near_tie else ''}"
            for d in self.differences
        ]
        return "\n".join(lines)


def check_lossless(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    stop_ids: Sequence[int] = (),
    scheduler: dx.Scheduler | None = None,
    max_requests: int = 8,
    framework: str = "torch",
) -> LosslessReport:
    """Decode every prompt greedily with and without the drafter and compare.

    Parameters
    ----------
    target, drafter
        In float32: bfloat16 logits tie far too often for a comparison of bits.
    prompts : sequence of token id sequences
        Prompts.
    max_new_tokens : int
        Tokens of each answer.
    stop_ids : sequence of int
        Ids that end an answer.
    scheduler : Scheduler, optional
        All drafts are verified when absent.
    max_requests : int
        Most requests in a batch.
    framework : {"torch", "numpy"}
        Kind of the arrays handed to the models.

    Examples
    --------
    >>> from dspark_ext.toy import ToyDrafter, ToyTarget
    >>> target = ToyTarget(9)
    >>> report = check_lossless(target, ToyDrafter(9, gamma=3), [[1], [2, 3]], framework="numpy")
    >>> report.passed(), report.tokens
    (True, 128)
    """
    params = dx.SamplingParams(max_new_tokens=max_new_tokens, stop_ids=tuple(stop_ids))
    longest = max(len(p) for p in prompts) + max_new_tokens
    answers: list[list[list[int]]] = []
    gaps: list[list[dict[int, float]]] = []
    length = 0.0
    for with_drafter in (False, True):
        recorder = GapRecorder(target)
        engine = Engine(
            recorder,
            drafter if with_drafter else None,
            gamma=drafter.gamma,
            max_requests=max_requests,
            scheduler=scheduler if with_drafter else None,
            max_len=longest,
            framework=framework,
        )
        texts, seen = [], []
        for first in range(0, len(prompts), max_requests):
            batch = prompts[first : first + max_requests]
            recorder.gaps = {}
            texts += engine.complete(batch, params)
            # Slots are given out in order, and a batch is never larger than the slots.
            seen += [recorder.gaps[slot] for slot in range(len(batch))]
        answers.append(texts)
        gaps.append(seen)
        length = engine.metrics.acceptance_length
    found = []
    for i, (plain, speculative) in enumerate(zip(*answers, strict=True)):
        if plain == speculative:
            continue
        at = _first_difference(plain, speculative)
        position = len(prompts[i]) - 1 + at  # of the row that decided token `at`
        found.append(
            Difference(
                prompt=i,
                index=at,
                plain=plain[at] if at < len(plain) else -1,
                speculative=speculative[at] if at < len(speculative) else -1,
                gap_plain=gaps[0][i].get(position, np.inf),
                gap_speculative=gaps[1][i].get(position, np.inf),
            )
        )
    return LosslessReport(len(prompts), sum(map(len, answers[0])), tuple(found), length)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
