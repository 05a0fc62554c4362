# SPDX-License-Identifier: Apache-2.0
"""Training of a drafter on responses of its target."""

from __future__ import annotations
