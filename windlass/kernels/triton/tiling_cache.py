"""Keeps the tilings that earlier starts chose by measured times: a file per GPU, driver and versions.

To measure again, remove `gemm/` from the cache folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import astuple
from pathlib import Path

import torch
import triton
from torch import Tensor

from windlass.folders import cache_dir, check_private
from windlass.kernels.triton.skinny import Tiling
from windlass.measurement_cache import MeasurementCache

_DRIVER = Path("/proc/driver/nvidia/version")

# The tilings of one weight shape by kind of GEMM and measured row count. cuBLAS is faster for missing ones.
Choices = Mapping[tuple[str, int], Tiling]


class TilingCache:
    """Choices by kinds of GEMM, dtype, shape and number of the weights: few may stay in the L2 cache."""

    def __init__(self, file: MeasurementCache) -> None:
        self._file = file

    @property
    def problem(self) -> str | None:
        """Why the file cannot be read or written."""
        return self._file.problem

    def find(
        self, weights: Sequence[Tensor], kinds: Sequence[str], known: Set[Tiling]
    ) -> Choices | None:
        """The choices for weights of one shape, all of them `known`; None: they must be measured."""
        found = self._file.get(_name(weights, kinds))
        try:
            choices = {(str(kind), int(rows)): Tiling(*tiling) for kind, rows, *tiling in found}
            return choices if known >= set(choices.values()) else None
        except (TypeError, ValueError):  # not in the file, or not written by `keep`
            return None

    def keep(self, weights: Sequence[Tensor], kinds: Sequence[str], choices: Choices) -> None:
        """Write the choices for weights of one shape."""
        self._file.put(
            _name(weights, kinds),
            [[kind, rows, *astuple(tiling)] for (kind, rows), tiling in choices.items()],
        )
        self._file.save()


def open_tiling_cache(device: torch.device) -> TilingCache:
    """The cache for this GPU, its driver, and the versions of torch, Triton and the kernels."""
    check_private(cache_dir())
    driver = _DRIVER.read_text() if _DRIVER.is_file() else ""
    key = (
        *(torch.cuda.get_device_name(device), driver),
        *(torch.__version__, torch.version.cuda, triton.__version__, _sources()),
    )
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    return TilingCache(MeasurementCache(cache_dir() / "gemm" / f"{digest}.json"))


def _sources() -> str:
    """A hash of the source of all Triton kernels, and of what measures them."""
    found = hashlib.blake2b(digest_size=12)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _name(weights: Sequence[Tensor], kinds: Sequence[str]) -> str:
    n, k = weights[0].shape
    dtype = str(weights[0].dtype).removeprefix("torch.")
    return f"{len(weights)} of {n}x{k}, {dtype}: {', '.join(kinds)}"
