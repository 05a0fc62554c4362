# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels beside their CPU twin: equal bits where the arithmetic is the same, and results
that know nothing of grid, batch, order of threads or kind of launch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dspark_ext as dx

Case = dict[str, Any]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KERNELS = ["simt", *(["cuda"] if dx.info()["cuda"]["usable"] else [])]
PER_REQUEST = ("base_logits", "hidden", "anchor", "seed", "position", "temperature")
EXACT = ("tokens", "logit", "logits", "status")

pytestmark = pytest.mark.parametrize("backend", KERNELS, indirect=True)


def random_case(
    rng: np.random.Generator,
    requests: int,
    gamma: int = 3,
    vocab: int = 1000,
    rank: int = 24,
    *,
    base: str = "f32",
    w1: str = "f32",
    w2: str = "f32",
    head: str = "vanilla",
    grid: bool = False,
    d: int = 20,
) -> Case:
    """Tensors of one call. ``grid``: multiples of 2^-4, whose dot products are exact."""

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if grid:
            return torch.from_numpy(rng.integers(-16, 17, shape) / 16).float()
        return torch.from_numpy(rng.normal(0, scale, shape)).float()

    case: Case = {
        "base_logits": (4 * values(requests, gamma, vocab)).to(DTYPES[base]),
        "w1": values(vocab, rank, scale=rank**-0.5).to(DTYPES[w1]),
        "w2": values(vocab, rank).to(DTYPES[w2]),
        "anchor": torch.from_numpy(rng.integers(0, vocab, requests)).int(),
        "seed": torch.from_numpy(rng.integers(0, 2**63, requests)),
        "position": torch.from_numpy(rng.integers(0, 2**31, requests)),
        "temperature": torch.from_numpy(np.resize(np.float32([1, 0, 0.7, 1.3]), requests)),
        "head": head,
        "store_logits": True,
    }
    if head != "vanilla":
        outputs, inputs = (rank, d + rank) if head == "gated" else (3 * rank, 2 * rank + d)
        case["hidden"] = values(requests, gamma, d)
        case["head_weight"] = values(outputs, inputs, scale=inputs**-0.5)
        case["head_bias"] = values(outputs)
        case["confidence_weight"] = values(d + rank, scale=(d + rank) ** -0.5)
        case["confidence_bias"] = 0.25
    return case


def run(case: Case, backend: str) -> dx.Draft:
    there = {
        k: v.cuda() if backend == "cuda" and isinstance(v, torch.Tensor) else v
        for k, v in case.items()
    }
    draft = dx.markov_loop(**there, backend=backend)
    return type(draft)(**{k: None if v is None else v.cpu() for k, v in vars(draft).items()})


def assert_equal(got: dx.Draft, want: dx.Draft, rows: Any = slice(None)) -> None:
    for name in (*EXACT, "lse", "confidence_logit"):
        a, b = getattr(got, name), getattr(want, name)
        if a is not None or b is not None:
            assert torch.equal(a[rows], b), name


