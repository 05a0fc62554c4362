# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, the counter layout, and the numbers made of its words."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_ext._C import _testing
from dspark_ext.reference import philox as reference

# Known-answer vectors of the generator's authors (Random123, philox4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert _testing.philox(*counter, *key) == words


@pytest.mark.parametrize("position", [0, 5, 2**32 - 1, 2**32 + 7])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_counter_layout(seed: int, position: int, rng: np.random.Generator) -> None:
    kind, distance, index = int(rng.integers(10)), int(rng.integers(17)), int(rng.integers(2**20))
    got = _testing.draw(seed, position, distance, kind, index)
    counter = (index, position & 0xFFFFFFFF, position >> 32, kind << 8 | distance)
    assert got == _testing.philox(*counter, seed & 0xFFFFFFFF, seed >> 32)
    words = reference.philox4x32(
        reference.counter(index, position, kind, distance), (seed & 0xFFFFFFFF, seed >> 32)
    )
    assert got == tuple(int(w) for w in words)


def test_uniform_has_53_bits_of_two_words(rng: np.random.Generator) -> None:
    for _ in range(100):
        seed, position = int(rng.integers(2**63)), int(rng.integers(2**32))
        first, second, *_ = _testing.draw(seed, position, 3, reference.Kind.ACCEPT, 0)
        u53 = _testing.draw_u53(seed, position, 3, reference.Kind.ACCEPT)
        assert u53 == first * 2**21 + second // 2**11
        assert u53 == reference.uniform53(seed, position, reference.Kind.ACCEPT, 3)


def test_segment_noise_equals_the_reference(rng: np.random.Generator) -> None:
    seed, position = int(rng.integers(2**63)), int(rng.integers(2**32))
    want = reference.segment_gumbel(seed, position, reference.Kind.DRAFT_SEGMENT, 2, 501)
    got = [_testing.segment_gumbel(seed, position, 2, 0, s) for s in range(501)]
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)
