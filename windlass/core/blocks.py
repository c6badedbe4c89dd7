"""The pool of KV blocks: reference counts, and the prefix cache.

A block is used (referenced), cached (free, but findable by its hash), or free. The free list is
the cache: a released block keeps its hash until it is allocated again, least recently used first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from windlass.core.types import BlockId

_DIGEST_BYTES = 16  # 128 bits: a collision is less likely than a broken disk
_MAX_EVICTED = 65_536  # hashes of evicted blocks that are kept


def root_hash(salt: str) -> bytes:
    """The root of a hash chain. Requests with different salts (tenant, adapter) never share blocks."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block: its own tokens and, through the parent, all tokens before them."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()


def group_key(digest: bytes, group: int) -> bytes:
    """The key of a block in the prefix cache: groups keep different KV of the same tokens."""
    return digest + bytes((group,)) if group else digest


class BlockPool:
    """Owns every reference count. No other class changes one."""

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._caching = caching
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        # Cached blocks that were allocated again, until KV tiers take them; None: there are no tiers.
        self.evictions: dict[bytes, BlockId] | None = None
        # In allocation order: blocks without a hash first, then the least recently used.
        self._free: OrderedDict[BlockId, None] = OrderedDict(
            (BlockId(i), None) for i in range(num_blocks)
        )
        self.num_cached_free = 0  # findable blocks without a reference

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, cached blocks included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[BlockId]:
        """The blocks of the longest cached prefix. Changes no state; valid until the next `take`."""
        found: list[BlockId] = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def is_cached(self, digest: bytes) -> bool:
        return digest in self._by_hash

    def was_evicted(self, digest: bytes) -> bool:
        """Whether a block with this hash was evicted recently."""
        return digest in self._evicted

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """Number of these blocks that sharing would remove from the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to blocks returned by `find`."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
                self.num_cached_free -= self._hash_of[block] is not None
            self._refs[block] += 1

    def take(self, count: int) -> list[BlockId]:
        """Allocate `count` blocks and evict their content. The caller has checked `num_free`."""
        taken: list[BlockId] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._evict(block)
            if digest is not None and self.evictions is not None:
                self.evictions[digest] = block
            self._refs[block] = 1
            taken.append(block)
        return taken

    def seal(self, block: BlockId, digest: bytes) -> None:
        """Cache a full block of verified tokens under its hash, unless that hash is cached already."""
        if self._caching and self._hash_of[block] is None and digest not in self._by_hash:
            self._hash_of[block] = digest
            self._by_hash[digest] = block

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of each block, tail first, so that prefixes are evicted last."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached_free += 1

    def reset_cache(self) -> int:
        """Evict the content of all free blocks; returns how many were cached."""
        cached = [block for block in self._free if self._hash_of[block] is not None]
        for block in cached:
            self._evict(block)
        return len(cached)

    def _evict(self, block: BlockId) -> bytes | None:
        """Forget the content of a block without a reference; returns its hash."""
        digest = self._hash_of[block]
        if digest is not None:
            self.num_cached_free -= 1
            del self._by_hash[digest]
            self._hash_of[block] = None
            self._evicted[digest] = None
            if len(self._evicted) > _MAX_EVICTED:
                self._evicted.popitem(last=False)
        return digest
