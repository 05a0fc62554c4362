# SPDX-License-Identifier: Apache-2.0
"""Prompts of the project's own for making training data: templates filled from word lists.

Two splits that share neither a template nor a topic: ``train`` and ``heldout``. Evaluation on the
held-out split therefore measures new questions about new subjects, not recall.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dspark.training import topics

DOMAINS = ("math", "code", "chat")
SPLITS = ("train", "heldout")

# How much of a mixed set each domain gets.
_SHARES = {"math": 0.36, "code": 0.24, "chat": 0.40}

# So many known prompts in a row mean that the list is used up (or that little is left of it).
_MOST_REPEATS = 5000


@dataclass(frozen=True)
class Prompt:
    """One user turn and the domain it stands for."""

    domain: str
    text: str


def build(count: int, seed: int = 0, split: str = "train") -> list[Prompt]:
    """Draw `count` distinct prompts of all domains, in a shuffled order.

    Parameters
    ----------
    count
        Number of prompts. The held-out code and chat lists are finite: asking for more than they
        hold raises.
    seed
        Same seed, same list, on every machine.
    split
        ``"train"`` or ``"heldout"``.

    Raises
    ------
    ValueError
        Unknown split, negative count, or more prompts than there are.

    Examples
    --------
    >>> [p.domain for p in build(3, seed=1)] == [p.domain for p in build(3, seed=1)]
    True
    >>> len({p.text for p in build(500)})
    500
    """
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, expected one of {SPLITS}")
    if count < 0:
        raise ValueError(f"count: got {count}, expected 0 or more")
    rng = random.Random(f"dspark prompts {split} {seed}")
    makers: dict[str, Callable[[], str]] = {
        "math": lambda: _math(rng, split),
        "code": lambda: _code(rng, split),
        "chat": lambda: _chat(rng, split),
    }
    chosen: list[Prompt] = []
    for index, domain in enumerate(DOMAINS):
        rest = count - len(chosen)
        wanted = rest if index == len(DOMAINS) - 1 else round(count * _SHARES[domain])
        chosen += [Prompt(domain, text) for text in _distinct(makers[domain], wanted, domain)]
    rng.shuffle(chosen)
    return chosen


def _distinct(make: Callable[[], str], wanted: int, domain: str) -> list[str]:
    seen: dict[str, None] = {}
    repeats = 0
    while len(seen) < wanted and repeats < _MOST_REPEATS:
        text = make()
        repeats = repeats + 1 if text in seen else 0
        seen[text] = None
    if len(seen) == wanted:
        return list(seen)
    raise ValueError(f"count: the {domain} prompts of this split run out at {len(seen)}")


def _math(rng: random.Random, split: str) -> str:
    a, b = rng.randint(3, 60), rng.randint(2, 40)
    c, d = rng.randint(2, 9), rng.randint(2, 12)
    first, second = rng.sample(topics.NAMES[split], 2)
    template = rng.choice(topics.MATH[split])
    text = template.format(
        a=a, b=b, c=c, d=d, ab=a + b, ac=a * c, abc=(a + b) * c, big=a + b + c,
        percent=rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 75)),
        round=rng.choice((40, 60, 80, 120, 200, 240, 300, 360, 400, 500)),
        name=first, other=second, thing=rng.choice(topics.THINGS[split]),
    )  # fmt: skip
    return f"{text} {rng.choice(topics.MATH_ENDINGS[split])}".strip()


def _code(rng: random.Random, split: str) -> str:
    task = rng.choice(topics.CODE_TASKS[split])
    return rng.choice(topics.CODE_TEMPLATES[split]).format(task=task)


def _chat(rng: random.Random, split: str) -> str:
    topic = rng.choice(topics.CHAT_TOPICS[split])
    return rng.choice(topics.CHAT_TEMPLATES[split]).format(topic=topic)
