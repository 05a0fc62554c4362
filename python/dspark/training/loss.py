# SPDX-License-Identifier: Apache-2.0
"""The training loss (paper section 3.3) with its gradient worked out by hand, chunk by chunk.

The draft logits of one step would fill hundreds of megabytes and a dozen passes of memory traffic
if autograd kept them. The LM head is frozen and the coefficients of all rows are known before,
so :class:`HeadLoss` computes the gradient with respect to the hidden states, the Markov input and
W2 right after each chunk's forward pass, while the chunk is still in cache.

A draft vocabulary smaller than the target's makes q zero outside it: the target's mass there
("missing") is added to the L1 distance, which keeps ``c* = 1 - L1 / 2 = sum min(p, q)`` exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-6


@dataclass(frozen=True)
class LossWeights:
    """Factors of the terms; the values of the paper's released configurations by default.

    Parameters
    ----------
    decay
        Constant of ``w_j = exp(-j / decay)``; 0 = no decay.
    detach_confidence
        Stop the confidence loss at the head's inputs. The public recipe lets it flow into the
        backbone and W1, hence False.
    """

    cross_entropy: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    detach_confidence: bool = False


def decay_weights(block_size: int, decay: float) -> Tensor:
    """``[γ]`` float32 weights of the slots.

    Examples
    --------
    >>> [round(w, 4) for w in decay_weights(3, 4.0).tolist()]
    [1.0, 0.7788, 0.6065]
    """
    slots = torch.arange(block_size, dtype=torch.float32)
    return torch.exp(-slots / decay) if decay > 0 else torch.ones(block_size)


def candidate_anchors(loss_mask: Tensor) -> Tensor:
    """Positions a with ``loss_mask[a]`` and ``loss_mask[a + 1]`` both set.

    Examples
    --------
    >>> candidate_anchors(torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 0])).tolist()
    [2, 3, 6]
    """
    mask = loss_mask.bool()
    return (mask[:-1] & mask[1:]).nonzero()[:, 0]


def valid_slots(loss_mask: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Which slots of each block have a label: a contiguous prefix inside the loss mask.

    Parameters
    ----------
    loss_mask
        ``[S]`` or ``[B, S]``.
    anchors
        ``[N]`` or ``[B, N]`` positions.

    Returns
    -------
    Tensor
        ``[..., N, γ]`` bool.

    Examples
    --------
    >>> mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 0])
    >>> valid_slots(mask, torch.tensor([2, 6]), 3).int().tolist()
    [[1, 1, 0], [1, 0, 0]]
    """
    length = loss_mask.shape[-1]
    labels = anchors[..., None] + 1 + torch.arange(block_size)
    rows = loss_mask.bool().unsqueeze(-2).expand(*anchors.shape, length)
    found = rows.gather(-1, labels.clamp_max(length - 1)) & (labels < length)
    return found.int().cumprod(dim=-1).bool()


@dataclass
class HeadRows:
    """Inputs of :func:`head_loss` for n rows (slots with a label).

    Parameters
    ----------
    label
        ``[n]`` draft column of the label, or −1 if it lies outside the draft vocabulary (then the
        row has no cross entropy).
    target_row
        ``[n]`` non-decreasing: row of `target_hidden` whose distribution is the row's p.
    target_hidden
        ``[m, d]`` final hidden states of the target.
    target_lse
        ``[m]`` log-sum-exp of the target's full logits.
    weight
        ``[n]`` weight of the row in the mean.
    """

    label: Tensor
    target_row: Tensor
    target_hidden: Tensor
    target_lse: Tensor
    weight: Tensor


@dataclass
class HeadResult:
    """What :func:`head_loss` returns; all but `loss` are without gradient.

    ``loss`` is the weighted mean of the cross-entropy and L1 terms; ``cross_entropy``, ``l1`` and
    ``accept`` (c*) are per row ``[n]``; ``match`` says whether p and q have the same argmax.
    """

    loss: Tensor
    cross_entropy: Tensor
    l1: Tensor
    accept: Tensor
    match: Tensor


