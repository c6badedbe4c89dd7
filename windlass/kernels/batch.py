"""One step's rows as tensors, and the pages that their keys and values lie in.

The layout of the KV cache is decided here and nowhere else: pages are
[block, head, position in block, dim], so that one head's keys of a block lie together. Pages of
one byte a number hold codes, and have a scale for every token and head beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# The types of codes, and the magnitude that the largest number of a token's head becomes.
LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# float32: values of tokens that only draw attention are so small that float16 could not scale them.
SCALE_DTYPE = torch.float32
# Maximum number of tokens of a row that share one read of its adapter.
LORA_TILE = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one layer; query heads share kv heads in equal groups."""

    num_q: int
    num_kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.num_q // self.num_kv


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The pages of one layer; scales where pages hold codes."""

    keys: Tensor  # [blocks, kv_heads, block_size, dim]
    values: Tensor
    key_scales: Tensor | None = None  # [blocks, kv_heads, block_size]
    value_scales: Tensor | None = None

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


def kv_token_bytes(num_layers: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> int:
    """What one token takes in pages of a type, scales included."""
    scale_bytes = SCALE_DTYPE.itemsize if dtype in LARGEST_CODE else 0
    return 2 * num_layers * num_kv_heads * (dim * dtype.itemsize + scale_bytes)


class KVCache:
    """Owns the pages of all layers."""

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int, int],  # blocks, kv_heads, block_size, dim
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Each [layers, keys and values, ...], which one layer's `LayerKV` takes apart.
        self._owned = [_zeros((num_layers, 2, *shape), dtype, device)]
        if dtype in LARGEST_CODE:
            self._owned.append(_zeros((num_layers, 2, *shape[:3]), SCALE_DTYPE, device))
        self.layers = [
            LayerKV(*(half for tensor in self._owned for half in tensor[layer]))
            for layer in range(num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._owned)

    @property
    def whole(self) -> Tensor | None:
        """Pages of all layers, [layers, 2, blocks, kv heads, block size, dim]; None: they hold codes."""
        return self._owned[0] if len(self._owned) == 1 else None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers; every source is read before any target is written."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        for tensor in self._owned:
            tensor[:, :, list(targets)] = tensor[:, :, list(sources)]


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
class AttentionWork:
    """The rows as kernels on a device take them: by what they are, with no length on the host."""

    singles: Tensor  # [n] int32: tokens that are alone in their row
    # [n, 5] int32: first token, tokens, slot, position of the first, and of the chunk it is part of.
    tiles: Tensor
    splits: int  # into how many parts the context of a single is cut, to fill the device
    counters: Tensor  # int32, zero between steps: one for each single and kv head
    # Tokens of a row that are singles side by side, and see each other's keys. The last `siblings` of
    # them are alternatives to the second instead, whose own keys go to page `spare`, row by row.
    width: int = 1
    siblings: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which adapter each token has, where any has one; slot 0 is nobody's.

    Kernels on a device read `slots` and `tiles`, the plain version reads `groups`.
    """

    slots: Tensor  # [tokens] int32
    # [n, 2] int32: first token and number of tokens of each tile, up to LORA_TILE;
    # None: every token is one.
    tiles: Tensor | None = None
    groups: tuple[tuple[int, Tensor | slice], ...] = ()  # slots but 0, and the tokens of each
    batch_invariant: bool = (
        False  # whether a token's result must not depend on the others of its adapter
    )
    # Tokens that are no piece but by themselves, where `tiles` has only the others: their slots, and 0.
    alone: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens of a step whose hidden states are read, one at least: kernels take no empty batch."""

    tokens: Tensor  # [n] int32
    adapters: AdapterRows | None = None  # of these alone


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step, packed one after another without padding."""

    positions: Tensor  # [tokens]
    token_slots: Tensor  # [tokens] the row of `tables` that each token belongs to
    tables: Tensor  # [slots, most blocks] block ids
    spans: list[Span]
    kv: list[LayerKV]
    work: AttentionWork | None = None
    batch_invariant: bool = False  # whether a row's result must not depend on the rows beside it
    adapters: AdapterRows | None = None  # None: the base alone
    logits_indices: LogitsIndices | None = None  # None: the hidden states of all tokens are read
    # Runs of tokens [first, last) whose inputs products may round as those of prompts.
    prompts: Sequence[tuple[int, int]] = ()

    @property
    def all_singles(self) -> bool:
        """Whether every row is known to be of one token, for kernels on a device."""
        return self.work is not None and len(self.work.singles) == len(self.positions)
