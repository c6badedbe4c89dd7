"""Explains prefix-cache misses: never seen, evicted, or cached under another salt.

Keeps a bounded number of hashes. It never reveals prompts of another `cache_salt`: a client that
shares no blocks must not learn about them here either.
"""

from __future__ import annotations

from collections import OrderedDict

from windlass.core.blocks import BlockPool, block_hash, group_key, root_hash
from windlass.core.request import Request

_MAX_FIRST_BLOCKS = 4096

NO_CACHE = "prefix caching is off"
SCORED = "prompt_logprobs need every token computed"
PARTIAL = "only full blocks are kept"
EVICTED = "evicted"
SALT = "known with another adapter, or with another setting of deterministic"
NEVER = "never seen"


class PrefixMisses:
    """Owns the hashes of recent first blocks, with and without their salt."""

    def __init__(self, pool: BlockPool, block_size: int, caching: bool, num_groups: int) -> None:
        self._pool = pool
        self._size = block_size
        self._caching = caching
        self._num_groups = num_groups
        self._firsts: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, request: Request, start: int) -> None:
        """Record on the request, whose cached prefix ends at `start`, the first miss and its reason."""
        if start < request.num_prompt - 1:
            request.share.first_miss = start
            request.share.why_missed = self._why(request, start // self._size)
        if self._caching and request.num_prompt >= self._size:
            self._firsts[self._first(request)] = request.root
            if len(self._firsts) > _MAX_FIRST_BLOCKS:
                self._firsts.popitem(last=False)

    def _why(self, request: Request, index: int) -> str:
        if not self._caching:
            return NO_CACHE
        if not request.may_read_cache:
            return SCORED
        if (index + 1) * self._size > request.num_prompt:
            return PARTIAL
        if self._was_evicted(request.hash_at(index, self._size)):
            return EVICTED
        if index == 0 and self._firsts.get(self._first(request), request.root) != request.root:
            return SALT
        return NEVER

    def _was_evicted(self, digest: bytes) -> bool:
        """Whether a group's block was evicted: then others may still have theirs."""
        keys = [group_key(digest, group) for group in range(self._num_groups)]
        return any(self._pool.was_evicted(key) or self._pool.is_cached(key) for key in keys)

    def _first(self, request: Request) -> bytes:
        return block_hash(root_hash(request.cache_salt), request.tokens[: self._size])
