# SPDX-License-Identifier: Apache-2.0
"""The model of the Markov loop on a GPU: worked numbers, and limits that no constant can move."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from lib import roofline

# R, V: floor, design bf16, design int8, chain in a graph; microseconds for gamma 7, r 256.
WHOLE_LOOP = {
    (1, 49_152): (6.0, 20, 14, 94),
    (1, 129_280): (15.8, 47, 24, 172),
    (1, 151_936): (18.6, 61, 26, 192),
    (1, 262_144): (32.1, 106, 48, 285),
    (8, 49_152): (7.1, 20, 14, 97),
    (8, 129_280): (18.8, 49, 24, 184),
    (8, 151_936): (22.0, 64, 27, 205),
    (8, 262_144): (38.0, 112, 53, 309),
    (32, 49_152): (11.0, 21, 16, 113),
    (32, 129_280): (28.9, 57, 30, 225),
    (32, 151_936): (33.9, 73, 33, 253),
    (32, 262_144): (58.5, 132, 68, 391),
    (128, 49_152): (28.5, 42, 32, 174),
    (128, 129_280): (75.1, 104, 70, 386),
    (128, 151_936): (88.2, 118, 81, 443),
    (128, 262_144): (152, 238, 147, 718),
    (256, 49_152): (57.1, 69, 52, 256),
    (256, 129_280): (150, 168, 124, 602),
    (256, 151_936): (176.5, 196, 144, 696),
    (256, 262_144): (304.5, 347, 243, 1155),
}
# R, V: tensor, U, special functions, ALU, W2 from memory, W2 resident, bound + exchange.
ONE_STEP = {
    (1, 49_152): (0.0, 0.02, 0.01, 0.0, 5.9, 1.0, 2.2),
    (8, 129_280): (0.7, 0.48, 0.28, 0.4, 15.4, 3.8, 5.4),
    (32, 151_936): (3.2, 2.26, 1.31, 2.0, 18.1, 5.7, 8.6),
    (128, 262_144): (21.7, 15.6, 9.05, 13.6, 31.2, 14.8, 31.6),
    (256, 151_936): (25.2, 18.1, 10.5, 15.7, 18.1, 7.3, 26.4),
}


def near(seconds: float, microseconds: float) -> bool:
    """Equal within the last digit that was written down."""
    text = f"{microseconds:g}"
    digit = 10.0 ** -len(text.partition(".")[2])
    return abs(1e6 * seconds - microseconds) <= 0.51 * digit


@pytest.mark.parametrize("shape", WHOLE_LOOP, ids=lambda s: f"R={s[0]}-V={s[1]}")
def test_whole_loop(shape: tuple[int, int]) -> None:
    r, v = shape
    got = [
        roofline.floor(r, v),
        roofline.loop(r, v),
        roofline.loop(r, v, width=1),
        roofline.stock(r, v),
    ]
    for seconds, written in zip(got, WHOLE_LOOP[shape], strict=True):
        assert near(seconds, written), (1e6 * seconds, written)


@pytest.mark.parametrize("shape", ONE_STEP, ids=lambda s: f"R={s[0]}-V={s[1]}")
def test_one_step(shape: tuple[int, int]) -> None:
    r, v = shape
    terms = roofline.step(r, v)
    got = [
        2.0 * r * v * 256 / roofline.H200.tensor,
        2.0 * r * v / roofline.H200.memory,
        terms.special,
        terms.alu,
        roofline.w2_bytes(v) / roofline.H200.memory,
        roofline.step(r, v, base_width=0).w2_resident,
        terms.bound + roofline.H200.exchange,
    ]
    for seconds, written in zip(got, ONE_STEP[shape], strict=True):
        assert abs(1e6 * seconds - written) <= 0.06 or near(seconds, written)


@pytest.mark.parametrize("shape", WHOLE_LOOP, ids=lambda s: f"R={s[0]}-V={s[1]}")
def test_nothing_is_predicted_below_the_floor(shape: tuple[int, int]) -> None:
    r, v = shape
    assert roofline.floor(r, v) < roofline.loop(r, v) < roofline.stock(r, v)
    assert roofline.floor(r, v, width=1) < roofline.loop(r, v, width=1)
    assert roofline.support_floor(r, v) < roofline.floor(r, v)


def test_all_of_w2_is_somewhere() -> None:
    for r, v in WHOLE_LOOP:
        for width in (1, 2):
            w2 = roofline.resident(r, v, width=width)
            assert w2.chip + w2.l2 + w2.memory == roofline.w2_bytes(v, width=width)
            assert min(w2.chip, w2.l2, w2.memory) >= 0


def test_constants_matter() -> None:
    slow = dataclasses.replace(roofline.H200, l2=3e12, exchange=2.4e-6)
    assert roofline.loop(1, 151_936, device=slow) > 1.3 * roofline.loop(1, 151_936)
    assert roofline.loop(1, 151_936, gamma=1) > roofline.floor(1, 151_936, gamma=1)


@pytest.mark.parametrize("shape", WHOLE_LOOP, ids=lambda s: f"R={s[0]}-V={s[1]}")
def test_what_was_built_lies_between_the_design_and_the_chain(shape: tuple[int, int]) -> None:
    r, v = shape
    ratio = roofline.built(r, v) / roofline.loop(r, v)
    assert 0.95 < ratio < (1.6 if r <= 32 else 1.9), ratio
    assert roofline.built(r, v) < roofline.stock(r, v)


def test_the_table_of_the_documentation_is_the_model() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "markov_loop.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 8
    for requests, vocab, cells in rows:
        r, v = int(requests), int(vocab.replace(",", ""))
        model = [
            roofline.floor(r, v),
            roofline.loop(r, v),
            roofline.built(r, v),
            roofline.loop(r, v, width=1),
            roofline.stock(r, v),
        ]
        for seconds, cell in zip(model, cells.split(" | "), strict=True):
            digits = len(cell.partition(".")[2])
            assert f"{1e6 * seconds:.{digits}f}" == cell, (r, v, cell)


def test_the_table_of_verification_is_the_model() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "rejection_sampler.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 8
    for requests, vocab, cells in rows:
        r, v = int(requests), int(vocab.replace(",", ""))
        model = [
            roofline.verification_floor(8 * r, v),
            roofline.verification_floor(r * roofline.visited(), v),
            roofline.verification(r, v),
            roofline.verification(r, v, sampled=True),
            roofline.verification(r, v, rows=8),
        ]
        assert [f"{1e6 * seconds:.1f}" for seconds in model] == cells.split(" | "), (r, v)
        assert model[1] < model[2] < model[3]
