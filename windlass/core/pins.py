"""Named prefixes whose KV blocks stay in the pool: a reference of their own keeps them from eviction.

A pin computes nothing: the blocks are those that a request with the same prompt has left in the prefix
cache. Pinned blocks are bounded, so that the longest request always fits the rest of the pool.
"""

from __future__ import annotations

from windlass.core.adapters import Adapters
from windlass.core.kv_allocator import KVAllocator
from windlass.core.kv_layout import tokens_in_flight
from windlass.core.limits import SchedulerLimits
from windlass.core.request import Request
from windlass.core.tenant_account import TenantAccount
from windlass.core.tiers import NoTiers
from windlass.core.types import BlockId, NewRequest, PinnedPrefix
from windlass.errors import CapacityError, RequestError


class PinnedPrefixes:
    """Owns one reference to each block of each pinned prefix, by name."""

    def __init__(
        self,
        limits: SchedulerLimits,
        allocator: KVAllocator,
        adapters: Adapters,
        *,
        tiers: NoTiers,
        caching: bool,
        max_share: float,
    ) -> None:
        self._limits = limits
        self._allocator = allocator
        self._adapters = adapters
        self._tiers = tiers
        self._caching = caching
        self._max_share = max_share
        self._blocks: dict[str, list[BlockId]] = {}

    @property
    def num_blocks(self) -> int:
        """Pinned blocks; one that several prefixes share counts once."""
        return len(set().union(*self._blocks.values()))

    @property
    def max_blocks(self) -> int:
        """Blocks that may be pinned: a share of the pool, less what the longest request needs."""
        limits = self._limits
        in_flight = tokens_in_flight(limits.max_num_batched_tokens, limits.num_stages)
        needed = limits.layout.blocks_for(limits.longest, in_flight)
        return max(0, min(int(limits.num_blocks * self._max_share), limits.num_blocks - needed))

    def pin(self, name: str, new: NewRequest, *, on_device: bool = True) -> PinnedPrefix:
        """Pin the full blocks of a prompt under a name, in place of what the name had, and save them.

        Pins nothing if some of them are not cached: `num_missing` tokens have to be computed first.
        `on_device` False: only KV tiers keep them.
        """
        size, groups = self._limits.block_size, self._limits.layout.groups
        if not self._caching:
            raise RequestError("prefix caching is off, so no KV block is kept. Turn it on.", "name")
        if not on_device and not self._tiers.has_stores:
            raise RequestError(
                "pin is false, and this engine has no KV tier to keep the prefix. Start it with "
                "--kv-offload-gb or --prefix-cache-dir, or leave out pin.",
                "pin",
            )
        num_full = (len(new.prompt) - self._limits.layout.has_state) // size
        if num_full == 0:
            raise RequestError(
                f"the prefix has {len(new.prompt)} tokens, and only full blocks of {size} tokens are "
                "kept. Send a longer one.",
                "prompt",
            )
        request = self._request(new)
        cached = self._allocator.find(request)
        blocks = cached.blocks if on_device else []
        if on_device:
            # Blocks that are not cached yet; a window needs fewer.
            num_needed = num_full * sum(group.lookback is None for group in groups)
            self._check_room(name, num_full * size, blocks=blocks, num_needed=num_needed)
        if cached.num_blocks < num_full:
            return PinnedPrefix(num_missing=(num_full - cached.num_blocks) * size)
        self._allocator.pool.share(blocks)
        self.unpin(name)
        if on_device:
            self._blocks[name] = blocks
        # For an engine that sleeps or is restarted: pinned blocks are never evicted to a tier.
        self._tiers.save(self._allocator.find_keys(request, self._allocator.pool)[1])
        return PinnedPrefix(num_tokens=num_full * size, num_blocks=len(blocks))

    def _check_room(
        self, name: str, num_tokens: int, blocks: list[BlockId], num_needed: int
    ) -> None:
        """Raise if the cached `blocks` of a prefix, or the number that it needs, are too many."""
        most, limits = self.max_blocks, self._limits
        others = set().union(*(own for key, own in self._blocks.items() if key != name))
        num_others = len(others)
        num_new = max(num_needed - len(others.intersection(blocks)), len({*blocks} - others))
        if num_others + num_new > most:
            raise CapacityError(
                f"the prefix of {num_tokens:,} tokens needs {num_new:,} KV blocks; {num_others:,} are pinned "
                f"already, and at most {most:,} of {limits.num_blocks:,} may be: --max-pinned-share "
                f"{self._max_share:g}, and room for a request of {limits.longest:,} tokens. Delete "
                "another prefix, shorten this one, raise --max-pinned-share, lower --max-model-len, or "
                "give the cache more memory.",
                "prompt",
            )

    def unpin(self, name: str) -> int:
        """Release the blocks of a prefix, which stay cached until they are evicted; returns their number."""
        blocks = self._blocks.pop(name, [])
        self._allocator.pool.release(blocks)
        return len(blocks)

    def clear(self) -> None:
        """Release all, when the content of the blocks is lost."""
        for name in list(self._blocks):
            self.unpin(name)

    def _request(self, new: NewRequest) -> Request:
        """A request that only finds blocks, never queued."""
        salt = ""
        if new.adapter:
            salt = self._adapters.enter(new.adapter)
            self._adapters.leave(new.adapter)
        return Request(
            new,
            0,
            max_tokens=1,
            stop_ids=frozenset(),
            seed=0,
            now=0.0,
            account=TenantAccount(new.tenant),
            adapter_salt=salt,
        )
