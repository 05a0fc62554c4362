# SPDX-License-Identifier: Apache-2.0
"""Options of ``dspark simulate`` become what is simulated; everything wrong is said at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dspark.scheduling.rounds import calibration_for, read_rounds
from dspark.scheduling.simulate import Workload
from dspark.scheduling.simulate_costs import Curve
from dspark.scheduling.simulate_limits import check_fields, option
from dspark.scheduling.simulate_policies import Policy, default_policies
from dspark.scheduling.simulate_traces import Recorded, Synthetic, Trace
from dspark_ext._arrays import Checker

__all__ = ["Setting", "read"]

_GENERATOR = ("gamma", "base", "decay", "request_spread", "round_spread", "position_spread",
              "persistence", "ece", "auroc")  # fmt: skip
_COST = ("draft_ms", "draft_ms_per_request", "ms_per_kv_token")
_WORK = ("output_tokens", "prompt_tokens", "tokens", "seed", "mtp_draft_share")
_MOST_LOAD = 1 << 17  # a built-in curve has an entry a row, up to 17 a request


@dataclass(frozen=True)
class Setting:
    """What :func:`dspark.scheduling.simulate.sweep` wants."""

    trace: Trace
    loads: list[int]
    policies: list[Policy]
    workload: Workload
    curve: Curve
    believed: Curve | None


class _Problems(Checker):
    """A checker that goes on behind what other code refuses, and behind files it cannot read."""

    def __init__(self) -> None:
        super().__init__("options")
        self.unread: list[OSError] = []

    @contextmanager
    def of(self, name: str, prefix: str = "") -> Iterator[None]:
        """Record an error of the block under the option's name."""
        try:
            yield
        except OSError as error:
            self.unread.append(error)
        except ValueError as error:
            self.problems.append(f"{name}: {str(error).removeprefix(prefix)}")

    def done(self) -> None:
        """Raise for illegal arguments, or else for files that cannot be read."""
        super().done()
        if self.unread:
            raise OSError("\n  ".join(str(error) for error in self.unread))


def read(args: argparse.Namespace) -> Setting:
    """Read the options of :func:`dspark.scheduling.simulate_cli.add_arguments`, and their files.

    Raises
    ------
    ArgumentError
        Lists everything that is wrong with the options and the files.
    OSError
        When nothing is wrong but files cannot be read.

    Examples
    --------
    >>> from dspark.scheduling.simulate_cli import add_arguments
    >>> parser = argparse.ArgumentParser()
    >>> add_arguments(parser)
    >>> setting = read(parser.parse_args(["--loads", "4", "2", "--policies", "none"]))
    >>> setting.loads, setting.trace.gamma, setting.curve.name
    ([2, 4], 7, 'smooth')
    """
    check = _Problems()
    given = {n: getattr(args, n) for n in (*_GENERATOR, *_COST, "min_gain")}
    given = {n: x for n, x in given.items() if x is not None}
    work = {n: getattr(args, n) for n in _WORK}
    check_fields(check, {**given, **work, "drift": args.drift}, option)
    for load in args.loads:
        check.whole("--loads", load, 1, _MOST_LOAD)
    numbers = not check.problems
    expected = "cpu: a simulation is arithmetic of the host, and costs come from a table"
    check.require(args.device == "cpu", "--device", repr(args.device), expected)
    if args.output is not None:
        check.require(bool(args.output.name), "--output", repr(str(args.output)), "a prefix")
    trace = _trace(args, check, {n: given[n] for n in _GENERATOR if n in given}, numbers)
    gamma = 7 if trace is None else trace.gamma
    policies = _policies(args.policies, gamma, check)
    # A wrong number is not an argument to build a curve of; the files are looked at all the same.
    changes = {n: given[n] for n in _COST if n in given and numbers}
    most = max(args.loads) * (1 + gamma) if numbers else 1 + gamma
    curves: dict[str, Curve] = {}
    for name in ("cost", "believed"):
        if getattr(args, name) is not None:
            with check.of(option(name), "cost: "):
                curves[name] = Curve.named(getattr(args, name), most, changes)
    check.done()
    assert trace is not None
    return Setting(
        trace=trace,
        loads=sorted(set(args.loads)),
        policies=policies,
        workload=Workload(**work, draft_in_theta=not args.free_draft),
        curve=curves["cost"],
        believed=curves.get("believed"),
    )


def _policies(names: list[str] | None, gamma: int, check: _Problems) -> list[Policy]:
    if not names:
        return default_policies(gamma)
    found = []
    for name in names:
        with check.of("--policies", "policy: "):
            found.append(Policy.parse(name))
    return found


def _trace(
    args: argparse.Namespace, check: _Problems, given: dict[str, Any], numbers: bool
) -> Trace | None:
    """The generator, or recorded rounds; ``None`` where the options allow neither."""
    if args.rounds is not None:
        return _recorded(args, check, [*given, *(["drift"] if args.drift else [])])
    if args.calibration is not None:
        check.problems.append("--calibration: got a file without --rounds")
    if not numbers:
        return None
    ece, auroc = given.pop("ece", None), given.pop("auroc", None)
    world = made = Synthetic(drift=args.drift, **given)
    for name, wanted in (("auroc", auroc), ("ece", ece)):
        with check.of(option(name), f"{name}: "):
            made = made.tuned(**{name: wanted}, seed=args.seed)
    return made if not check.problems else world


def _recorded(args: argparse.Namespace, check: _Problems, foreign: list[str]) -> Trace | None:
    if foreign:
        names = ", ".join(map(option, foreign))
        check.problems.append(f"{names}: of the generator, not of --rounds")
    arrays = None
    with check.of("--rounds"):
        arrays, notes = read_rounds(args.rounds)
    if arrays is None:
        return None
    tau = None
    if args.calibration is not None:
        gamma = arrays["logit"].shape[1]
        with check.of("--calibration"):
            tau = calibration_for(args.calibration, gamma, notes, "the rounds").temperature
    with check.of("--rounds"):
        return Recorded.read(args.rounds, arrays, tau)
    return None
