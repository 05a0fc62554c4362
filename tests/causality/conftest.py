# SPDX-License-Identifier: Apache-2.0
"""The enumerator beside the tests is importable by its name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