def head_loss(
    hidden: Tensor,
    u: Tensor | None,
    w2: Tensor | None,
    lm_head: Tensor,
    rows: HeadRows,
    weights: LossWeights,
    *,
    full_vocabulary: bool,
    chunk: int = 128,
) -> HeadResult:
    """Cross-entropy and L1 terms of n rows over the draft vocabulary.

    Parameters
    ----------
    hidden
        ``[n, d]``.
    u, w2
        ``[n, r]`` and ``[V_d, r]`` of the sequential head, or None.
    lm_head
        ``[V_d, d]``, frozen.
    full_vocabulary
        The columns are the whole vocabulary: there is no missing mass.
    chunk
        Rows handled at a time.

    Examples
    --------
    >>> rows = HeadRows(torch.tensor([1]), torch.tensor([0]), torch.zeros(1, 2),
    ...                 torch.tensor([2.0]).log(), torch.ones(1))
    >>> out = head_loss(torch.zeros(1, 2), None, None, torch.zeros(2, 2), rows, LossWeights(),
    ...                 full_vocabulary=True)
    >>> round(float(out.loss), 4), float(out.accept)
    (0.0693, 1.0)
    """
    parts = _HeadLoss.apply(hidden, u, w2, lm_head, rows, weights, full_vocabulary, chunk)
    return HeadResult(*parts)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        u: Tensor | None,
        w2: Tensor | None,
        lm_head: Tensor,
        rows: HeadRows,
        weights: LossWeights,
        full_vocabulary: bool,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        count = len(hidden)
        scale = rows.weight / (rows.weight.sum() + EPSILON)
        needs = any(ctx.needs_input_grad)
        d_hidden = torch.empty_like(hidden) if needs else None
        d_u = torch.empty_like(u) if needs and u is not None else None
        d_w2 = torch.zeros_like(w2) if needs and w2 is not None else None
        ce, l1 = hidden.new_empty(count), hidden.new_empty(count)
        match = torch.empty(count, dtype=torch.bool)
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            p, missing, first = _target(rows, lm_head, part, full_vocabulary)
            z = torch.mm(hidden[part], lm_head.t())
            if u is not None and w2 is not None:
                z.addmm_(u[part], w2.t())
            log_sum = torch.logsumexp(z, dim=-1)
            label = rows.label[part]
            in_draft = (label >= 0).to(z.dtype)
            column = label.clamp_min(0)[:, None]
            ce[part] = (log_sum - z.gather(1, column)[:, 0]) * in_draft
            row = rows.target_row[part] - first
            if not needs:
                match[part] = z.argmax(dim=-1) == p.argmax(dim=-1)[row]
            q = z.sub_(log_sum[:, None]).exp_()
            difference = q - p[row]
            l1[part] = difference.abs().sum(dim=-1) + missing[row]
            if not needs:
                continue
            assert d_hidden is not None
            sign = difference.sign_()
            mean_sign = (q[:, None] @ sign[:, :, None])[:, :, 0]
            # d CE / d z = q - onehot, d L1 / d z = q (sign - sum q sign).
            scale_l1 = (weights.l1 * scale[part])[:, None]
            scale_ce = (weights.cross_entropy * scale[part] * in_draft)[:, None]
            dz = sign.mul_(scale_l1).add_(scale_ce - scale_l1 * mean_sign).mul_(q)
            dz.scatter_add_(1, column, -scale_ce)
            torch.mm(dz, lm_head, out=d_hidden[part])
            if u is not None and w2 is not None:
                torch.mm(dz, w2, out=d_u[part])  # type: ignore[index]
                d_w2.addmm_(dz.t(), u[part])  # type: ignore[union-attr]
        ctx.gradients = (d_hidden, d_u, d_w2)
        loss = (scale * (weights.cross_entropy * ce + weights.l1 * l1)).sum()
        accept = (1 - 0.5 * l1).clamp(0, 1)
        ctx.mark_non_differentiable(ce, l1, accept, match)
        return loss, ce, l1, accept, match

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = tuple(None if g is None else g * gradients[0] for g in ctx.gradients)
        return (*scaled, None, None, None, None, None)


def _target(
    rows: HeadRows, lm_head: Tensor, part: slice, full_vocabulary: bool
) -> tuple[Tensor, Tensor, int]:
    """p on the draft columns, the missing mass, and the first target row, for one chunk."""
    first, last = int(rows.target_row[part][0]), int(rows.target_row[part][-1])
    here = slice(first, last + 1)
    p = torch.mm(rows.target_hidden[here], lm_head.t())
    p = p.sub_(rows.target_lse[here, None]).exp_()
    if full_vocabulary:
        return p, p.new_zeros(len(p)), first
    return p, (1 - p.sum(dim=-1)).clamp_min(0), first


def confidence_loss(logit: Tensor, accept: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean binary cross entropy against the detached labels c*.

    Parameters
    ----------
    logit, accept, weight
        ``[n]`` each.

    Examples
    --------
    >>> one = torch.ones(1)
    >>> round(float(confidence_loss(torch.zeros(1), one, one)), 4)
    0.6931
    """
    bce = F.binary_cross_entropy_with_logits(
        logit, accept.detach().to(logit.dtype), reduction="none"
    )
    return (weight * bce).sum() / (weight.sum() + EPSILON)


def tau(accept: Tensor, valid: Tensor) -> Tensor:
    """Mean over blocks of ``1 + sum_j prod_{i<=j} c*_i``: tokens a round would commit.

    Parameters
    ----------
    accept, valid
        ``[N, γ]``; slots that are not valid end the product.

    Examples
    --------
    >>> float(tau(torch.tensor([[0.5, 0.5]]), torch.tensor([[True, True]])))
    1.75
    """
    return 1 + (accept * valid).cumprod(dim=-1).sum(dim=-1).mean()
