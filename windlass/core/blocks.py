"""The pool of KV blocks: who holds which, and which can be found again by what they contain.

A block is used (referenced), cached (free, but findable by its hash), or free. The free list is
the cache: a released block keeps its hash until it is handed out again, least recently used first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from windlass.core.types import BlockId

_DIGEST_BYTES = 16  # 128 bits: a collision is less likely than a broken disk
_MOST_GONE = 65_536  # hashes of evicted blocks that are remembered


def root_hash(salt: str) -> bytes:
    """Where a chain starts; requests with different salts (tenant, adapter) never share."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block: its own tokens and, through the parent, all before them."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


class BlockPool:
    """Owns every reference count. A request's list of block ids is its claim; nobody else counts."""

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = caching
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        # In the order in which blocks are handed out: never sealed first, then the longest unused.
        self._free: OrderedDict[BlockId, None] = OrderedDict(
            (BlockId(i), None) for i in range(num_blocks)
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Findable blocks, used or free."""
        return len(self._by_hash)

    def num_cached_free(self) -> int:
        """Of the findable ones, those that nobody uses. Looks at all of them."""
        return sum(self._refs[block] == 0 for block in self._by_hash.values())

    def find(self, hashes: Iterable[bytes]) -> list[BlockId]:
        """The blocks of the longest known prefix. Changes nothing; valid until the next `take`."""
        found: list[BlockId] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block of this hash was findable once, and not too long ago."""
        return digest in self._gone

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of these would leave the free list if they were shared."""
        return sum(self._refs[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to blocks that `find` gave."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def take(self, count: int) -> list[BlockId]:
        """Hand out `count` blocks, forgetting what they held. The caller checked `num_free`."""
        taken: list[BlockId] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def seal(self, block: BlockId, digest: bytes) -> None:
        """Make a full block of verified tokens findable, unless another holds the same already."""
        if self._caching and self._hash_of[block] is None and digest not in self._by_hash:
            self._hash_of[block] = digest
            self._by_hash[digest] = block

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of each, tail first, so that a prefix outlives its ends."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def reset_cache(self) -> int:
        """Forget the content of all free blocks; returns how many were findable."""
        cached = [block for block in self._free if self._hash_of[block] is not None]
        for block in cached:
            self._forget(block)
        return len(cached)

    def _forget(self, block: BlockId) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash_of[block] = None
            self._gone[digest] = None
            if len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)
