# SPDX-License-Identifier: Apache-2.0
"""Other implementations behind one call each, found when a bench runs; none is a requirement."""
