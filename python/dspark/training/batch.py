# SPDX-License-Identifier: Apache-2.0
"""One training step's forward pass: anchors, blocks, and the loss over a few sequences.

Everything random is a function of (seed, step), so a resumed run repeats the interrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.modeling import Drafter
from dspark.training.data import Sample
from dspark.training.loss import (
    EPSILON,
    HeadRows,
    LossWeights,
    candidate_anchors,
    confidence_loss,
    decay_weights,
    head_loss,
    valid_slots,
)


@dataclass
class Batch:
    """Padded sequences with their anchors.

    Parameters
    ----------
    ids, loss_mask
        ``[B, S]`` int64 and bool.
    features
        ``[B, S, m d]`` float32, zero on padding (never attended: anchors lie before it).
    final, lse
        ``[B, S, d]`` and ``[B, S]`` of the target; only read at ``anchor + slot`` of valid slots.
    anchors, keep
        ``[B, N]``; dropped entries are padding.
    """

    ids: Tensor
    loss_mask: Tensor
    features: Tensor
    final: Tensor
    lse: Tensor
    anchors: Tensor
    keep: Tensor


@dataclass
class StepResult:
    """Loss with gradient, its parts, and per-slot results ``[B N, γ]`` for the metrics."""

    loss: Tensor
    cross_entropy: float
    l1: float
    confidence: float
    accept: Tensor
    match: Tensor
    valid: Tensor
    confidence_logit: Tensor | None


def collate(samples: Sequence[Sample], anchors: int, random: np.random.Generator) -> Batch:
    """Pad samples and draw up to `anchors` anchors for each, uniformly without replacement.

    Answers are what is trained on: the loss mask covers everything after the prompt.

    Examples
    --------
    >>> collate(samples, 64, np.random.default_rng(0)).anchors.shape      # doctest: +SKIP
    torch.Size([4, 64])
    """
    count, length = len(samples), max(len(s.ids) for s in samples)
    width, size = samples[0].features.shape[1], samples[0].final.shape[1]
    batch = Batch(
        ids=torch.zeros(count, length, dtype=torch.long),
        loss_mask=torch.zeros(count, length, dtype=torch.bool),
        features=torch.zeros(count, length, width),
        final=torch.zeros(count, length, size),
        lse=torch.zeros(count, length),
        anchors=torch.zeros(count, anchors, dtype=torch.long),
        keep=torch.zeros(count, anchors, dtype=torch.bool),
    )
    for row, sample in enumerate(samples):
        end, start = len(sample.ids), sample.prompt_length
        batch.ids[row, :end] = sample.ids
        batch.loss_mask[row, start:end] = True
        batch.features[row, :end] = sample.features
        batch.final[row, start - 1 : end] = sample.final
        batch.lse[row, start - 1 : end] = sample.lse
        candidates = candidate_anchors(batch.loss_mask[row]).numpy()
        chosen = random.permutation(candidates)[:anchors]
        chosen.sort()
        batch.anchors[row, : len(chosen)] = torch.from_numpy(chosen)
        batch.keep[row, : len(chosen)] = True
    return batch


def sample_slots(weight: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Draw K of γ slots for each block, early (heavy) slots more often.

    Systematic sampling: every block gets exactly K = ceil(sum of w) slots, and slot j is among
    them with probability ``pi_j = min(1, c w_j)`` where c makes the probabilities sum to K. A drawn
    slot carries ``w_j / pi_j``, so expected weighted sums are those of all slots.

    Parameters
    ----------
    weight
        ``[B, N, γ]``, the same for every block.

    Returns
    -------
    tuple
        Slots ``[B, N, K]`` ascending and their weights ``[B, N, K]``.

    Examples
    --------
    >>> weight = torch.tensor([1.0, 0.5, 0.25]).expand(1, 2, 3)
    >>> sample_slots(weight, np.random.default_rng(0))[0].shape
    torch.Size([1, 2, 2])
    """
    w = weight[0, 0].double()
    count = min(len(w), int(torch.ceil(w.sum() - 1e-9)))
    pi = w.clone()
    for _ in range(len(w)):
        free = pi < 1
        if not bool(free.any()):
            break
        pi[free] *= (count - (~free).sum()) / pi[free].sum()
        pi.clamp_(max=1)
    upper = pi.cumsum(0)
    upper[-1] = count
    shift = torch.from_numpy(random.random(weight.shape[:2]))
    # Slot j is drawn when an integer plus the shift falls into its stretch of the cumulated pi.
    marks = shift[..., None] + torch.arange(count)
    chosen = torch.searchsorted(upper, marks, right=True).clamp_max(len(w) - 1)
    return chosen, (w / pi).float()[chosen]


