# SPDX-License-Identifier: Apache-2.0
"""Configurations of a sweep: some at random, and few that contain every pair of values.

A configuration is a dict from parameter to value. Used by ``test_sweep.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

__all__ = ["Config", "pairs_of", "pairwise", "sample"]

Config = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Legal = Callable[[Config], bool]


def sample(
    domain: Mapping[str, Sequence[Any]], count: int, legal: Legal, rng: np.random.Generator
) -> Iterator[Config]:
    """``count`` legal configurations, every parameter drawn evenly and on its own."""
    found = 0
    while found < count:
        config = {name: values[rng.integers(len(values))] for name, values in domain.items()}
        if legal(config):
            found += 1
            yield config


def pairs_of(config: Config) -> set[Pair]:
    """Every two (parameter, value) that a configuration has together."""
    return set(combinations(config.items(), 2))


def pairwise(
    domain: Mapping[str, Sequence[Any]], legal: Legal, rng: np.random.Generator, tries: int = 30
) -> list[Config]:
    """Configurations that contain every pair of values that is legal at all, found greedily.

    Each one starts from a pair that is missing, gets its other values in random order, each the
    one that brings most missing pairs, and the best of ``tries`` is kept. What cannot be completed
    to a legal configuration in many tries is left out.
    """
    names = list(domain)
    missing = {
        ((a, x), (b, y))
        for a, b in combinations(names, 2)
        for x, y in product(domain[a], domain[b])
    }
    found = []
    while missing:
        start = min(missing, key=repr)
        made = [_grow(domain, dict(start), missing, rng) for _ in range(tries)]
        made = [config for config in made if legal(config)]
        if not made:
            made = [c for c in _complete(domain, start, 2000, rng) if legal(c)]
        missing.discard(start)
        if made:
            best = max(made, key=lambda config: len(pairs_of(config) & missing))
            found.append(best)
            missing -= pairs_of(best)
    return found


def _grow(
    domain: Mapping[str, Sequence[Any]],
    config: Config,
    missing: set[Pair],
    rng: np.random.Generator,
) -> Config:
    order = [name for name in domain if name not in config]
    rng.shuffle(order)
    for name in order:
        values = list(domain[name])
        rng.shuffle(values)
        gains = [
            sum(_pair(domain, (name, value), item) in missing for item in config.items())
            for value in values
        ]
        config[name] = values[int(np.argmax(gains))]
    return {name: config[name] for name in domain}


def _pair(domain: Mapping[str, Sequence[Any]], a: tuple[str, Any], b: tuple[str, Any]) -> Pair:
    order = list(domain)
    return (a, b) if order.index(a[0]) < order.index(b[0]) else (b, a)


def _complete(
    domain: Mapping[str, Sequence[Any]], start: Pair, tries: int, rng: np.random.Generator
) -> Iterator[Config]:
    """The pair with other values at random."""
    for _ in range(tries):
        config = {name: values[rng.integers(len(values))] for name, values in domain.items()}
        yield config | dict(start)
