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
        If given, slots are sampled: slot j takes part with probability ``w_j`` and weight 1
        instead of always with weight ``w_j``. The expected sums are the same and the LM head, the
        larger half of a step, runs on about half the rows.

    Returns
    -------
    StepResult
        Slots that took no part have ``valid`` unset.

    Examples
    --------
    >>> run_step(drafter, batch, LossWeights()).loss.backward()           # doctest: +SKIP
    """
    slots = drafter.config.block_size
    anchor_ids = batch.ids.gather(1, batch.anchors)
    hidden = drafter.blocks(anchor_ids, batch.anchors, drafter.context(batch.features))
    valid = valid_slots(batch.loss_mask, batch.anchors, slots) & batch.keep[..., None]
    weight = decay_weights(slots, weights.decay).expand(valid.shape)
    if random is not None:
        draw = torch.from_numpy(random.random(valid.shape, dtype=np.float32))
        valid, weight = valid & (draw < weight), torch.ones(valid.shape)
    # Position of slot j's previous token, which is also where its target distribution stands.
    source = batch.anchors[..., None] + torch.arange(slots)
    last = batch.ids.shape[1] - 1
    previous = batch.ids.gather(1, source.clamp_max(last).flatten(1)).view_as(source)
    u = embedding = None
    if drafter.markov_head is not None:
        u, embedding = drafter.markov_head(hidden, previous)

    rows, order, flat = _rows(drafter, batch, source, valid, weight)
    picked = hidden.flatten(0, 2)[order]
    picked_u = None if u is None else u.flatten(0, 2)[order]
    head = drafter.markov_head
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
