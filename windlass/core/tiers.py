"""KV tiers below the device: which blocks are saved, which prefixes are loaded, and who waits for them.

A block that is evicted from the device is saved, unless its record is still stored. A queued request whose prefix is longer in the tiers
than on the device waits while the missing blocks are loaded, if that is faster than computing them:

    blocks      | on the device | in a tier           | nowhere
    request     | shared        | loaded, then shared | computed

A load belongs to the prefix cache, not to the request: blocks that arrive are sealed and stay when the
request is gone, and no block is reused while a load writes it. A load that fails is a miss. Copies and
files are the runner's (runner/kv_tiers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from windlass.core.blocks import BlockPool
from windlass.core.deadlines import Rates
from windlass.core.kv_allocator import CachedPrefix, KVAllocator
from windlass.core.limits import SchedulerLimits
from windlass.core.request import Request
from windlass.core.step import Step
from windlass.core.types import BlockId, TierStats

# A loaded prefix may be evicted again before its request is admitted.
_MAX_LOADS = 2
# Blocks of computed prompts that are saved per plan, beside evicted ones: a step waits for the copies.
_MAX_PROMPT_SAVES = 64
_MAX_QUEUED_SAVES = 4096

# Decisions about prefixes that a tier has, as stats count them.
LOADED = "loaded"
RECOMPUTED = "recomputed"  # computing was expected to be faster
FAILED = "failed"  # a record could not be loaded
NO_ROOM = "no room"  # no block was free to load into


class TierStores(Protocol):
    """The stores of the runner, the fastest first. Numbers of tiers are indices of `names`."""

    names: Sequence[str]
    num_ended: int  # loads so far
    keeps_prompts: bool  # a store outlives the engine: prompts are saved when they are computed
    prompt_token_s: (
        float  # to compute a prompt token, measured before the first request; 0: unknown
    )

    def find(self, key: bytes) -> int | None:
        """The fastest tier that has a record."""
        ...

    def lacks(self, key: bytes) -> bool:
        """Whether a save would store the record in a tier."""
        ...

    def poll(self) -> list[tuple[bytes, bool]]:
        """Advance copies. Returns the loads that have ended, and whether their blocks are filled."""
        ...

    @property
    def is_saving(self) -> bool:
        """Whether saves are being copied; `poll` advances them."""
        ...

    def record_s(self, tier: int) -> float:
        """Measured seconds to load one record."""
        ...

    def clear(self) -> None:
        """Drop the records in memory."""
        ...

    def close(self) -> None:
        """Finish all writes. Only another `close` may follow."""
        ...

    def stats(self) -> list[TierStats]: ...


class _Wait:
    """A queued request that found blocks in a tier: the keys it waits for, and what was decided."""

    __slots__ = ("decision", "failed", "keys", "num_loads", "reason", "start", "tiers")

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.num_loads = 0
        self.failed = False
        self.decision = self.reason = ""
        self.start = 0  # tokens on the device before the load
        self.tiers: list[int] = []  # of each record


class _Load:
    """Blocks that are held until all records for them have arrived."""

    __slots__ = ("blocks", "num_left")

    def __init__(self, blocks: list[BlockId], num_left: int) -> None:
        self.blocks = blocks
        self.num_left = num_left


class _Loading:
    """A record on its way into a block."""

    __slots__ = ("block", "load", "tier", "valid", "waits")

    def __init__(self, block: BlockId, tier: int, load: _Load, wait: _Wait) -> None:
        self.block = block
        self.tier = tier
        self.load = load
        self.waits = [wait]
        self.valid = True  # the prefix cache was not reset meanwhile


class _Lookup:
    """Finds blocks on the device, on their way to it, and in the first tiers."""

    def __init__(
        self,
        pool: BlockPool,
        loading: Mapping[bytes, _Loading],
        find_tier: Callable[[bytes], int | None],
        num_tiers: int,
    ) -> None:
        self._pool = pool
        self._loading = loading
        self._find_tier = find_tier
        self._num_tiers = num_tiers

    def is_cached(self, key: bytes) -> bool:
        if self._pool.is_cached(key) or key in self._loading:
            return True
        tier = self._find_tier(key)
        return tier is not None and tier < self._num_tiers

    def find(self, keys: Iterable[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for key in keys:
            if not self.is_cached(key):
                break
            found.append(key)
        return found


class NoTiers:
    """The tiers of an engine without any."""

    has_stores = False

    @property
    def has_work(self) -> bool:
        return False

    @property
    def state(self) -> int:
        return 0

    def begin(self) -> None:
        pass

    def should_wait(
        self,
        step: Step,
        request: Request,
        cached: CachedPrefix,
        *,
        num_slots: int,
        alone: bool,
    ) -> bool:
        del step, request, cached, num_slots, alone
        return False

    def is_waiting(self, request: Request) -> bool:
        del request
        return False

    def drop(self, request: Request) -> None:
        pass

    admitted = drop

    def moves(self) -> tuple[list[tuple[BlockId, bytes]], list[tuple[bytes, BlockId]]] | None:
        """The saves and loads of the plan; None: there are none."""
        return None

    def save(self, keys: Sequence[bytes]) -> None:
        """Save blocks of the device in the next plans, unless all tiers have them."""

    def reset(self) -> None:
        pass

    clear = close = reset

    def stats(self) -> tuple[TierStats, ...]:
        return ()

    @property
    def decisions(self) -> dict[str, int]:
        return {}


class Tiers(NoTiers):
    """Owns the loads in progress, with the blocks that they write, and the saves of the next plan."""

    has_stores = True

    def __init__(
        self,
        stores: TierStores,
        allocator: KVAllocator,
        limits: SchedulerLimits,
        rates: Callable[[], Rates],
    ) -> None:
        self._stores = stores
        self._allocator = allocator
        self._pool = allocator.pool
        self._limits = limits
        self._rates = rates
        self._pool.evictions = {}
        self._prompts: dict[bytes, None] = {}  # keys of computed prompts that are not saved yet
        if stores.keeps_prompts:
            allocator.on_prompt_block = self._save_prompt
        self._waits: dict[str, _Wait] = {}  # by request id
        self._loading: dict[bytes, _Loading] = {}
        self._num_loading = [0] * len(stores.names)  # of each tier
        self._loads: list[tuple[bytes, BlockId]] = []  # of the next plan
        self._decisions: dict[str, int] = {}
        self._hit_tokens = [0] * len(stores.names)

    # ---- loads -------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """While this is unchanged, a request whose blocks are loading cannot start."""
        return self._stores.num_ended

    @property
    def has_work(self) -> bool:
        """Whether blocks are being copied, or have to be."""
        return bool(
            self._loading or self._prompts or self._pool.evictions or self._stores.is_saving
        )

    def begin(self) -> None:
        """Start a plan: seal the blocks that have arrived."""
        if not self._loading and not self._stores.is_saving:
            return
        for key, ok in self._stores.poll():
            self._end(key, ok)

    def _end(self, key: bytes, ok: bool) -> None:
        loading = self._loading.pop(key)
        self._num_loading[loading.tier] -= 1
        if ok and loading.valid:
            self._pool.seal(loading.block, key)
        for wait in loading.waits:
            wait.keys.discard(key)
            wait.failed = wait.failed or not ok
        load = loading.load
        load.num_left -= 1
        if not load.num_left:
            self._pool.release(load.blocks)

    def is_waiting(self, request: Request) -> bool:
        """Whether blocks of a queued request are being loaded."""
        wait = self._waits.get(request.request_id)
        return wait is not None and bool(wait.keys)

    def should_wait(
        self,
        step: Step,
        request: Request,
        cached: CachedPrefix,
        *,
        num_slots: int,
        alone: bool,
    ) -> bool:
        """Whether a queued request waits for blocks from a tier; starts to load them.

        It loads only what it could use now: with a free slot, and with blocks for the whole request.
        """
        if self.is_waiting(request):
            return True
        wait = self._waits.get(request.request_id) or _Wait()
        if wait.failed or wait.num_loads >= _MAX_LOADS or not self._allocator.may_read(request):
            return False
        num_tokens = len(request.tokens)
        num_left = num_tokens - min(cached.num_blocks * self._limits.block_size, num_tokens - 1)
        count = self._limits.chunk(num_left, step.room_for(num_left))
        if not count or self._allocator.lacking(request, cached, count=count, alone=alone) > 0:
            return False  # nor can it start without them
        if not wait.num_loads:
            wait.decision = ""
        keys = self._worth_loading(request, cached, wait)
        self._waits[request.request_id] = wait
        if not keys:
            return False
        if sum(bool(other.keys) for other in self._waits.values()) >= num_slots:
            return True
        return self._start(keys, wait)

    def _worth_loading(self, request: Request, cached: CachedPrefix, wait: _Wait) -> list[bytes]:
        """The keys of the longest prefix that is faster to load than to compute; none: no prefix is."""
        size, stores = self._limits.block_size, self._stores
        longest = len(request.tokens) - 1
        for num_tiers in range(len(stores.names), 0, -1):
            lookup = _Lookup(self._pool, self._loading, find_tier=stores.find, num_tiers=num_tiers)
            num_blocks, keys = self._allocator.find_keys(request, lookup)
            if num_blocks <= cached.num_blocks:
                break
            tiers = [self._tier(key) for key in keys if not self._pool.is_cached(key)]
            # Records that are on their way arrive first.
            ahead = (num * stores.record_s(tier) for tier, num in enumerate(self._num_loading))
            load_s = sum(map(stores.record_s, tiers)) + sum(ahead)
            start = min(cached.num_blocks * size, longest)
            num_tokens = min(num_blocks * size, longest) - start
            token_s = self._rates().prompt_token_s or stores.prompt_token_s
            names = " and ".join(stores.names[tier] for tier in sorted(set(tiers)))
            compute = f"{1000 * num_tokens * token_s:.1f}" if token_s else "an unknown number of"
            reason = (
                f"{num_tokens} tokens from {names}: {1000 * load_s:.1f} ms to load, {compute} ms "
                "to compute"
            )
            is_worth = not token_s or load_s < num_tokens * token_s
            if is_worth or not wait.num_loads:
                wait.decision = LOADED if is_worth else RECOMPUTED
                wait.reason, wait.start, wait.tiers = reason, start, tiers
            if is_worth:
                return keys
        return []

    def _tier(self, key: bytes) -> int:
        """The tier of a key that is not on the device."""
        loading = self._loading.get(key)
        return (self._stores.find(key) or 0) if loading is None else loading.tier

    def _start(self, keys: list[bytes], wait: _Wait) -> bool:
        """Allocate the blocks of a prefix that are missing, and load them."""
        pool, loading = self._pool, self._loading
        new = [key for key in keys if not pool.is_cached(key) and key not in loading]
        shared = pool.find(key for key in keys if pool.is_cached(key))
        if len(new) + pool.num_free_among(shared) > pool.num_free:
            return False
        pool.share(shared)
        fresh = dict(zip(new, pool.take(len(new)), strict=True))
        found = iter(shared)
        # In token order: prefixes are evicted last.
        blocks = [fresh[key] if key in fresh else next(found) for key in keys if key not in loading]
        load = _Load(blocks, len(new))
        for key in keys:
            if key in loading:
                loading[key].waits.append(wait)
                wait.keys.add(key)
        for key, block in fresh.items():
            tier = self._tier(key)
            loading[key] = _Loading(block, tier, load=load, wait=wait)
            self._num_loading[tier] += 1
            wait.keys.add(key)
        self._loads += fresh.items()
        if not new:
            pool.release(blocks)
        wait.num_loads += 1
        return True

    def admitted(self, request: Request) -> None:
        """Record what was decided for a request that starts now."""
        wait = self._waits.pop(request.request_id, None)
        if wait is None or not wait.decision:
            return
        if wait.failed:
            wait.decision = FAILED
        elif wait.decision == LOADED and not wait.num_loads:
            wait.decision = NO_ROOM
        self._decisions[wait.decision] = self._decisions.get(wait.decision, 0) + 1
        num_tokens = max(0, request.computed - wait.start) if wait.num_loads else 0
        if num_tokens:
            self._count_hits(request, wait.tiers, num_tokens)
        request.share.tier_decision = f"{wait.decision}: {wait.reason}"

    def _count_hits(self, request: Request, tiers: list[int], num_tokens: int) -> None:
        """Count loaded tokens by tier: each has the share of its records."""
        share, num_records, num_counted = request.share, 0, 0
        for tier in sorted(set(tiers)):
            num_records += tiers.count(tier)
            own = num_tokens * num_records // len(tiers) - num_counted
            num_counted += own
            self._hit_tokens[tier] += own
            name = self._stores.names[tier]
            share.loaded = {**share.loaded, name: share.loaded.get(name, 0) + own}
        if request.timeline.admitted is None:
            request.timeline.num_loaded = num_tokens

    def drop(self, request: Request) -> None:
        """Forget a queued request that is gone. Its loads go on: their blocks are cached."""
        self._waits.pop(request.request_id, None)

    # ---- saves -------------------------------------------------------------------------------

    def save(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._save_prompt(key)

    def _save_prompt(self, key: bytes) -> None:
        if len(self._prompts) < _MAX_QUEUED_SAVES and self._stores.lacks(key):
            self._prompts[key] = None

    def moves(self) -> tuple[list[tuple[BlockId, bytes]], list[tuple[bytes, BlockId]]] | None:
        evictions = self._pool.evictions
        if not (evictions or self._loads or self._prompts):
            return None
        assert evictions is not None
        # Records that stores have as well: from now on they are the only ones.
        saves = [(block, key) for key, block in evictions.items()]
        evictions.clear()
        # A prompt's block that was evicted meanwhile is saved by its eviction.
        for key in list(self._prompts)[:_MAX_PROMPT_SAVES]:
            del self._prompts[key]
            saves += [(block, key) for block in self._pool.find([key])]
        loads, self._loads = self._loads, []
        return saves, loads

    # ---- the whole ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what is on its way, after a reset of the prefix cache."""
        self._prompts.clear()
        for loading in self._loading.values():
            loading.valid = False

    def clear(self) -> None:
        """Drop the records in host memory. Those on disk stay."""
        self._stores.clear()

    def close(self) -> None:
        """Finish all writes. No plan may follow."""
        self._stores.close()

    def stats(self) -> tuple[TierStats, ...]:
        found = zip(self._stores.stats(), self._hit_tokens, strict=True)
        return tuple(replace(stats, num_hit_tokens=tokens) for stats, tokens in found)

    @property
    def decisions(self) -> dict[str, int]:
        return dict(self._decisions)
