"""Triton kernels for CUDA. Tests compare each with its reference implementation.

Triton loads compiled code from its own cache, so that folder is checked before Triton is imported.
"""

from __future__ import annotations

import contextlib

from windlass.folders import check_private, triton_cache_dir


def check_cache() -> None:
    """Raise ConfigError if another user could have written compiled kernels; creates the folder."""
    folder = triton_cache_dir()
    with contextlib.suppress(OSError):  # a folder that cannot be made holds no code
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder, variable="TRITON_CACHE_DIR")


check_cache()
