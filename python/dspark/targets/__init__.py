# SPDX-License-Identifier: Apache-2.0
"""Target models: weights on this machine, and the decoder that runs them."""
