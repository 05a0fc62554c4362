# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter as a torch module, for training and as the readable form of the model.

Paper section 3.1. Context features of the target become H (eq. 2); every layer attends to the keys
and values of H and of the block (eq. 3); the block is ``[anchor, MASK, ..., MASK]`` with no causal
mask. Slot k proposes the token k places after the anchor. Tensor names are those of the public
DeepSpec checkpoints. The embedding table and the LM head are the target's: they are attached, not
stored.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.drafters.config import DrafterConfig

KeyValues = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a plain multiplicative weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Rotary:
    """cos/sin of RoPE at given positions, computed in float64."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self._inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``positions [...]`` to cos and sin ``[..., 1, D]``, ready for ``[..., heads, D]``."""
        angle = positions[..., None, None].double() * self._inverse.to(positions.device)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotation of ``x [..., heads, D]``."""
    low, high = x.chunk(2, dim=-1)
    return x * cos_sin[0] + torch.cat([-high, low], dim=-1) * cos_sin[1]


def take_slots(x: Tensor, chosen: Tensor) -> Tensor:
    """Pick slots ``chosen [B, N, K]`` of ``x [B, N, γ, ...]``.

    Examples
    --------
    >>> take_slots(torch.arange(4.0).view(1, 1, 4, 1), torch.tensor([[[2, 3]]])).flatten().tolist()
    [2.0, 3.0]
    """
    tail = x.shape[3:]
    index = chosen.reshape(*chosen.shape, *([1] * len(tail))).expand(*chosen.shape, *tail)
    return x.gather(2, index)


class Attention(nn.Module):
    """Projections of one layer and the two-part attention: context plus own block."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.shape = (c.num_key_value_heads, c.num_attention_heads, c.head_dim)
        kv, q = c.num_key_value_heads * c.head_dim, c.num_attention_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm: nn.Module = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm: nn.Module = RMSNorm(c.head_dim, c.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def key_value(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``x [..., d]`` to keys (normed, rotated) and values, ``[..., Hkv, D]``."""
        kv_heads, _, dim = self.shape
        k = self.k_norm(self.k_proj(x).unflatten(-1, (kv_heads, dim)))
        return rotate(k, cos_sin), self.v_proj(x).unflatten(-1, (kv_heads, dim))

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        bias: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attention of N blocks in each of B sequences.

        Parameters
        ----------
        x
            ``[B, N, γ, d]``, after the input norm.
        cos_sin
            At the slots' positions, ``[B, N, γ, 1, D]`` each.
        context
            Keys and values of H, ``[B, S, Hkv, D]`` each.
        bias
            ``[B, 1, N, 1, S]``: 0 where the block may see the context position, else −inf.
        chosen
            ``[B, N, K]`` slots that ask; None = all. Every slot answers.

        Returns
        -------
        Tensor
            ``[B, N, γ or K, d]``. A block sees its context and itself, never another block.
        """
        kv_heads, heads, dim = self.shape
        group = heads // kv_heads
        k, v = self.key_value(x, cos_sin)
        if chosen is not None:
            x = take_slots(x, chosen)
            cos_sin = take_slots(cos_sin[0], chosen), take_slots(cos_sin[1], chosen)
        batch, blocks, slots, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (heads, dim))), cos_sin)
        # Rows of one KV head: (block, query head of the group, slot).
        q = torch.unflatten(q, -2, (kv_heads, group)).permute(0, 3, 1, 4, 2, 5)
        q = (q * dim**-0.5).reshape(batch, kv_heads, blocks, group * slots, dim)
        k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 3, 1, 2, 4)
        keys, values = (t.transpose(1, 2) for t in context)
        past = torch.matmul(q.flatten(2, 3), keys.transpose(-1, -2))
        past = torch.unflatten(past, 2, (blocks, -1))
        own = torch.matmul(q, k.transpose(-1, -2))
        weight = torch.cat([past + bias, own], dim=-1).softmax(dim=-1)
        past, own = torch.split(weight, [past.shape[-1], own.shape[-1]], dim=-1)
        out = torch.unflatten(torch.matmul(past.flatten(2, 3), values), 2, (blocks, -1))
        out = torch.unflatten(out + torch.matmul(own, v), 3, (group, slots))
        out = out.permute(0, 2, 4, 1, 3, 5).reshape(batch, blocks, slots, -1)
        projected: Tensor = self.o_proj(out)
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., d]``."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm decoder layer over blocks."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        bias: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`Attention.forward`; adds both residual branches."""
        out: Tensor = self.self_attn(self.input_layernorm(x), cos_sin, context, bias, chosen)
        out = out + (x if chosen is None else take_slots(x, chosen))
        mlp: Tensor = self.mlp(self.post_attention_layernorm(out))
        return out + mlp


class MarkovHead(nn.Module):
    """Sequential head: a low-rank bias on the logits that knows the previous token (eq. 5, 6).

    All three kinds end in ``bias = W2 u`` with ``u [..., r]``; :meth:`forward` returns u, so that
    the product with W2 can be fused with the LM head's.
    """

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.kind, rank = c.markov_head_type, c.markov_rank
        self.markov_w1 = nn.Embedding(c.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, c.columns, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(c.hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + c.hidden_size, 3 * rank)

    def forward(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Run all slots with given previous tokens (teacher forcing).

        Parameters
        ----------
        hidden
            ``[..., γ, d]`` final hidden states.
        previous
            ``[..., γ]`` token before each slot's own; the anchor for the first slot.

        Returns
        -------
        tuple
            u and W1[previous], both ``[..., γ, r]``.
        """
        e = self.markov_w1(previous)
        if self.kind == "vanilla":
            return e, e
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e, e
        state, outputs = torch.zeros_like(e[..., 0, :]), []
        for k in range(hidden.shape[-2]):
            z = self.joint_proj(torch.cat([state, e[..., k, :], hidden[..., k, :]], dim=-1))
            gate, candidate, output = z.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=-2), e


