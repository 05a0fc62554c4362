# SPDX-License-Identifier: Apache-2.0
"""Target models: decoders on torch with paged keys and values."""

from __future__ import annotations
