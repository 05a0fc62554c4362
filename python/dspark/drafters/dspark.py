# SPDX-License-Identifier: Apache-2.0
"""The drafter at inference: a paged context cache and one parallel block per round.

Same mathematics as :mod:`dspark.drafters.modeling`, on flattened rows. Per round and layer the
features of the newly committed tokens are appended as keys and values, then the block's own keys
are written behind them (dead entries as soon as the round ends) and every slot attends to both
without a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.drafters.modeling import Drafter
from dspark.targets.linear import Linear
from dspark.targets.llama import Llama, RotaryTable, rotate
from dspark.targets.paged import PagedAttention, Pages, new_pages
from dspark_ext.interfaces import DraftHead, NewFeatures


@dataclass
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Linear
    kv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class DSparkDrafter:
    """The drafter protocol of :mod:`dspark_ext.interfaces`.

    Parameters
    ----------
    drafter
        Weights. The target's embedding and LM head need not be attached.
    target
        The model it was trained for; supplies embedding and head.
    dtype
        float32 or bfloat16 for weights, activations and cache; None = the target's.

    Raises
    ------
    ValueError
        If the drafter does not fit the target (sizes or taps), naming what differs.

    Examples
    --------
    >>> drafter = DSparkDrafter.load(shipped(), target.llama)             # doctest: +SKIP
    >>> dx.decode_round(target, drafter, state)                           # doctest: +SKIP
    """

    def __init__(self, drafter: Drafter, target: Llama, dtype: torch.dtype | None = None) -> None:
        _check_fit(drafter, target)
        self.config = drafter.config
        self.dtype = dtype or target.dtype
        self._rotary = RotaryTable(self.config.head_dim, self.config.rope_theta)
        self._embedding = target.embedding.to(self.dtype)
        with torch.no_grad():
            rows = target.head_weight
            if drafter.d2t is not None:
                rows = rows[drafter.d2t.long()]
            self._lm_head = Linear(rows.to(self.dtype))
            self._fc = Linear(self._cast(drafter.fc.weight))
            self._hidden_norm = self._cast(drafter.hidden_norm.weight)
            self._norm = self._cast(drafter.norm.weight)
            self._layers = [self._layer(layer) for layer in drafter.layers]
            self._head = _draft_head(drafter, self.dtype)

    @classmethod
    def load(cls, folder: Path, target: Llama, dtype: torch.dtype | None = None) -> DSparkDrafter:
        """Read a checkpoint folder, see :meth:`Drafter.load`.

        Examples
        --------
        >>> DSparkDrafter.load(shipped(), target.llama).gamma             # doctest: +SKIP
        7
        """
        return cls(Drafter.load(folder), target, dtype)

    @property
    def gamma(self) -> int:
        """Draft tokens per round."""
        return self.config.block_size

    @property
    def head(self) -> DraftHead:
        """Weights for :func:`dspark_ext.markov_loop`."""
        return self._head

    def new_cache(self, num_pages: int, page_size: int) -> Pages:
        """Pages for all draft layers."""
        c = self.config
        return new_pages(
            c.num_hidden_layers,
            num_pages,
            page_size,
            c.num_key_value_heads,
            c.head_dim,
            self.dtype,
        )

    @torch.inference_mode()
    def draft(
        self, anchor: Any, position: Any, new_features: NewFeatures, state: Any
    ) -> tuple[Any, Any]:
        """Extend the context, run one block per active request.

        Parameters
        ----------
        anchor, position
            ``[R]``: last committed token of each request and its absolute position.
        new_features
            Target features of the tokens committed since the last call.
        state
            ``page_table``, ``active`` and ``drafter_pages`` are read.

        Returns
        -------
        tuple
            Base logits ``[R, γ, V_d]`` and final hidden states ``[R, γ, d]``, float32, of the kind
            of `anchor`. Rows of inactive requests are zero.
        """
        active = np.asarray(state.active).astype(bool)
        where = np.asarray(position).astype(np.int64)
        self._extend(where, new_features, state)
        slots = np.flatnonzero(active)
        hidden = self._block(torch.as_tensor(anchor).long(), where, slots, state)
        logits = self._lm_head.float32(hidden)
        count, gamma = len(active), self.gamma
        shaped = (logits.view(len(slots), gamma, -1), hidden.float().view(len(slots), gamma, -1))
        if len(slots) != count:
            shaped = _spread(shaped[0], slots, count), _spread(shaped[1], slots, count)
        if isinstance(anchor, Tensor):
            return shaped
        return shaped[0].numpy(), shaped[1].numpy()

    def _extend(self, position: np.ndarray, new: NewFeatures, state: Any) -> None:
        """Append keys and values of newly committed tokens; repeating it changes nothing."""
        number = np.asarray(new.num_new).astype(np.int64)
        if not number.any():
            return
        starts = np.asarray(new.cu_seqlens).astype(np.int64)[:-1]
        cu_seqlens = np.concatenate(([0], np.cumsum(number))).astype(np.int32)
        offset = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], number)
        rows = torch.from_numpy(np.repeat(starts, number) + offset)
        before = np.where(number > 0, position - number, 0)
        features = torch.as_tensor(new.rows)[rows].to(self.dtype)
        h = self._rms(self._fc(features), self._hidden_norm)
        positions = torch.from_numpy(np.repeat(before, number) + offset)
        cos, sin = self._rotary.at(positions, self.dtype)
        attention = PagedAttention(
            state.drafter_pages,
            state.page_table,
            before.astype(np.int32),
            position.astype(np.int32),
            cu_seqlens,
            int(number.max()),
        )
        heads = self.config.num_key_value_heads
        for index, layer in enumerate(self._layers):
            kv = layer.kv(h).view(len(h), -1, self.config.head_dim)
            k = self._head_norm(kv[:, :heads], layer.k_norm)
            attention.append(index, rotate(k, cos, sin), kv[:, heads:])

    def _block(self, anchor: Tensor, position: np.ndarray, slots: np.ndarray, state: Any) -> Tensor:
        """Final hidden states ``[A γ, d]`` of the active requests' blocks."""
        c, gamma, count = self.config, self.gamma, len(position)
        ids = torch.full((len(slots), gamma), c.mask_token_id)
        ids[:, 0] = anchor[torch.from_numpy(slots)]
        x = self._embedding[ids.flatten()]
        positions = (position[slots][:, None] + np.arange(gamma)).reshape(-1)
        cos, sin = self._rotary.at(torch.from_numpy(positions), self.dtype)
        rows = np.zeros(count, dtype=np.int64)
        rows[slots] = gamma
        before = np.where(rows > 0, position, 0)
        attention = PagedAttention(
            state.drafter_pages,
            state.page_table,
            before.astype(np.int32),
            (before + rows).astype(np.int32),
            np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
            gamma,
            causal=False,
        )
        heads, key_heads = c.num_attention_heads, c.num_attention_heads + c.num_key_value_heads
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._rms(x, layer.input_norm)).view(len(x), -1, c.head_dim)
            q = rotate(self._head_norm(qkv[:, :heads], layer.q_norm), cos, sin)
            k = rotate(self._head_norm(qkv[:, heads:key_heads], layer.k_norm), cos, sin)
            out = attention.attend(index, q, k, qkv[:, key_heads:])
            x = x + layer.out(out.reshape(len(x), -1))
            gate, up = layer.gate_up(self._rms(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return self._rms(x, self._norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _head_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._rms(x, weight)

    def _cast(self, parameter: Tensor) -> Tensor:
        return parameter.detach().to(self.dtype)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        k, v = attention.k_proj.weight, attention.v_proj.weight
        norms = [getattr(n, "weight", None) for n in (attention.q_norm, attention.k_norm)]
        return _Layer(
            input_norm=self._cast(layer.input_layernorm.weight),
            post_norm=self._cast(layer.post_attention_layernorm.weight),
            q_norm=None if norms[0] is None else self._cast(norms[0]),
            k_norm=None if norms[1] is None else self._cast(norms[1]),
            qkv=Linear(self._cast(torch.cat([attention.q_proj.weight, k, v]))),
            kv=Linear(self._cast(torch.cat([k, v]))),
            out=Linear(self._cast(attention.o_proj.weight)),
            gate_up=Linear(self._cast(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))),
            down=Linear(self._cast(mlp.down_proj.weight)),
        )


def _spread(x: Tensor, slots: np.ndarray, count: int) -> Tensor:
    full = x.new_zeros(count, *x.shape[1:])
    full[torch.from_numpy(slots)] = x
    return full


def _draft_head(drafter: Drafter, dtype: torch.dtype) -> DraftHead:
    """Heads as arguments of the sequential loop."""
    head, confidence = drafter.markov_head, drafter.confidence_head
    if head is None:
        # A loop without bias: rank 1 with zero weights.
        c = drafter.config
        w1, w2 = torch.zeros(c.vocab_size, 1), torch.zeros(c.columns, 1)
        kind, extra = "vanilla", None
    else:
        w1, w2 = head.markov_w1.weight.detach().to(dtype), head.markov_w2.weight.detach().to(dtype)
        kind = head.kind
        extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
    linear = None if extra is None else getattr(head, extra)
    weight = None if confidence is None else confidence.proj.weight.detach()[0].float().contiguous()
    return DraftHead(
        w1=w1,
        w2=w2,
        kind=kind,
        weight=None if linear is None else linear.weight.detach().float(),
        bias=None if linear is None else linear.bias.detach().float(),
        confidence_weight=weight,
        confidence_bias=0.0 if confidence is None else float(confidence.proj.bias),
        draft_to_target=drafter.d2t,
    )


def _check_fit(drafter: Drafter, target: Llama) -> None:
    c, t = drafter.config, target.config
    pairs = (
        ("vocab_size", c.vocab_size, t.vocab_size),
        ("hidden_size", c.hidden_size, t.hidden_size),
        ("num_target_layers", c.num_target_layers, t.num_hidden_layers),
        ("target_layer_ids", c.target_layer_ids, target.taps),
    )
    wrong = [f"{name}: drafter {a}, target {b}" for name, a, b in pairs if a != b]
    if wrong:
        raise ValueError("drafter does not fit the target: " + "; ".join(wrong))
