# SPDX-License-Identifier: Apache-2.0
"""``python -m dspark_ext``."""

from __future__ import annotations

from dspark_ext.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
