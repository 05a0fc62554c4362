# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 against the published vectors, and the counter layout of the contract."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_ext.reference.philox import Kind, counter, philox4x32, segment_gumbel, uniform53

KNOWN = [
    pytest.param([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8", id="zeros"),
    pytest.param(
        [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd", id="ones"
    ),
    pytest.param(
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
        id="pi",
    ),
]


@pytest.mark.parametrize(("counters", "keys", "expected"), KNOWN)
def test_published_vectors(counters: list[int], keys: list[int], expected: str) -> None:
    assert " ".join(f"{int(w):08x}" for w in philox4x32(counters, keys)) == expected


def test_vectorised_equals_one_by_one() -> None:
    counters = np.random.default_rng(0).integers(0, 2**32, (50, 4))
    keys = np.random.default_rng(1).integers(0, 2**32, (50, 2))
    together = philox4x32(counters, keys)
    assert all(np.array_equal(together[i], philox4x32(counters[i], keys[i])) for i in range(50))


def test_uniform_takes_the_high_bits_of_two_words() -> None:
    seed, position, delta = 0x299F31D0A4093822, (3 << 32) + 17, 5
    words = philox4x32([0, 17, 3, (int(Kind.ACCEPT) << 8) | 5], [0xA4093822, 0x299F31D0])
    expected = (int(words[0]) << 21) | (int(words[1]) >> 11)
    assert uniform53(seed, position, Kind.ACCEPT, delta) == expected


def test_segment_noise_uses_four_words_of_a_call() -> None:
    noise = segment_gumbel(5, 9, Kind.BONUS_SEGMENT, 2, 7)
    for s in range(7):
        words = philox4x32(counter(s >> 2, 9, Kind.BONUS_SEGMENT, 2), [5, 0])
        v = (float(words[s & 3]) + 0.5) * 2.0**-32
        assert noise[s] == -np.log(-np.log1p(-v))


def test_everything_in_the_counter_matters() -> None:
    base = {"seed": 1, "position": 100, "kind": Kind.DRAFT_INNER, "delta": 1}
    variants = [{"seed": 2}, {"position": 101}, {"kind": Kind.ACCEPT}, {"delta": 2}]
    draws = [uniform53(**{**base, **change}) for change in [{}, *variants]]
    assert len(set(draws)) == len(draws)


def test_uniforms_and_gumbels_have_their_law() -> None:
    uniforms = np.array([uniform53(3, n, Kind.ACCEPT, 1) for n in range(4000)]) * 2.0**-53
    assert abs(uniforms.mean() - 0.5) < 5 / np.sqrt(12 * 4000)
    gumbels = segment_gumbel(3, 0, Kind.DRAFT_SEGMENT, 1, 200_000)
    # mean = Euler's constant, variance = pi^2 / 6
    assert abs(gumbels.mean() - 0.5772156649) < 5 * np.sqrt(np.pi**2 / 6 / 200_000)
    assert abs(gumbels.var() - np.pi**2 / 6) < 0.05
