# SPDX-License-Identifier: Apache-2.0
"""The drafter against numbers computed independently from the published research code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from dspark.drafters.modeling import Drafter  # noqa: E402

# The numbers were computed in float64 and printed with six decimals; float32 rounding of two
# layers of width 8 stays below a hundredth of this.
TOLERANCE = 1e-4


def wave(count: int, width: int, phase: float = 0.0) -> torch.Tensor:
    return torch.cos(0.23 * torch.arange(count * width).double() + phase).view(1, count, width)


def close(actual: torch.Tensor, expected: list[float]) -> bool:
    wanted = torch.tensor(expected, dtype=torch.float64)
    return bool((actual.detach().double() - wanted).abs().max() < TOLERANCE)


def greedy(drafter: Drafter, hidden: torch.Tensor, anchor: int) -> tuple[list[int], torch.Tensor]:
    """Token by token, each slot conditioned on the one drafted before."""
    previous = [anchor]
    for k in range(3):
        filled = torch.tensor([*previous, 0, 0][:3])
        logits, _ = drafter.logits(hidden, filled)
        previous.append(int(logits[k].argmax()))
    return previous[1:], drafter.logits(hidden, torch.tensor(previous[:3]))[1]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["f64", "f32"])
def drafter(
    request: pytest.FixtureRequest, golden_drafter: Callable[[torch.dtype], Drafter]
) -> Drafter:
    return golden_drafter(request.param)


def test_context_feature(drafter: Drafter) -> None:
    h = drafter.hidden_norm(drafter.fc(wave(4, 16).to(drafter.fc.weight.dtype)))
    expected = [-1.118417, -0.753946, -0.328623, 0.168753, 0.710965, 1.197392, 1.497909, 1.538296]
    assert close(h[0, 0], expected)


def test_first_round(drafter: Drafter) -> None:
    context = drafter.context(wave(4, 16).to(drafter.fc.weight.dtype))
    hidden = drafter.blocks(torch.tensor([[7]]), torch.tensor([[4]]), context)[0, 0]
    assert close(
        hidden[0], [0.594372, 0.970586, 1.281324, 1.447592, 1.387185, 1.087796, 0.629460, 0.131991]
    )
    assert close(
        hidden[2],
        [0.891321, 0.514972, 0.041147, -0.504270, -1.019376, -1.371077, -1.479973, -1.364849],
    )
    tokens, confidence = greedy(drafter, hidden, anchor=7)
    assert tokens == [6, 4, 0]
    assert close(confidence, [2.132225, 1.900909, 0.375103])
    logits, _ = drafter.logits(hidden, torch.tensor([7, 6, 4]))
    assert close(
        logits[0],
        [
            *(0.002754, -1.335394, 1.081195, -1.862126, 2.543409, -2.127098),
            *(3.176793, -2.867459, 2.780775, -3.389092, 2.407477),
        ],
    )


@pytest.mark.parametrize("cached", [False, True], ids=["one-shot", "cached"])
def test_second_round(drafter: Drafter, cached: bool) -> None:
    dtype = drafter.fc.weight.dtype
    first, second = wave(4, 16).to(dtype), wave(2, 16, 1.0).to(dtype)
    if cached:
        old, new = drafter.context(first), drafter.context(second, start=4)
        context = [
            (torch.cat([k, more_k], 1), torch.cat([v, more_v], 1))
            for (k, v), (more_k, more_v) in zip(old, new, strict=True)
        ]
    else:
        context = drafter.context(torch.cat([first, second], 1))
    hidden = drafter.blocks(torch.tensor([[5]]), torch.tensor([[6]]), context)[0, 0]
    assert close(
        hidden[0],
        [-1.282971, -1.328709, -1.231547, -0.938460, -0.456371, 0.115866, 0.636606, 1.008065],
    )
    tokens, confidence = greedy(drafter, hidden, anchor=5)
    assert tokens == [5, 0, 0]
    assert close(confidence, [-2.759688, 1.057901, 1.550544])


def test_blocks_do_not_see_each_other(drafter: Drafter) -> None:
    context = drafter.context(wave(9, 16).to(drafter.fc.weight.dtype))
    anchors, positions = torch.tensor([[7, 2, 5]]), torch.tensor([[4, 6, 9]])
    together = drafter.blocks(anchors, positions, context)
    for n in range(3):
        cut = [(k[:, : positions[0, n]], v[:, : positions[0, n]]) for k, v in context]
        alone = drafter.blocks(anchors[:, n : n + 1], positions[:, n : n + 1], cut)
        assert (together[:, n] - alone[:, 0]).abs().max() < 1e-5


def test_chosen_slots_are_the_same_slots(drafter: Drafter) -> None:
    context = drafter.context(wave(9, 16).to(drafter.fc.weight.dtype))
    anchors, positions = torch.tensor([[7, 2]]), torch.tensor([[4, 6]])
    chosen = torch.tensor([[[0, 2], [1, 2]]])
    every = drafter.blocks(anchors, positions, context)
    some = drafter.blocks(anchors, positions, context, chosen)
    for n in range(2):
        assert (every[0, n, chosen[0, n]] - some[0, n]).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_heads_by_hand(kind: str, golden_drafter: Callable[[torch.dtype], Drafter]) -> None:
    """u of one slot after another, written out from equations 5 and 6."""
    torch.manual_seed(3)
    config = golden_drafter(torch.float64).config.with_(markov_head_type=kind)
    drafter = Drafter(config).double()
    head = drafter.markov_head
    assert head is not None
    hidden, previous = torch.randn(3, 8).double(), torch.tensor([7, 1, 4])
    u, e = head(hidden, previous)
    state = torch.zeros(2).double()
    for k in range(3):
        word = head.markov_w1.weight[previous[k]]
        if kind == "vanilla":
            expected = word
        elif kind == "gated":
            g = head.gate_proj
            expected = torch.sigmoid(g.weight @ torch.cat([hidden[k], word]) + g.bias) * word
        else:
            j = head.joint_proj
            z = (j.weight @ torch.cat([state, word, hidden[k]]) + j.bias).view(3, 2)
            state = torch.sigmoid(z[0]) * state + (1 - torch.sigmoid(z[0])) * torch.tanh(z[1])
            expected = torch.tanh(z[2])
        assert torch.allclose(u[k], expected, atol=1e-12)
        assert torch.equal(e[k], word)
