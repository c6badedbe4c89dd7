"""Saves KV blocks to tiers and loads them, while steps run.

Rows of host memory are the host tier, and the way to and from all others:

    save:  block -> row (the host's record) -> put in other stores, by a thread
    load:  get from another store into a row, by a thread -> block

Copies are started by the thread that submits steps, and never waited for. Core decides what is saved
and loaded (core/tiers.py). Every rank has the records of its slice; a load counts when all ranks have it.

Requests wait for loads, so every load ends: a failed copy, a failed store and a store that does not
answer count as misses.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.core.types import BlockId, StepPlan, TierStats
from windlass.errors import ConfigError, EngineError
from windlass.kernels.batch import KVCache
from windlass.kernels.storages import Held
from windlass.runner.device import gib
from windlass.runner.kv_copies import make_block_copies, measure_write_rate, offload_bytes
from windlass.runner.kv_records import BlockCopies, PendingCopy, RecordLayout
from windlass.runner.tier_threads import NUM_READERS, PeerTier, Record, SlowTier, Tier, submit
from windlass.tiers.host import HostStore
from windlass.tiers.peer import PeerExport, PeerStore
from windlass.tiers.store import BlockStore

if TYPE_CHECKING:
    from windlass.runner.worker import Followers

_log = logging.getLogger("windlass.tiers")

_MAX_INCOMPLETE = (
    65_536  # keys of lost records; an older entry is dropped, and costs one more failed load
)
_FORGET_S = 60.0  # half-life of a measured rate, so that a store that was slow once is used again


class _Saving(NamedTuple):
    copy: PendingCopy
    rows: list[tuple[bytes, int]]  # (key, row)


class _Writing(NamedTuple):
    """Rows on their way into blocks."""

    copy: PendingCopy
    records: list[Record]


def open_tiers(
    config: EngineConfig, caches: Sequence[KVCache], others: Sequence[BlockStore]
) -> KVTiers:
    """Open the tiers of one rank, and measure the speed of its copies. `others`: see `KVTiers`."""
    size = config.cache.kv_offload_gb
    num_bytes = offload_bytes(config.cache, config.parallel.num_ranks)
    record_bytes = RecordLayout(caches).record_bytes
    if size is not None and num_bytes < record_bytes:
        raise ConfigError(
            f"--kv-offload-gb {size:g} is {gib(num_bytes)} per rank, and one KV block takes "
            f"{gib(record_bytes)}. Set a larger size."
        )
    copies = make_block_copies(caches, num_bytes, plain_kernels=config.model.plain_kernels)
    rate = measure_write_rate(copies)
    tiers = KVTiers(copies, others, host_record_s=copies.record_bytes / rate)
    reason = f"{copies.rows.num_rows:,} blocks, {rate / 2**30:.1f} GiB/s to the device"
    tiers.choices.append(Choice("host tier", gib(num_bytes), reason))
    for store in others:
        stats = store.stats()
        reason = f"{stats.num_records:,} blocks, {gib(stats.num_bytes)}, are stored"
        tiers.choices.append(Choice(f"{store.name} tier", gib(stats.max_bytes), reason))
    return tiers


class KVTiers:
    """Owns the stores, their threads, and the copies in progress. Implements core's `TierStores`."""

    def __init__(
        self,
        copies: BlockCopies,
        others: Sequence[BlockStore],
        *,
        host_record_s: float = 0.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`others`: slower stores, in order. `host_record_s`: measured seconds of one copy."""
        self._clock = clock
        self._copies = copies
        self._host = HostStore(copies.rows)
        self._slow = [SlowTier(store) for store in others]
        self._tiers: list[Tier] = [Tier(self._host, host_record_s), *self._slow]
        self.names: Sequence[str] = [tier.store.name for tier in self._tiers]
        self.keeps_prompts = bool(others)
        self.choices: list[Choice] = []  # lines of the start-up table
        self.num_ended = 0
        self.prompt_token_s = 0.0
        self._saving: deque[_Saving] = deque()
        self._writing: deque[_Writing] = deque()
        self._queued: deque[tuple[bytes, BlockId, int]] = deque()  # wait for a row
        self._fetched: SimpleQueue[Record] = SimpleQueue()
        self._ended: list[tuple[bytes, bool]] = []
        self._others: _OtherRanks | None = None
        self._is_closed = False

    def share(self, peer: PeerExport | PeerStore) -> None:
        """Add the store between this engine and another one, before the first plan."""
        tier = PeerTier(peer)
        self._slow.append(tier)
        self._tiers.append(tier)
        self.names = [*self.names, peer.name]

    def lead(self, followers: Followers) -> None:
        """Count a load only when the other ranks have theirs, too."""
        self._others = _OtherRanks(followers)

    def save_again(self, keys: Iterable[bytes]) -> None:
        """Make `lacks` true for records that other ranks have lost."""
        if self._others is not None:
            self._others.lose(keys)

    def found_again(self, keys: Iterable[bytes]) -> None:
        """Make `find` return records again that all ranks have."""
        if self._others is not None:
            self._others.complete(keys)

    def storages(self) -> Iterator[Held]:
        return self._copies.storages()

    # ---- lookups, from core ------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        if self._others is not None and key in self._others.incomplete:
            return None
        if self._host.contains(key):
            return 0
        for number, tier in enumerate(self._slow, 1):
            if not tier.late and tier.store.contains(key):
                return number
        return None

    def lacks(self, key: bytes) -> bool:
        if self._others is not None and key in self._others.incomplete:
            return True
        return not self._host.contains(key) or any(tier.lacks(key) for tier in self._slow)

    def record_s(self, tier: int) -> float:
        if tier == 0:
            return self._tiers[0].record_s
        found = self._tiers[tier]
        age_s = perf_counter() - found.measured_at
        return self._tiers[0].record_s + found.record_s * 0.5 ** (age_s / _FORGET_S)

    @property
    def is_saving(self) -> bool:
        return bool(self._saving) or (self._others is not None and self._others.are_saving)

    # ---- plans, from the runner --------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Start the saves and loads of a plan, before its rows."""
        if plan.saves or plan.loads:
            self._advance()
            # First: saves evict other records. Blocks are read before records are written to them.
            ready = self._find_loads(plan.loads)
            self._save(plan.saves)
            self._write(ready)
            self._fetch_queued()
        if plan.saves and self._others is not None:
            # Other ranks may have copies to start even if this rank has none.
            self._others.are_saving = True
            self._others.complete(key for _, key in plan.saves)

    def _save(self, saves: Sequence[tuple[BlockId, bytes]]) -> None:
        blocks, rows = [], []
        for block, key in saves:
            if self._host.use(key):
                self._write_behind(key)
                continue
            row = self._host.reserve()
            if row is None:
                self._tiers[0].num_refused += 1
                continue
            blocks.append(block)
            rows.append((key, row))
        if not blocks:
            return
        try:
            copy = self._copies.read(blocks, [row for _, row in rows])
        except Exception:  # at the border of a tier: a failed save loses only the record
            _log.exception("%d KV blocks could not be copied to host memory", len(blocks))
            self._tiers[0].num_refused += len(blocks)
            self._copies.wait()  # the copies that were started use the rows
            for _, row in rows:
                self._host.free(row)
            return
        self._saving.append(_Saving(copy, rows))

    def _write_behind(self, key: bytes) -> None:
        """Put a record of the host into the other stores, unless too many are waiting."""
        for tier in self._slow:
            if not tier.lacks(key):
                continue
            row = self._host.pin(key)
            if row is None:
                continue
            if tier.room.acquire(blocking=False):
                submit(tier.writer, partial(self._put, tier, key, row))
            else:
                tier.num_refused += 1
                self._host.unpin(row)

    def _put(self, tier: SlowTier, key: bytes, row: int) -> None:
        """On a tier's thread: store a pinned row."""
        try:
            tier.store.put(key, self._copies.rows.row(row))
        except Exception:  # at the border of a thread: a failed store must not end the engine
            _log.exception("the %s tier could not store a KV block", tier.store.name)
        finally:
            self._host.unpin(row)
            tier.room.release()

    def _find_loads(self, loads: Sequence[tuple[bytes, BlockId]]) -> list[Record]:
        """The loads whose records lie in host memory, pinned; queues those from other stores.

        The last blocks of a prefix come first. Among records used at the same time, stores evict
        the first ones, and a prefix without its first blocks is useless.
        """
        ready = []
        for key, block in reversed(loads):
            row = self._host.pin(key)
            if row is not None:
                ready.append(Record(key, row, block=block, tier=0))
                continue
            number = self.find(key)
            if number is None:
                self._fail(key, 0)
            else:
                self._queued.append((key, block, number))
        return ready

    def _fetch_queued(self) -> None:
        """Read records of other stores into free rows."""
        while self._queued:
            row = self._host.reserve()
            if row is None:
                break
            key, block, number = self._queued.popleft()
            record = Record(key, row, block=block, tier=number)
            self._slow[number - 1].read(record, partial(self._fetch, record), self._clock())
        is_moving = self._writing or self._saving or any(tier.reads for tier in self._slow)
        if self._queued and not is_moving:
            # Writes to other stores pin all rows.
            for key, _, number in self._queued:
                self._fail(key, number)
            self._queued.clear()

    def _fetch(self, record: Record) -> None:
        """On a tier's thread: read a record into its row."""
        store, ok, began = self._tiers[record.tier].store, False, perf_counter()
        try:
            ok = store.get(record.key, self._copies.rows.row(record.row))
        except Exception:  # at the border of a thread: a failed load is a miss
            _log.exception("the %s tier could not load a KV block", store.name)
        self._fetched.put(record._replace(ok=ok, seconds=perf_counter() - began))

    def _write(self, records: list[Record]) -> None:
        """Copy rows into blocks."""
        if not records:
            return
        rows, blocks = [each.row for each in records], [each.block for each in records]
        began = perf_counter()
        try:
            copy = self._copies.write(rows, blocks)
        except Exception:  # at the border of a tier: a failed load is a miss
            _log.exception("%d KV blocks could not be copied to the device", len(blocks))
            for record in records:
                self._fail(record.key, record.tier)
            self._copies.wait()  # the copies that were started use the blocks
            for record in records:
                self._release(record)
            return
        if copy.done():  # on a CPU; a GPU's copy is only seen to be complete at the next plan
            self._tiers[0].measure((perf_counter() - began) / len(records))
        self._writing.append(_Writing(copy, records))

    def _fail(self, key: bytes, tier: int) -> None:
        self._tiers[tier].num_failures += 1
        self._ended.append((key, False))

    # ---- progress ----------------------------------------------------------------------------

    def poll(self) -> list[tuple[bytes, bool]]:
        self._advance()
        ended, self._ended = self._ended, []
        if self._others is not None:
            ended = self._others.agreed(ended)
        self.num_ended += len(ended)
        return ended

    def _advance(self) -> None:
        while self._saving and self._saving[0].copy.done():
            for key, row in self._saving.popleft().rows:
                self._host.commit(row, key)
                self._write_behind(key)
        self._write(self._take_fetched())
        for number, tier in enumerate(self._slow, 1):
            if tier.reads and (late := tier.give_up(self._clock())):
                self._give_up(number, late)
        while self._writing and self._writing[0].copy.done():
            self._finish(self._writing.popleft())
        if self._queued:
            self._fetch_queued()

    def _take_fetched(self) -> list[Record]:
        """The records that threads have read into rows, and that loads wait for."""
        fetched = []
        while not self._fetched.empty():
            record = self._fetched.get()
            is_awaited = self._slow[record.tier - 1].ended(record, self._clock())
            if record.ok and is_awaited:
                self._tiers[record.tier].measure(record.seconds / NUM_READERS)
                fetched.append(record)
            elif record.ok:
                self._host.commit(record.row, record.key)
            else:
                self._host.free(record.row)
                if is_awaited:
                    self._fail(record.key, record.tier)
        return fetched

    def _give_up(self, number: int, late: list[Record]) -> None:
        """Fail the loads from a store that does not answer. Its reads may still write the rows of `late`."""
        for record in late:
            self._fail(record.key, number)
        for key, _, _ in (each for each in self._queued if each[2] == number):
            self._fail(key, number)
        self._queued = deque(each for each in self._queued if each[2] != number)

    def _finish(self, writing: _Writing) -> None:
        for record in writing.records:
            self._tiers[record.tier].num_loads += 1
            self._release(record)
            self._ended.append((record.key, True))
        # The device has these records, too. Prefixes are evicted from their end, so the last come
        # first.
        for record in reversed(writing.records):
            self._host.evict_first(record.key)

    def _release(self, record: Record) -> None:
        """Give up the row of a complete record."""
        if record.tier:
            self._host.commit(record.row, record.key)
        else:
            self._host.unpin(record.row)

    def encode_ended(self) -> bytes:
        """For rank 0, from another rank: whether saves are in progress, and the loads that have ended."""
        ended = self.poll()
        found = b"".join(bytes((ok, len(key))) + key for key, ok in ended)
        return bytes((self.is_saving,)) + found

    def clear(self) -> None:
        if self._others is not None:
            self._others.clear()
        self._finish_saves()
        self._host.clear()

    def _finish_saves(self) -> None:
        for saving in self._saving:
            saving.copy.wait()
        self._advance()

    def stats(self) -> list[TierStats]:
        found = []
        for number, tier in enumerate(self._tiers):
            stats = tier.store.stats()
            found.append(
                TierStats(
                    name=tier.store.name,
                    num_records=stats.num_records,
                    num_bytes=stats.num_bytes,
                    max_bytes=stats.max_bytes,
                    num_saves=stats.writes,
                    num_loads=tier.num_loads,
                    num_failures=tier.num_failures,
                    num_refused=stats.refused + tier.num_refused,
                    num_corrupt=stats.corrupt,
                    num_evictions=stats.evictions,
                    record_s=self.record_s(number),
                )
            )
        return found

    def close(self) -> None:
        """Complete all copies and writes to other stores, on all ranks."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._others is not None:
            self._others.close()
        self._finish_saves()
        for tier in self._slow:
            tier.close()
        self._copies.close()


class _OtherRanks:
    """The loads of all ranks: each counts when every rank has reported it.

    `incomplete`: keys whose records some ranks have lost. They are misses until they are saved again;
    ranks that have them skip the copy.
    """

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._reports: dict[bytes, list[bool]] = {}
        self.are_saving = False
        self.incomplete: dict[bytes, None] = {}

    def lose(self, keys: Iterable[bytes]) -> None:
        self.incomplete.update(dict.fromkeys(keys))
        while len(self.incomplete) > _MAX_INCOMPLETE:
            del self.incomplete[next(iter(self.incomplete))]

    def complete(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.incomplete.pop(key, None)

    def agreed(self, own: list[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
        replies = self._followers.call("kv_loads")
        self.are_saving = any(reply[0] for reply in replies)
        for key, ok in own:
            self._reports.setdefault(key, []).append(ok)
        for reply in replies:
            at = 1
            while at < len(reply):
                end = at + 2 + reply[at + 1]
                self._reports.setdefault(reply[at + 2 : end], []).append(bool(reply[at]))
                at = end
        num_ranks = 1 + len(replies)
        reported = [key for key, oks in self._reports.items() if len(oks) == num_ranks]
        ended = [(key, all(self._reports.pop(key))) for key in reported]
        self.lose(key for key, ok in ended if not ok)
        return ended

    def clear(self) -> None:
        self._followers.call("kv_clear")
        self.incomplete.clear()

    def close(self) -> None:
        """Wait until the other ranks have written what they save."""
        try:
            self._followers.call("kv_close")
        except EngineError as error:  # they have ended
            _log.warning("KV blocks of other ranks may not be stored: %s", error)
