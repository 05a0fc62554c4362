# SPDX-License-Identifier: Apache-2.0
"""Accepted length on prompt files, and the check that greedy output is unchanged."""
