# SPDX-License-Identifier: Apache-2.0
"""Drafters: configuration, torch module, and the paged form used at inference."""
