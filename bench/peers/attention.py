# SPDX-License-Identifier: Apache-2.0
"""The same attention by others: who is here is found out when the bench runs.

Every peer answers the same queries and is compared with dspark's answer before it is timed; what
cannot be imported, refuses the problem or answers something else is named with its reason. None is
a dependency.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import Call, Peers, Problem, find_each

__all__ = ["PEERS", "Problem", "dense_of", "find", "problem", "sdpa_calls"]


def problem(
    requests: int, rows: int, context: int, heads: int, kv_heads: int, d: int,
    dtype: str, cache_dtype: str, page: int, seed: int, device: str = "cpu",
) -> Problem:  # fmt: skip
    """Ragged contexts in [L / 2, L], the last one of length L; pages in random order.

    Returns
    -------
    dict
        ``q [R rows, Hq, D]``, ``k_cache``, ``v_cache [pages, page, Hkv, D]``, ``table``,
        ``kv_len``, ``cu``, the sizes, and ``scale`` of a cache in FP8 (else None).
    """
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(context // 2, context + 1, (requests,), generator=g).clamp(min=rows)
    length[-1] = context
    columns = -(-context // page)
    pages = requests * columns
    kind = getattr(torch, dtype)
    made = torch.Generator(device).manual_seed(seed)
    caches = []
    for _ in range(2):
        cache = torch.randn(pages, page, kv_heads, d, generator=made, device=device, dtype=kind)
        caches.append(cache.to(getattr(torch, cache_dtype)))
    q = torch.randn(requests * rows, heads, d, generator=made, device=device, dtype=kind)
    table = torch.randperm(pages, generator=g).int().view(requests, columns)
    fp8 = cache_dtype == "float8_e4m3fn"
    return {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "table": table.to(device),
        "kv_len": length.int().to(device), "lengths": length.tolist(),
        "cu": (torch.arange(requests + 1, dtype=torch.int32) * rows).to(device),
        "requests": requests, "rows": rows, "context": context, "page": page,
        "scale": torch.ones(1, device=device) if fp8 else None,
    }  # fmt: skip


def dense_of(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each request in order, [R, Hkv, L, D], in the dtype of the queries."""
    kv_heads, d = p["k_cache"].shape[2:]
    flat = p["table"].flatten().long()

    def gather(cache: torch.Tensor) -> torch.Tensor:
        # index_select has no kernel for FP8: its bytes are moved instead
        raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        found = raw.index_select(0, flat).view(cache.dtype).to(p["q"].dtype)
        return found.view(p["requests"], -1, kv_heads, d)[:, : p["context"]].transpose(1, 2)

    return gather(p["k_cache"]), gather(p["v_cache"])


def _mask(p: Problem) -> torch.Tensor:
    """Keys that each row sees, [R, rows, L]."""
    device = p["q"].device
    offset = torch.arange(p["rows"], device=device)
    position = p["kv_len"].long()[:, None] - p["rows"] + offset
    return torch.arange(p["context"], device=device) <= position[:, :, None]


def _folded(p: Problem) -> torch.Tensor:
    """Queries with the heads of a group as rows, [R, Hkv, group rows, D]: no key is repeated."""
    heads, d = p["q"].shape[1:]
    kv_heads = p["k_cache"].shape[2]
    q = p["q"].view(p["requests"], p["rows"], kv_heads, heads // kv_heads, d)
    return q.permute(0, 2, 3, 1, 4).reshape(p["requests"], kv_heads, -1, d).contiguous()


def _unfold(out: torch.Tensor, p: Problem) -> torch.Tensor:
    heads, d = p["q"].shape[1:]
    kv_heads = p["k_cache"].shape[2]
    out = out.view(p["requests"], kv_heads, heads // kv_heads, p["rows"], d)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, d)


def sdpa_calls(p: Problem) -> dict[str, Call]:
    """torch's attention on dense keys, and with the gather that paging would cost it."""
    folded, group = _folded(p), p["q"].shape[1] // p["k_cache"].shape[2]
    mask = _mask(p).repeat(1, group, 1)[:, None]
    k, v = (x.contiguous() for x in dense_of(p))
    _compare(_unfold(F.scaled_dot_product_attention(folded, k, v, attn_mask=mask), p), p)
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(folded, k, v, attn_mask=mask),
        "gather": lambda: F.scaled_dot_product_attention(folded, *dense_of(p), attn_mask=mask),
    }


def _compare(out: torch.Tensor, p: Problem) -> None:
    """Refuse a peer that computes something else. ``answer`` is dspark's."""
    tolerance = 2e-5 if out.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        out.view(p["answer"].shape), p["answer"], atol=tolerance, rtol=tolerance
    )


