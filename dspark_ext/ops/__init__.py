# SPDX-License-Identifier: Apache-2.0
"""One module per family: arguments checked, then one call into the C API."""
