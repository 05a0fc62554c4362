# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the frequencies, and the rotation of queries."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_ext._arrays import ArgumentError, is_integer, is_torch, to_numpy

__all__ = ["Rope"]

_LENGTH = "original_max_position_embeddings"
#: What each kind of scaling must and may be given.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", _LENGTH, "length"),
    "yarn": ("factor", _LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


class Rope:
    """Rotary embedding of keys and queries.

    Of the first ``E = dim`` elements of a head, the pairs ``(x_i, x_{i + E/2})`` (half-split, the
    layout of Llama, Qwen and SmolLM checkpoints), or ``(x_{2i}, x_{2i + 1})`` with ``interleaved``
    (GPT-J, GLM), turn by ``position * inv_freq[i]`` with ``inv_freq[i] = theta ** (-2 i / E)``,
    scaled as asked; elements from ``E`` on stay. Cosine and sine are multiplied by
    :attr:`amplitude`, which is 1 but for YaRN. Frequencies, angles and that product are float64,
    rounded to float32 once, so that positions up to 2**20 and beyond stay exact.

    Parameters
    ----------
    theta : float
        Base, > 0.
    scaling : mapping, optional
        As in a model's configuration, with ``rope_type`` (or ``type``):

        * ``"default"``: nothing;
        * ``"linear"``: positions divided by ``factor``;
        * ``"dynamic"``: the base grows with the length, ``factor``,
          ``original_max_position_embeddings`` and ``length``, the longest sequence to be served.
          The keys of a cache are turned once, so the length is part of the embedding here and not
          the sequence's of the moment;
        * ``"yarn"`` (arXiv 2309.00071): ``factor``, ``original_max_position_embeddings``, optional
          ``beta_fast`` (32), ``beta_slow`` (1), ``truncate`` (true), and ``attention_factor``, or
          ``mscale`` and ``mscale_all_dim``, for the amplitude (default ``0.1 ln(factor) + 1``);
        * ``"llama3"``: ``factor``, ``low_freq_factor``, ``high_freq_factor``,
          ``original_max_position_embeddings``.
    interleaved : bool
        Pairs lie side by side.
    dim : int, optional
        ``E``, even: how many elements of a head turn, a model's
        ``partial_rotary_factor * head_dim``. All of them by default.

    Raises
    ------
    ArgumentError
        ``theta`` or a factor is missing, not finite or not positive; ``dim`` is no even number.
    NotImplementedError
        Another ``rope_type`` (``"longrope"``).

    Examples
    --------
    >>> Rope(10000.0).inv_freq(4).tolist()
    [1.0, 0.01]
    >>> Rope(10000.0, {"rope_type": "linear", "factor": 2.0}).inv_freq(4).tolist()
    [0.5, 0.005]
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    >>> round(Rope(10000.0, yarn).amplitude, 6), Rope(10000.0, dim=2).inv_freq(64).tolist()
    (1.138629, [1.0])
    """

    def __init__(
        self,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        *,
        interleaved: bool = False,
        dim: int | None = None,
    ) -> None:
        self.theta = float(theta)
        self.scaling = dict(scaling or {})
        self.interleaved = bool(interleaved)
        self.dim = dim
        self._cache: dict[int, np.ndarray[Any, Any]] = {}
        kind = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        if kind not in _NEEDED:
            raise NotImplementedError(
                f"Rope: scaling: rope_type {kind!r} is missing in this release; "
                f"{', '.join(map(repr, _NEEDED))} are supported"
            )
        self._kind = str(kind)
        given = {"theta": self.theta} | {n: self.scaling.get(n) for n in _NEEDED[self._kind]}
        if self._kind == "yarn":
            given |= {n: self.scaling[n] for n in _YARN_OPTIONS if self.scaling.get(n) is not None}
        bad = [
            f"{name}: got {x!r}, expected a positive number"
            for name, x in given.items()
            if not _positive(x)
        ]
        if not (dim is None or (is_integer(dim) and dim >= 2 and dim % 2 == 0)):
            bad.append(f"dim: got {dim!r}, expected an even number of elements, or None")
        if bad:
            raise ArgumentError("\n  ".join(["Rope:", *bad]))
        #: Factor of cosine and sine, float.
        self.amplitude = self._yarn_amplitude() if self._kind == "yarn" else 1.0

    def __repr__(self) -> str:
        more = ", interleaved=True" if self.interleaved else ""
        more += "" if self.dim is None else f", dim={self.dim}"
        return f"Rope({self.theta!r}, {self.scaling or None!r}{more})"

    def turning(self, head_dim: int) -> int:
        """Return how many leading elements of a head of this size turn."""
        turn = head_dim if self.dim is None else self.dim
        if turn % 2 or turn > head_dim:
            expected = "an even size" if self.dim is None else f"at least dim = {self.dim}"
            raise ArgumentError(f"Rope: head_dim: got {head_dim}, expected {expected}")
        return turn

    def inv_freq(self, head_dim: int) -> np.ndarray[Any, Any]:
        """Return radians per position, shape (E / 2,), float64. Do not write to it."""
        found = self._cache.get(head_dim)
        if found is None:
            turn = self.turning(head_dim)
            base = self.theta
            if self._kind == "dynamic":
                base *= self._dynamic_growth(turn)
            plain = base ** (-2.0 * np.arange(turn // 2) / turn)
            found = self._cache[head_dim] = np.ascontiguousarray(self._scaled(plain, turn))
            found.flags.writeable = False
        return found

    def _scaled(self, plain: np.ndarray[Any, Any], turn: int) -> np.ndarray[Any, Any]:
        if self._kind in ("default", "dynamic"):
            return plain
        factor = float(self.scaling["factor"])
        if self._kind == "linear":
            return np.asarray(plain / factor)
        if self._kind == "yarn":
            keep = self._yarn_kept(turn)
            return np.asarray(plain / factor * (1 - keep) + plain * keep)
        names = ("low_freq_factor", "high_freq_factor", _LENGTH)
        low, high, length = (float(self.scaling[name]) for name in names)
        # Turns within the original context decide: few turns are stretched, many stay, and between
        # `low` and `high` turns the two are blended.
        turns = length * plain / (2 * math.pi)
        blend = np.clip((turns - low) / (high - low) if high != low else turns >= low, 0.0, 1.0)
        return np.asarray((1 - blend) * plain / factor + blend * plain)

    def _dynamic_growth(self, turn: int) -> float:
        """Factor of the base that keeps the slowest turn within the original context."""
        factor, original, length = (float(self.scaling[n]) for n in ("factor", _LENGTH, "length"))
        stretch = factor * max(length, original) / original - (factor - 1)
        return float(stretch ** (turn / (turn - 2))) if turn > 2 else 1.0

    def _yarn_kept(self, turn: int) -> np.ndarray[Any, Any]:
        """Share of each frequency that is not stretched: 1 for fast turns, 0 for slow ones."""
        length, options = float(self.scaling[_LENGTH]), self.scaling

        def index(turns: float) -> float:
            """The frequency that makes so many turns within the original context."""
            return turn * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first = index(float(options.get("beta_fast") or 32.0))
        last = index(float(options.get("beta_slow") or 1.0))
        if options.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, turn - 1)
        last = last + 0.001 if last == first else last
        return np.asarray(1 - np.clip((np.arange(turn // 2) - first) / (last - first), 0, 1))

    def _yarn_amplitude(self) -> float:
        given, factor = self.scaling.get("attention_factor"), float(self.scaling["factor"])
        if given is not None:
            return float(given)

        def growth(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        both = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        if both[0] and both[1]:
            return growth(float(both[0])) / growth(float(both[1]))
        return growth(1.0)

    def rotate(self, x: Any, positions: Any) -> Any:
        """Return ``x`` turned to its positions: for queries (keys are turned by the append).

        Parameters
        ----------
        x : array, shape (B, H, D), float32 | bfloat16 | float16
            Heads of each token.
        positions : array, shape (B,), int
            Absolute positions. Read by the host: positions on a device are waited for.

        Examples
        --------
        >>> x = np.array([[[1.0, 0.0]]], np.float32)
        >>> Rope(10000.0).rotate(x, np.array([1])).round(4).tolist()
        [[[0.5403000116348267, 0.8414999842643738]]]
        """
        turn = self.turning(x.shape[-1])
        at = to_numpy(positions).astype(np.float64)
        angle = at[:, None, None] * self.inv_freq(x.shape[-1])
        cosine = (np.cos(angle) * self.amplitude).astype(np.float32)
        sine = (np.sin(angle) * self.amplitude).astype(np.float32)
        first = slice(0, turn, 2) if self.interleaved else slice(0, turn // 2)
        second = slice(1, turn, 2) if self.interleaved else slice(turn // 2, turn)
        if is_torch(x):
            torch = sys.modules["torch"]
            c, s = torch.from_numpy(cosine).to(x.device), torch.from_numpy(sine).to(x.device)
            a, b, out = x[..., first].float(), x[..., second].float(), x.clone()
            out[..., first], out[..., second] = a * c - b * s, b * c + a * s
            return out
        a, b = x[..., first].astype(np.float32), x[..., second].astype(np.float32)
        out = x.copy()
        out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
        return out


def _positive(x: Any) -> bool:
    try:
        return x is not None and math.isfinite(float(x)) and float(x) > 0
    except (TypeError, ValueError):
        return False