def run_step(
    drafter: Drafter,
    batch: Batch,
    weights: LossWeights,
    random: np.random.Generator | None = None,
) -> StepResult:
    """Forward pass and loss of one batch.

    Parameters
    ----------
    drafter
        With the target's tables attached.
    random
        If given, each block trains a random subset of its slots, chosen so that the expected loss
        is the same (see :func:`sample_slots`). The last layer and the LM head, most of a step, run
        on these slots only. Not possible with the rnn head, which needs every slot in turn.

    Returns
    -------
    StepResult

    Raises
    ------
    ValueError
        `random` given for a drafter with an rnn head.

    Examples
    --------
    >>> run_step(drafter, batch, LossWeights()).loss.backward()           # doctest: +SKIP
    """
    slots, head = drafter.config.block_size, drafter.markov_head
    anchor_ids = batch.ids.gather(1, batch.anchors)
    valid = valid_slots(batch.loss_mask, batch.anchors, slots) & batch.keep[..., None]
    weight = decay_weights(slots, weights.decay).expand(valid.shape)
    chosen, offset = None, torch.arange(slots)
    if random is not None:
        if head is not None and head.kind == "rnn":
            raise ValueError("random: slots cannot be sampled with the rnn head")
        chosen, weight = sample_slots(weight, random)
        offset, valid = chosen, valid.gather(2, chosen)
    hidden = drafter.blocks(anchor_ids, batch.anchors, drafter.context(batch.features), chosen)
    # Position of a slot's previous token, which is also where its target distribution stands.
    source = batch.anchors[..., None] + offset
    last = batch.ids.shape[1] - 1
    previous = batch.ids.gather(1, source.clamp_max(last).flatten(1)).view_as(source)
    u = embedding = None
    if head is not None:
        u, embedding = head(hidden, previous)

    rows, order, flat = _rows(drafter, batch, source, valid, weight)
    picked = hidden.flatten(0, 2)[order]
    picked_u = None if u is None else u.flatten(0, 2)[order]
    result = head_loss(
        picked,
        picked_u,
        None if head is None else head.markov_w2.weight,
        drafter.lm_head,
        rows,
        weights,
        full_vocabulary=drafter.d2t is None,
    )
    loss, confidence, logit = result.loss, 0.0, None
    if drafter.confidence_head is not None:
        picked_e = None if embedding is None else embedding.flatten(0, 2)[order]
        if weights.detach_confidence:
            picked = picked.detach()
            picked_e = None if picked_e is None else picked_e.detach()
        logit = drafter.confidence_head(picked, picked_e)
        term = confidence_loss(logit, result.accept, rows.weight)
        loss = loss + weights.confidence * term
        confidence = float(term.detach())
    total = rows.weight.sum() + EPSILON
    return StepResult(
        loss=loss,
        cross_entropy=float((rows.weight * result.cross_entropy).sum() / total),
        l1=float((rows.weight * result.l1).sum() / total),
        confidence=confidence,
        accept=_scatter(result.accept, order, valid),
        match=_scatter(result.match, order, valid),
        valid=flat,
        confidence_logit=None if logit is None else _scatter(logit.detach(), order, valid),
    )


def _rows(
    drafter: Drafter, batch: Batch, source: Tensor, valid: Tensor, weight: Tensor
) -> tuple[HeadRows, Tensor, Tensor]:
    """Rows of valid slots ordered by the target position they are compared with.

    Several blocks cover the same position: in this order each chunk of the head meets few
    different target distributions and computes each of them once.
    """
    length = batch.ids.shape[1]
    sequence = torch.arange(len(batch.ids))[:, None, None]
    key = (sequence * length + source).flatten()
    flat = valid.flatten()
    chosen = flat.nonzero()[:, 0]
    order = chosen[torch.argsort(key[chosen], stable=True)]
    unique, row = torch.unique_consecutive(key[order], return_inverse=True)
    label = batch.ids.flatten()[key[order] + 1]
    if drafter.d2t is not None:
        column = torch.searchsorted(drafter.d2t.long(), label).clamp_max(len(drafter.d2t) - 1)
        label = torch.where(drafter.d2t[column] == label, column, -1)
    rows = HeadRows(
        label=label,
        target_row=row,
        target_hidden=batch.final.flatten(0, 1)[unique],
        target_lse=batch.lse.flatten()[unique],
        weight=weight.flatten()[order],
    )
    return rows, order, valid.flatten(0, 1)


def _scatter(values: Tensor, order: Tensor, valid: Tensor) -> Tensor:
    """Rows back to ``[B N, γ]``, zero where there is none."""
    full = torch.zeros(valid.numel(), dtype=torch.float32)
    full[order] = values.float()
    return full.view(-1, valid.shape[-1])
