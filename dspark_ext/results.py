# SPDX-License-Identifier: Apache-2.0
"""Result objects of the operators: frozen dataclasses of arrays.

The arrays are of the caller's kind (torch or NumPy) and on the caller's device. ``R`` is the number
of requests, ``gamma`` the draft length, ``V`` the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Confidence", "Draft", "Plan", "Verification"]

Array = Any  # a torch.Tensor or a numpy.ndarray; torch is not imported here


@dataclass(frozen=True, eq=False)
class Draft:
    """Result of :func:`dspark_ext.markov_loop`.

    ``log q(x) = logit / T - lse`` with ``lse = log sum exp(z / T)`` over the law's support
    (greedy rows: ``T = 1``).
    """

    tokens: Array  # [R, gamma] int32, target ids
    logit: Array  # [R, gamma] f32, z_k(x_k)
    lse: Array | None  # [R, gamma] f32; None for a screened greedy draft
    confidence_logit: Array | None  # [R, gamma] f32, before STS and sigmoid
    logits: Array | None  # [R, gamma, V_d] corrected logits z, dtype of the base logits
    support_ids: Array | None  # [R, gamma, M] int32 target ids, ascending, -1 behind the last
    support_logits: Array | None  # [R, gamma, M] their z, -inf where truncated or padding
    status: Array  # [R] int32


@dataclass(frozen=True, eq=False)
class Confidence:
    """Result of :func:`dspark_ext.confidence`."""

    conditional: Array  # [R, gamma] f32, c_k
    survival: Array  # [R, gamma] f32, a_k = prod_{i <= k} c_i
    status: Array  # [R] int32


@dataclass(frozen=True, eq=False)
class Plan:
    """Result of :func:`dspark_ext.prefix_schedule`: lengths and the target's batch layout."""

    length: Array  # [R] int32, scheduled draft tokens
    cu_seqlens: Array  # [R + 1] int32, prefix sums of active * (1 + length)
    total_tokens: Array  # [] int32, B
    theta: Array  # [] f64, expected tokens per second; NaN without a cost table
    row_to_request: Array  # [padded_tokens] int32, -1 on padding
    row_offset: Array  # [padded_tokens] int32, 0 = anchor, j = draft j, -1 on padding
    token_ids: Array | None  # [padded_tokens] int32
    positions: Array | None  # [padded_tokens] int64
    work: Array  # opaque plan for verify_attention
    status: Array  # [R] int32


@dataclass(frozen=True, eq=False)
class Verification:
    """Result of :func:`dspark_ext.rejection_sample`."""

    num_accepted: Array  # [R] int32, drafts accepted and emitted
    num_emitted: Array  # [R] int32
    tokens: Array  # [R, gamma + 1] int32, -1 padded
    next_anchor: Array  # [R] int32, the last emitted token
    logprob: Array  # [R, gamma + 1] f32 under p
    logprob_raw: Array  # [R, gamma + 1] f32 under the unprocessed row
    accepted: Array  # [R, gamma] int8: 1, 0, -1 unobserved, -2 not scheduled
    finish: Array  # [R] int32: 0 none, 1 stop, 2 length
    status: Array  # [R] int32
    top_ids: Array | None = None  # [R, gamma + 1, n] int32, likeliest first under p, -1 padded
    top_logprob: Array | None = None  # [R, gamma + 1, n] f32
    top_ids_raw: Array | None = None  # [R, gamma + 1, n] int32 under the unprocessed row
    top_logprob_raw: Array | None = None  # [R, gamma + 1, n] f32
