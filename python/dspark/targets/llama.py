# SPDX-License-Identifier: Apache-2.0
"""A small Llama decoder on torch whose attention is an argument.

Every call works on a flat list of tokens (``token_ids [N]``, ``positions [N]``): which tokens
belong to the same sequence, and where their keys live, is known to the attention object alone.
So the same weights serve dense generation (:mod:`dspark.targets.dense`) and paged verification
of drafts (:mod:`dspark.targets.paged`).

Accepts the Hugging Face layout (``config.json``, ``model.safetensors``) of Llama models without
biases and with the default RoPE.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.targets.linear import Linear


class Attention(Protocol):
    """What a decoder layer needs: store k and v, return the attention output."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [N, Hq, D]``, ``k``/``v [N, Hkv, D]`` (RoPE applied) to ``out [N, Hq, D]``."""
        ...


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama model, read from its ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LlamaConfig:
        """Check a Hugging Face configuration and keep what the decoder uses.

        Raises
        ------
        ValueError
            Naming the field if the model is not a plain Llama.

        Examples
        --------
        >>> raw = dict(model_type="llama", vocab_size=8, hidden_size=8, intermediate_size=16,
        ...            num_hidden_layers=1, num_attention_heads=2, rms_norm_eps=1e-5)
        >>> LlamaConfig.from_dict(raw).head_dim
        4
        """
        rope = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or {}
        kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
        wrong = [
            f"{name} is {raw.get(name)!r}"
            for name, allowed in (
                ("model_type", ("llama",)),
                ("hidden_act", (None, "silu")),
                ("attention_bias", (None, False)),
                ("mlp_bias", (None, False)),
            )
            if raw.get(name) not in allowed
        ]
        if kind != "default":
            wrong.append(f"rope_type is {kind!r}")
        if wrong:
            raise ValueError("config.json: this decoder cannot run it: " + ", ".join(wrong))
        eos = raw.get("eos_token_id")
        heads = raw["num_attention_heads"]
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            max_position_embeddings=raw.get("max_position_embeddings") or 2048,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        )


