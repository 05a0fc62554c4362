# SPDX-License-Identifier: Apache-2.0
"""Generation loop and the measures of speculative decoding."""

from __future__ import annotations

from dspark.engine.engine import Chunk, Engine
from dspark.engine.metrics import Metrics

__all__ = ["Chunk", "Engine", "Metrics"]