class ConfidenceHead(nn.Module):
    """Linear map of hidden state and Markov embedding to the logit of acceptance (eq. 7)."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = c.confidence_head_with_markov
        width = c.hidden_size + (c.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """``hidden [..., d]``, ``embedding [..., r]`` to float32 (or wider) logits ``[...]``."""
        if self.with_markov:
            assert embedding is not None
            hidden = torch.cat([hidden, embedding], dim=-1)
        logit: Tensor = self.proj(hidden)[..., 0]
        return logit if logit.dtype == torch.float64 else logit.float()


class Drafter(nn.Module):
    """The whole drafter.

    Parameters
    ----------
    config
        Sizes.
    d2t
        ``[V_d]`` strictly increasing target ids of the draft columns; needed exactly if
        ``config.draft_vocab_size`` is set.

    Examples
    --------
    >>> config = DrafterConfig(vocab_size=11, hidden_size=8, intermediate_size=16,
    ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    ...     block_size=3, target_layer_ids=(0,), mask_token_id=10, num_target_layers=4,
    ...     markov_rank=2)
    >>> drafter = Drafter(config).attach(torch.randn(11, 8), torch.randn(11, 8))
    >>> context = drafter.context(torch.randn(1, 4, 8))
    >>> drafter.blocks(torch.tensor([[7]]), torch.tensor([[4]]), context).shape
    torch.Size([1, 1, 3, 8])
    """

    embedding: Tensor
    lm_head: Tensor
    d2t: Tensor | None

    def __init__(self, config: DrafterConfig, d2t: Tensor | None = None) -> None:
        super().__init__()
        if (d2t is None) != (config.draft_vocab_size is None):
            raise ValueError("d2t: needed exactly when config.draft_vocab_size is set")
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.register_buffer("d2t", None if d2t is None else _check_d2t(d2t, config))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def attach(self, embedding: Tensor, lm_head: Tensor) -> Drafter:
        """Use the target's frozen embedding ``[V, d]`` and LM head ``[V, d]``.

        Only the head's rows of the draft vocabulary are kept. Neither is saved nor trained.

        Raises
        ------
        ValueError
            If a shape does not fit the configuration.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, tensor in (("embedding", embedding), ("lm_head", lm_head)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name}: got {tuple(tensor.shape)}, expected {expected}")
        rows = lm_head if self.d2t is None else lm_head[self.d2t.long()]
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("lm_head", rows.detach().clone(), persistent=False)
        return self

    def context(self, features: Tensor, start: int = 0) -> KeyValues:
        """Keys and values of the context in every layer (eq. 2 and 3).

        Parameters
        ----------
        features
            ``[B, S, m d]`` raw outputs of the tapped layers.
        start
            Position of the first row, for contexts that grow.

        Returns
        -------
        list
            Per layer k and v, ``[B, S, Hkv, D]``; RoPE applied.
        """
        h = self.hidden_norm(self.fc(features))
        positions = torch.arange(start, start + features.shape[1], device=features.device)
        cos_sin = self.rotary.at(positions[None].expand(features.shape[:2]), h.dtype)
        attentions = (layer.self_attn for layer in self.layers if isinstance(layer, Layer))
        return [attention.key_value(h, cos_sin) for attention in attentions]

    def blocks(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: KeyValues,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states of blocks.

        Parameters
        ----------
        anchors, positions
            ``[B, N]`` token ids and absolute positions. A block sees context rows before its
            anchor's position only: the target has not processed the anchor yet.
        context
            Result of :meth:`context` (row j = position j).
        chosen
            ``[B, N, K]`` slots to return; None = all. The last layer computes only these.

        Returns
        -------
        Tensor
            ``[B, N, γ or K, d]`` after the final norm.
        """
        c = self.config
        ids = torch.full((*anchors.shape, c.block_size), c.mask_token_id, device=anchors.device)
        ids[..., 0] = anchors
        x = self.embedding[ids].to(self.fc.weight.dtype)
        slots = positions[..., None] + torch.arange(c.block_size, device=positions.device)
        cos_sin = self.rotary.at(slots, x.dtype)
        reach = torch.arange(context[0][0].shape[1], device=positions.device)
        hidden = reach >= positions[..., None]
        bias = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
        bias = bias.masked_fill_(hidden, -torch.inf)[:, None, :, None]
        last = len(self.layers) - 1
        for number, (layer, keys_values) in enumerate(zip(self.layers, context, strict=True)):
            x = layer(x, cos_sin, keys_values, bias, chosen if number == last else None)
        final: Tensor = self.norm(x)
        return final

    def logits(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """Corrected draft logits and confidence logits with given previous tokens.

        Parameters
        ----------
        hidden
            ``[..., γ, d]``.
        previous
            ``[..., γ]`` target ids.

        Returns
        -------
        tuple
            ``[..., γ, V_d]`` and ``[..., γ]`` (None without a confidence head).
        """
        logits = F.linear(hidden, self.lm_head.to(hidden.dtype))
        embedding = None
        if self.markov_head is not None:
            u, embedding = self.markov_head(hidden, previous)
            logits = logits + self.markov_head.markov_w2(u)
        if self.confidence_head is None:
            return logits, None
        return logits, self.confidence_head(hidden, embedding)

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write ``config.json`` and ``model.safetensors`` (`dtype`; d2t as int32).

        Examples
        --------
        >>> drafter.save(Path("checkpoint"))                              # doctest: +SKIP
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.to(torch.int32 if name == "d2t" else dtype).contiguous()
            for name, tensor in self.state_dict().items()
        }
        with tempfile.TemporaryDirectory(dir=folder) as work:
            temporary = Path(work) / "model.safetensors"
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(0o644)  # safetensors makes files that only their owner can read
            os.replace(temporary, folder / "model.safetensors")
        self.config.save(folder)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Drafter:
        """Read a checkpoint of this project or a public one of a supported family.

        Stored copies of the target's embedding and head are dropped after a check of their shape.

        Raises
        ------
        ValueError
            Naming every missing, unexpected or misshapen tensor.

        Examples
        --------
        >>> Drafter.load(Path("checkpoint")).config.block_size            # doctest: +SKIP
        7
        """
        from safetensors.torch import load_file

        config = DrafterConfig.load(folder)
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(str(path)))
        problems = []
        table = (config.vocab_size, config.hidden_size)
        for name in ("embed_tokens.weight", "lm_head.weight"):
            stored = tensors.pop(name, None)
            if stored is not None and tuple(stored.shape) != table:
                problems.append(f"{name}: got {tuple(stored.shape)}, expected {table}")
        drafter = cls(config, tensors.get("d2t"))
        wanted = drafter.state_dict()
        problems += [f"{name}: missing" for name in sorted(wanted.keys() - tensors.keys())]
        problems += [f"{name}: unexpected" for name in sorted(tensors.keys() - wanted.keys())]
        problems += [
            f"{name}: got {tuple(tensors[name].shape)}, expected {tuple(wanted[name].shape)}"
            for name in sorted(wanted.keys() & tensors.keys())
            if tensors[name].shape != wanted[name].shape
        ]
        if problems:
            raise ValueError(f"{folder.name}: " + "; ".join(problems))
        drafter.load_state_dict(tensors)
        return drafter.to(dtype)


def _check_d2t(d2t: Tensor, config: DrafterConfig) -> Tensor:
    ids = d2t.to(torch.int32)
    legal = ids.shape == (config.columns,) and bool((ids[1:] > ids[:-1]).all())
    if not legal or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise ValueError(
            f"d2t: expected {config.columns} strictly increasing ids below {config.vocab_size}"
        )
    return ids
