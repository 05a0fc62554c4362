# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of one request, and the seeds of requests that live together."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass
from numbers import Integral, Real

from dspark_ext._arrays import ArgumentError

__all__ = ["RULES", "SamplingParams", "distinct_seed", "mix_seed"]

#: rule -> code of ``dspark_rule``
RULES = {"greedy": 0, "token": 1, "block": 2, "match": 3, "synthetic": 4}
MIN_TEMPERATURE = 1e-3
_LARGEST_FLOAT32 = 3.4028234e38
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Parameters
    ----------
    temperature : float
        0 is greedy (exact argmax); else at least 1e-3.
    top_k : int
        Keep the k most probable ids; 0 = off.
    top_p : float
        Keep the most probable ids up to this mass, in (0, 1]; the crossing id stays.
    min_p : float
        Keep ids with ``p(x) >= min_p * max p``, in [0, 1].
    repetition_penalty : float
        Divides positive logits of ids in the prompt or the output, multiplies the others; 1 = off.
    presence_penalty, frequency_penalty : float
        Taken from the logit of an id in the output: once, and once for every time it is there.
        Drafts of a round count for the rows behind them. 0 = off.
    min_tokens : int
        No stop id is emitted before this many tokens.
    seed : int, optional
        64-bit seed; a random one when absent. The same request with the same seed emits the same
        tokens (:doc:`the contract <contract>` says under which schedules).
    max_new_tokens : int
        Tokens to emit at the most, at least 1; a stop id counts.
    stop_ids : sequence of int
        The request ends behind the first of these; it is emitted.
    rule : {"token", "block", "greedy", "match", "synthetic"}
        How drafts are accepted: ``token`` = min(1, p/q) with residual; ``block`` = all drafts of a
        round together, which accepts at least as many; ``match`` = sample the target and accept the
        equal prefix, so that the output equals plain seeded decoding. ``synthetic``, for benchmarks
        only: drafts are accepted whatever they are, and the status word of every round says so.
    synthetic_acceptance : float, optional
        For the rule ``synthetic``: tokens that a round emits on average, at least 1.
    draft_temperature : float, optional
        Temperature of the draft; that of the target when absent; 0 = greedy drafts.
    max_draft : int, optional
        Most drafts to verify per round; gamma when absent.
    min_draft : int
        Drafts that are always verified. A constant: it must not depend on what was drafted.
    weight : float
        Weight of this request's tokens in the scheduler's objective, in [0, 128].

    Raises
    ------
    ArgumentError
        Listing every illegal value.

    Examples
    --------
    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=3).rule
    'token'
    >>> SamplingParams(temperature=-1, top_p=0)
    Traceback (most recent call last):
        ...
    dspark_ext._arrays.ArgumentError: SamplingParams: 2 problems
      temperature: got -1, expected 0 (greedy) or at least 0.001
      top_p: got 0, expected a number in (0, 1]
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int | None = None
    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    rule: str = "token"
    synthetic_acceptance: float | None = None
    draft_temperature: float | None = None
    max_draft: int | None = None
    min_draft: int = 0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.stop_ids, Iterable) and not isinstance(self.stop_ids, str):
            ids = tuple(int(i) if _is_id(i) else i for i in self.stop_ids)
            object.__setattr__(self, "stop_ids", ids)
        problems = self._problems()
        if problems:
            count = len(problems)
            head = f"SamplingParams: {count} problem{'s' if count > 1 else ''}"
            raise ArgumentError("\n  ".join([head, *problems]))

    @property
    def has_sampled_drafts(self) -> bool:
        """Whether drafts are sampled, and verified against the law they come from.

        Examples
        --------
        >>> SamplingParams(0.7).has_sampled_drafts
        True
        >>> SamplingParams(0.7, rule="match").has_sampled_drafts
        False
        """
        draft = self.temperature if self.draft_temperature is None else self.draft_temperature
        return self.temperature > 0 and draft > 0 and self.rule in ("token", "block")

    def _problems(self) -> list[str]:
        found: list[str] = []

        def expect(name: str, ok: bool, wanted: str) -> None:
            if not ok:
                found.append(f"{name}: got {getattr(self, name)!r}, expected {wanted}")

        temperature = f"0 (greedy) or at least {MIN_TEMPERATURE}"
        expect("temperature", _is_temperature(self.temperature), temperature)
        draft_ok = self.draft_temperature is None or _is_temperature(self.draft_temperature)
        expect("draft_temperature", draft_ok, f"None, {temperature}")
        expect("top_k", _is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer in [0, 2^31)")
        expect("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        expect("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]")
        factor_ok = _is_finite(self.repetition_penalty) and self.repetition_penalty > 0
        expect("repetition_penalty", factor_ok, "a finite number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            expect(name, _is_finite(getattr(self, name)), "a finite number")
        least_ok = _is_int(self.min_tokens) and 0 <= self.min_tokens < 2**31
        expect("min_tokens", least_ok, "an integer >= 0")
        seed_ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= _MASK)
        expect("seed", seed_ok, "None or an integer in [0, 2^64)")
        tokens_ok = _is_int(self.max_new_tokens) and 1 <= self.max_new_tokens < 2**31
        expect("max_new_tokens", tokens_ok, "an integer >= 1")
        ids = self.stop_ids if isinstance(self.stop_ids, tuple) else (None,)
        ids_ok = all(_is_id(i) for i in ids)
        expect("stop_ids", ids_ok, "token ids >= 0")
        expect("rule", self.rule in RULES, " or ".join(map(repr, RULES)))
        if self.rule == "greedy" and self.temperature != 0:
            found.append(
                f"rule: got 'greedy' with temperature {self.temperature!r}, expected temperature 0"
            )
        mean = self.synthetic_acceptance
        mean_ok = mean is None
        if self.rule == "synthetic":
            mean_ok = mean is not None and _is_finite(mean) and 1 <= mean <= 17
        wanted = "a number in [1, gamma + 1] with the rule 'synthetic', else None"
        expect("synthetic_acceptance", mean_ok, wanted)
        draft_len_ok = self.max_draft is None or (_is_int(self.max_draft) and self.max_draft >= 0)
        expect("max_draft", draft_len_ok, "None or an integer >= 0")
        expect("min_draft", _is_int(self.min_draft) and self.min_draft >= 0, "an integer >= 0")
        expect(
            "weight", _is_number(self.weight) and 0 <= self.weight <= 128, "a number in [0, 128]"
        )
        return found


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_id(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and 0 <= int(x) < 2**31


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_finite(x: object) -> bool:
    return _is_number(x) and abs(x) <= _LARGEST_FLOAT32  # type: ignore[arg-type]


def _is_temperature(x: float) -> bool:
    return _is_number(x) and (x == 0 or (x >= MIN_TEMPERATURE and math.isfinite(x)))


def mix_seed(seed: int, ordinal: int) -> int:
    """Return the seed of sample ``ordinal`` of a request; sample 0 keeps the seed itself.

    Examples
    --------
    >>> mix_seed(7, 0)
    7
    >>> len({mix_seed(7, i) for i in range(1000)})
    1000
    """
    if ordinal == 0:
        return seed
    # One step of a 64-bit bijection (multiply, xor-shift): distinct ordinals give distinct seeds.
    x = (seed + ordinal * 0x9E3779B97F4A7C15) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)


def distinct_seed(seed: int, used: Container[int]) -> int:
    """Return the first of ``mix_seed(seed, 0), mix_seed(seed, 1), ...`` that is not in ``used``.

    Requests that share a scheduler must not share their random numbers: with equal seeds the
    "other requests' tokens" that a schedule may look at would be a request's own.

    Examples
    --------
    >>> distinct_seed(7, ()), distinct_seed(7, {7}) == mix_seed(7, 1)
    (7, True)
    """
    ordinal = 0
    while mix_seed(seed, ordinal) in used:
        ordinal += 1
    return mix_seed(seed, ordinal)
