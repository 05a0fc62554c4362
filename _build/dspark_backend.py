# SPDX-License-Identifier: Apache-2.0
"""In-tree PEP 517 backend: setuptools, with build requirements that depend on the machine.

A static list in ``pyproject.toml`` would make everybody download CMake and a CUDA compiler. Here
a build asks only for what is missing; see ``toolchain.py`` for the rules and for ``DSPARK_CUDA``.
"""

from __future__ import annotations

from typing import Any

import toolchain
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return setuptools' own requirements and those that this machine does not meet."""
    toolchain.check_registry_reachable()
    return [
        *build_meta.get_requires_for_build_wheel(config_settings),
        *toolchain.build_requirements(),
    ]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return the same as for a wheel: an editable install compiles the extension too."""
    toolchain.check_registry_reachable()
    return [
        *build_meta.get_requires_for_build_editable(config_settings),
        *toolchain.build_requirements(),
    ]
