# SPDX-License-Identifier: Apache-2.0
"""Random verification calls, and the comparison with the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_ext.reference.rejection_sampler import rejection_sample as reference_sample
from dspark_ext.results import Verification

Call = tuple[np.ndarray, np.ndarray, dict[str, Any]]
_EXACT = ("num_accepted", "num_emitted", "tokens", "next_anchor", "accepted", "finish", "status")
#: A float32 lse of size up to 16 has an error of 2^-21, times a few sums: decisions closer than
#: this may fall either way.
MARGIN = 1e-5


class _Maker:
    """Builds one random call."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.requests = int(rng.integers(1, 5))
        self.gamma = int(rng.integers(1, 6))
        self.vocab = int(rng.choice([1, 2, 5, 40, 128, 129, 300, 700]))
        self.dtype = np.float32 if rng.random() < 0.6 else np.float16
        self.scale = float(rng.choice([0.3, 2, 8]))
        self.kwargs: dict[str, Any] = {}

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def logits(self) -> np.ndarray:
        rng, vocab = self.rng, self.vocab
        self.length = rng.integers(0, self.gamma + 1, self.requests)
        self.first = np.concatenate([[0], np.cumsum(1 + self.length)])
        rows = int(self.first[-1])
        x = rng.normal(size=(rows, vocab + 7 * int(rng.integers(0, 3)))) * self.scale
        if self.chance(0.3):
            x[rng.random(x.shape) < 0.3] = -np.inf
        if self.chance(0.15):
            x[rng.integers(rows)] = np.nan
        if self.chance(0.1):
            x[rng.integers(rows)] = -np.inf
        if self.chance(0.1):
            x[rng.integers(rows), rng.integers(vocab)] = np.inf
        if self.chance(0.3):
            x = np.round(x * 2) / 2  # ties
        x[:, vocab:] = 1e4  # padding that would win
        return x.astype(self.dtype)

    def sampling(self) -> None:
        rng, requests, k = self.rng, self.requests, self.kwargs
        k["temperature"] = rng.choice([0, 0.7, 1, 1, 1.5], requests).astype(np.float32)
        if self.chance(0.5):
            k["rule"] = rng.choice([0, 1, 1, 2, 2, 3, 4], requests).astype(np.int32)
            k["synthetic_acceptance"] = 1 + rng.random(requests) * self.gamma
        else:
            k["rule"] = str(rng.choice(["token", "match", "greedy", "block", "token"]))
        if self.chance(0.4):
            k["top_k"] = rng.choice([0, 1, 3, 10, 200], requests)
        if self.chance(0.4):
            k["top_p"] = rng.choice([0.1, 0.5, 0.9, 0.99, 1], requests).astype(np.float32)
        if self.chance(0.4):
            k["min_p"] = rng.choice([0, 0.01, 0.1, 1], requests).astype(np.float32)
        if self.chance(0.3):
            k["logit_bias"] = rng.normal(size=(requests, self.vocab)).astype(np.float32)
        if self.chance(0.3):
            words = -(-self.vocab // 32)
            ragged = (int(self.first[-1]), words)
            shape = ragged if self.chance(0.5) else (requests, self.gamma + 1, words)
            bits = rng.integers(0, 2**32, shape, dtype=np.uint64)
            k["token_mask"] = bits.astype(np.uint32).view(np.int32)
        if self.chance(0.3):
            self.penalties()
        if self.chance(0.2):
            k["top_logprobs"] = int(rng.choice([1, 4, 30, 128]))
        if self.chance(0.3):
            shape = (requests, 3) if self.chance(0.5) else (2,)
            k["stop_ids"] = rng.integers(-1, self.vocab, shape)
        if self.chance(0.3):
            k["max_new_tokens"] = rng.integers(0, self.gamma + 2, requests)
        if self.chance(0.2):
            k["active"] = rng.integers(0, 2, requests).astype(np.uint8)

    def penalties(self) -> None:
        rng, requests, k = self.rng, self.requests, self.kwargs
        for name, values in (
            ("repetition_penalty", [1, 0.7, 1.3]),
            ("presence_penalty", [0, -0.5, 1]),
            ("frequency_penalty", [0, 0.4, -0.2]),
        ):
            if self.chance(0.6):
                k[name] = rng.choice(values, requests).astype(np.float32)
        if self.chance(0.6):
            k["output_counts"] = rng.integers(-1, 3, (requests, self.vocab)).astype(np.int32)
        if self.chance(0.6):
            words = rng.integers(0, 2**32, (requests, -(-self.vocab // 32)), dtype=np.uint64)
            k["prompt_mask"] = words.astype(np.uint32).view(np.int32)
        if self.chance(0.5):
            k["anchor"] = rng.integers(-1, self.vocab + self.chance(0.1), requests)
        if self.chance(0.6):
            k["min_tokens_left"] = rng.integers(0, self.gamma + 1, requests)

    def drafts(self, target: np.ndarray) -> np.ndarray:
        rng = self.rng
        shape = (self.requests, self.gamma)
        drafts = rng.integers(0, self.vocab, shape)
        if self.chance(0.6):
            drafts = self.law(target, drafts)
        if self.chance(0.2):
            drafts[rng.random(shape) < 0.2] = rng.choice([-1, self.vocab, 2**31 + 3, 2**32 + 1])
        return drafts

    def law(self, target: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        rng, shape = self.rng, (self.requests, self.gamma)
        ids = np.arange(self.vocab)
        if self.chance(0.4):
            ids = np.sort(rng.choice(self.vocab, int(rng.integers(1, self.vocab + 1)), False))
            self.kwargs["draft_to_target"] = ids
            drafts = ids[rng.integers(0, len(ids), shape)] if self.chance(0.8) else drafts
        z = rng.normal(size=(*shape, len(ids))) * self.scale
        if len(ids) == self.vocab and self.chance(0.6):  # close to the target
            for r, length in enumerate(self.length):
                rows = target[self.first[r] : self.first[r] + length, : self.vocab]
                z[r, :length] = rows + rng.normal(size=rows.shape) * 0.5
        if self.chance(0.3):
            z[rng.random(z.shape) < 0.3] = -np.inf
        z = z.astype(self.dtype)
        t = self.kwargs["temperature"]
        if self.chance(0.3):
            t = rng.choice([0, 0.7, 1.3], self.requests).astype(np.float32)
            self.kwargs["draft_temperature"] = t
        column = np.searchsorted(ids, drafts).clip(0, len(ids) - 1)
        logit = np.take_along_axis(z, column[..., None], -1)[..., 0]
        self.kwargs["draft_lse"] = log_sum_exp(z, np.where(t == 0, 1, t)[:, None, None])
        self.kwargs["draft_logit"] = logit.astype(np.float32)
        if self.chance(0.1):
            z[rng.integers(self.requests), rng.integers(self.gamma), rng.integers(len(ids))] = (
                np.nan
            )
        if self.chance(0.3):
            self.kwargs |= self.as_list(z, ids)
        else:
            self.kwargs["draft_logits"] = z
        return drafts

    def as_list(self, z: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The same law as lists of ids; some lists are out of order."""
        rng = self.rng
        listed = np.full((*z.shape[:2], len(ids) + int(rng.integers(0, 3))), -1, np.int32)
        listed[..., : len(ids)] = ids
        if self.chance(0.1):
            slot = (rng.integers(self.requests), rng.integers(self.gamma))
            listed[slot] = rng.permutation(listed[slot])
        logits = np.full(listed.shape, np.nan, z.dtype)  # what is behind the last is not read
        logits[..., : len(ids)] = z
        return {"support_ids": listed, "support_logits": logits}

    def call(self) -> Call:
        rng = self.rng
        target = self.logits()
        self.sampling()
        drafts = self.drafts(target)
        length, first = self.length.copy(), self.first.copy()
        if self.chance(0.1):
            length[rng.integers(self.requests)] = rng.choice([-3, 17, self.gamma + 1])
        if self.chance(0.1):
            first[rng.integers(self.requests + 1)] = rng.choice([-5, len(target) + 3, 0])
        self.kwargs |= {
            "draft_len": length,
            "cu_seqlens": first,
            "seed": rng.integers(0, 2**64, self.requests, dtype=np.uint64),
            "position": rng.integers(0, 2**32 - 32, self.requests),
            "vocab_size": self.vocab,
        }
        return target, drafts, self.kwargs


def log_sum_exp(z: np.ndarray, temperature: Any) -> np.ndarray:
    """log sum exp(z / T) over the last axis, float32; NaN counts as -inf."""
    with np.errstate(all="ignore"):
        x = np.where(np.isnan(z), -np.inf, z.astype(np.float64)) / temperature
        top = x.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        return (np.log(np.exp(x - top).sum(-1)) + top[..., 0]).astype(np.float32)


@pytest.fixture
def random_call() -> Callable[[np.random.Generator], Call]:
    return lambda rng: _Maker(rng).call()


#: Random calls a property is tried on; the emulated kernels take milliseconds a row.
EXAMPLES = {"reference": 20, "cpu": 80, "simt": 4, "cuda": 80}


@pytest.fixture
def for_any_call(backend: str) -> Callable[[Callable[[np.random.Generator, Call], None]], None]:
    """Run ``body(rng, call)`` on as many random calls as the backend has time for."""

    def run(body: Callable[[np.random.Generator, Call], None]) -> None:
        @settings(max_examples=EXAMPLES[backend])
        @given(seed=st.integers(0, 2**32 - 1))
        def try_one(seed: int) -> None:
            rng = np.random.default_rng(seed)
            body(rng, _Maker(rng).call())

        try_one()

    return run


@pytest.fixture
def assert_like_reference() -> Callable[[Verification, Call], int]:
    """Compare with the reference; returns how many requests were decided by a tiny margin."""

    def compare(got: Verification, call: Call) -> int:
        target, drafts, kwargs = call
        name = {"float32": "f32", "float16": "f16"}
        margin = np.full((drafts.shape[0], drafts.shape[1] + 1), np.inf)
        law = kwargs.get("draft_logits", kwargs.get("support_logits"))
        with np.errstate(all="ignore"):
            want = reference_sample(
                target,
                drafts,
                **kwargs,
                dtype=name[str(target.dtype)],
                draft_dtype="f32" if law is None else name[str(law.dtype)],
                margin=margin,
            )
        active = np.asarray(kwargs.get("active", np.ones(len(drafts)))) != 0
        close = 0
        for r in np.flatnonzero(active):
            same = all(np.array_equal(getattr(got, f)[r], getattr(want, f)[r]) for f in _EXACT)
            if not same and margin[r].min() < MARGIN:
                close += 1
                continue
            for field in _EXACT:
                np.testing.assert_array_equal(
                    getattr(got, field)[r], getattr(want, field)[r], f"{field} of request {r}"
                )
            lists = ("top_ids", "top_ids_raw") if kwargs.get("top_logprobs") else ()
            for field in lists:
                np.testing.assert_array_equal(getattr(got, field)[r], getattr(want, field)[r])
            lists = ("top_logprob", "top_logprob_raw") if lists else ()
            for field in ("logprob", "logprob_raw", *lists):
                np.testing.assert_allclose(
                    getattr(got, field)[r], getattr(want, field)[r], rtol=1e-5, atol=1e-5
                )
        return close

    return compare
