# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of a DSpark drafter in the layout of the public DeepSpec checkpoints.

The file is a copy of the target's configuration with drafter fields added. Fields that have no
influence on the computation are ignored; a field that has one and holds a value this package
does not know is an error, because a wrong guess would only show as a low acceptance rate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen3DSparkModel", "LlamaDSparkModel")
HEAD_TYPES = ("vanilla", "gated", "rnn")

_NOT_YET = ("Gemma4DSparkModel", "Qwen3Eagle3Model", "Gemma4Eagle3Model", "Eagle3DraftModel")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_anchors",
    "enable_confidence_head",
    "markov_rank",
)


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and switches of a drafter.

    Parameters
    ----------
    architecture
        ``"Qwen3DSparkModel"`` (per-head norms on q and k) or ``"LlamaDSparkModel"`` (none, so that
        layers of a Llama target can be copied into it).
    block_size
        γ, tokens proposed per round.
    target_layer_ids
        Tapped layers of the target, increasing; −1 is the embedding output.
    mask_token_id
        Row of the target's embedding table that fills the slots after the anchor.
    num_target_layers
        Depth of the target.
    draft_vocab_size
        Columns of the draft distribution; None = the whole vocabulary. An addition of this
        project: the ids are stored as tensor ``d2t`` in the checkpoint.

    Examples
    --------
    >>> config = DrafterConfig(vocab_size=11, hidden_size=8, intermediate_size=16,
    ...     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ...     block_size=3, target_layer_ids=(0, 1), mask_token_id=10, num_target_layers=4)
    >>> DrafterConfig.from_dict(config.to_dict()) == config
    True
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    architecture: str = "Qwen3DSparkModel"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_anchors: int = 512
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: int | None = None
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("drafter config: " + "; ".join(problems))

    @property
    def qk_norm(self) -> bool:
        """Whether q and k pass through per-head norms."""
        return self.architecture == "Qwen3DSparkModel"

    @property
    def columns(self) -> int:
        """V_d, the width of the draft logits."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DrafterConfig:
        """Read the fields of a ``config.json``.

        Raises
        ------
        ValueError
            Missing or illegal fields, all of them named.
        NotImplementedError
            A drafter family or a RoPE scaling this release cannot run.

        Examples
        --------
        >>> DrafterConfig.from_dict({"architectures": ["Other"]})
        Traceback (most recent call last):
        ...
        ValueError: drafter config: architectures: got ['Other'], expected one of \
('Qwen3DSparkModel', 'LlamaDSparkModel')
        """
        names = raw.get("architectures") or []
        if len(names) == 1 and names[0] in _NOT_YET:
            raise NotImplementedError(f"drafter config: architectures: {names[0]} cannot be run")
        if len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ValueError(
                f"drafter config: architectures: got {names}, expected one of {ARCHITECTURES}"
            )
        missing = [name for name in _REQUIRED if raw.get(name) is None]
        if missing:
            raise ValueError(f"drafter config: missing {', '.join(missing)}")
        heads, rank = raw["num_attention_heads"], raw["markov_rank"]
        config = cls(
            architecture=names[0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            block_size=raw["block_size"],
            target_layer_ids=tuple(raw["target_layer_ids"]),
            mask_token_id=raw["mask_token_id"],
            num_target_layers=raw.get("num_target_layers") or max(raw["target_layer_ids"]) + 2,
            num_anchors=raw["num_anchors"],
            markov_rank=rank,
            markov_head_type=raw.get("markov_head_type", "vanilla"),
            enable_confidence_head=raw["enable_confidence_head"],
            confidence_head_with_markov=raw.get("confidence_head_with_markov", rank > 0),
            draft_vocab_size=raw.get("draft_vocab_size"),
            max_position_embeddings=raw.get("max_position_embeddings") or 4096,
        )
        _reject_unused(raw)
        return config

    @classmethod
    def load(cls, folder: Path) -> DrafterConfig:
        """Read ``config.json`` of a checkpoint folder.

        Examples
        --------
        >>> DrafterConfig.load(Path("checkpoint")).block_size             # doctest: +SKIP
        7
        """
        return cls.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    def to_dict(self) -> dict[str, Any]:
        """Fields of ``config.json``; optional ones only where they apply."""
        fields: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "max_position_embeddings": self.max_position_embeddings,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": False,
            "num_target_layers": self.num_target_layers,
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
            "block_size": self.block_size,
            "num_anchors": self.num_anchors,
            "enable_confidence_head": self.enable_confidence_head,
            "markov_rank": self.markov_rank,
        }
        if self.enable_confidence_head:
            fields["confidence_head_with_markov"] = self.confidence_head_with_markov
        if self.markov_rank:
            fields["markov_head_type"] = self.markov_head_type
        if self.draft_vocab_size is not None:
            fields["draft_vocab_size"] = self.draft_vocab_size
        return fields

    def save(self, folder: Path) -> None:
        """Write ``config.json`` into a folder."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def with_(self, **changes: Any) -> DrafterConfig:
        """A changed copy, checked like a new one.

        Examples
        --------
        >>> config.with_(block_size=5).block_size                         # doctest: +SKIP
        5
        """
        return replace(self, **changes)


