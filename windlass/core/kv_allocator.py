"""Allocates KV blocks to requests: prefix-cache hits and fresh blocks, sealing, release.

Decides how many blocks a request needs and whether they are free now. The scheduler decides which
request gets them and which one is preempted. A request has one block table per group of the layout;
all of them have the same length. Blocks behind a window are freed while the request runs:

    positions   0 ......... computed - lookback ......... computed ...... room
    full        |  held                                                       |
    window      |  NO_BLOCK  |  held                                          |
    state       |  NO_BLOCK                          |  held                  |

The runner keeps freed ids in its tables: kernels do not read behind a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import NamedTuple, Protocol

from windlass.core.blocks import BlockPool, group_key
from windlass.core.kv_layout import KVGroup
from windlass.core.limits import SchedulerLimits
from windlass.core.memory import BlockUse
from windlass.core.misses import PrefixMisses
from windlass.core.policy import InflightPrefixes
from windlass.core.request import Request
from windlass.core.step import Step
from windlass.core.types import NO_BLOCK, BlockId


class CachedPrefix(NamedTuple):
    """The longest prefix that all groups can serve. Valid until the next allocation."""

    num_blocks: int
    tables: list[list[BlockId]]  # per group; NO_BLOCK behind its window

    @property
    def blocks(self) -> list[BlockId]:
        return [block for table in self.tables for block in table if block != NO_BLOCK]


class Lookup(Protocol):
    """Finds cached blocks: in the pool, or in the pool and KV tiers."""

    def find(self, hashes: Iterable[bytes], /) -> Sized:
        """The blocks of the longest cached prefix."""
        ...

    def is_cached(self, digest: bytes, /) -> bool: ...


class KVAllocator:
    """Owns the in-flight prefixes and the record of cache misses; the pool owns reference counts."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, caching: bool) -> None:
        self.pool = pool
        self._limits = limits
        self._caching = caching
        self._groups = groups = limits.layout.groups
        self._size = limits.block_size
        # Groups whose blocks are freed while the request runs.
        self._windowed = [i for i, group in enumerate(groups) if group.lookback is not None]
        self._inflight = InflightPrefixes(self._size)
        self._misses = PrefixMisses(pool, self._size, caching=caching, num_groups=len(groups))
        # Called with the key of each block of a prompt when it is sealed.
        self.on_prompt_block: Callable[[bytes], None] | None = None

    def use(self, running: Iterable[Request]) -> BlockUse:
        """The current use of the blocks."""
        pool = self.pool
        num_cached = pool.num_cached_free
        unfilled = (each.room - each.computed for each in running)
        return BlockUse(
            num_used=pool.num_used,
            num_cached=num_cached,
            num_free=pool.num_free - num_cached,
            block_size=self._size,
            num_unfilled=sum(unfilled) * len(self._groups),
        )

    def find(self, request: Request) -> CachedPrefix:
        """The request's longest cached prefix."""
        if not self.may_read(request):
            return CachedPrefix(0, [[] for _ in self._groups])
        hashes = self._hashes(request)
        num_blocks = self._longest(hashes, len(request.tokens), self.pool)
        tables = [
            self._cached_table(index, hashes[:num_blocks], len(request.tokens))
            for index in range(len(self._groups))
        ]
        return CachedPrefix(num_blocks, tables)

    def _hashes(self, request: Request) -> list[bytes]:
        """The hashes of the blocks that a request can share."""
        # At least the last token is computed, and a state before it is only stored at a block's end.
        num_tokens = len(request.tokens) - self._limits.layout.has_state
        return request.hashes(num_tokens // self._size, self._size)

    def find_keys(self, request: Request, where: Lookup) -> tuple[int, list[bytes]]:
        """The number of blocks of the longest prefix found, and the keys that the request reads of it.

        Keys are in token order.
        """
        num_tokens, hashes = len(request.tokens), self._hashes(request)
        num_blocks = self._longest(hashes, num_tokens, where)
        return num_blocks, self._keys(hashes[:num_blocks], num_tokens)

    def prompt_keys(self, request: Request) -> list[bytes]:
        """The keys of the prompt's full blocks that tokens after the first output token read."""
        hashes = request.hashes(request.num_prompt // self._size, self._size)
        return self._keys(hashes, request.num_prompt + 1)

    def _keys(self, hashes: list[bytes], num_tokens: int) -> list[bytes]:
        """The keys of a prefix that a request of so many tokens reads, in token order."""
        firsts = [self._first_read(group, len(hashes), num_tokens) for group in self._groups]
        return [
            group_key(hashes[at], index)
            for at in range(min(firsts), len(hashes))
            for index, first in enumerate(firsts)
            if at >= first
        ]

    def _longest(self, hashes: list[bytes], num_tokens: int, where: Lookup) -> int:
        """The number of blocks of the longest prefix that all groups have cached."""
        num_blocks, index, num_agreed = len(hashes), 0, 0
        while num_agreed < len(self._groups):
            shorter = self._longest_in(
                index, hashes[:num_blocks], num_tokens=num_tokens, where=where
            )
            num_agreed = num_agreed + 1 if shorter == num_blocks else 1
            num_blocks = shorter
            index = (index + 1) % len(self._groups)
        return num_blocks

    def _longest_in(self, index: int, hashes: list[bytes], num_tokens: int, where: Lookup) -> int:
        """The number of blocks of the longest prefix that one group can serve."""
        group = self._groups[index]
        if group.lookback is None:
            return len(where.find(group_key(digest, index) for digest in hashes))
        end = len(hashes)
        while end:
            # Shorter prefixes that end behind a missing block read it, too: continue before it.
            needed = range(self._first_read(group, end, num_tokens), end)
            keys = ((at, group_key(hashes[at], index)) for at in reversed(needed))
            missing = next((at for at, key in keys if not where.is_cached(key)), None)
            if missing is None:
                break
            end = missing
        return end

    def _first_read(self, group: KVGroup, num_blocks: int, num_tokens: int) -> int:
        """The first block that a request reads whose first `num_blocks` blocks are cached."""
        return group.first_block(min(num_blocks * self._size, num_tokens - 1), self._size)

    def _cached_table(self, index: int, hashes: list[bytes], num_tokens: int) -> list[BlockId]:
        first = self._first_read(self._groups[index], len(hashes), num_tokens)
        keys = (group_key(digest, index) for digest in hashes[first:])
        return [NO_BLOCK] * first + self.pool.find(keys)

    def may_read(self, request: Request) -> bool:
        return self._caching and request.may_read_cache

    def should_wait(self, request: Request, cached: CachedPrefix) -> bool:
        """Whether running requests are computing most of the prefix that it still needs."""
        return self._inflight.should_wait(request, cached.num_blocks)

    def num_held(self, request: Request) -> int:
        """Blocks of a running request, also those that it shares."""
        return sum(map(len, request.tables)) - sum(request.first_held)

    def lacking(self, request: Request, cached: CachedPrefix, count: int, alone: bool) -> int:
        """The number of blocks that a queued request lacks for its first `count` tokens."""
        limits, pool, size = self._limits, self.pool, self._size
        num_tokens, num_cached = len(request.tokens), cached.num_blocks
        copy_last = num_cached * size >= num_tokens
        start = min(num_cached * size, num_tokens - 1)
        num_free = pool.num_free - pool.num_free_among(cached.blocks)
        num_fresh = limits.blocks_for(start + count) - num_cached + copy_last
        need_all = sum(
            max(num_fresh, group.blocks_for(num_tokens, count, size) + copy_last - num_shared)
            for group, num_shared in zip(self._groups, _num_shared(cached), strict=True)
        )
        # Headroom for running requests.
        spare = 0 if alone else len(self._groups) + pool.num_blocks // 100
        return need_all + spare - num_free

    def start(self, step: Step, request: Request, cached: CachedPrefix, alone: bool) -> int:
        """Allocate the first blocks of a queued request; returns how many tokens `step` computes.

        Returns 0 if the step has no budget, and -n if n blocks are lacking; allocates nothing then.
        """
        limits, pool, size = self._limits, self.pool, self._size
        num_tokens, num_cached = len(request.tokens), cached.num_blocks
        # Sampling needs logits, so at least the last token is computed. When its block is cached
        # too, that block is copied: a shared block is never written to.
        copy_last = num_cached * size >= num_tokens
        start = min(num_cached * size, num_tokens - 1)
        count = limits.chunk(num_tokens - start, step.room_for(num_tokens - start))
        num_fresh = limits.blocks_for(start + count) - num_cached + copy_last
        lacking = self.lacking(request, cached, count=count, alone=alone)
        if count == 0 or lacking > 0:
            request.share.short_blocks = max(request.share.short_blocks, lacking)
            return -lacking if count else 0
        pool.share(cached.blocks)
        fresh = pool.take(num_fresh * len(self._groups))
        if copy_last:
            num_cached -= 1
            sources = [table.pop() for table in cached.tables]
            step.plan.copies.extend(zip(sources, fresh[::num_fresh], strict=True))
            pool.release(sources)
        request.tables = cached.tables
        request.first_held = [
            min(group.first_block(start, size), num_cached) for group in self._groups
        ]
        request.room = num_cached * size
        self._append(request, fresh)
        request.planned = request.computed = start
        request.num_sealed = num_cached
        if self._caching or self._windowed:
            request.seal_at = (num_cached + 1) * size
        if self._caching:
            self._inflight.add(request, start)
        return count

    def _append(self, request: Request, fresh: list[BlockId]) -> None:
        """Append blocks to the request's tables: as many for each group, one group after the other."""
        count = len(fresh) // len(self._groups)
        for index, table in enumerate(request.tables):
            table += fresh[index * count : (index + 1) * count]
        request.room += count * self._size

    def note_miss(self, request: Request) -> None:
        """Record why the rest of a just-admitted prompt was not in the prefix cache."""
        self._misses.note(request, request.computed)

    def end_with_drafts(self, request: Request, end: int, spare: int, num_running: int) -> int:
        """The position up to which to allocate. Draft tokens and lookahead get only spare blocks."""
        if request.pooling is not None:
            return end
        spare = 0 if self._limits.layout.has_state else min(len(request.drafts), spare)
        if spare:
            spare += self._limits.lookahead_after_drafts
        spare = max(spare, self._limits.lookahead)
        extended = min(end + spare, request.longest)
        reserved = num_running * len(self._groups)
        has_spare = self.need(request, extended) <= self.pool.num_free - reserved
        return extended if has_spare else end

    def need(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks for `num_tokens`."""
        num_blocks = self._limits.blocks_for(num_tokens) - request.room // self._size
        return num_blocks * len(self._groups)

    def grow(self, request: Request, count: int) -> list[BlockId]:
        """Allocate the `count` blocks that `need` returned; returns them as a row carries them."""
        fresh = self.pool.take(count) if count > 0 else []
        self._append(request, fresh)
        return fresh

    def advance(self, request: Request) -> None:
        """Seal the request's newly full blocks, and free the blocks behind its windows."""
        # The token that this row samples is not known yet: its block is sealed by the next row.
        size = self._size
        num_full = min(request.computed, len(request.tokens)) // size
        if self._caching:
            for at in range(request.num_sealed, num_full):
                digest = request.hash_at(at, size)
                for index, table in enumerate(request.tables):
                    self.pool.seal(table[at], group_key(digest, index))
                self._inflight.sealed(digest)
            if self.on_prompt_block is not None:
                self._report_prompt(request, num_full, self.on_prompt_block)
        request.num_sealed = num_full
        request.seal_at = (num_full + 1) * size
        for index in self._windowed:
            # Steps in flight start at `computed` or later. Only sealed blocks are freed.
            begin = request.first_held[index]
            end = min(self._groups[index].first_block(request.computed, size), num_full)
            if end > begin:
                table = request.tables[index]
                self.pool.release(table[begin:end])
                table[begin:end] = [NO_BLOCK] * (end - begin)
                request.first_held[index] = end

    def _report_prompt(
        self, request: Request, num_full: int, report: Callable[[bytes], None]
    ) -> None:
        end = min(num_full, request.num_prompt // self._size)
        for digest in request.hashes(end, self._size)[request.num_sealed :]:
            for index in range(len(self._groups)):
                report(group_key(digest, index))

    def release(self, request: Request) -> None:
        if self._caching:
            self._inflight.drop(request)
        # In token order over all groups: a prefix hit needs the blocks of all.
        rows = zip(*request.tables, strict=True)
        self.pool.release([block for row in rows for block in row if block != NO_BLOCK])


def _num_shared(cached: CachedPrefix) -> list[int]:
    return [len(table) - table.count(NO_BLOCK) for table in cached.tables]
