# SPDX-License-Identifier: Apache-2.0
"""The operators in float64 NumPy, written from the contract and the paper: the oracle's oracle."""
