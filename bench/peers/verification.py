# SPDX-License-Identifier: Apache-2.0
"""Verification as others do it, on the arguments of ``rejection_sample`` (see ``problem``).

Every adaptor begins where an engine does, with logits, so one that wants probabilities makes them.
It returns a call without arguments, or raises with the reason why there is none.
"""

from __future__ import annotations

import types

import torch

from . import Call, Peers, Problem, find_each

__all__ = ["GAMMA", "TEMPERATURE", "composed", "find", "problem"]

GAMMA = 7
TEMPERATURE = 0.8


def problem(
    requests: int, vocab: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> Problem:
    """Logits with the spread of a language model's, most mass on few ids; drafts of a near law."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    shape = (requests, GAMMA + 1, 20)
    target = normal(requests, GAMMA + 1, vocab).mul_(2.5)
    lifted = torch.randint(vocab, shape, generator=generator, device=device)
    target.scatter_(2, lifted, 10 + 3 * normal(*shape))
    draft = (target[:, :GAMMA] + normal(requests, GAMMA, vocab).mul_(0.3)).to(dtype)
    tokens = []
    for row in draft.flatten(0, 1):  # row by row: a big batch would need several times its size
        law = torch.softmax(row.float() / TEMPERATURE, -1)
        tokens.append(torch.multinomial(law, 1, generator=generator))
    drafts = torch.stack(tokens).view(requests, GAMMA)
    counting = torch.arange(requests + 1, dtype=torch.int32, device=device)
    return {
        "target_logits": target.to(dtype).flatten(0, 1),
        "draft_tokens": drafts.int(),
        "draft_len": torch.full((requests,), GAMMA, dtype=torch.int32, device=device),
        "cu_seqlens": counting * (GAMMA + 1),
        "seed": torch.arange(requests, device=device),
        "position": torch.full((requests,), 1000, device=device),
        "temperature": torch.full((requests,), TEMPERATURE, device=device),
        "draft_logits": draft,
        "draft_logit": draft.gather(2, drafts[..., None])[..., 0].float(),
        "draft_lse": torch.stack([torch.logsumexp(z.float() / TEMPERATURE, -1) for z in draft]),
    }


def _truncate(z: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    if top_k:
        smallest = z.topk(top_k, dim=-1).values[..., -1:]
        z = z.masked_fill(z < smallest, -torch.inf)
    if top_p < 1:
        values, order = z.sort(dim=-1, descending=True)
        mass = torch.softmax(values, -1)
        out = mass.cumsum(-1) - mass >= top_p
        z = z.masked_fill(out.scatter(-1, order, out), -torch.inf)
    return z


def composed(p: Problem, top_k: int = 0, top_p: float = 1.0) -> Call:
    """Softmax of target and draft, gather, compare, residual, one draw: torch operations."""
    requests, gamma, vocab = p["draft_logits"].shape
    tokens = p["draft_tokens"].long()
    rows = torch.arange(requests, device=tokens.device)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        z = p["target_logits"].view(requests, gamma + 1, vocab).float() / TEMPERATURE
        law = torch.softmax(_truncate(z, top_k, top_p), -1)
        draft = torch.softmax(p["draft_logits"].float() / TEMPERATURE, -1)
        px = law[:, :gamma].gather(2, tokens[..., None])[..., 0]
        qx = draft.gather(2, tokens[..., None])[..., 0]
        coin = torch.rand(requests, gamma, device=tokens.device)
        accepted = (coin < px / qx).int().cumprod(1).sum(1)
        last = law[rows, accepted]
        rejected = accepted < gamma
        q = draft[rows, accepted.clamp(max=gamma - 1)]
        residual = torch.where(rejected[:, None], (last - q).clamp(min=0), last)
        if not tokens.is_cuda:
            return torch.multinomial(residual, 1)
        return (residual / torch.empty_like(residual).exponential_()).argmax(-1)

    return run


def _probabilities(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 probabilities of the target rows and the draft slots."""
    requests, _, vocab = p["draft_logits"].shape
    target = p["target_logits"].view(requests, GAMMA + 1, vocab)
    scaled = (z.float() / TEMPERATURE for z in (target, p["draft_logits"]))
    law, draft = (torch.softmax(z, -1) for z in scaled)
    return law, draft


def _transformers(p: Problem) -> tuple[str, dict[str, Call]]:
    """``_speculative_sampling`` of Hugging Face's assisted decoding: one request a call."""
    import transformers
    from transformers.generation.utils import _speculative_sampling

    target, draft = p["target_logits"].float(), p["draft_logits"].float()
    if len(draft) > 1:
        raise NotImplementedError("takes one request a call")
    tokens = p["draft_tokens"].long()

    @torch.inference_mode()
    def run() -> object:
        return _speculative_sampling(tokens, draft / TEMPERATURE, GAMMA, target[None] / TEMPERATURE)

    return transformers.__version__, {"transformers": run}


def _flashinfer(p: Problem) -> tuple[str, dict[str, Call]]:
    """``chain_speculative_sampling``; "chain" alone is given its probabilities."""
    import flashinfer
    from flashinfer.sampling import chain_speculative_sampling

    if not p["draft_logits"].is_cuda:
        raise NotImplementedError("runs on a GPU only")
    tokens = p["draft_tokens"]

    def whole() -> object:
        law, draft = _probabilities(p)
        return chain_speculative_sampling(draft, tokens, law)

    law, draft = _probabilities(p)
    calls = {
        "flashinfer": whole,
        "flashinfer chain": lambda: chain_speculative_sampling(draft, tokens, law),
    }
    return str(flashinfer.__version__), calls


def _vllm(p: Problem) -> tuple[str, dict[str, Call]]:
    """``rejection_sample`` of vLLM's V1 engine, behind its softmax and the draw of the bonus."""
    import vllm
    from vllm.v1.sample.rejection_sampler import rejection_sample

    if not p["draft_logits"].is_cuda:
        raise NotImplementedError("runs on a GPU only")
    requests, _, vocab = p["draft_logits"].shape
    device = p["draft_logits"].device
    sampling = types.SimpleNamespace(
        all_greedy=False, all_random=True, temperature=p["temperature"], generators={},
        top_k=None, top_p=None,
    )  # fmt: skip
    ends = GAMMA * torch.arange(1, requests + 1, dtype=torch.int32, device=device)
    tokens, lengths = p["draft_tokens"].flatten(), [GAMMA] * requests

    def run() -> object:
        law, draft = _probabilities(p)
        bonus = (law[:, -1] / torch.empty_like(law[:, -1]).exponential_()).argmax(-1, keepdim=True)
        verified = law[:, :-1].reshape(-1, vocab)
        return rejection_sample(
            tokens, lengths, GAMMA, ends, draft.flatten(0, 1), verified, bonus.int(), sampling
        )

    return str(vllm.__version__), {"vllm": run}


PEERS: Peers = {"transformers": _transformers, "flashinfer": _flashinfer, "vllm": _vllm}


def find(p: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """``peers.find_each`` of the peers here."""
    return find_each(PEERS, p)
