"""One step's rows as tensors, and the pages of the KV cache.

Only this file defines the KV cache layout: pages are [block, head, position in block, dim], so the
keys of one head in a block are contiguous. Latent pages (MLA) have one head, whose vectors are keys, and
in their first numbers values. Pages of 8-bit types hold quantised codes, with one scale per token and
head in a separate tensor. A layout with recurrent states has all pages of a block in one line of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.core.kv_layout import KVGroup, KVLayout
from windlass.errors import UnsupportedError
from windlass.kernels.gemm_io import Inputs
from windlass.kernels.storages import Held, held
from windlass.kernels.token_split import TokenSplit

# Code types of a quantised KV cache, and the code of the largest magnitude of a token's head.
MAX_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# float32, because the values of attention sinks are so small that a float16 scale underflows.
SCALE_DTYPE = torch.float32
# Max tokens of a row that share one read of its adapter.
LORA_TILE = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one layer; query heads share kv heads in equal groups (GQA)."""

    num_q: int
    num_kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.num_q // self.num_kv


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The pages of one layer, with scales if the pages hold codes.

    Of latent pages, `keys` and `values` are the same tensor.
    """

    keys: Tensor  # [blocks, kv_heads, block_size, dim]
    values: Tensor
    key_scales: Tensor | None = None  # [blocks, kv_heads, block_size]
    value_scales: Tensor | None = None
    group: int = 0  # of the layout: which block table finds the pages

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def stride(self) -> int:
        """Vectors from one page to the next: in layouts with states, other pages lie between them."""
        return self.keys.stride(0) // self.keys.shape[3]


@dataclass(frozen=True, slots=True)
class LayerState:
    """The recurrent states of one layer, of which every block has one."""

    pages: Tensor  # [blocks, values] float32
    block_size: int  # tokens per block
    group: int = 0  # of the layout


LayerPages = LayerKV | LayerState


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeroed pages: a padded read of a NaN times a weight of zero would be NaN.

    On a CPU the system zeroes memory on first touch, so gigabytes of pages cost nothing until they
    are used. torch would write all of them at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(shape)


def attention_layout(
    windows: Sequence[int | None],
    *,
    num_kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    states: Mapping[int, int] | None = None,
    beside: bool = False,
    layer_heads: Sequence[Heads] = (),
) -> KVLayout:
    """The KV layout of attention layers, given the window of each; None: full attention.

    `states`: the layers that have a recurrent state instead, of so many numbers. With `beside` all layers
    have both, attention first. `layer_heads`: the heads of each layer, if they differ.
    """
    states, groups = states or {}, []
    sizes = [(heads.num_kv, heads.dim) for heads in layer_heads]
    sizes = sizes or [(num_kv_heads, dim)] * len(windows)
    per_layer = 2 if beside else 1
    for layer, window in enumerate(windows):
        if beside or layer not in states:
            attention = KVGroup(
                kind="full" if window is None else "window",
                layers=(per_layer * layer,),
                page=(2, sizes[layer][0], block_size, sizes[layer][1]),
                item_bytes=dtype.itemsize,
                scale_bytes=SCALE_DTYPE.itemsize if dtype in MAX_CODE else 0,
                window=window,
            )
            groups.append(attention)
        if layer in states:
            at = per_layer * (layer + 1) - 1
            groups.append(_state_group(at, states[layer], dim))
    return KVLayout.of(groups, block_size, per_layer)


def _state_group(layer: int, num_values: int, align: int) -> KVGroup:
    """The KV group of one layer with a recurrent state of `num_values` numbers.

    `align`: numbers of a key vector, a multiple of which a block has.
    """
    unit = math.lcm(align, 4)  # vector loads are aligned to 16 bytes
    page = (-(-num_values // unit) * unit,)
    return KVGroup(kind="state", layers=(layer,), page=page, item_bytes=4)


def latent_layout(num_layers: int, *, dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """The KV layout of MLA layers that keep a latent vector of `dim` numbers per token."""
    group = KVGroup(
        kind="latent",
        layers=tuple(range(num_layers)),
        page=(block_size, dim),
        item_bytes=dtype.itemsize,
        scale_bytes=SCALE_DTYPE.itemsize if dtype in MAX_CODE else 0,
    )
    return KVLayout.of([group], block_size)


class KVCache:
    """Owns the pages of all layers. Groups use the same pages, since a block belongs to one of them."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers: list[LayerPages]
        kinds = {group.kind for group in layout.groups}
        self._block_axis = 0 if layout.mixes_pages or layout.has_state else 2
        if self._block_axis == 0:
            if "latent" in kinds or dtype in MAX_CODE:
                raise UnsupportedError(
                    f"KV groups of the kinds {', '.join(sorted(kinds))} in {dtype}: pages of different "
                    "shapes hold unquantised keys, values and states only."
                )
            self._owned = [_zeros((num_blocks, layout.block_bytes), torch.uint8, device)]
            self.layers = _layers_in_bytes(layout, self._owned[0], dtype)
            return
        page = layout.groups[0].page
        (planes, *shape) = (1, 1, *page) if "latent" in kinds else page
        # Each [page slots, 2 (keys, values) or 1 (latent), blocks, heads, ...]; a `LayerKV` holds views
        # of one slot.
        slots = (layout.num_page_slots, planes, num_blocks)
        self._owned = [_zeros((*slots, *shape), dtype, device)]
        if dtype in MAX_CODE:
            self._owned.append(_zeros((*slots, *shape[:2]), SCALE_DTYPE, device))
        places = (layout.place(layer) for layer in range(layout.num_layers))
        self.layers = [self._layer(group, slot) for group, slot in places]

    def _layer(self, group: int, slot: int) -> LayerKV:
        pages = self._owned[0][slot]
        keys, values = pages[0], pages[-1]
        key_scales = value_scales = None
        if len(self._owned) > 1:
            scales = self._owned[1][slot]
            key_scales, value_scales = scales[0], scales[-1]
        return LayerKV(
            keys=keys,
            values=values,
            key_scales=key_scales,
            value_scales=value_scales,
            group=group,
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._owned)

    def storages(self) -> Iterator[Held]:
        return held("KV cache", *self._owned)

    @property
    def pages(self) -> Tensor | None:
        """All pages, [page slots, 2, blocks, kv heads, block size, dim]; None for other layouts."""
        pages = self._owned[0]
        return pages if len(self._owned) == 1 and pages.ndim == 6 and pages.shape[1] == 2 else None

    def planes(self) -> list[Tensor]:
        """Views of all pages as [planes, blocks, bytes]: block b is [:, b] of every tensor."""
        return [
            tensor.view(-1, tensor.shape[self._block_axis], math.prod(page)).view(torch.uint8)
            for tensor in self._owned
            for page in [tensor.shape[self._block_axis + 1 :]]
        ]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in all layers. Every source is read before any target is written."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        for tensor in self._owned:
            by_block = tensor.movedim(self._block_axis, 0)
            by_block[list(targets)] = by_block[list(sources)]


