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

# Rows of one elementwise pass: 16 rows of 16,384 columns are 1 MiB, which stays in the L2 cache.
_PASS_ROWS = 16


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
    ``accept`` (c*) are per row ``[n]``; ``match`` says whether p and q have the same argmax (only
    filled in while gradients are off: training does not need it).
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
    gradient = torch.is_grad_enabled()
    parts = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, u, w2, lm_head, rows, weights, full_vocabulary, chunk, gradient
    )
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
        gradient: bool,
    ) -> tuple[Tensor, ...]:
        count, size = hidden.shape
        scale = rows.weight / (rows.weight.sum() + EPSILON)
        needs = gradient and any(ctx.needs_input_grad)
        # One product for both parts of the logits, and one for both parts of the gradient.
        x, table = hidden, lm_head
        if u is not None and w2 is not None:
            x, table = torch.cat([hidden, u], dim=-1), torch.cat([lm_head, w2], dim=-1)
        dx = torch.empty_like(x) if needs else None
        d_w2 = torch.zeros_like(w2) if needs and w2 is not None else None
        ce, l1 = hidden.new_empty(count), hidden.new_empty(count)
        match = torch.zeros(count, dtype=torch.bool)
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            p, missing, first = _target(rows, lm_head, part, full_vocabulary)
            z = torch.mm(x[part], table.t())
            for low in range(part.start, part.stop, _PASS_ROWS):
                here = slice(low, min(low + _PASS_ROWS, part.stop))
                row = rows.target_row[here] - first
                block = z[here.start - start : here.stop - start]
                if not needs:
                    match[here] = block.argmax(dim=-1) == p.argmax(dim=-1)[row]
                ce[here], l1[here] = _pass(
                    block, p[row], rows.label[here], scale[here], weights, needs
                )
                l1[here] += missing[row]
            if dx is not None:
                torch.mm(z, table, out=dx[part])
                if d_w2 is not None and u is not None:
                    d_w2.addmm_(z.t(), u[part])
        d_hidden = d_u = None
        if dx is not None:
            d_hidden, d_u = dx[:, :size], (None if u is None else dx[:, size:])
        ctx.gradients = (d_hidden, d_u, d_w2)
        loss = (scale * (weights.cross_entropy * ce + weights.l1 * l1)).sum()
        accept = (1 - 0.5 * l1).clamp(0, 1)
        ctx.mark_non_differentiable(ce, l1, accept, match)
        return loss, ce, l1, accept, match

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = tuple(None if g is None else g * gradients[0] for g in ctx.gradients)
        return (*scaled, None, None, None, None, None, None)


def _pass(
    z: Tensor, p: Tensor, label: Tensor, scale: Tensor, weights: LossWeights, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Cross entropy and L1 of a few rows; turns z into the gradient dL/dz in place.

    ``d CE / d z = q - onehot(label)`` and ``d L1 / d z = q (sign - sum q sign)`` with
    ``sign = sign(q - p)``.
    """
    in_draft = (label >= 0).to(z.dtype)
    column = label.clamp_min(0)[:, None]
    top = z.amax(dim=-1, keepdim=True)
    at_label = z.gather(1, column) - top
    total = z.sub_(top).exp_().sum(dim=-1, keepdim=True)
    ce = (total.log() - at_label)[:, 0] * in_draft
    q = z.div_(total)
    signed = torch.sub(q, p)
    l1 = torch.linalg.vector_norm(signed, ord=1, dim=-1)
    if gradient:
        torch.copysign(q, signed, out=signed)
        scale_l1 = (weights.l1 * scale)[:, None]
        scale_ce = (weights.cross_entropy * scale * in_draft)[:, None]
        constant = scale_ce - scale_l1 * signed.sum(dim=-1, keepdim=True)
        q.mul_(constant).addcmul_(signed, scale_l1)
        q.scatter_add_(1, column, -scale_ce)
    return ce, l1


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