def _problems(c: DrafterConfig) -> list[str]:
    found: list[str] = []

    def expect(name: str, condition: bool, wanted: str) -> None:
        if not condition:
            found.append(f"{name}: got {getattr(c, name)!r}, expected {wanted}")

    expect("architecture", c.architecture in ARCHITECTURES, f"one of {ARCHITECTURES}")
    expect("markov_head_type", c.markov_head_type in HEAD_TYPES, f"one of {HEAD_TYPES}")
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_anchors"):
        expect(name, getattr(c, name) >= 1, "1 or more")
    expect("block_size", 1 <= c.block_size <= 16, "1 to 16")
    expect("markov_rank", c.markov_rank >= 0, "0 or more")
    expect("mask_token_id", 0 <= c.mask_token_id < c.vocab_size, f"0 to {c.vocab_size - 1}")
    heads = c.num_key_value_heads
    expect(
        "num_attention_heads",
        heads >= 1 and c.num_attention_heads % heads == 0,
        f"a multiple of num_key_value_heads = {heads}",
    )
    expect("head_dim", c.head_dim >= 2 and c.head_dim % 2 == 0, "an even number")
    # The last layer is excluded: public tools store its output after the final norm.
    last = c.num_target_layers - 2
    taps = list(c.target_layer_ids)
    legal = bool(taps) and taps == sorted(set(taps)) and taps[0] >= -1 and taps[-1] <= last
    expect("target_layer_ids", legal, f"increasing numbers from -1 to {last}")
    if c.draft_vocab_size is not None:
        expect("draft_vocab_size", 1 <= c.draft_vocab_size <= c.vocab_size, f"1 to {c.vocab_size}")
    if c.enable_confidence_head:
        expect(
            "confidence_head_with_markov",
            not c.confidence_head_with_markov or c.markov_rank > 0,
            "false without a markov head (markov_rank = 0)",
        )
    return found


def _rope_theta(raw: dict[str, Any]) -> float:
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    if kind != "default":
        raise NotImplementedError(f"drafter config: rope_type: {kind!r} cannot be run")
    return float(new.get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _reject_unused(raw: dict[str, Any]) -> None:
    """Fields that change the computation and have only one supported value."""
    supported = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    wrong = [
        f"{name}: got {raw[name]!r}, expected {value!r}"
        for name, value in supported.items()
        if raw.get(name, value) not in (None, value)
    ]
    kinds = set(raw.get("layer_types") or []) - {"full_attention"}
    if kinds:
        wrong.append(f"layer_types: got {sorted(kinds)}, expected full_attention only")
    if wrong:
        raise ValueError("drafter config: " + "; ".join(wrong))
