# SPDX-License-Identifier: Apache-2.0
"""config.json of drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dspark.drafters.config import DrafterConfig  # noqa: E402
from dspark.drafters.modeling import Drafter  # noqa: E402

PUBLIC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": 36,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 150,
    "block_size": 7,
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "tie_word_embeddings": False,
}


def test_reads_the_public_layout() -> None:
    config = DrafterConfig.from_dict(PUBLIC)
    assert config.rope_theta == 1e6 and config.head_dim == 16 and config.qk_norm
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.columns == 200
    assert DrafterConfig.from_dict(config.to_dict()) == config


def test_accepts_the_older_rope_field() -> None:
    raw = {k: v for k, v in PUBLIC.items() if k != "rope_parameters"} | {"rope_theta": 5e5}
    assert DrafterConfig.from_dict(raw).rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type: got 'lstm'"),
        ({"target_layer_ids": [1, 35]}, "target_layer_ids"),
        ({"target_layer_ids": [9, 1]}, "target_layer_ids"),
        ({"mask_token_id": 200}, "mask_token_id: got 200"),
        ({"block_size": 17}, "block_size: got 17"),
        ({"num_attention_heads": 3}, "num_attention_heads: got 3"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"block_size": None, "markov_rank": None}, "missing block_size, markov_rank"),
        ({"architectures": ["Other"]}, r"architectures: got \['Other'\]"),
        ({"draft_vocab_size": 500}, "draft_vocab_size: got 500"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_names_what_is_wrong(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        DrafterConfig.from_dict(PUBLIC | change)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_type: 'yarn'"),
    ],
    ids=["gemma", "yarn"],
)
def test_names_what_is_missing(change: dict[str, Any], word: str) -> None:
    with pytest.raises(NotImplementedError, match=word):
        DrafterConfig.from_dict(PUBLIC | change)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none"])
def test_tensor_names_and_round_trip(kind: str, tmp_path: Path) -> None:
    config = DrafterConfig.from_dict(PUBLIC)
    if kind == "none":
        config = config.with_(markov_rank=0, enable_confidence_head=False)
    else:
        config = config.with_(markov_head_type=kind)
    drafter = Drafter(config)
    names = set(drafter.state_dict())
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"]
    parts += ["mlp.down_proj", *(f"self_attn.{x}_proj" for x in "qkvo")]
    parts += ["self_attn.q_norm", "self_attn.k_norm"]
    expected |= {f"layers.{i}.{part}.weight" for i in range(2) for part in parts}
    if kind != "none":
        expected |= {f"markov_head.markov_w{i}.weight" for i in (1, 2)}
        expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
    if extra:
        expected |= {f"markov_head.{extra}.weight", f"markov_head.{extra}.bias"}
    assert names == expected
    drafter.save(tmp_path)
    loaded = Drafter.load(tmp_path)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name


def test_loader_drops_stored_tables_and_names_problems(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = DrafterConfig.from_dict(PUBLIC)
    Drafter(config).save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    table = torch.zeros(200, 32, dtype=torch.bfloat16)
    save_file(tensors | {"embed_tokens.weight": table, "lm_head.weight": table.clone()}, path)
    assert "embed_tokens.weight" not in Drafter.load(tmp_path).state_dict()
    broken = {k: v for k, v in tensors.items() if k != "fc.weight"}
    broken |= {"norm.weight": torch.ones(31), "extra.weight": torch.ones(1)}
    save_file(broken | {"lm_head.weight": torch.zeros(3, 32)}, path)
    with pytest.raises(ValueError, match="lm_head") as error:
        Drafter.load(tmp_path)
    for word in ("fc.weight: missing", "extra.weight: unexpected", "norm.weight: got (31,)"):
        assert word in str(error.value)


def test_reduced_vocabulary_is_checked() -> None:
    config = DrafterConfig.from_dict(PUBLIC).with_(draft_vocab_size=3)
    with pytest.raises(ValueError, match="d2t"):
        Drafter(config)
    with pytest.raises(ValueError, match="strictly increasing"):
        Drafter(config, torch.tensor([3, 3, 5]))
    drafter = Drafter(config, torch.tensor([3, 4, 199]))
    tables = torch.randn(200, 32), torch.randn(200, 32)
    assert torch.equal(drafter.attach(*tables).lm_head, tables[1][[3, 4, 199]])
    with pytest.raises(ValueError, match="embedding: got"):
        drafter.attach(tables[0][:5], tables[1])
