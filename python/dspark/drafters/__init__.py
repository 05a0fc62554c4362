# SPDX-License-Identifier: Apache-2.0
"""Draft models: the DSpark drafter and its configuration."""

from __future__ import annotations
