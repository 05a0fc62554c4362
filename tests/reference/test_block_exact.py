# SPDX-License-Identifier: Apache-2.0
"""Block verification by exact enumeration: its law, its acceptance, and the published mistake."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dspark_ext.reference import block_rule
from dspark_ext.reference.enumeration import Branches, exact_law
from dspark_ext.reference.rejection_sampler import rejection_sample


class Iid:
    """The same p and q at every position; drafts are enumerated too."""

    def __init__(self, p: Any, q: Any, gamma: int, **verify: Any) -> None:
        self.p, self.q, self.gamma, self.verify = np.asarray(p), np.asarray(q), gamma, verify

    def run(self, draws: Branches) -> tuple[tuple[int, ...], int]:
        drafts = [draws.choose(self.q.tolist()) for _ in range(self.gamma)]
        z = np.log(np.tile(self.q, (1, self.gamma, 1)))
        out = rejection_sample(
            np.log(np.tile(self.p, (self.gamma + 1, 1))), [drafts], draft_len=[self.gamma],
            cu_seqlens=[0, self.gamma + 1], seed=[0], position=[5], temperature=1.0,
            draft_logit=np.log(self.q[drafts])[None], draft_lse=np.zeros((1, self.gamma)),
            draft_logits=z, draws=[draws], **self.verify,
        )  # fmt: skip
        tokens = tuple(int(t) for t in out.tokens[0, : out.num_emitted[0]])
        return tokens, int(out.num_accepted[0])

    def accepted(self) -> float:
        return sum(n * mass for (_, n), mass in exact_law(self.run).items())

    def joint(self, length: int) -> np.ndarray:
        """Law of the first tokens, rounds that emit fewer continued by p."""
        law = np.zeros((len(self.p),) * length)
        for (tokens, _), mass in exact_law(self.run).items():
            rest = np.array(mass)
            for _ in range(length - len(tokens)):
                rest = np.multiply.outer(rest, self.p)
            law[tokens[:length]] += rest
        return law


def power(p: Any, length: int) -> np.ndarray:
    law = np.array(1.0)
    for _ in range(length):
        law = np.multiply.outer(law, p)
    return law


V26 = ([0.2, 0.4, 0.4], [0.1, 0.1, 0.8])


def test_v26_acceptance() -> None:
    assert Iid(*V26, 2, rule="block").accepted() == pytest.approx(1.04, abs=1e-12)
    assert Iid(*V26, 2, rule="token").accepted() == pytest.approx(0.96, abs=1e-12)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_v26_joint_law(rule: str) -> None:
    law = Iid(*V26, 2, rule=rule).joint(3)
    np.testing.assert_allclose(law, power(V26[0], 3), atol=1e-12)


def test_v26_a_token_wise_residual_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the block criterion with the residual of the rule `token`."""
    right = block_rule.residual
    monkeypatch.setattr(block_rule, "residual", lambda *args: right(*args[:4]))
    law = Iid(*V26, 2, rule="block").joint(2)
    assert law[2, 0] == pytest.approx(0.10, abs=1e-12)  # 0.08 is right


def reach(p: Any, q: Any, drafts: tuple[int, ...]) -> float:
    """P_i of the rule: the chance that all of these drafts stay."""
    chance = 1.0
    for x in drafts:
        chance = min(1.0, chance * p[x] / q[x])
    return chance


def test_the_textbook_value() -> None:
    """Sun et al., section 1: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 against 10/9.

    Draft by draft, i of them stay with probability beta^i, beta = sum min(p, q) = 2/3. Decided
    together, the first i stay with probability E[P_i]: 2/3, and (4/4 + 2 + 2/2 + 1)/9 = 5/9.
    """
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    beta = sum(map(min, p, q))
    token = beta + beta**2
    block = sum(
        np.prod([q[x] for x in drafts]) * reach(p, q, drafts)
        for n in (1, 2)
        for drafts in itertools.product(range(2), repeat=n)
    )
    assert (token, block) == (pytest.approx(10 / 9), pytest.approx(11 / 9))
    assert Iid(p, q, 2, rule="token").accepted() == pytest.approx(token, abs=1e-12)
    assert Iid(p, q, 2, rule="block").accepted() == pytest.approx(block, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_at_least_as_many(seed: int) -> None:
    """And exactly sum E[P_i]; the law of four tokens is the target's."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([0.7] * 3), rng.dirichlet([0.9] * 3)
    block, token = Iid(p, q, 3, rule="block"), Iid(p, q, 3, rule="token")
    np.testing.assert_allclose(block.joint(4), power(p, 4), atol=1e-12)
    assert block.accepted() >= token.accepted() - 1e-12
    reach, mass, want = np.ones(1), np.ones(1), 0.0
    for _ in range(3):
        reach = np.minimum(1, np.multiply.outer(reach, p / q)).reshape(-1)
        mass = np.multiply.outer(mass, q).reshape(-1)
        want += float(reach @ mass)
    assert block.accepted() == pytest.approx(want, abs=1e-12)


def test_one_draft_is_the_rule_token() -> None:
    laws = exact_law(Iid(*V26, 1, rule="block").run), exact_law(Iid(*V26, 1, rule="token").run)
    assert laws[0] == pytest.approx(laws[1], abs=1e-12)
