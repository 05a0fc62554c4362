# SPDX-License-Identifier: Apache-2.0
"""What :func:`dspark_ext.decode_round` asks of a target model and of a drafter.

Any object with these methods will do; nothing has to inherit from anything here. ``R`` is the
number of slots of the :class:`dspark_ext.RoundState` (some of them may be inactive), ``gamma`` the
draft length, ``B`` the rows of one target forward, ``m * d`` the width of the tapped features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from dspark_ext.decode_round import Round
    from dspark_ext.results import Draft, Plan
    from dspark_ext.state import RoundState

__all__ = [
    "Cache",
    "CalibrationMonitor",
    "ConfidenceProvider",
    "DraftHead",
    "Drafter",
    "NewFeatures",
    "Target",
]

Array = Any  # a torch.Tensor or a numpy.ndarray


@dataclass(frozen=True, eq=False)
class Cache:
    """Where a target keeps the keys and values of one forward pass.

    Attributes
    ----------
    pages
        What ``target.new_cache(num_pages, page_size)`` returned; ``None`` for targets without it.
    page_table : array, shape (R, max_pages), int32
        Page ids; -1 = none.
    kv_len : array, shape (R,), int32
        Lengths before this forward: what :func:`dspark_ext.paged_kv_append` wants.
    kv_len_after : array, shape (R,), int32
        Lengths including the new rows, 0 for inactive slots: what
        :func:`dspark_ext.verify_attention` wants.
    max_q_len : int
        Most rows that one request has in this forward.
    page_size : int
        Tokens in a page.
    """

    pages: Any
    page_table: Array
    kv_len: Array
    kv_len_after: Array
    max_q_len: int
    page_size: int


class NewFeatures(NamedTuple):
    """Target features of the tokens committed since the drafter was last called.

    Request r owns rows ``cu_seqlens[r] .. cu_seqlens[r + 1] - 1`` of ``rows``; only the first
    ``num_new[r]`` of them belong to committed tokens, at the absolute positions
    ``position[r] - num_new[r] .. position[r] - 1`` (``position`` = that of the anchor, as passed to
    ``draft``). Rows of rejected drafts follow and are to be ignored.
    """

    rows: Array  # [N, m * d], dtype of the target
    cu_seqlens: Array  # [R + 1] int32, NumPy
    num_new: Array  # [R] int32, NumPy; 0 for inactive slots


@dataclass(frozen=True, eq=False)
class DraftHead:
    """Weights of the sequential head and of the confidence head (``drafter.head``).

    The fields are arguments of :func:`dspark_ext.markov_loop` of the same meaning.

    Attributes
    ----------
    w1 : array, shape (V, r)
        Markov embedding, indexed by target ids.
    w2 : array, shape (V_d, r)
        Markov projection.
    kind : {"vanilla", "gated", "rnn"}
        Kind of head.
    weight, bias : array, optional
        Gated (r, d + r), (r,); rnn (3r, 2r + d), (3r,).
    confidence_weight : array, shape (d + r,) or (d,), float32, optional
        Without it only the schedules ``off`` and ``fixed`` are possible.
    confidence_bias : float
        Added to the confidence logit.
    draft_to_target : array, shape (V_d,), int32, optional
        Reduced draft vocabulary.
    w2_scale : array, shape (V_d,), float32, optional
        Row scales of an int8 ``w2``.
    topk_support : int
        Draft from the M largest base logits only; 0 = all. The law of the emitted tokens stays, the
        acceptance may fall, and a round keeps M logits a draft instead of V_d.
    """

    w1: Array
    w2: Array
    kind: str = "vanilla"
    weight: Array | None = None
    bias: Array | None = None
    confidence_weight: Array | None = None
    confidence_bias: float = 0.0
    draft_to_target: Array | None = None
    w2_scale: Array | None = None
    topk_support: int = 0


class Target(Protocol):
    """The model whose law is kept."""

    def forward(
        self,
        token_ids: Array,
        positions: Array,
        plan: Plan,
        cache: Cache,
        *,
        logit_rows: Array | None = None,
    ) -> tuple[Array, Array | None]:
        """Run the flattened rows of all requests.

        Parameters
        ----------
        token_ids, positions : array, shape (B,)
            int32 and int64, in ``plan.cu_seqlens`` order.
        plan : Plan
            ``cu_seqlens`` says which rows belong together.
        cache : Cache
            Pages, tables and lengths; the new rows are appended at ``kv_len``.
        logit_rows : array, shape (L,), int64, optional
            Rows whose logits are wanted; all of them when absent. Prefill asks for one a request.

        Returns
        -------
        tuple
            Logits (B, V) or (L, V), float32, bfloat16 or float16; and features (B, m * d), or
            ``None`` when the target has no taps.
        """
        ...


class Drafter(Protocol):
    """The model that proposes."""

    @property
    def head(self) -> DraftHead:
        """Weights of the sequential and the confidence head."""
        ...

    def draft(
        self, anchor: Array, position: Array, new_features: NewFeatures, state: RoundState
    ) -> tuple[Array, Array]:
        """Extend the context by the new features, then run one block per active request.

        Parameters
        ----------
        anchor, position : array, shape (R,)
            int32 and int64; meaningless where ``state.active`` is 0.
        new_features : NewFeatures
            Everything committed since the last call. Writing the same rows twice must be harmless:
            a round that was aborted behind this call is repeated with the same arguments.
        state : RoundState
            ``page_table``, ``page_size``, ``active`` and ``drafter_pages`` (what
            ``drafter.new_cache(num_pages, page_size)`` returned). Pages for positions up to
            ``position + gamma`` are reserved, so that the block's own keys fit behind the context.

        Returns
        -------
        tuple
            Base logits (R, gamma, V_d) and final hidden states (R, gamma, d), float32; rows of
            inactive slots hold anything.
        """
        ...


class ConfidenceProvider(Protocol):
    """Confidences for the scheduler from elsewhere than the drafter's own head."""

    @property
    def safe_with_sampled_drafts(self) -> bool:
        """Whether c_k is known before x_k is drawn.

        True when c_k is a function of the context, the drafts before x_k and past rounds. A
        provider that looks at x_k (its probability under the draft law, say) must answer False: the
        decision to verify x_k would depend on x_k, which bends the law of sampled drafts. Greedy
        drafts, greedy targets and the rule ``match`` survive it.
        """
        ...

    def conditional(self, state: RoundState, draft: Draft) -> Array:
        """Probability that draft k survives given that the drafts before it did.

        Returns
        -------
        array, shape (R, gamma), float32
            Rows of slots without a draft (``state.host.drafting`` is 0) hold anything.
        """
        ...

    def observe(self, state: RoundState, result: Round) -> None:
        """Learn from a committed round; ``state.serial`` tells which request holds a slot."""
        ...


class CalibrationMonitor(Protocol):
    """Watches the confidences of rounds, and may correct and explore between them."""

    def temperatures(self, state: RoundState) -> Array | None:
        """STS temperatures of every slot (R, gamma), float32; ``None``: the scheduler's own."""
        ...

    def floors(self, state: RoundState) -> Array | None:
        """Drafts to verify whatever they promise (R,), int32; must not depend on the drafts."""
        ...

    def observe(self, state: RoundState, result: Round) -> None:
        """Learn from a committed round."""
        ...
