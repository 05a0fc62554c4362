# SPDX-License-Identifier: Apache-2.0
"""The training loss: published numbers, and autograd on a plainly written version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dspark.drafters.modeling import Drafter  # noqa: E402
from dspark.training import loss as L  # noqa: E402
from dspark.training.batch import Batch, run_step, sample_slots  # noqa: E402


def golden_batch(drafter: Drafter) -> Batch:
    dtype = drafter.fc.weight.dtype
    wave = torch.arange(128).double()
    final = 1.5 * torch.cos(0.23 * wave[:64] + 0.5).view(1, 8, 8).to(dtype)
    return Batch(
        ids=torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]),
        loss_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]]).bool(),
        features=torch.cos(0.23 * wave).view(1, 8, 16).to(dtype),
        final=final,
        lse=torch.logsumexp(final @ drafter.lm_head.t(), dim=-1),
        anchors=torch.tensor([[2, 4]]),
        keep=torch.tensor([[True, True]]),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_published_numbers(
    dtype: torch.dtype, golden_drafter: Callable[[torch.dtype], Drafter]
) -> None:
    drafter = golden_drafter(dtype)
    result = run_step(drafter, golden_batch(drafter), L.LossWeights())
    result.loss.backward()
    assert result.cross_entropy == pytest.approx(3.857889, abs=1e-4)
    assert result.l1 == pytest.approx(1.263262, abs=1e-4)
    assert result.confidence == pytest.approx(1.277886, abs=1e-4)
    assert float(result.loss.detach()) == pytest.approx(2.800610, abs=1e-4)
    assert float(L.tau(result.accept, result.valid)) == pytest.approx(1.436592, abs=1e-4)
    accept = [0.369055, 0.564927, 0.936019, 0.092818, 0.082658]
    logits = [-2.622320, 2.780934, -1.140642, 0.866749, 1.693460]
    assert result.accept.flatten()[:5].tolist() == pytest.approx(accept, abs=1e-4)
    assert result.confidence_logit is not None
    assert result.confidence_logit.flatten()[:5].tolist() == pytest.approx(logits, abs=1e-4)
    assert result.valid.int().tolist() == [[1, 1, 1], [1, 1, 0]]
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    gradients = {
        0.186338: drafter.confidence_head.proj.bias.grad,
        0.137290: drafter.markov_head.markov_w1.weight.grad,
        0.048410: drafter.markov_head.markov_w2.weight.grad,
        2.096510: drafter.fc.weight.grad,
    }
    for expected, gradient in gradients.items():
        assert float(gradient.norm()) == pytest.approx(expected, abs=1e-4)
    assert drafter.embedding.grad is None and drafter.lm_head.grad is None


def test_c2_decay_weights() -> None:
    four = [1, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130]
    seven = [1, 0.866878, 0.751477, 0.651439, 0.564718, 0.489542, 0.424373]
    assert L.decay_weights(7, 4.0).tolist() == pytest.approx(four, abs=1e-6)
    assert L.decay_weights(7, 7.0).tolist() == pytest.approx(seven, abs=1e-6)
    assert L.decay_weights(3, 0.0).tolist() == [1, 1, 1]


def test_anchors_and_valid_slots() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 0])
    assert L.candidate_anchors(mask).tolist() == [2, 3, 6]
    assert L.valid_slots(mask, torch.tensor([2, 6]), 3).int().tolist() == [[1, 1, 0], [1, 0, 0]]
    # A slot behind a gap stays out although its own label is inside the mask.
    assert L.valid_slots(mask, torch.tensor([4]), 4).int().tolist() == [[0, 0, 0, 0]]


def plain_terms(
    hidden: torch.Tensor, u: torch.Tensor, w2: torch.Tensor, head: torch.Tensor, rows: L.HeadRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """CE and L1 per row, with logits of the whole batch and nothing clever."""
    q = torch.softmax(hidden @ head.T + u @ w2.T, dim=-1)
    p = torch.exp(rows.target_hidden @ head.T - rows.target_lse[:, None])[rows.target_row]
    l1 = (q - p).abs().sum(-1) + (1 - p.sum(-1)).clamp_min(0)
    inside = rows.label >= 0
    chosen = q.gather(1, rows.label.clamp_min(0)[:, None])[:, 0]
    return torch.where(inside, -chosen.log(), torch.zeros_like(chosen)), l1


@pytest.mark.parametrize("chunk", [1, 3, 64], ids=lambda c: f"chunk{c}")
def test_gradient_on_a_reduced_vocabulary(chunk: int, rng: np.random.Generator) -> None:
    n, m, d, r, full, columns = 37, 9, 6, 4, 60, 23
    torch.manual_seed(int(rng.integers(1 << 30)))
    head_full = torch.randn(full, d).double()
    kept = torch.randperm(full)[:columns].sort().values
    target = torch.randn(m, d).double()
    rows = L.HeadRows(
        label=torch.randint(-1, columns, (n,)),
        target_row=torch.randint(0, m, (n,)).sort().values,
        target_hidden=target,
        target_lse=torch.logsumexp(target @ head_full.T, -1),
        weight=torch.rand(n).double(),
    )
    weights = L.LossWeights()
    inputs = [torch.randn(*s).double() for s in ((n, d), (n, r), (columns, r))]
    plain = [x.clone().requires_grad_() for x in inputs]
    ours = [x.clone().requires_grad_() for x in inputs]
    ce, l1 = plain_terms(*plain, head_full[kept], rows)
    scale = rows.weight / (rows.weight.sum() + 1e-6)
    expected = (scale * (0.1 * ce + 0.9 * l1)).sum()
    (3 * expected).backward()
    out = L.head_loss(*ours, head_full[kept], rows, weights, full_vocabulary=False, chunk=chunk)
    (3 * out.loss).backward()
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert torch.allclose(out.cross_entropy, ce.detach(), atol=1e-12)
    assert torch.allclose(out.accept, (1 - l1.detach() / 2).clamp(0, 1), atol=1e-12)
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)
    # c* is the overlap of q, which is zero outside the kept ids, with the full p.
    q = torch.zeros(n, full).double()
    q[:, kept] = torch.softmax(inputs[0] @ head_full[kept].T + inputs[1] @ inputs[2].T, -1)
    p = torch.softmax(target @ head_full.T, -1)[rows.target_row]
    assert torch.allclose(out.accept, torch.minimum(p, q).sum(-1), atol=1e-12)


def test_match_is_reported_without_gradient(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(1 << 30)))
    head, hidden = torch.randn(30, 5), torch.randn(8, 5)
    rows = L.HeadRows(
        label=torch.zeros(8, dtype=torch.long),
        target_row=torch.arange(8),
        target_hidden=torch.cat([hidden[:4], -hidden[4:]]),
        target_lse=torch.zeros(8),
        weight=torch.ones(8),
    )
    # Parameters that require gradients must not switch the report off.
    u, w2 = torch.zeros(8, 2), torch.zeros(30, 2, requires_grad=True)
    with torch.no_grad():
        out = L.head_loss(hidden, u, w2, head, rows, L.LossWeights(), full_vocabulary=True)
    same = (hidden @ head.T).argmax(-1) == (rows.target_hidden @ head.T).argmax(-1)
    assert torch.equal(out.match, same) and bool(same[:4].all())


def test_confidence_can_be_detached(golden_drafter: Callable[[torch.dtype], Drafter]) -> None:
    gradients = []
    for detach in (False, True):
        drafter = golden_drafter(torch.float64)
        weights = L.LossWeights(cross_entropy=0.0, l1=0.0, detach_confidence=detach)
        run_step(drafter, golden_batch(drafter), weights).loss.backward()
        gradients.append(float(drafter.fc.weight.grad.norm()))
    assert gradients[0] > 1e-3 and gradients[1] == 0


def test_sampled_slots_keep_expected_sums(rng: np.random.Generator) -> None:
    """Mean of the drawn weights over many blocks against w, within five standard errors."""
    blocks, weight = 20000, L.decay_weights(7, 4.0)
    chosen, drawn = sample_slots(weight.expand(1, blocks, 7), rng)
    assert chosen.shape == (1, blocks, 4)
    assert bool((chosen[..., 1:] > chosen[..., :-1]).all())
    mean = torch.zeros(7).scatter_add_(0, chosen.flatten(), drawn.flatten()) / blocks
    # A slot's weight is w / pi with probability pi, else 0: variance w^2 (1 - pi) / pi, pi >= w.
    error = (weight * (1 - weight) / blocks).sqrt()
    assert bool(((mean - weight).abs() <= 5 * error + 1e-6).all())
