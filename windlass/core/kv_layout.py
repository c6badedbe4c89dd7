"""The geometry of the KV cache: which layers keep what, for how long, and in how many bytes.

Layers with the same kind of KV form a group with its own block table. All groups take their blocks
from one pool: a block id belongs to one group at a time, and every block has the same bytes.

    block 7, of group 0:  | layer 0 | layer 2 | layer 4 |
    block 8, of group 1:  | layer 1 | layer 3 | unused  |

No torch: sizes and rules. kernels/batch.py allocates the pages, core/kv_allocator.py the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

# full: every token of the context. window: the last `window` tokens. latent: every token, one vector
# instead of keys and values. state: one recurrent state, of which every full block keeps a copy.
KVKind = Literal["full", "window", "latent", "state"]

# More groups waste less memory, but each has its own table, and each request a last block in each.
_MAX_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share a block table. A pipeline stage may have none of a group's layers.

    `page` is one layer's part of a block: [2, heads, block size, dim] with keys and values, [block
    size, dim] with latent vectors, [values] with a state. Codes have a scale per vector.
    """

    kind: KVKind
    layers: tuple[int, ...]
    page: tuple[int, ...]
    item_bytes: int
    scale_bytes: int = 0
    window: int | None = None

    def __post_init__(self) -> None:
        assert (self.kind == "window") == (self.window is not None), self
        assert self.window is None or self.window > 0, self
        assert self.kind != "state" or not self.scale_bytes, "a state is not quantised"

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in one block."""
        return prod(self.page) * self.item_bytes + prod(self.page[:-1]) * self.scale_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of one block, without padding."""
        return len(self.layers) * self.layer_bytes

    @property
    def lookback(self) -> int | None:
        """How many positions before a token its computation reads; None: all of them.

        A state is read where the token before left it.
        """
        if self.kind == "state":
            return 1
        return None if self.window is None else self.window - 1

    def first_block(self, position: int, block_size: int) -> int:
        """The index of the first block that tokens from `position` on read."""
        lookback = self.lookback
        return 0 if lookback is None else max(0, position - lookback) // block_size

    def blocks_for(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Max blocks that a request of `num_tokens` holds at once, if `chunk` tokens are in flight."""
        lookback = self.lookback
        num_blocks = -(-num_tokens // block_size)
        if lookback is None:
            return num_blocks
        # Blocks are freed when a later one is full: up to block_size - 1 tokens late.
        ahead = -(-(chunk + block_size - 1) // block_size)
        return min(num_blocks, -(-lookback // block_size) + ahead)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model's layers, which take blocks of equal size from one pool.

    With `per_layer` of 2, the groups' layers 2 i and 2 i + 1 are what layer i of the model keeps.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    per_layer: int = 1

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        assert layers == list(range(len(layers))), f"layers {layers}: each is in one group"

    @classmethod
    def of(cls, groups: Iterable[KVGroup], block_size: int, per_layer: int = 1) -> KVLayout:
        """A layout of these groups, merged by kind and split so that little of each block is unused."""
        return cls(_split(_merged(groups)), block_size, per_layer)

    @classmethod
    def unsized(cls, block_size: int) -> KVLayout:
        """A layout of one full group of one byte per token, for schedulers without a model."""
        group = KVGroup(kind="full", layers=(0,), page=(block_size, 1), item_bytes=1)
        return cls((group,), block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, of whichever group, padding included."""
        return max(group.num_bytes for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes per token that every group keeps, padding included; a state has none per token."""
        num_blocks = sum(group.kind != "state" for group in self.groups)
        return -(-num_blocks * self.block_bytes // self.block_size)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence; each full block keeps a copy as large."""
        return sum(group.num_bytes for group in self.groups if group.kind == "state")

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def num_page_slots(self) -> int:
        """Layers of the largest group: a block has pages for so many."""
        return max(len(group.layers) for group in self.groups)

    @property
    def mixes_pages(self) -> bool:
        """Whether the groups' pages have different shapes."""
        return len({group.page for group in self.groups}) > 1

    @property
    def has_state(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """A layer's group, and its page slot in a block of that group."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"layer {layer}: the layout has {self.num_layers} layers")

    def blocks_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Max blocks that a request of `num_tokens` holds at once, if `chunk` tokens are in flight."""
        return sum(group.blocks_for(num_tokens, chunk, self.block_size) for group in self.groups)

    def bytes_for(self, num_tokens: int, chunk: int = 1) -> int:
        """Bytes of the blocks of one request."""
        return self.blocks_for(num_tokens, chunk) * self.block_bytes

    def bytes_read(self, context: int) -> float:
        """Bytes that one decoded token reads, after a context of so many tokens."""
        return sum(
            group.num_bytes
            * (
                1
                if group.kind == "state"
                else min(context, group.window or context) / self.block_size
            )
            for group in self.groups
        )

    def max_tokens(self, num_blocks: int, chunk: int, longest: int) -> int:
        """The longest request, up to `longest` tokens, that `num_blocks` blocks hold."""
        if self.blocks_for(longest, chunk) <= num_blocks:
            return longest
        low, high = 0, longest - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle, chunk) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def stage(self, layers: range) -> KVLayout:
        """The layout of some layers, numbered from 0, with all groups: block ids are those of all stages."""
        start, stop = layers.start * self.per_layer, layers.stop * self.per_layer
        groups = tuple(
            replace(
                group, layers=tuple(each - start for each in group.layers if start <= each < stop)
            )
            for group in self.groups
        )
        return replace(self, groups=groups)

    def without_windows(self) -> KVLayout:
        """The same layers with every block kept, for readers that look behind the windows."""
        if all(group.window is None for group in self.groups):
            return self
        kept = [
            group if group.window is None else replace(group, kind="full", window=None)
            for group in self.groups
        ]
        return KVLayout.of(kept, self.block_size, self.per_layer)


def tokens_in_flight(max_num_batched_tokens: int, num_stages: int) -> int:
    """Max tokens of the plans before the last commit. The overlapped loop has two plans."""
    return max(2, num_stages) * max_num_batched_tokens


def _merged(groups: Iterable[KVGroup]) -> list[KVGroup]:
    """Join groups that differ in their layers only."""
    layers: dict[KVGroup, tuple[int, ...]] = {}
    for group in groups:
        key = replace(group, layers=(0,))
        layers[key] = layers.get(key, ()) + group.layers
    return [replace(key, layers=tuple(sorted(members))) for key, members in layers.items()]


def _split(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """Split groups over blocks of equal bytes, with the least padding and then the fewest groups."""

    def cost(block_bytes: int) -> tuple[bool, int, int]:
        num_groups = sum(count_parts(group, block_bytes) for group in groups)
        return num_groups > _MAX_GROUPS, num_groups * block_bytes, num_groups

    def count_parts(group: KVGroup, block_bytes: int) -> int:
        return -(-len(group.layers) // (block_bytes // group.layer_bytes))

    smallest = max(group.layer_bytes for group in groups)
    multiples = (
        count * group.layer_bytes for group in groups for count in range(1, len(group.layers) + 1)
    )
    best = min((size for size in multiples if size >= smallest), key=cost)
    return tuple(part for group in groups for part in _parts(group, count_parts(group, best)))


def _parts(group: KVGroup, count: int) -> Iterable[KVGroup]:
    """Cut a group into `count` groups of about as many layers, also among those of a pipeline stage."""
    for at in range(count):
        yield replace(group, layers=group.layers[at::count])
