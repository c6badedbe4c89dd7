"""LoRA metadata of a step: grouped by adapter for the reference version, tiled for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.kernels.batch import LORA_TILE, AdapterRows
from windlass.runner.slots import to_device


def grouped(
    slots: NDArray[Any], device: torch.device, batch_invariant: bool = False
) -> AdapterRows:
    """Group tokens by adapter, so that each adapter is read once."""
    groups = tuple(
        (int(slot), _tokens(np.flatnonzero(slots == slot), device))
        for slot in np.unique(slots)
        if slot
    )
    return AdapterRows(
        to_device(slots.astype(np.int32), device), groups=groups, batch_invariant=batch_invariant
    )


def _tokens(indices: NDArray[Any], device: torch.device) -> Tensor | slice:
    """A slice if the tokens are contiguous, else their indices."""
    first, end = int(indices[0]), int(indices[-1]) + 1
    return slice(first, end) if end - first == len(indices) else to_device(indices, device)


def in_tiles(slots: NDArray[Any], counts: Sequence[int], device: torch.device) -> AdapterRows:
    """Tiles of consecutive tokens of one row; `counts` are tokens per row."""
    tiles = lora_tiles(slots, counts)
    return AdapterRows(to_device(slots.astype(np.int32), device), to_device(tiles, device))


def lora_tiles(slots: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
    """[n, 2]: first token and token count of each tile. Rows without an adapter have none."""
    tiles: list[tuple[int, int]] = []
    first = 0
    for count in counts:
        if slots[first]:
            tiles += [(first + at, min(LORA_TILE, count - at)) for at in range(0, count, LORA_TILE)]
        first += count
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)
