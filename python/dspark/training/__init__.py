# SPDX-License-Identifier: Apache-2.0
"""Training: prompts, data, loss, the loop, and the ``dspark train`` command."""
