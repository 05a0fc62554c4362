# SPDX-License-Identifier: Apache-2.0
"""The exact joint law of what several requests emit over several rounds under a schedule.

A small system: a vocabulary of two or three tokens, a target and a drafter that know the previous
token, a confidence of slot k that depends on the drafted token before it, requests that join, leave
and follow each other in a slot. Its distribution is carried forward round by round: every way the
drafts can fall, the lengths that a policy chooses for them, every outcome of the verification. A
policy is a piece of scheduling: the project's own operators, or a deliberate mistake.

The outcomes of a verification come from the project's reference rules by enumeration. A request is
described by its emitted tokens and by what the policy remembers of it, so that paths that cannot
be told apart any more are added up, and all paths are moved together in arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from dspark_ext.reference.enumeration import Branches, exact_law
from dspark_ext.reference.rejection_sampler import rejection_sample

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One request. ``confidence[k][x]`` is c of slot k + 1 behind the token x."""

    tokens: int  # it emits this many
    confidence: tuple[tuple[float, ...], ...]
    start: int = 0  # the token before its first
    joins: int = 0  # round of its first draft
    follows: int | None = None  # it waits until this request has finished, and takes its slot
    floor: int = 0
    cap: int = 16
    weight: float = 1.0
    rule: str = "token"


@dataclass(frozen=True)
class Batch:
    """What a policy sees in a round, one row per request; rows of inactive ones hold zeros."""

    live: np.ndarray  # [R, gamma] float32 survivals of this round's drafts
    drafts: tuple[Tokens, ...]  # for policies that look where they must not
    active: np.ndarray  # [R] uint8
    cap: np.ndarray  # [R] int32: the request's own, and one less than the tokens it may still emit
    floor: np.ndarray
    weight: np.ndarray
    memory: tuple[Any, ...]


class Past(NamedTuple):
    """What a round was to one request, as far as a policy may remember it."""

    live: np.ndarray  # [gamma] float32
    length: int  # -1: it did not draft
    flags: Tokens  # accepted 1, rejected 0, unobserved -1, not scheduled -2


class Policy(Protocol):
    """Chooses lengths, -1 for a request that does not draft; remembers what it likes of a round."""

    def start(self) -> Hashable: ...

    def lengths(self, batch: Batch) -> Sequence[int]: ...

    def remember(self, memory: Any, past: Past) -> Hashable: ...


@dataclass(frozen=True)
class World:
    """Laws by the previous token: target ``p[x]``, drafter ``q[x]``; both rows sum to 1."""

    p: tuple[tuple[float, ...], ...]
    q: tuple[tuple[float, ...], ...]
    requests: tuple[Request, ...]
    gamma: int = 2

    @property
    def vocab(self) -> int:
        return len(self.p)

    @property
    def blocks(self) -> list[Tokens]:
        """Every block of drafts."""
        return list(itertools.product(range(self.vocab), repeat=self.gamma))

    def drafted(self, anchor: int, block: Tokens) -> float:
        """Probability of a block behind an anchor."""
        pairs = zip((anchor, *block[:-1]), block, strict=True)
        return float(np.prod([self.q[x][y] for x, y in pairs]))

    def survival(self, request: Request, anchor: int, block: Tokens) -> Tokens:
        """Survivals of a block, float32, as the operator ``confidence`` makes them."""
        c = [request.confidence[k][x] for k, x in enumerate((anchor, *block[:-1]))]
        return tuple(np.cumprod(np.array(c, np.float32), dtype=np.float32).tolist())

    def truth(self, request: Request) -> dict[Tokens, float]:
        """The target's own law of the request's tokens."""
        law: dict[Tokens, float] = {(): 1.0}
        for _ in range(request.tokens):
            law = {
                (*t, y): mass * self.p[t[-1] if t else request.start][y]
                for t, mass in law.items()
                for y in range(self.vocab)
            }
        return law

    def product(self) -> dict[tuple[Tokens, ...], float]:
        """The law that every lossless schedule must give: independent requests."""
        laws = [self.truth(r).items() for r in self.requests]
        return {
            tuple(t for t, _ in combination): float(np.prod([m for _, m in combination]))
            for combination in itertools.product(*laws)
        }


