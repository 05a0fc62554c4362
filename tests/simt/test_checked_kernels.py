# SPDX-License-Identifier: Apache-2.0
"""Every kernel with every access checked: small shapes, a few orders of threads, late and random
copies, one or many multiprocessors. mutation.py runs the same cases on kernels made wrong.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx
from dspark_ext.vocab_parallel import Shard, ShardedVerification

#: name -> environment of the emulated device. Six segments of the vocabulary meet a few
#: multiprocessors, so that blocks own one, several, or different numbers of them.
DEVICES = {
    "in-order": {"DSPARK_SIMT_SEED": "0", "DSPARK_SIMT_SMS": "3"},
    "seed-1-small-memory": {
        "DSPARK_SIMT_SEED": "1",
        "DSPARK_SIMT_SMS": "2",
        "DSPARK_SIMT_SHARED_KB": "80",
    },
    "seed-2-random-copies": {
        "DSPARK_SIMT_SEED": "2",
        "DSPARK_SIMT_SMS": "4",
        "DSPARK_SIMT_ASYNC": "random",
    },
    "seed-3-ampere-one": {
        "DSPARK_SIMT_SEED": "3",
        "DSPARK_SIMT_SMS": "1",
        "DSPARK_SIMT_CAPABILITY": "80",
    },
    "seed-4-no-cooperation": {
        "DSPARK_SIMT_SEED": "4",
        "DSPARK_SIMT_SMS": "3",
        "DSPARK_SIMT_COOPERATIVE": "2",
    },
}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def device(name: str) -> AbstractContextManager[None]:
    """The environment of an emulated device."""
    return environment(DEVICES[name])


def confidence() -> None:
    rng = np.random.default_rng(1)
    logit = rng.normal(0, 3, (33, 5)).astype(np.float32)
    active = rng.integers(0, 2, 33).astype(np.uint8)
    one, two = (
        dx.confidence(logit, [1.0, 1.5, 0.5, 2.0, 1.0], active=active, backend=b)
        for b in ("cpu", "simt")
    )
    on = active != 0
    for name in ("conditional", "survival", "status"):
        np.testing.assert_array_equal(getattr(two, name)[on], getattr(one, name)[on])


def markov_loop(
    weights: torch.dtype,
    head: str = "vanilla",
    requests: int = 3,
    rank: int = 16,
    vocab: int = 650,
    int8: bool = False,
    screen: bool = False,
    nan: bool = False,
    **options: Any,
) -> Callable[[], None]:
    """A case of exactly representable numbers: every backend and every order gives these bits."""

    def run() -> None:
        rng = np.random.default_rng(2)
        gamma, d = 3, 5

        def dyadic(*shape: int) -> torch.Tensor:
            return torch.from_numpy((rng.integers(-16, 17, shape) / 16).astype(np.float32))

        arguments: dict[str, Any] = {
            "base_logits": (dyadic(requests, gamma, vocab + 4) * 4).bfloat16(),
            "w1": dyadic(vocab, rank).to(weights),
            "w2": dyadic(vocab, rank).to(weights),
            "anchor": torch.from_numpy(rng.integers(0, vocab, requests).astype(np.int32)),
            "seed": torch.from_numpy(rng.integers(0, 2**62, requests)),
            "position": torch.from_numpy(rng.integers(0, 2**31, requests)),
            "temperature": torch.tensor([0.75, 0.0, 1.0] * requests)[:requests].float(),
            "head": head,
            **options,
        }
        if nan:
            arguments["base_logits"][:, :, 3::97] = torch.nan
        if int8:
            arguments["w2"], arguments["w2_scale"] = dx.quantize_rows(arguments["w2"])
        if screen:
            bytes8, scale = dx.quantize_rows(arguments["w2"])
            arguments |= {"w2_screen": bytes8, "screen_scale": scale, "temperature": None}
        if head != "vanilla":
            sizes = {"gated": (rank, d + rank), "rnn": (3 * rank, 2 * rank + d)}[head]
            arguments |= {
                "hidden": dyadic(requests, gamma, d),
                "head_weight": dyadic(*sizes) / 16,
                "head_bias": dyadic(sizes[0]),
                "confidence_weight": dyadic(d + rank),
            }
        one, two = (dx.markov_loop(**arguments, backend=b) for b in ("cpu", "simt"))
        on = np.flatnonzero(options.get("active", np.ones(requests)))
        for name in ("tokens", "logit", "lse", "logits", "support_ids", "status"):
            if getattr(one, name, None) is not None:
                assert torch.equal(getattr(two, name)[on], getattr(one, name)[on]), name

    return run


def markov_loop_for_nobody() -> None:
    """No request takes part: what began to load before that was known is waited for."""
    weights = torch.zeros(650, 128, dtype=torch.bfloat16)
    dx.markov_loop(
        torch.zeros(3, 2, 650),
        weights,
        weights,
        anchor=torch.zeros(3, dtype=torch.int32),
        seed=torch.zeros(3, dtype=torch.int64),
        position=torch.zeros(3, dtype=torch.int64),
        active=torch.zeros(3, dtype=torch.bool),
        backend="simt",
    )


def prefix_schedule(mode: str, requests: int, gamma: int) -> Callable[[], None]:
    """A plan of survivals with ties, for tokens that are laid out."""

    def run() -> None:
        rng = np.random.default_rng(4)
        tokens = requests * (gamma + 1)
        coarse = rng.integers(1, 9, (requests, gamma)).astype(np.float32) / 8
        survival = np.cumprod(coarse, axis=1, dtype=np.float32)
        options: dict[str, Any] = {
            "cost": np.maximum.accumulate(10 + 0.01 * np.arange(tokens + 1.0)),
            "weight": rng.integers(1, 4, requests).astype(np.float32) / 2,
            "min_len": rng.integers(0, 2, requests).astype(np.int32),
            "capacity": int(tokens * 0.9),
            "anchor": rng.integers(0, 99, requests).astype(np.int32),
            "draft_tokens": rng.integers(0, 99, (requests, gamma)).astype(np.int32),
            "position": rng.integers(0, 999, requests),
        }
        if mode == "two_phase":
            options["lagged"] = dx.LaggedSurvival()
            for _ in range(2):
                options["lagged"].push(survival[::-1].copy())
        if mode == "threshold":
            options |= {"conditional": coarse, "threshold": 0.5}
        one, two = (
            dx.prefix_schedule(survival, mode=mode, **options, backend=b) for b in ("cpu", "simt")
        )
        for name, value in vars(one).items():
            if value is not None:
                np.testing.assert_array_equal(getattr(two, name), value, name)

    return run


def paged_kv(requests: int, tokens: int) -> Callable[[], None]:
    """Some tokens of each request over a page boundary, rotated, then the commit."""

    def run() -> None:
        rng = np.random.default_rng(5)
        k, v = (torch.from_numpy(rng.normal(0, 1, (requests * tokens, 2, 8))).float() for _ in "kv")
        table = torch.from_numpy(rng.permutation(3 * requests).astype(np.int32)).view(requests, 3)
        cu_seqlens = torch.arange(requests + 1, dtype=torch.int32) * tokens
        results = []
        for backend in ("cpu", "simt"):
            caches = [torch.full((3 * requests, 4, 2, 8), 7.0).bfloat16() for _ in "kv"]
            length = torch.full((requests,), 3, dtype=torch.int32)
            position = length.long()
            dx.paged_kv_append(
                *(k, v, *caches),
                page_table=table,
                kv_len=length,
                cu_seqlens=cu_seqlens,
                rope=dx.Rope(10000.0),
                backend=backend,
            )
            emitted = torch.arange(requests, dtype=torch.int32) % (tokens + 1)
            dx.paged_kv_commit(length, position, num_emitted=emitted, backend=backend)
            results.append((*caches, length, position))
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two)

    return run


def rejection_sampler(requests: int, **division: str) -> Callable[[], None]:
    """Every rule, law and processor in one call, divided as the environment says."""

    def run() -> None:
        rng = np.random.default_rng(6)
        gamma, vocab = 2, 450
        rows = requests * (gamma + 1)
        z = rng.normal(size=(requests, gamma, 200)).astype(np.float32)
        ids = np.sort(rng.choice(vocab, 200, replace=False))
        column = rng.integers(0, 200, (requests, gamma, 1))
        mask = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint64)
        arguments: dict[str, Any] = {
            "target_logits": (rng.normal(size=(rows, vocab + 3)) * 2).astype(np.float16),
            "draft_tokens": ids[column[..., 0]],
            "draft_len": gamma,
            "cu_seqlens": np.arange(requests + 1) * (gamma + 1),
            "seed": np.arange(requests),
            "position": 5,
            "vocab_size": vocab,
            "rule": np.resize([1, 2, 3, 1, 2, 0], requests),
            "temperature": np.resize([1.0, 0.7, 1.0, 0.5, 1.0], requests).astype(np.float32),
            "draft_temperature": np.resize([1.0, 1.0, 1.0, 0.0], requests).astype(np.float32),
            "top_k": np.resize([0, 0, 20], requests),
            "top_p": np.resize([1.0, 0.7], requests).astype(np.float32),
            "token_mask": mask.astype(np.uint32).view(np.int32),
            "repetition_penalty": 1.2,
            "anchor": np.arange(requests),
            "stop_ids": [3, 9, -(2**31)],
            "min_tokens_left": 1,
            "top_logprobs": 3,
            "draft_logits": z,
            "draft_logit": np.take_along_axis(z, column, -1)[..., 0],
            "draft_lse": np.log(np.exp(z).sum(-1)).astype(np.float32),
            "draft_to_target": ids,
        }
        with environment({f"DSPARK_REJECTION_SAMPLER_{k}": v for k, v in division.items()}):
            one, two = (dx.rejection_sample(**arguments, backend=b) for b in ("cpu", "simt"))
        for name, value in vars(one).items():
            if value is not None:
                np.testing.assert_array_equal(getattr(two, name), value, name)

    return run


def rejection_without_mass() -> None:
    """A residual of nothing, and a row of nothing: its lowest allowed id is behind 256 words."""
    vocab, allowed = 8200, 8195
    logits = np.zeros((4, vocab), np.float16)
    logits[2, allowed] = -np.inf
    mask = np.full((4, -(-vocab // 32)), -1, np.int32)
    mask[2] = 0
    mask[2, allowed // 32] = 1 << allowed % 32
    uniform = {
        "draft_logits": np.zeros((2, 1, vocab), np.float16),
        "draft_lse": np.full((2, 1), np.log(vocab) - 0.01, np.float32),
        "draft_logit": np.full((2, 1), np.log(vocab) - 0.1, np.float32),  # says q = 0.9: rejected
    }
    one, two = (
        dx.rejection_sample(
            logits,
            np.full((2, 1), 7),
            draft_len=1,
            cu_seqlens=np.array([0, 2, 4]),
            seed=np.array([1, 2]),
            position=5,
            temperature=np.ones(2, np.float32),
            token_mask=mask,
            **uniform,
            backend=b,
        )
        for b in ("cpu", "simt")
    )
    assert two.status[0] == dx.Status.ZERO_RESIDUAL
    assert two.status[1] & dx.Status.EMPTY_SUPPORT and two.tokens[1].tolist() == [allowed, -1]
    for name, value in vars(one).items():
        if value is not None:
            np.testing.assert_array_equal(getattr(two, name), value, name)


def vocab_parallel(rule: str, law: str, requests: int = 3) -> Callable[[], None]:
    """Two ranks, the second with a broken last segment: scan, draw and finish of each. The draft's
    law is stored, a list of ids, or one-hot.
    """

    def run() -> None:
        rng = np.random.default_rng(7)
        gamma, sizes = 2, (256, 194)
        rows, vocab = requests * (gamma + 1), sum(sizes)
        z = rng.normal(size=(requests, gamma, vocab)).astype(np.float32)
        drafts = rng.integers(0, vocab, (requests, gamma))
        logits = (rng.normal(size=(rows, vocab)) * 2).astype(np.float16)
        options: dict[str, Any] = {}
        if law == "listed":
            ids = np.sort(rng.choice(vocab, 40, replace=False)).astype(np.int32)
            options["support_ids"] = ids = np.tile(ids, (requests, gamma, 1))
            drafts = ids[..., 7].copy()
            options["support_logits"] = z = np.take_along_axis(z, ids, -1)
        if law != "one-hot":
            column = np.full_like(drafts, 7) if law == "listed" else drafts
            options["draft_lse"] = np.log(np.exp(z).sum(-1)).astype(np.float32)
            options["draft_logit"] = np.take_along_axis(z, column[..., None], -1)[..., 0]

        def rank(k: int, backend: str) -> ShardedVerification:
            own = slice(sum(sizes[:k]), sum(sizes[: k + 1]))
            return ShardedVerification(
                Shard(sizes, k),
                np.ascontiguousarray(logits[:, own]),
                drafts,
                draft_len=[2, 1, 0][:requests],
                cu_seqlens=np.arange(requests + 1) * (gamma + 1),
                seed=np.arange(requests),
                position=5,
                temperature=np.float32([1.0, 0.7, 1.0][:requests]),
                rule=rule,
                stop_ids=[3, 9],
                draft_logits=np.ascontiguousarray(z[..., own]) if law == "stored" else None,
                backend=backend,
                **options,
            )

        results = []
        for backend in ("cpu", "simt"):
            ranks = [rank(k, backend) for k in range(len(sizes))]
            scans = [r.scan() for r in ranks]
            draws = [r.draw(scans) for r in ranks]
            results.append([r.finish(draws) for r in ranks])
        for one, two in zip(*results, strict=True):
            for name, value in vars(one).items():
                if value is not None:
                    np.testing.assert_array_equal(getattr(two, name), value, name)

    return run


def verify_attention(
    dtype: torch.dtype,
    cache: torch.dtype,
    d: int,
    heads: int = 4,
    clusters: str = "0",
    page_size: int = 8,
    **options: Any,
) -> Callable[[], None]:
    """Ragged rows over shuffled pages: tiles that blocks share and tiles that they do not."""

    def run() -> None:
        rng = np.random.default_rng(6)
        kv_len = [150, 5, 300, 64]  # of 3, 0, 9 and 1 query tokens
        pages = [-(-n // page_size) for n in kv_len]
        table = torch.full((4, max(pages)), -1, dtype=torch.int32)
        free = iter(rng.permutation(sum(pages)))
        for r, n in enumerate(pages):
            table[r, :n] = torch.tensor([next(free) for _ in range(n)], dtype=torch.int32)

        def normal(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

        values = normal(sum(pages), page_size, 1, d)
        for r, n in enumerate(kv_len):  # behind the last key: nobody sees it
            values[table[r, pages[r] - 1], (n - 1) % page_size + 1 :] = torch.nan
        arguments: dict[str, Any] = {
            "q": normal(13, heads, d).to(dtype),
            "k_cache": normal(sum(pages), page_size, 1, d).to(cache),
            "v_cache": values.to(cache),
            "page_table": table,
            "kv_len": torch.tensor(kv_len, dtype=torch.int32),
            "cu_seqlens": torch.tensor([0, 3, 3, 12, 13], dtype=torch.int32),
            "max_q_len": 9,
            "return_lse": True,
            **options,
        }
        with environment({"DSPARK_VERIFY_ATTENTION_CLUSTER": clusters}):
            one, two = (dx.verify_attention(**arguments, backend=b) for b in ("cpu", "simt"))
        torch.testing.assert_close(two[0], one[0], rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(two[1], one[1], rtol=1e-5, atol=1e-5)

    return run


#: family -> name -> case. The first ones of a family are the quickest.
CASES: dict[str, dict[str, Callable[[], None]]] = {
    "confidence": {"confidence": confidence},
    "paged_kv": {"one-token-a-block": paged_kv(2, 3), "several": paged_kv(300, 5)},
    "prefix_scheduler": {
        "causal": prefix_schedule("causal", 5, 4),
        "two-phase": prefix_schedule("two_phase", 33, 7),
        "threshold": prefix_schedule("threshold", 7, 5),
        "off": prefix_schedule("off", 7, 5),
        "causal-large": prefix_schedule("causal", 40, 16),
    },
    "rejection_sampler": {
        "alone": rejection_sampler(2, TEAM="1", ROWS="0"),
        "team": rejection_sampler(5, TEAM="2", ROWS="0"),
        "all-rows": rejection_sampler(3, TEAM="2", ROWS="1"),
        "without-mass": rejection_without_mass,
    },
    "vocab_parallel": {
        "stored-law": vocab_parallel("token", "stored"),
        "listed-law": vocab_parallel("token", "listed", requests=1),
        "match": vocab_parallel("match", "one-hot"),
    },
    "verify_attention": {
        "plain": verify_attention(torch.float32, torch.float32, 12),
        "bf16": verify_attention(torch.bfloat16, torch.bfloat16, 256, window=100, soft_cap=2.0),
        "f8-two-row-groups": verify_attention(
            torch.bfloat16, torch.float8_e4m3fn, 128, heads=5, causal=False
        ),
        "bf16-clusters": verify_attention(torch.bfloat16, torch.bfloat16, 64, clusters="4"),
        "plain-clusters": verify_attention(torch.float32, torch.float32, 12, clusters="2"),
        "bf16-wgmma": verify_attention(
            torch.bfloat16, torch.bfloat16, 64, heads=16, page_size=16, window=290
        ),
        # Sixteen heads: two tiles, so that splits are few on some devices and many on others.
        "f16-invariant": verify_attention(
            torch.float16, torch.float16, 64, heads=16, page_size=16, batch_invariant=True
        ),
        "f8-bulk-two-row-groups": verify_attention(
            torch.float16, torch.float8_e4m3fn, 128, heads=5, page_size=16
        ),
    },
    "markov_loop": {
        "f32": markov_loop(torch.float32, rank=7),
        "bf16": markov_loop(torch.bfloat16),
        "bf16-rnn": markov_loop(torch.bfloat16, "rnn", requests=2),
        "f16-gated": markov_loop(torch.float16, "gated", requests=2),
        "bf16-many": markov_loop(torch.bfloat16, requests=18, rank=64, store_logits=True),
        "bf16-nobody": markov_loop_for_nobody,
        "bf16-streams": markov_loop(torch.bfloat16, requests=5, rank=128),
        "bf16-nine-segments": markov_loop(torch.bfloat16, "gated", requests=1, vocab=1100),
        "topk": markov_loop(torch.bfloat16, topk_support=40),
        "topk-passes": markov_loop(
            torch.bfloat16, requests=1, vocab=9000, nan=True, topk_support=300
        ),
        "topk-everything": markov_loop(torch.bfloat16, requests=1, vocab=90, topk_support=300),
        "topk-rnn": markov_loop(torch.float32, "rnn", rank=7, topk_support=300, store_logits=True),
        "topk-int8": markov_loop(torch.float16, int8=True, topk_support=40),
        "int8": markov_loop(torch.bfloat16, requests=9, rank=48, int8=True),
        "int8-plain": markov_loop(torch.bfloat16, "gated", requests=2, rank=7, int8=True),
        "screen": markov_loop(torch.bfloat16, rank=48, screen=True),
        "screen-inactive": markov_loop(
            torch.bfloat16, requests=4, screen=True, active=np.uint8([0, 1, 1, 0])
        ),
        "screen-rnn": markov_loop(torch.bfloat16, "rnn", requests=9, screen=True),
        "f16-groups": markov_loop(torch.float16, requests=66, rank=64),
    },
}


@pytest.fixture
def checked_library(monkeypatch: pytest.MonkeyPatch, checked: Any) -> None:
    """Let ``backend="simt"`` use the checked library."""
    monkeypatch.setenv("DSPARK_SIMT", str(Path(checked._name)))


def test_few_tiles_are_merged_by_clusters(checked: Any, checked_library: None) -> None:
    """The launch that verify_attention chooses, seen by the barriers that are passed."""
    checked.dspark_simt_record.restype = ctypes.c_char_p

    def clustered(requests: int, pages: int, **options: Any) -> bool:
        cache = np.zeros((1, 64, 2, 8), np.float32)
        checked.dspark_simt_record(1)
        dx.verify_attention(
            np.zeros((requests, 2, 8), np.float32), cache, cache,
            page_table=np.zeros((requests, pages), np.int32), kv_len=[5] * requests,
            cu_seqlens=list(range(requests + 1)), max_q_len=1, backend="simt", **options,
        )  # fmt: skip
        places = checked.dspark_simt_record(0).decode()
        return "verify_attention/exchange.cuh" not in places

    with environment({"DSPARK_SIMT_SMS": "8", "DSPARK_VERIFY_ATTENTION_CLUSTER": ""}):
        assert clustered(1, 9)
        assert not clustered(1, 9, batch_invariant=True)
        assert not clustered(1, 1)  # one unit
        assert not clustered(40, 9)  # too many tiles


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, cases in CASES.items() for n in cases], ids=str
)
def test_no_finding(checked_library: None, family: str, name: str, where: str) -> None:
    with device(where):
        CASES[family][name]()


@pytest.mark.slow
def test_no_undefined_behaviour(open_library: Callable[[str], Any]) -> None:
    """The checks of g++ print what they find, so the cases run in a process of their own."""
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('cases', sys.argv[1])\n"
        "cases = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(cases)\n"
        "for family in cases.CASES.values():\n"
        "    for case in family.values():\n"
        "        case()\n"
    )
    environment = {**os.environ, "DSPARK_SIMT": open_library("undefined")._name}
    done = subprocess.run(
        [sys.executable, "-c", program, __file__], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_checker_sees_the_arrays_of_a_call(
    checked_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that is one element short is written out of bounds, and named."""
    from dspark_ext import _C, _arrays, _simt

    assert _simt.load() and _C.simt_checks()
    register = _C.simt_register

    def short(data: int, size: int, name: str) -> None:
        register(data, size - 4 if name == "survival" else size, name)

    monkeypatch.setattr(_C, "simt_register", short)
    with pytest.raises(RuntimeError, match=r"write of 4 bytes out of bounds, 4 bytes past the end"):
        dx.confidence(np.zeros((3, 2), np.float32), backend="simt")
    assert _arrays.traced == []