class RotaryTable:
    """cos/sin of RoPE (half-split rotation), grown on demand.

    Examples
    --------
    >>> table = RotaryTable(head_dim=4, theta=1e4)
    >>> x = torch.ones(2, 1, 4)
    >>> bool((table.rotate(x, torch.tensor([0, 3]))[0] == x[0]).all())
    True
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self._inverse = 1.0 / theta**exponent
        self._cos = self._sin = torch.empty(0, head_dim)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for ``positions [N]``, each ``[N, 1, D]``."""
        top = int(positions.max()) + 1 if positions.numel() else 0
        if top > len(self._cos):
            length = max(256, 1 << (top - 1).bit_length())
            angle = torch.arange(length, dtype=torch.float64)[:, None] * self._inverse
            angle = torch.cat([angle, angle], dim=-1)
            self._cos, self._sin = angle.cos().float(), angle.sin().float()
        return (
            self._cos[positions][:, None].to(dtype),
            self._sin[positions][:, None].to(dtype),
        )

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x [N, H, D]`` at ``positions [N]``."""
        return rotate(x, *self.at(positions, x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of ``x [..., D]`` by broadcastable cos and sin.

    Examples
    --------
    >>> rotate(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.ones(2)).tolist()
    [0.0, 1.0]
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


@dataclass
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class Llama:
    """Weights of a Llama model and its forward pass.

    Parameters
    ----------
    config
        Sizes.
    weights
        Tensors by Hugging Face name.
    dtype
        float32 or bfloat16: weights, activations and the cache.
    taps
        Layers whose raw outputs are returned as features; −1 is the embedding output.

    Examples
    --------
    >>> llama = Llama.load(ensure(), taps=(1, 14, 27))                    # doctest: +SKIP
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype = torch.float32,
        taps: Sequence[int] = (),
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: got {dtype}, expected torch.float32 or torch.bfloat16")
        bad = [t for t in taps if not -1 <= t < config.num_hidden_layers]
        if bad or list(taps) != sorted(set(taps)):
            raise ValueError(f"taps: got {tuple(taps)}, expected increasing layer numbers")
        self.config = config
        self.dtype = dtype
        self.taps = tuple(taps)
        self.rotary = RotaryTable(config.head_dim, config.rope_theta)
        self.embedding = weights["model.embed_tokens.weight"].to(dtype)
        self.norm = weights["model.norm.weight"].to(dtype)
        head = weights.get("lm_head.weight")
        self.head_weight = self.embedding if head is None else head.to(dtype)
        self._head: Linear | None = None
        self.layers = [self._layer(weights, i) for i in range(config.num_hidden_layers)]

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype = torch.float32, taps: Sequence[int] = ()
    ) -> Llama:
        """Read ``config.json`` and ``model.safetensors`` of `folder`.

        Raises
        ------
        ValueError
            If the configuration is not a plain Llama, or `dtype`/`taps` are illegal.

        Examples
        --------
        >>> Llama.load(ensure()).config.num_hidden_layers                 # doctest: +SKIP
        30
        """
        from safetensors.torch import load_file

        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(str(folder / "model.safetensors"))
        return cls(LlamaConfig.from_dict(raw), weights, dtype, taps)

    @property
    def head(self) -> Linear:
        """The LM head, made on first use (a drafter's trainer never needs it)."""
        if self._head is None:
            self._head = Linear(self.head_weight)
        return self._head

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """Hugging Face names (without prefix) to weights of one layer, for initialising drafters.

        Examples
        --------
        >>> sorted(llama.layer_weights(29))[0]                            # doctest: +SKIP
        'input_layernorm.weight'
        """
        layer, c = self.layers[index], self.config
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        wq, wk, wv = torch.split(layer.qkv.weight, [q, kv, kv])
        gate, up = layer.gate_up.weight.chunk(2)
        return {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
            "self_attn.q_proj.weight": wq,
            "self_attn.k_proj.weight": wk,
            "self_attn.v_proj.weight": wv,
            "self_attn.o_proj.weight": layer.out.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down.weight,
        }

    @torch.inference_mode()
    def hidden(
        self, token_ids: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Run all layers.

        Parameters
        ----------
        token_ids, positions
            ``[N]`` integers.
        attention
            Owner of the cache; called once a layer.

        Returns
        -------
        tuple
            Final hidden states after the final norm ``[N, d]``, and the tapped layers' raw outputs
            ``[N, m d]`` in increasing layer order (empty without taps).
        """
        c = self.config
        x = self.embedding[token_ids]
        cos, sin = self.rotary.at(positions, self.dtype)
        features = [x] if -1 in self.taps else []
        query_heads, heads = c.num_attention_heads, c.num_attention_heads + c.num_key_value_heads
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms(x, layer.input_norm)).view(len(x), -1, c.head_dim)
            qk = rotate(qkv[:, :heads], cos, sin)
            out = attention.attend(index, qk[:, :query_heads], qk[:, query_heads:], qkv[:, heads:])
            x = x + layer.out(out.reshape(len(x), -1))
            gate, up = layer.gate_up(self._rms(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
            if index in self.taps:
                features.append(x)
        joined = torch.cat(features, dim=-1) if features else x.new_empty(len(x), 0)
        return self._rms(x, self.norm), joined

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """LM head on post-norm hidden states ``[N, d]``; float32 ``[N, V]``."""
        return self.head.float32(hidden)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _layer(self, weights: dict[str, Tensor], index: int) -> _Layer:
        def get(*names: str) -> Tensor:
            parts = [weights[f"model.layers.{index}.{name}.weight"] for name in names]
            return torch.cat(parts).to(self.dtype)

        return _Layer(
            input_norm=get("input_layernorm"),
            post_norm=get("post_attention_layernorm"),
            qkv=Linear(get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            out=Linear(get("self_attn.o_proj")),
            gate_up=Linear(get("mlp.gate_proj", "mlp.up_proj")),
            down=Linear(get("mlp.down_proj")),
        )
