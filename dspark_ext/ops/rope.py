# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the frequencies, and the rotation of queries."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_ext._arrays import ArgumentError, is_torch, to_numpy

__all__ = ["Rope"]

_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Rope:
    """Half-split rotary embedding (the layout of Llama, Qwen and SmolLM checkpoints).

    Elements ``i`` and ``i + D / 2`` of a head are turned by ``position * inv_freq[i]`` with
    ``inv_freq[i] = theta ** (-2 i / D)``, scaled as asked. Frequencies and angles are float64, the
    cosine and sine are rounded to float32, so that positions up to 2**20 and beyond stay exact.

    Parameters
    ----------
    theta : float
        Base, > 0.
    scaling : mapping, optional
        As in a model's configuration, with ``rope_type`` (or ``type``): ``"default"``;
        ``"linear"`` with ``factor``; ``"llama3"`` with ``factor``, ``low_freq_factor``,
        ``high_freq_factor`` and ``original_max_position_embeddings``.

    Raises
    ------
    ArgumentError
        ``theta`` or a factor is missing, not finite or not positive.
    NotImplementedError
        Another ``rope_type`` (``"yarn"``, ``"dynamic"``, ``"longrope"``).

    Examples
    --------
    >>> Rope(10000.0).inv_freq(4).tolist()
    [1.0, 0.01]
    >>> Rope(10000.0, {"rope_type": "linear", "factor": 2.0}).inv_freq(4).tolist()
    [0.5, 0.005]
    """

    def __init__(self, theta: float, scaling: Mapping[str, Any] | None = None) -> None:
        self.theta = float(theta)
        self.scaling = dict(scaling or {})
        self._cache: dict[int, np.ndarray[Any, Any]] = {}
        kind = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise NotImplementedError(
                f"Rope: scaling: rope_type {kind!r} is missing in this release; "
                "'default', 'linear' and 'llama3' are supported"
            )
        self._kind = str(kind)
        needed = {"default": (), "linear": ("factor",), "llama3": ("factor", *_LLAMA3)}[self._kind]
        given = {"theta": self.theta} | {name: self.scaling.get(name) for name in needed}
        bad = [
            f"{name}: got {x!r}, expected a positive number"
            for name, x in given.items()
            if not _positive(x)
        ]
        if bad:
            raise ArgumentError("\n  ".join(["Rope:", *bad]))

    def __repr__(self) -> str:
        return f"Rope({self.theta!r}, {self.scaling or None!r})"

    def inv_freq(self, head_dim: int) -> np.ndarray[Any, Any]:
        """Return radians per position, shape (head_dim / 2,), float64. Do not write to it."""
        found = self._cache.get(head_dim)
        if found is None:
            if head_dim % 2:
                raise ArgumentError(f"Rope: head_dim: got {head_dim}, expected an even size")
            plain = self.theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
            found = self._cache[head_dim] = np.ascontiguousarray(self._scaled(plain))
            found.flags.writeable = False
        return found

    def _scaled(self, plain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self._kind == "default":
            return plain
        factor = float(self.scaling["factor"])
        if self._kind == "linear":
            return np.asarray(plain / factor)
        low, high, length = (float(self.scaling[name]) for name in _LLAMA3)
        # Turns within the original context decide: few turns are stretched, many stay, and between
        # `low` and `high` turns the two are blended.
        turns = length * plain / (2 * math.pi)
        blend = np.clip((turns - low) / (high - low) if high != low else turns >= low, 0.0, 1.0)
        return np.asarray((1 - blend) * plain / factor + blend * plain)

    def rotate(self, x: Any, positions: Any) -> Any:
        """Return ``x`` turned to its positions: for queries (keys are turned by the append).

        Parameters
        ----------
        x : array, shape (B, H, D), float32 | bfloat16 | float16
            Heads of each token.
        positions : array, shape (B,), int
            Absolute positions.

        Examples
        --------
        >>> x = np.array([[[1.0, 0.0]]], np.float32)
        >>> Rope(10000.0).rotate(x, np.array([1])).round(4).tolist()
        [[[0.5403000116348267, 0.8414999842643738]]]
        """
        half = x.shape[-1] // 2
        at = to_numpy(positions).astype(np.float64)
        angle = at[:, None, None] * self.inv_freq(x.shape[-1])
        cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        if is_torch(x):
            torch = sys.modules["torch"]
            c, s = torch.from_numpy(cosine).to(x.device), torch.from_numpy(sine).to(x.device)
            a, b = x[..., :half].float(), x[..., half:].float()
            return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)
        a, b = x[..., :half].astype(np.float32), x[..., half:].astype(np.float32)
        turned = (a * cosine - b * sine, b * cosine + a * sine)
        return np.concatenate(turned, axis=-1).astype(x.dtype)


def _positive(x: Any) -> bool:
    try:
        return x is not None and math.isfinite(float(x)) and float(x) > 0
    except (TypeError, ValueError):
        return False
