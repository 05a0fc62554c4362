# SPDX-License-Identifier: Apache-2.0
"""Counts comparisons, and keeps the largest error and the failures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

__all__ = ["Result", "Tally"]

# Share of sampled tokens that may differ: float32 and float64 disagree where the deciding margin is
# below float32's resolution. At these problem sizes one draw in about 10^5 is that close.
CLOSE_CALLS = 1e-3


@dataclass(frozen=True)
class Result:
    """Outcome of one family."""

    name: str
    cases: int  # problems
    values: int  # numbers compared
    close_calls: int  # tokens that differ because the margin is below float32's resolution
    max_error: float  # largest |cpu - reference| / bound, 1 is the limit
    seconds: float
    failures: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and something was compared."""
        return not self.failures and self.values > 0

    def line(self) -> str:
        """One line for a person, and one more for each failure."""
        head = (
            f"{self.name:<18} {'ok' if self.ok else 'FAILED':<6} {self.cases:>4} problems "
            f"{self.values:>8} values  error {self.max_error:4.2f} of bound  "
            f"{self.close_calls} close calls  {self.seconds:5.2f} s"
        )
        return "\n".join([head, *(f"    {text}" for text in self.failures[:10])])

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "ok": self.ok}


@dataclass
class Tally:
    """Collects the comparisons of one family."""

    cases: int = 0
    values: int = 0
    draws: int = 0
    close_calls: int = 0
    max_error: float = 0.0
    failures: list[str] = field(default_factory=list)

    def equal(self, what: str, got: Any, want: Any) -> None:
        """Integers: every one must agree."""
        got, want = np.asarray(got), np.asarray(want)
        self.values += want.size
        if got.shape != want.shape:
            self.failures.append(f"{what}: shape {got.shape}, expected {want.shape}")
        elif not np.array_equal(got, want):
            at = tuple(int(i) for i in np.argwhere(got != want)[0])
            self.failures.append(f"{what}{list(at)}: got {got[at]}, expected {want[at]}")

    def close(self, what: str, got: Any, want: Any, *, rtol: float, atol: float = 0.0) -> None:
        """Floats: within the bound; NaN and infinities must be in the same places."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        self.values += want.size
        if got.shape != want.shape:
            self.failures.append(f"{what}: shape {got.shape}, expected {want.shape}")
            return
        finite = np.isfinite(want)
        same = np.array_equal(finite, np.isfinite(got)) and np.array_equal(
            got[~finite], want[~finite], equal_nan=True
        )
        if not same:
            self.failures.append(f"{what}: NaN or infinities in other places than expected")
            return
        bound = atol + rtol * np.abs(want[finite])
        excess = np.abs(got[finite] - want[finite]) / np.where(bound > 0, bound, 1e-300)
        if excess.size:
            self.max_error = max(self.max_error, float(excess.max()))
            if excess.max() > 1:
                at = int(excess.argmax())
                pair = f"got {got[finite][at]!r}, expected {want[finite][at]!r}"
                self.failures.append(f"{what}: {pair}, {excess[at]:.3g} times the bound")

    def drawn(self, got: Any, want: Any) -> np.ndarray[Any, Any]:
        """Sampled tokens: count differences per request [R]; True where the request agrees.

        A chain of draws is lost from its first difference on, so a request counts once.
        """
        got, want = np.asarray(got), np.asarray(want)
        self.values += want.size
        self.draws += want.size
        agree = (got == want).reshape(len(want), -1).all(axis=1)
        self.close_calls += int((~agree).sum())
        return np.asarray(agree)

    def result(self, name: str, seconds: float) -> Result:
        """Close the account; too many close calls are a failure."""
        allowed = max(1, int(self.draws * CLOSE_CALLS))
        if self.close_calls > allowed:
            self.failures.append(
                f"{self.close_calls} requests of {self.draws} draws differ from the reference, "
                f"at most {allowed} can be rounding"
            )
        return Result(
            name,
            self.cases,
            self.values,
            self.close_calls,
            self.max_error,
            seconds,
            list(self.failures),
        )