@cache
def outcomes(
    p: tuple[tuple[float, ...], ...], q: tuple[tuple[float, ...], ...], anchor: int, block: Tokens,
    length: int, rule: str,
) -> list[tuple[Tokens, Tokens, float]]:  # fmt: skip
    """(tokens, flags, probability) of verifying the first ``length`` drafts of a block."""
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(np.array(p)), np.log(np.array(q))
    before = (anchor, *block)
    laws = log_q[list(before[:-1])]
    told = np.array([log_q[x, y] for x, y in itertools.pairwise(before)])

    def run(draws: Branches) -> tuple[Tokens, Tokens]:
        out = rejection_sample(
            log_p[list(before[: length + 1])], [block], draft_len=[length],
            cu_seqlens=[0, length + 1], seed=[0], position=[0], temperature=1.0, rule=rule,
            draft_logit=told[None], draft_lse=np.zeros((1, len(block))),
            draft_logits=laws[None], draws=[draws],
        )  # fmt: skip
        return tuple(out.tokens[0, : out.num_emitted[0]].tolist()), tuple(out.accepted[0].tolist())

    return [(tokens, flags, mass) for (tokens, flags), mass in exact_law(run).items()]


@dataclass
class _Names:
    """Numbers for hashable things, in the order in which they come."""

    known: list[Any] = field(default_factory=list)
    number: dict[Any, int] = field(default_factory=dict)

    def of(self, thing: Hashable) -> int:
        if thing not in self.number:
            self.number[thing] = len(self.known)
            self.known.append(thing)
        return self.number[thing]

    def map(self, function: Any) -> np.ndarray:
        return np.array([function(x) for x in self.known], dtype=np.int64)


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row i becomes counts[i] rows: their origins, and 0, 1, ... within each origin."""
    origin = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    return origin, within


def _distinct(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows of integer columns: first positions, and the class of every row."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 2) + column + 1
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


class Ensemble:
    """All states of the system with their probabilities, moved by :meth:`round`."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world, self.policy = world, policy
        self.states = [_Names() for _ in world.requests]  # (tokens, memory)
        self.at = np.array([[s.of(((), policy.start())) for s in self.states]])
        self.mass = np.ones(1)
        self.rounds = 0

    def _active(self) -> np.ndarray:
        requests = self.world.requests
        done = np.stack(
            [
                s.map(lambda x, n=r.tokens: len(x[0]) >= n)[self.at[:, i]] != 0
                for i, (s, r) in enumerate(zip(self.states, requests, strict=True))
            ],
            axis=1,
        )
        there = np.array([r.joins <= self.rounds for r in requests])
        free = [np.ones(len(done), bool) if r.follows is None else done[:, r.follows]
                for r in requests]  # fmt: skip
        return ~done & there & np.stack(free, axis=1)

    def round(self) -> bool:
        """One round of all states; False when nothing is left to do."""
        active = self._active()
        if not active.any() and all(r.joins <= self.rounds for r in self.world.requests):
            return False
        blocks = self.world.blocks
        block = np.zeros_like(self.at)
        for r in range(len(self.states)):
            origin, within = _spread(np.where(active[:, r], len(blocks), 1))
            anchor = self._anchors(r)[self.at[origin, r]]
            table = np.array([[self.world.drafted(x, b) for b in blocks]
                              for x in range(self.world.vocab)])  # fmt: skip
            weight = np.where(active[origin, r], table[anchor, within], 1.0)
            keep = weight > 0
            origin, within, weight = origin[keep], within[keep], weight[keep]
            self.at, active, block = self.at[origin], active[origin], block[origin]
            block[:, r] = within
            self.mass = self.mass[origin] * weight
        length = self._schedule(active, block)
        for r in range(len(self.states)):
            active, block, length = self._verify(r, active, block, length)
        first, which = _distinct(list(self.at.T))
        self.mass = np.bincount(which, weights=self.mass, minlength=len(first))
        self.at = self.at[first]
        self.rounds += 1
        return True

    def _anchors(self, r: int) -> np.ndarray:
        start = self.world.requests[r].start
        return self.states[r].map(lambda s: s[0][-1] if s[0] else start)

    def _schedule(self, active: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Ask the policy once for every distinct thing it can see."""
        seen, names = [], []
        for r, states in enumerate(self.states):
            view = _Names()  # (memory, cap, anchor) of a private state
            public = states.map(lambda s, v=view, r=r: v.of(self._public(r, s)))[self.at[:, r]]
            seen += [np.where(active[:, r], public + 1, 0), np.where(active[:, r], block[:, r], 0)]
            names.append(view)
        first, which = _distinct(seen)
        chosen = np.zeros((len(first), len(self.states)), dtype=np.int64)
        for i, row in enumerate(first):
            views = [
                names[r].known[seen[2 * r][row] - 1] if active[row, r] else None
                for r in range(len(self.states))
            ]
            chosen[i] = self._ask(views, block[row])
        return chosen[which]

    def _public(self, r: int, state: tuple[Tokens, Any]) -> tuple[Any, int, int]:
        request, (tokens, memory) = self.world.requests[r], state
        cap = max(0, min(request.cap, self.world.gamma, request.tokens - len(tokens) - 1))
        return memory, cap, tokens[-1] if tokens else request.start

    def _ask(self, views: list[Any], block: np.ndarray) -> np.ndarray:
        world, count = self.world, len(views)
        live = np.zeros((count, world.gamma), np.float32)
        cap, floor = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for r, view in enumerate(views):
            if view is not None:
                _, cap[r], anchor = view
                live[r] = world.survival(world.requests[r], anchor, world.blocks[block[r]])
                floor[r] = min(world.requests[r].floor, cap[r])
        on = np.array([v is not None for v in views])
        batch = Batch(
            live=live,
            drafts=tuple(world.blocks[b] for b in block),
            active=on.astype(np.uint8),
            cap=cap,
            floor=floor,
            weight=np.array([r.weight for r in world.requests], np.float32),
            memory=tuple(self.policy.start() if v is None else v[0] for v in views),
        )
        return np.where(on, self.policy.lengths(batch), 0) if on.any() else np.zeros(count, int)

    def _verify(
        self, r: int, active: np.ndarray, block: np.ndarray, length: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Replace the states of one request by their outcomes."""
        first, which = _distinct([self.at[:, r], block[:, r], length[:, r], active[:, r]])
        after: list[list[tuple[int, float]]] = []
        for row in first:
            old = int(self.at[row, r])
            ways = self._ways(r, old, int(block[row, r]), int(length[row, r]))
            after.append(list(ways) if active[row, r] else [(old, 1.0)])
        counts = np.array([len(a) for a in after])
        start = np.cumsum(counts) - counts
        states, chances = (np.array(x) for x in zip(*itertools.chain(*after), strict=True))
        origin, within = _spread(counts[which])
        pick = start[which][origin] + within
        self.at, self.mass = self.at[origin], self.mass[origin] * chances[pick]
        self.at[:, r] = states[pick]
        return active[origin], block[origin], length[origin]

    def _ways(self, r: int, old: int, block: int, length: int) -> Iterator[tuple[int, float]]:
        world, request = self.world, self.world.requests[r]
        tokens, memory = self.states[r].known[old]
        anchor, drafts = tokens[-1] if tokens else request.start, world.blocks[block]
        live = np.array(world.survival(request, anchor, drafts), np.float32)
        for new, flags, chance in outcomes(
            world.p, world.q, anchor, drafts, max(length, 0), request.rule
        ):
            whole = (*tokens, *new)[: request.tokens]
            kept = self.policy.start()  # a finished request leaves nothing behind
            if len(whole) < request.tokens:
                kept = self.policy.remember(memory, Past(live, length, flags))
            yield self.states[r].of((whole, kept)), chance


def joint_law(world: World, policy: Policy, most_rounds: int = 32) -> dict[Any, float]:
    """Law of the tokens of all requests, run until everything has been emitted."""
    ensemble = Ensemble(world, policy)
    while ensemble.round():
        assert ensemble.rounds < most_rounds, "the policy does not come to an end"
    law: dict[Any, float] = {}
    for row, mass in zip(ensemble.at, ensemble.mass, strict=True):
        key = tuple(s.known[i][0] for s, i in zip(ensemble.states, row, strict=True))
        law[key] = law.get(key, 0.0) + float(mass)
    return law


def distance(world: World, policy: Policy) -> float:
    """Largest difference between the law of the policy's output and the target's."""
    got, want = joint_law(world, policy), world.product()
    return max(abs(got.get(key, 0.0) - want.get(key, 0.0)) for key in {*got, *want})


def first_token(world: World, policy: Policy, request: int = 0) -> list[float]:
    """Law of a request's first token, to compare with stated numbers."""
    law = np.zeros(world.vocab)
    for key, mass in joint_law(world, policy).items():
        law[key[request][0]] += mass
    return law.tolist()
