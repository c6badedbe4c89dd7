"""Allocates KV blocks to requests: prefix-cache hits and fresh blocks, sealing, release.

Decides how many blocks a request needs and whether they are free now. The scheduler decides which
request gets them and which one is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.blocks import BlockPool
from windlass.core.limits import SchedulerLimits
from windlass.core.memory import BlockUse
from windlass.core.misses import PrefixMisses
from windlass.core.policy import InflightPrefixes
from windlass.core.request import Request
from windlass.core.step import Step
from windlass.core.types import BlockId


class KVAllocator:
    """Owns the in-flight prefixes and the record of cache misses; the pool owns reference counts."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, caching: bool) -> None:
        self.pool = pool
        self._limits = limits
        self._caching = caching
        self._inflight = InflightPrefixes(limits.block_size)
        self._misses = PrefixMisses(pool, limits.block_size, caching)

    def use(self, running: Iterable[Request]) -> BlockUse:
        """The current use of the blocks."""
        pool, size = self.pool, self._limits.block_size
        num_cached = pool.num_cached_free()
        unfilled = (len(each.blocks) * size - each.computed for each in running)
        return BlockUse(
            num_used=pool.num_used,
            num_cached=num_cached,
            num_free=pool.num_free - num_cached,
            block_size=size,
            num_unfilled=sum(unfilled),
        )

    def find(self, request: Request) -> list[BlockId]:
        """The blocks of the request's longest cached prefix."""
        if not self.may_read(request):
            return []
        size = self._limits.block_size
        return self.pool.find(request.hashes(len(request.tokens) // size, size))

    def may_read(self, request: Request) -> bool:
        return self._caching and request.may_read_cache

    def should_wait(self, request: Request, cached: list[BlockId]) -> bool:
        """Whether running requests are computing most of the prefix that it still needs."""
        return self._inflight.should_wait(request, len(cached))

    def start(self, step: Step, request: Request, cached: list[BlockId], alone: bool) -> int:
        """Allocate the first blocks of a queued request; returns how many tokens `step` computes.

        0: the step has no budget. -n: n blocks are lacking. Neither allocates anything.
        """
        limits, pool = self._limits, self.pool
        num_tokens = len(request.tokens)
        # Sampling needs logits, so at least the last token is computed. When its block is cached
        # too, that block is copied: a shared block is never written to.
        copy_last = len(cached) * limits.block_size >= num_tokens
        start = min(len(cached) * limits.block_size, num_tokens - 1)
        count = limits.chunk(num_tokens - start, step.budget)
        num_free = pool.num_free - pool.num_free_among(cached)
        need_all = limits.blocks_for(num_tokens) - len(cached) + copy_last
        spare = 0 if alone else 1 + pool.num_blocks // 100  # headroom for running requests
        lacking = need_all + spare - num_free
        if count == 0 or lacking > 0:
            request.share.short_blocks = max(request.share.short_blocks, lacking)
            return -lacking if count else 0
        pool.share(cached)
        fresh = pool.take(limits.blocks_for(start + count) - len(cached) + copy_last)
        if copy_last:
            source = cached.pop()
            step.plan.copies.append((source, fresh[0]))
            pool.release([source])
        request.blocks = cached + fresh
        request.planned = request.computed = start
        request.num_sealed = len(cached)
        if self._caching:
            request.seal_at = (len(cached) + 1) * limits.block_size
            self._inflight.add(request, start)
        return count

    def note_miss(self, request: Request) -> None:
        """Record why the rest of a just-admitted prompt was not in the prefix cache."""
        self._misses.note(request, request.computed)

    def end_with_drafts(self, request: Request, end: int, spare: int, num_running: int) -> int:
        """The position up to which to allocate: draft tokens and lookahead only from spare blocks."""
        spare = min(len(request.drafts), spare)
        if spare:
            spare += self._limits.lookahead_after_drafts
        spare = max(spare, self._limits.lookahead)
        extended = min(end + spare, request.longest)
        has_spare = self.need(request, extended) <= self.pool.num_free - num_running
        return extended if has_spare else end

    def need(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks for `num_tokens`."""
        return self._limits.blocks_for(num_tokens) - len(request.blocks)

    def seal(self, request: Request) -> None:
        """Add the request's newly full blocks to the prefix cache."""
        # The token that this row samples is not known yet: its block is sealed by the next row.
        size = self._limits.block_size
        num_full = min(request.computed, len(request.tokens)) // size
        for index in range(request.num_sealed, num_full):
            digest = request.hash_at(index, size)
            self.pool.seal(request.blocks[index], digest)
            self._inflight.sealed(digest)
        request.num_sealed = num_full
        request.seal_at = (num_full + 1) * size

    def release(self, request: Request) -> None:
        if self._caching:
            self._inflight.drop(request)
        self.pool.release(request.blocks)
