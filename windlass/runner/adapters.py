"""LoRA metadata of a step: grouped by adapter for the reference version, tiled for the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.batch import PIECE, AdapterRows
from windlass.runner.slots import to_device


def grouped(slots: np.ndarray, device: torch.device, batch_invariant: bool = False) -> AdapterRows:
    """Group tokens by adapter, so that each adapter is read once."""
    groups = tuple(
        (int(slot), _tokens(np.flatnonzero(slots == slot), device))
        for slot in np.unique(slots)
        if slot
    )
    return AdapterRows(
        to_device(slots.astype(np.int32), device), groups=groups, batch_invariant=batch_invariant
    )


def _tokens(places: np.ndarray, device: torch.device) -> Tensor | slice:
    """A slice if the tokens are contiguous, else their indices."""
    first, end = int(places[0]), int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else to_device(places, device)


def in_pieces(slots: np.ndarray, counts: Sequence[int], device: torch.device) -> AdapterRows:
    """Tiles of consecutive tokens of one row; `counts` are tokens per row."""
    pieces = pieces_of(slots, counts)
    return AdapterRows(to_device(slots.astype(np.int32), device), to_device(pieces, device))


def pieces_of(slots: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """[n, 2]: first token and token count of each tile. Rows without an adapter have none."""
    pieces: list[tuple[int, int]] = []
    first = 0
    for count in counts:
        if slots[first]:
            pieces += [(first + at, min(PIECE, count - at)) for at in range(0, count, PIECE)]
        first += count
    return np.array(pieces, dtype=np.int32).reshape(-1, 2)
