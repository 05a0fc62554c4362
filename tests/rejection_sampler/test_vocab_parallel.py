# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over ranks: the unsplit decisions, equal on every rank, and the law always."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

import dspark_ext as dx
from dspark_ext import _C, _simt
from dspark_ext.vocab_parallel import Shard, ShardedVerification

FIELDS = ("tokens", "accepted", "num_accepted", "num_emitted", "next_anchor", "finish", "status")
SPLITS = {
    "one": (700,),
    "two": (384, 316),
    "four": (128, 256, 128, 188),
    "narrow": (128,) * 5 + (60,),
    "ragged": (100, 7, 300, 293),
}


def pack(allowed: np.ndarray) -> np.ndarray:
    """Bits [B, n] as words [B, ceil(n / 32)]."""
    width = -(-allowed.shape[1] // 32) * 32
    wide = np.zeros((len(allowed), width), bool)
    wide[:, : allowed.shape[1]] = allowed
    return np.packbits(wide.reshape(len(wide), -1, 32), axis=2, bitorder="little").view("<i4")[
        ..., 0
    ]


class Call:
    """A random call, whole and by shards."""

    def __init__(self, seed: int, vocab: int = 700) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.requests, self.gamma = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        rows = self.requests * (self.gamma + 1)
        self.logits = (rng.normal(size=(rows, vocab)) * 2.5).astype(np.float32)
        if rng.random() < 0.3:
            self.logits = np.round(self.logits)  # ties over shards
        if rng.random() < 0.3:
            self.logits[rng.integers(rows), rng.integers(vocab, size=9)] = np.nan
        if rng.random() < 0.2:
            self.logits[rng.integers(rows)] = -np.inf
        self.bias = self.allowed = None
        if rng.random() < 0.4:
            self.bias = rng.normal(size=(self.requests, vocab)).astype(np.float32)
        if rng.random() < 0.4:
            self.allowed = rng.random((rows, vocab)) < rng.choice(
                [0.0, 0.5], (rows, 1), p=[0.1, 0.9]
            )
        self.shared: dict[str, Any] = {
            "draft_len": rng.integers(0, self.gamma + 1, self.requests),
            "cu_seqlens": np.arange(self.requests + 1) * (self.gamma + 1),
            "seed": rng.integers(0, 2**60, self.requests, dtype=np.uint64),
            "position": 20,
            "temperature": rng.choice([0, 0.8, 1, 1.4], self.requests).astype(np.float32),
            "rule": str(rng.choice(["token", "token", "match", "greedy"])),
            "stop_ids": rng.integers(0, vocab, 2).tolist(),
            "max_new_tokens": rng.integers(1, self.gamma + 2, self.requests),
        }
        self.active = np.arange(self.requests)
        if rng.random() < 0.2:
            self.shared["active"] = rng.integers(0, 2, self.requests).astype(np.uint8)
            self.active = np.flatnonzero(self.shared["active"])
        self.drafts = self._law(vocab)

    def _law(self, vocab: int) -> np.ndarray:
        rng, shape = self.rng, (self.requests, self.gamma)
        near = np.nan_to_num(self.logits, nan=-9, neginf=-9)
        z = near.reshape(self.requests, self.gamma + 1, vocab)[:, :-1]
        z = (z + rng.normal(size=z.shape) * 0.6).astype(np.float32)
        self.columns = self.support = None
        t = self.shared["temperature"][:, None, None]
        t = np.where(t == 0, 1, t)
        kind = rng.choice(["one-hot", "full", "list"])
        if kind == "one-hot":
            return rng.integers(-1, vocab, shape)
        if kind == "list":
            ids = np.stack([np.sort(rng.choice(vocab, 40, False)) for _ in range(z[..., 0].size)])
            ids = ids.reshape(*shape, 40).astype(np.int32)
            self.support = (ids, np.take_along_axis(z, ids, -1))
            full = np.full_like(z, -np.inf)
            np.put_along_axis(full, ids, self.support[1], -1)
            z = full
        else:
            self.columns = z
        drafts = (z / t + rng.gumbel(size=z.shape)).argmax(-1)
        scaled = z.astype(np.float64) / t
        self.shared["draft_lse"] = np.log(np.exp(scaled).sum(-1)).astype(np.float32)
        self.shared["draft_logit"] = np.take_along_axis(z, drafts[..., None], -1)[..., 0]
        if rng.random() < 0.2 and self.columns is not None:
            self.columns[0, 0, rng.integers(vocab)] = np.nan
        return drafts

    def whole(self, backend: str) -> Any:
        extra: dict[str, Any] = {"draft_logits": self.columns, "logit_bias": self.bias}
        extra["token_mask"] = None if self.allowed is None else pack(self.allowed)
        if self.support is not None:
            extra["support_ids"], extra["support_logits"] = self.support
        return dx.rejection_sample(
            self.logits, self.drafts, backend=backend, **(self.shared | extra)
        )

    def rank(self, shard: Shard, form: str = "cpu") -> ShardedVerification:
        part = slice(shard.first_id, shard.first_id + shard.size)
        extra: dict[str, Any] = {
            "logit_bias": None if self.bias is None else self.bias[:, part],
            "token_mask": None if self.allowed is None else pack(self.allowed[:, part]),
            "draft_logits": None if self.columns is None else self.columns[..., part],
        }
        if self.support is not None:
            extra["support_ids"], extra["support_logits"] = self.support
        return ShardedVerification(
            shard, self.logits[:, part], self.drafts, backend=form, **(self.shared | extra)
        )


def run(ranks: list[ShardedVerification]) -> list[Any]:
    scans = [rank.scan() for rank in ranks]
    draws = [rank.draw(scans) for rank in ranks]
    return [rank.finish(draws) for rank in ranks]


FORMS = ["cpu", "reference"]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), split=st.sampled_from(sorted(SPLITS)))
def test_every_rank_and_the_unsplit_call_agree(form: str, seed: int, split: str) -> None:
    call = Call(seed)
    with np.errstate(all="ignore"):
        sizes = SPLITS[split]
        results = run([call.rank(Shard(sizes, k), form) for k in range(len(sizes))])
        want = call.whole(form)
    for other in results[1:]:
        for field in (*FIELDS, "logprob", "logprob_raw"):
            np.testing.assert_array_equal(getattr(results[0], field), getattr(other, field))
    if split == "ragged":  # other segments: another draw of the same law
        return
    on = call.active
    for field in FIELDS:
        got, full = getattr(results[0], field)[on], getattr(want, field)[on]
        np.testing.assert_array_equal(got, full, field)
    for field in ("logprob", "logprob_raw"):
        got, full = getattr(results[0], field)[on], getattr(want, field)[on]
        finite = np.isfinite(full)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        # One sum in float64 is grouped by rank: the float32 next to it at the most.
        np.testing.assert_array_max_ulp(got[finite], full[finite], 1)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), split=st.sampled_from(sorted(SPLITS)))
