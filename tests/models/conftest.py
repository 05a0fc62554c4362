# SPDX-License-Identifier: Apache-2.0
"""Models shared by the tests: the golden drafter, a tiny Llama, the real target's folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dspark.drafters.config import DrafterConfig  # noqa: E402
from dspark.drafters.modeling import Drafter  # noqa: E402
from dspark.targets import smollm2  # noqa: E402
from dspark.targets.llama import Llama, LlamaConfig  # noqa: E402

GOLDEN = DrafterConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    block_size=3,
    target_layer_ids=(0, 1),
    mask_token_id=10,
    num_target_layers=4,
    markov_rank=2,
)


@pytest.fixture
def golden_drafter() -> Callable[[torch.dtype], Drafter]:
    """Weights by formula: sorted names give t, row-major indices give i."""

    def make(dtype: torch.dtype) -> Drafter:
        drafter = Drafter(GOLDEN).to(dtype)
        tables = ("embed_tokens.weight", "lm_head.weight")
        names = sorted([*drafter.state_dict(), *tables])
        assert len(names) == 31

        def fill(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            i, t = torch.arange(math.prod(shape)).double(), names.index(name)
            if name.endswith("norm.weight"):
                return (1 + 0.1 * torch.sin(0.7 * i + t)).view(shape)
            return (0.5 * torch.sin(0.37 * i + t)).view(shape)

        drafter.load_state_dict({n: fill(n, p.shape) for n, p in drafter.state_dict().items()})
        return drafter.attach(*(fill(name, (11, 8)).to(dtype) for name in tables))

    return make


def tiny_config(layers: int = 4) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=128,
    )


def tiny_weights(config: LlamaConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    d, f = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, 2 * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, d), "model.norm.weight": (d,)}
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


@pytest.fixture
def tiny_llama() -> Callable[..., Llama]:
    def make(
        seed: int = 0, taps: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Llama:
        config = tiny_config()
        return Llama(config, tiny_weights(config, seed), dtype, taps)

    return make


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The converted real target; the first test that asks pays for the conversion."""
    try:
        return smollm2.ensure(progress=False)
    except smollm2.TargetNotInstalledError as error:
        pytest.skip(str(error))
