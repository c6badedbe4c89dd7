"""One step's rows as tensors, and the pages that their keys and values lie in.

The layout of the KV cache is decided here and nowhere else: pages are
[block, head, position in block, dim], so that one head's keys of a block lie together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The pages of one layer."""

    keys: Tensor  # [blocks, kv_heads, block_size, dim]
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pages of zeros: a padded read of garbage (NaN) times a weight of zero would be NaN.

    On a CPU the system gives zeroed memory when it is first touched, so that gigabytes of pages
    cost nothing until they are used; torch would write them all at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(shape)


class KVCache:
    """Owns the pages of all layers."""

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],  # blocks, kv_heads, block_size, dim
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pages = _zeros((num_layers, 2, *shape), dtype, device)
        self.layers = [LayerKV(pages[0], pages[1]) for pages in self._pages]

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers; every source is read before any target is written."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        self._pages[:, :, list(targets)] = self._pages[:, :, list(sources)]


@dataclass(frozen=True, slots=True)
class Span:
    """One row's place in the packed tokens: tokens [first, first + count), positions from start."""

    first: int
    count: int
    start: int

    @property
    def context(self) -> int:
        """Keys that its last token sees."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step, packed one after another without padding."""

    positions: Tensor  # [tokens]
    blocks: Tensor  # [tokens] the block that each token's key and value go to
    offsets: Tensor  # [tokens] and the position inside it
    tables: Tensor  # [rows, most blocks] block ids; beyond a row's own: 0
    spans: list[Span]
    kv: list[LayerKV]