def test_the_compiled_form_and_the_definition_agree(seed: int, split: str) -> None:
    """Any split, one of no whole segments too: the same decisions from the same numbers."""
    call, sizes = Call(seed), SPLITS[split]
    with np.errstate(all="ignore"):
        got, want = (
            run([call.rank(Shard(sizes, k), f) for k in range(len(sizes))])[0] for f in FORMS
        )
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)
    for field in ("logprob", "logprob_raw"):
        np.testing.assert_allclose(
            getattr(got, field), getattr(want, field), rtol=1e-5, atol=1e-5, err_msg=field
        )


@pytest.mark.parametrize("split", sorted(SPLITS))
@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernels_have_the_bits_of_the_cpu(
    split: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is exchanged, and the results; teams of CTAs from capability 9.0 on."""
    if not _simt.load():
        pytest.skip("the SIMT library is not built: run `make simt`")
    monkeypatch.setenv("DSPARK_SIMT_CAPABILITY", capability)
    sizes, first = SPLITS[split], 10 * sorted(SPLITS).index(split)
    for seed in range(first, first + 3):
        monkeypatch.setenv("DSPARK_SIMT_SEED", str(seed))
        call = Call(seed)
        ranks, want = (
            [call.rank(Shard(sizes, k), f) for k in range(len(sizes))] for f in ("simt", "cpu")
        )
        scans, wanted = ([rank.scan() for rank in side] for side in (ranks, want))
        np.testing.assert_array_equal(np.stack(scans), np.stack(wanted))
        draws, wanted = ([r.draw(scans) for r in side] for side in (ranks, want))
        np.testing.assert_array_equal(np.stack(draws), np.stack(wanted))
        got, full = (side[0].finish(draws) for side in (ranks, want))
        for field in (*FIELDS, "logprob", "logprob_raw"):
            np.testing.assert_array_equal(getattr(got, field), getattr(full, field), field)


@pytest.mark.parametrize("sizes", [(128, 70_016, 384, 29_472), (128 * 67, 91_424)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_shards_of_many_segments(sizes: tuple[int, ...], threads: int) -> None:
    """Segment numbers that are no multiple of four, and rows that threads share."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(3):
            call = Call(seed, 100_000)
            got = run([call.rank(Shard(sizes, k)) for k in range(len(sizes))])[-1]
            want = call.whole("cpu")
            for field in FIELDS:
                a, b = getattr(got, field)[call.active], getattr(want, field)[call.active]
                np.testing.assert_array_equal(a, b, field)
    finally:
        torch.set_num_threads(before)


P = np.array([0.3, 0.2, 0.15, 0.15, 0.1, 0.1])
Q = np.array([0.1, 0.4, 0.1, 0.1, 0.2, 0.1])


def emitted(sizes: tuple[int, ...], count: int, told: Any = None, **changes: Any) -> np.ndarray:
    """First tokens of `count` requests with one draft each; drafts are drawn from Q.

    Verification is told the law `told` instead.
    """
    rows = np.tile(np.log(P).astype(np.float32), (2 * count, 1))
    drafts = np.random.default_rng(4).choice(6, (count, 1), p=Q)
    z = np.tile(np.log(Q).astype(np.float32), (count, 1, 1)) if told is None else told
    ranks = []
    for k, size in enumerate(sizes):
        shard = Shard(sizes, k)
        part = slice(shard.first_id, shard.first_id + size)
        ranks.append(
            ShardedVerification(
                shard, rows[:, part], drafts, draft_len=1, cu_seqlens=np.arange(count + 1) * 2,
                seed=np.arange(count), position=6, temperature=1.0,
                draft_logit=np.take_along_axis(z, drafts[..., None], -1)[..., 0],
                draft_lse=np.zeros((count, 1), np.float32), draft_logits=z[..., part],
                **changes,
            )
        )  # fmt: skip
    return run(ranks)[0].tokens[:, 0]


def p_value(tokens: np.ndarray) -> float:
    return float(stats.chisquare(np.bincount(tokens, minlength=6), P * len(tokens)).pvalue)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", ["token", "match"])
def test_the_law_of_any_split(rule: str, form: str) -> None:
    count = 40_000 if form == "cpu" else 500
    for sizes in ((1, 3, 2), (6,), (2, 1, 1, 1, 1)) if form == "cpu" else ((1, 3, 2),):
        assert p_value(emitted(sizes, count, rule=rule, backend=form)) > 1e-5


def test_drafts_as_they_came_are_another_law() -> None:
    """The control of the compiled form: a law that is flatter than the drafts'."""
    flat = np.full((40_000, 1, 6), np.log(1 / 6), np.float32)
    assert p_value(emitted((1, 3, 2), 40_000, told=flat)) < 1e-5


def test_normalising_locally_is_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each rank draws within itself, and a rank is chosen without its mass."""
    right = ShardedVerification._candidate

    def wrong(self: Any, out: Any, at: Any, key: int, offset: int, row: Any) -> None:
        noise = np.random.default_rng([int(np.sum(at)), self.shard.rank, key % 2**32])
        right(self, out, at, int(noise.integers(1, 2**62)), offset, row)

    monkeypatch.setattr(ShardedVerification, "_candidate", wrong)
    assert p_value(emitted((1, 3, 2), 500, rule="match", backend="reference")) < 1e-5


def test_ties_over_shards_give_the_lowest_id() -> None:
    rows = np.zeros((1, 10), np.float32)
    ranks = [
        ShardedVerification(
            Shard((4, 6), k), rows[:, part], [[0]], draft_len=0, cu_seqlens=[0, 1], seed=0,
            position=1,
        )
        for k, part in enumerate((slice(0, 4), slice(4, 10)))
    ]  # fmt: skip
    assert run(ranks)[0].tokens.tolist() == [[0, -1]]


@pytest.mark.parametrize("rule", ["block", "synthetic"])
def test_other_rules_say_so(rule: str) -> None:
    with pytest.raises(NotImplementedError, match=f"rule='{rule}'"):
        ShardedVerification(
            Shard((2,), 0), np.zeros((1, 2), np.float32), [[0]], draft_len=0, cu_seqlens=[0, 1],
            seed=0, position=1, rule=rule,
        )  # fmt: skip


def one_draft(**changes: Any) -> dict[str, Any]:
    """Arguments of one request with two drafts over eight ids."""
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    return {
        "target_logits": x,
        "draft_tokens": [[1, 2]],
        "draft_len": [2],
        "cu_seqlens": [0, 3],
        "seed": [1],
        "position": [5],
        "temperature": 1.0,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cu_seqlens": [-1, 2]}, ["cu_seqlens"]),
        ({"cu_seqlens": [0, 2]}, ["cu_seqlens: got [0, 2] (request [0])"]),
        ({"cu_seqlens": [1, 4]}, ["cu_seqlens"]),
        ({"draft_len": [3]}, ["draft_len", "cu_seqlens"]),
        ({"draft_len": [-1]}, ["draft_len"]),
        ({"max_new_tokens": [-1], "position": [2**33]}, ["max_new_tokens", "position"]),
        ({"seed": ["x"], "temperature": [1.0, 1.0]}, ["seed", "temperature"]),
        ({"draft_tokens": [1, 2]}, ["draft_tokens"]),
        ({"stop_ids": [[1]]}, ["stop_ids"]),
        ({"target_logits": np.zeros((3, 8))}, ["target_logits: got float64"]),
        (
            {"draft_logits": np.zeros((1, 2, 8), np.float32)},
            ["draft_logit, draft_lse, draft_logits: got only draft_logits"],
        ),
        ({"logit_bias": np.zeros(8, np.float32)}, ["logit_bias"]),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(changes: dict[str, Any], words: list[str]) -> None:
    arguments = one_draft(**changes)
    target = arguments.pop("target_logits")
    drafts = arguments.pop("draft_tokens")
    with pytest.raises(dx.ArgumentError) as error:
        ShardedVerification(Shard((8,), 0), target, drafts, **arguments)
    for word in words:
        assert word in str(error.value)


def test_other_backends_say_so() -> None:
    arguments = one_draft(backend="cuda")
    target, drafts = arguments.pop("target_logits"), arguments.pop("draft_tokens")
    with pytest.raises(dx.ArgumentError, match="backend: got 'cuda'"):
        ShardedVerification(Shard((8,), 0), target, drafts, **arguments)


def compiled() -> Any:
    """The C arguments of one rank of two, whole and right."""
    arguments = one_draft()
    target, drafts = arguments.pop("target_logits"), arguments.pop("draft_tokens")
    rank = ShardedVerification(Shard((8, 3), 0), target, drafts, **arguments)
    rank.scan()
    assert rank._compiled is not None
    return rank._compiled


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"rank": 2}, ValueError, ["rank: got 2, expected 0..1"]),
        ({"num_ranks": 0}, ValueError, ["num_ranks", "rank"]),
        ({"shard_sizes": 0}, ValueError, ["shard_sizes: got NULL"]),
        ({"call.vocab_size": 3}, ValueError, ["vocab_size: got 3, expected shard_sizes[0] = 8"]),
        ({"call.gamma": 99}, ValueError, ["gamma: got 99"]),
        ({"call.status": 0}, ValueError, ["status: got NULL"]),
        ({"scan": 0}, ValueError, ["scan: got NULL"]),
        ({"call.top_k": 8, "call.min_p": 8}, NotImplementedError, ["call.top_k", "call.min_p"]),
        ({"call.top_logprobs": 2}, ValueError, ["call.top_logprobs: got 2", "top_ids"]),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else "",
)
def test_the_c_functions_name_what_is_wrong(
    fields: dict[str, int], error: type[Exception], words: list[str]
) -> None:
    one = compiled()
    for name, value in fields.items():
        setattr(one.call if "." in name else one.params, name.removeprefix("call."), value)
    with pytest.raises(error) as caught:
        one._run("vocab_parallel_scan")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("gamma", [-3, 0, 99])
def test_no_scratch_is_sized_for_a_gamma_that_is_none(gamma: int) -> None:
    one = compiled()
    one.call.gamma = gamma
    one.params.call = one.call
    with pytest.raises(ValueError, match=f"gamma: got {gamma}"):
        _C.vocab_parallel_workspace(_C.CPU, one.params)


def test_a_small_workspace_and_a_missing_device_are_refused() -> None:
    one = compiled()
    with pytest.raises(ValueError, match="workspace: got 0 bytes"):
        _C.vocab_parallel_scan(_C.CPU, one.params)
    refusal = "workspace: got 0" if dx.info()["cuda"]["compiled"] else "built without CUDA"
    with pytest.raises((NotImplementedError, ValueError), match=refusal):
        _C.vocab_parallel_scan(_C.CUDA, one.params)


def test_a_shard_has_ids_and_a_rank() -> None:
    with pytest.raises(dx.ArgumentError, match="sizes"):
        Shard((0, 8), 1)
    with pytest.raises(dx.ArgumentError, match="rank: got 2"):
        Shard((4, 4), 2)


@pytest.mark.parametrize(
    "ids",
    [[[1, 1], [2, 2]], [[2, 1], [3, 2]], [[1, 8], [2, 99]], [[-1, 1], [-1, 2]]],
    ids=["twice", "falling", "beyond", "hole"],
)
def test_lists_out_of_order_are_no_law(ids: list[list[int]], backend: str) -> None:
    arguments = one_draft(
        support_ids=np.array([ids], np.int32),
        support_logits=np.zeros((1, 2, 2), np.float32),
        draft_logit=np.zeros((1, 2), np.float32),
        draft_lse=np.full((1, 2), np.log(2), np.float32),
    )
    target, drafts = arguments.pop("target_logits"), np.array(arguments.pop("draft_tokens"))
    ranks = [
        ShardedVerification(Shard((4, 4), k), target[:, 4 * k : 4 * k + 4], drafts, **arguments)
        for k in range(2)
    ]
    got = run(ranks)[0]
    want = dx.rejection_sample(target, drafts, **arguments, backend=backend)
    np.testing.assert_array_equal(got.status, want.status)
    assert int(got.status[0]) & int(dx.Status.BAD_DRAFT_ID)
    assert got.num_accepted.tolist() == want.num_accepted.tolist() == [0]


@pytest.mark.parametrize("level", [1e17, np.inf], ids=str)
def test_huge_logits_keep_their_shares(level: float) -> None:
    """Four ids tied at the top have 1/4 each, on whatever ranks they lie."""
    rows = np.zeros((2, 8), np.float32)
    rows[:, 2:6] = level
    ranks = [
        ShardedVerification(
            Shard((4, 4), k), rows[:, 4 * k : 4 * k + 4], [[2]], draft_len=[1], cu_seqlens=[0, 2],
            seed=[3], position=[9], temperature=1.0,
        )
        for k in range(2)
    ]  # fmt: skip
    result = run(ranks)[0]
    np.testing.assert_allclose(result.logprob[0, 0], np.log(0.25), rtol=1e-6)