def _on_gpu(p: Problem) -> None:
    if p["q"].device.type != "cuda":
        raise RuntimeError("runs on a GPU only")


def _plain_cache(p: Problem) -> None:
    if p["scale"] is not None:
        raise RuntimeError("a cache in FP8 needs queries in FP8 there")


def _flex(p: Problem) -> tuple[str, dict[str, Call]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _on_gpu(p)
    _plain_cache(p)
    heads, d = p["q"].shape[1:]
    q = p["q"].view(p["requests"], p["rows"], heads, d).transpose(1, 2).contiguous()
    k, v = (x.contiguous() for x in dense_of(p))
    start = p["kv_len"].long() - p["rows"]

    def seen(b: Any, _: Any, row: Any, key: Any) -> Any:
        return key <= start[b] + row

    blocks = create_block_mask(
        seen, p["requests"], None, p["rows"], p["context"], device=str(q.device)
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True)

    _compare(call().transpose(1, 2), p)
    return torch.__version__, {"flex": call}


def _varlen(p: Problem) -> tuple[str, dict[str, Call]]:
    from torch.nn.attention.varlen import varlen_attn

    _on_gpu(p)
    _plain_cache(p)
    k, v = (
        torch.cat([x[r, :, :n].transpose(0, 1) for r, n in enumerate(p["lengths"])])
        for x in dense_of(p)
    )
    cu_k = torch.cat([p["cu"][:1], p["kv_len"].cumsum(0).int()])

    def call() -> torch.Tensor:
        return varlen_attn(
            p["q"], k, v, p["cu"], cu_k, p["rows"], max(p["lengths"]), enable_gqa=True,
            window_size=(-1, 0),
        )  # fmt: skip

    _compare(call(), p)
    return torch.__version__, {"varlen": call}


def _flashinfer(p: Problem) -> tuple[str, dict[str, Call]]:
    import flashinfer

    _on_gpu(p)
    heads, d = p["q"].shape[1:]
    page, kv_heads = p["page"], p["k_cache"].shape[2]
    counts = [-(-n // page) for n in p["lengths"]]
    pages = torch.cat([p["table"][r, :n] for r, n in enumerate(counts)])
    first = torch.tensor([0, *counts], device=p["q"].device).cumsum(0).int()
    last = torch.tensor([(n - 1) % page + 1 for n in p["lengths"]], device=p["q"].device).int()
    memory = torch.empty(256 * 2**20, dtype=torch.uint8, device=p["q"].device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD")
    wrapper.plan(
        p["cu"], first, pages, last, heads, kv_heads, d, page, causal=True,
        q_data_type=p["q"].dtype, kv_data_type=p["k_cache"].dtype,
    )  # fmt: skip

    def call() -> torch.Tensor:
        return wrapper.run(p["q"], (p["k_cache"], p["v_cache"]))

    _compare(call(), p)
    return flashinfer.__version__, {"flashinfer": call}


def _flash_attention_2(p: Problem) -> tuple[str, dict[str, Call]]:
    import flash_attn

    _on_gpu(p)
    _plain_cache(p)
    heads, d = p["q"].shape[1:]
    q = p["q"].view(p["requests"], p["rows"], heads, d)
    large = 256  # its pages are multiples of this
    columns = -(-p["context"] // large)
    caches = []
    for x in dense_of(p):
        x = F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, columns * large - p["context"]))
        caches.append(x.reshape(-1, large, *x.shape[2:]).contiguous())
    table = torch.arange(len(caches[0]), device=q.device).int().view(p["requests"], -1)

    def call() -> torch.Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=p["kv_len"], block_table=table, causal=True
        )

    _compare(call(), p)
    return flash_attn.__version__, {"flash_attn": call}


def _flash_attention_3(p: Problem) -> tuple[str, dict[str, Call]]:
    import flash_attn_interface

    _on_gpu(p)
    _plain_cache(p)
    q = p["q"].view(p["requests"], p["rows"], *p["q"].shape[1:])

    def call() -> torch.Tensor:
        out = flash_attn_interface.flash_attn_with_kvcache(
            q, p["k_cache"], p["v_cache"], cache_seqlens=p["kv_len"], page_table=p["table"],
            causal=True,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    _compare(call(), p)
    return getattr(flash_attn_interface, "__version__", "3"), {"flash_attn_3": call}


PEERS: Peers = {
    "torch flex": _flex,
    "torch varlen": _varlen,
    "flashinfer": _flashinfer,
    "flash_attn": _flash_attention_2,
    "flash_attn 3": _flash_attention_3,
}


def find(p: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """``peers.find_each`` of the peers here."""
    return find_each(PEERS, p)
