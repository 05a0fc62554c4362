# SPDX-License-Identifier: Apache-2.0
"""Shared by the benches: fair timing in one run, floors, and reports."""