def assert_twins(got: dx.Draft, want: dx.Draft) -> None:
    """What the CPU backend answers, to the bit; lse is a sum in another order, in float64."""
    for name in EXACT:
        if getattr(want, name) is not None:
            assert torch.equal(getattr(got, name), getattr(want, name)), name
    a, b = got.lse.numpy(), want.lse.numpy()
    near = np.abs(b) < 1e30
    np.testing.assert_array_equal(a[~near], b[~near])
    assert np.all(np.abs(a[near] - b[near]) <= np.spacing(np.abs(b[near])))
    if want.confidence_logit is not None:
        torch.testing.assert_close(
            got.confidence_logit, want.confidence_logit, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requests", [1, 10])
def test_the_scalar_source_has_the_bits_of_the_cpu(
    requests: int, dtype: str, head: str, backend: str, rng: np.random.Generator
) -> None:
    """Random weights: the order of additions shows, and it is the same."""
    case = random_case(rng, requests, 2, 500, 21, base=dtype, w1=dtype, w2=dtype, head=head)
    assert_twins(run(case, backend), dx.markov_loop(**case))


WEIGHTS = [("bf16", "bf16"), ("f32", "bf16"), ("f16", "f16")]


@pytest.mark.parametrize("source", ["mma", "wgmma"])
@pytest.mark.parametrize(("w1", "w2"), WEIGHTS)
@pytest.mark.parametrize(
    ("requests", "rank"),
    [(1, 16), (3, 48), (8, 512), (9, 80), (17, 144), (40, 16), (70, 208)],
    ids=lambda n: str(n),
)
def test_tensor_cores_on_exact_weights(
    requests: int,
    rank: int,
    w1: str,
    w2: str,
    source: str,
    backend: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights on a grid: z is the same in every order of additions."""
    monkeypatch.setenv("DSPARK_MARKOV_LOOP_SOURCE", source)
    case = random_case(rng, requests, 2, 700, rank, w1=w1, w2=w2, grid=True)
    assert_twins(run(case, backend), dx.markov_loop(**case))


@pytest.mark.parametrize("source", ["mma", "wgmma"])
@pytest.mark.parametrize("head", ["gated", "rnn"])
@pytest.mark.parametrize(("w1", "w2"), WEIGHTS)
@pytest.mark.parametrize(("requests", "rank"), [(2, 80), (33, 16)], ids=lambda n: str(n))
def test_tensor_cores_on_inner_vectors(
    requests: int,
    rank: int,
    w1: str,
    w2: str,
    head: str,
    source: str,
    backend: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An inner vector is any float32, so only its three parts together can give these sums."""
    monkeypatch.setenv("DSPARK_MARKOV_LOOP_SOURCE", source)
    case = random_case(rng, requests, 2, 700, rank, w1=w1, w2=w2, head=head, grid=True)
    got, want = run(case, backend), dx.markov_loop(**case)
    bound = 2.0**-24 * rank * (rank / 16 + 8)
    torch.testing.assert_close(got.logits[:, 0], want.logits[:, 0], rtol=0, atol=bound)
    torch.testing.assert_close(got.lse[:, 0], want.lse[:, 0], rtol=0, atol=2 * bound)
    assert (got.tokens == want.tokens).float().mean() > 0.9


@pytest.mark.parametrize("w1", DTYPES)
@pytest.mark.parametrize("w2", ["bf16", "f16"])
def test_tensor_cores_lose_nothing_of_a_vector(
    w1: str, w2: str, backend: str, rng: np.random.Generator
) -> None:
    """One column of W2 is 1 and the others 0: the bias is an element of W1, of any magnitude."""
    case = random_case(rng, 5, 1, 300, 32, w1=w1, w2=w2)
    span = 30 if w1 == "f32" else 6
    wide = rng.normal(0, 1, (300, 32)) * 2.0 ** rng.integers(-span, 6, (300, 32))
    case["w1"] = torch.from_numpy(wide).to(DTYPES[w1])
    case["w2"].zero_()
    case["w2"][torch.arange(300), torch.arange(300) % 32] = 1
    case["base_logits"].zero_()
    z = run(case, backend).logits[:, 0]
    want = case["w1"][case["anchor"].long()].float()[:, torch.arange(300) % 32]
    # f16 parts share one exponent a vector: 2^-39 of its largest element is the last bit.
    limit = 0.0 if w2 == "bf16" or w1 == "f16" else 2.0**-38 * float(want.abs().max())
    torch.testing.assert_close(z, want, rtol=0, atol=limit)


@pytest.mark.parametrize("w2", ["f32", "bf16"])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_what_is_not_finite_goes_through(
    bad: str, w2: str, backend: str, rng: np.random.Generator
) -> None:
    case = random_case(rng, 3, 2, 300, 32, w1="f32", w2=w2, grid=True)
    case["w2"] = case["w2"].abs() + 1
    case["w1"][case["anchor"][1].long(), 5] = float(bad)
    got, want = run(case, backend), dx.markov_loop(**case)
    assert_twins(got, want)
    assert bool(got.status[1]) == (bad != "inf")


def test_rows_that_no_tensor_copy_can_read(backend: str, rng: np.random.Generator) -> None:
    """W2 and W1 at odd addresses: the scalar source serves them."""
    case = random_case(rng, 3, 2, 300, 32, base="bf16", w1="bf16", w2="bf16", grid=True)
    want = dx.markov_loop(**case)
    for name in ("w1", "w2", "base_logits"):
        x = case[name]
        wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype)
        wide[..., 1 : x.shape[-1] + 1] = x
        case[name] = wide[..., 1 : x.shape[-1] + 1]
        assert_twins(run(case, backend), want)


@pytest.mark.parametrize("source", ["scalar", "mma", "wgmma"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_request_does_not_depend_on_its_batch(
    head: str,
    source: str,
    backend: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSPARK_MARKOV_LOOP_SOURCE", source)
    w2 = "bf16"
    case = random_case(rng, 36, 2, 300, 48, base="bf16", w1=w2, w2=w2, head=head)
    want = run(case, backend)
    for rows in ([35], [3, 20], list(range(30, 22, -1)), list(range(0, 36, 3))):
        part = {k: v[rows] if k in PER_REQUEST else v for k, v in case.items()}
        assert_equal(want, run(part, backend), rows)


@pytest.mark.parametrize("w2", ["f32", "bf16"])
@pytest.mark.parametrize("requests", [2, 37])
def test_inactive_requests_are_not_there(
    requests: int, w2: str, backend: str, rng: np.random.Generator
) -> None:
    case = random_case(rng, requests, 2, 700, 32, w1=w2, w2=w2)
    want = run(case, backend)
    active = torch.zeros(3 * requests, dtype=torch.bool)
    places = torch.from_numpy(np.sort(rng.choice(3 * requests, requests, replace=False)))
    active[places] = True
    for name in PER_REQUEST:
        if name not in case:
            continue
        x = case[name]
        fill = float("nan") if x.is_floating_point() else -1
        case[name] = torch.full((3 * requests, *x.shape[1:]), fill, dtype=x.dtype)
        case[name][places] = x
    case["active"] = active
    if backend == "cuda":
        case["active"] = active.cuda()
    got = run(case, backend)
    assert_equal(got, want, places)


@pytest.mark.parametrize("requests", [1, 12, 40])
@pytest.mark.parametrize("w2", ["f32", "bf16"])
def test_forced_uniforms(requests: int, w2: str, backend: str, rng: np.random.Generator) -> None:
    case = random_case(rng, requests, 2, 400, 16, w1=w2, w2=w2, grid=True)
    edges = np.uint64([0, 1, 2**52, 2**53 - 1])
    uniform = np.resize(edges, (requests, 2))
    want = dx.markov_loop(**case, debug_uniform=torch.from_numpy(uniform.astype(np.int64)))
    case["debug_uniform"] = torch.from_numpy(uniform.astype(np.int64))
    assert_twins(run(case, backend), want)


def test_more_requests_than_one_launch_takes(backend: str, rng: np.random.Generator) -> None:
    case = random_case(rng, 600, 1, 150, 16, base="bf16", w1="bf16", w2="bf16", grid=True)
    assert_twins(run(case, backend), dx.markov_loop(**case))


def test_faster_sources_can_be_held_back(
    rng: np.random.Generator, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For benches. The scalar source adds in the CPU's order, tensor cores in another one."""
    case = random_case(rng, 3, rank=64, w1="bf16", w2="bf16")
    twin = dx.markov_loop(**case, backend="cpu")
    same = {}
    for source in ("scalar", "mma", "any"):
        monkeypatch.setenv("DSPARK_MARKOV_LOOP_SOURCE", source)
        same[source] = torch.equal(run(case, backend).logits, twin.logits)
    assert same == {"scalar": True, "mma": False, "any": False}


def test_full_vocabulary(backend: str, rng: np.random.Generator) -> None:
    """Resident segments, and a stream that goes forwards and backwards."""
    case = random_case(rng, 2, 2, 151_936, 64, base="bf16", w1="bf16", w2="bf16", grid=True)
    case["store_logits"] = False
    assert_twins(run(case, backend), dx.markov_loop(**case))


@pytest.mark.parametrize("capability", ["75", "80", "120"])
@pytest.mark.parametrize(("requests", "rank"), [(3, 64), (20, 512)])
def test_other_devices(
    requests: int,
    rank: int,
    capability: str,
    backend: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tensor cores for bf16, and less shared memory: other sources, tiles and launches."""
    if backend != "simt":
        pytest.skip("the device is what it is")
    monkeypatch.setenv("DSPARK_SIMT_CAPABILITY", capability)
    case = random_case(rng, requests, 2, 500, rank, w1="f32", w2="bf16", grid=True)
    assert_twins(run(case, backend), dx.markov_loop(**case))