def _layers_in_bytes(layout: KVLayout, owned: Tensor, dtype: torch.dtype) -> list[LayerPages]:
    """Views of the bytes of all blocks, [blocks, bytes], where the groups' pages differ."""
    layers: list[LayerPages] = []
    for layer in range(layout.num_layers):
        index, slot = layout.place(layer)
        group = layout.groups[index]
        at = owned[:, slot * group.layer_bytes : (slot + 1) * group.layer_bytes]
        if group.kind == "state":
            layers.append(LayerState(at.view(torch.float32), layout.block_size, index))
        else:
            pages = at.view(dtype).unflatten(1, group.page)
            layers.append(LayerKV(keys=pages[:, 0], values=pages[:, 1], group=index))
    return layers


@dataclass(frozen=True, slots=True)
class Span:
    """One row's range in the packed tokens: tokens [first, first + count), positions from start."""

    first: int
    count: int
    start: int

    @property
    def context(self) -> int:
        """Number of keys that the last token attends to."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class CachedContext:
    """The cached tokens before a chunk of `LongChunks`."""

    slot: int
    num_tokens: int
    tiles: Tensor  # those of the chunk


@dataclass(frozen=True, slots=True)
class LongChunks:
    """Prompt chunks that are worth contiguous keys and values; layers with windows read pages."""

    # [n, 4] int32: first token, token count, first token of its chunk, position in its chunk.
    tiles: Tensor
    others: Tensor  # the `AttentionWork.tiles` of the other chunks
    contexts: tuple[CachedContext, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Attention metadata of a step for device kernels; no length is needed on the host."""

    singles: Tensor  # [n] int32: indices of tokens that are the only one of their row
    # [n, 5] int32: first token, token count, slot, position of the first token, start of its chunk.
    tiles: Tensor
    splits: int  # KV splits per single token, to fill the device
    counters: Tensor  # int32, zero between steps: one per single token and kv head
    # Adjacent single tokens that belong to one row and attend to each other's keys. The last
    # `siblings` of them are alternatives to the second token; their keys go to page `spare`.
    width: int = 1
    siblings: int = 0
    spare: int = 0
    long_contexts: bool = False  # of few single tokens: splits are many, and tiles small
    long: LongChunks | None = None


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapter slot of each token; slot 0 means no adapter.

    Device kernels read `slots` and `tiles`; the reference implementation reads `groups`.
    """

    slots: Tensor  # [tokens] int32
    # [n, 2] int32: first token and token count of each tile, up to LORA_TILE tokens of one
    # adapter; None: each token is computed separately.
    tiles: Tensor | None = None
    groups: tuple[tuple[int, Tensor | slice], ...] = ()  # slots except 0, and their tokens
    # Whether a token's result must not depend on the other tokens of its adapter.
    batch_invariant: bool = False
    # [tokens] int32, if `tiles` covers only multi-token rows: slots of single-token rows, 0 elsewhere.
    single_slots: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The tokens of a step whose hidden states are read, at least one: kernels need a row."""

    tokens: Tensor  # [n] int32
    adapters: AdapterRows | None = None  # of these tokens


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of a step, packed one after another without padding."""

    positions: Tensor  # [tokens]
    token_slots: Tensor  # [tokens] row of `tables` of each token
    # [groups, slots, max blocks] block ids. Entries behind a group's window are stale or NO_BLOCK:
    # a kernel reads no page, nor computes its address, before a row's first visible position.
    tables: Tensor
    spans: list[Span]
    kv: Sequence[LayerPages]
    work: AttentionWork | None = None
    batch_invariant: bool = False  # whether a row's result must not depend on the other rows
    adapters: AdapterRows | None = None  # None: no row uses an adapter
    logits_indices: LogitsIndices | None = None  # None: all tokens
    # Ranges of prompt tokens [first, last), whose activations GEMMs may quantise more coarsely.
    prompts: Sequence[tuple[int, int]] = ()
    split: TokenSplit | None = None  # None: every rank has the residual stream of all tokens

    def all_tokens(self, x: Inputs) -> Inputs:
        """The rows of all tokens, where each rank may have some."""
        return x if self.split is None else self.split.gather(x)

    def kv_of(self, layer: int) -> LayerKV:
        kv = self.kv[layer]
        assert isinstance(kv, LayerKV)
        return kv

    def state_of(self, layer: int) -> LayerState:
        state = self.kv[layer]
        assert isinstance(state, LayerState)
        return state

    def table_of(self, pages: LayerPages) -> Tensor:
        """The block tables that find a layer's pages: [slots, max blocks]."""
        return self.tables[pages.group]

    @property
    def all_singles(self) -> bool:
        """Whether device kernels may treat every token as a single-token row."""
        return self.work is not None and len(self.work.singles) == len(self.positions)
