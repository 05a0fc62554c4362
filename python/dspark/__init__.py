# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding of language models with the operators of :mod:`dspark_ext`."""

from __future__ import annotations

from dspark_ext import __version__

__all__ = ["__version__"]
