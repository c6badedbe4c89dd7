"""Scheduling policies: queue order, preemption order, and when queued requests may start."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from windlass.core.fair_share import CLASSES
from windlass.core.request import Request
from windlass.core.tenant_account import TenantAccount


class Policy(Protocol):
    """The order of requests: the smallest key runs first, the largest is preempted first."""

    def key(self, request: Request) -> tuple[int, ...]: ...


class Fcfs:
    """First come, first served, after health probes and before the requests of batches."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (CLASSES.get(request.priority, 0), request.arrival)


class Priority:
    """Lower `priority` first; among equals, first come, first served."""

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.priority, request.arrival)


class Gate(Protocol):
    """Limits how many queued requests may start now."""

    def openings(self, num_waiting: int, num_running: int, waited_s: float) -> int: ...

    def moved(self, started: int) -> None:
        """Called for every start (+1) and every preemption (-1)."""
        ...


class Continuous:
    """Continuous batching: start whatever fits at every step."""

    def openings(self, num_waiting: int, num_running: int, waited_s: float) -> int:  # noqa: ARG002
        return num_waiting

    def moved(self, started: int) -> None:
        pass


class Static:
    """Static batching: a batch starts together, and the next starts when all of it has finished.

    A batch forms when `max_batch_size` requests wait, or when the first has waited `max_wait_s`.
    A size of one means no batching.
    """

    def __init__(self, max_batch_size: int, max_wait_s: float) -> None:
        self._size = max_batch_size
        self._max_wait_s = max_wait_s
        self._left = 0  # requests of the forming batch that have not started

    def openings(self, num_waiting: int, num_running: int, waited_s: float) -> int:
        if num_running == 0 and self._left <= 0:
            ready = num_waiting >= self._size or waited_s >= self._max_wait_s
            self._left = min(self._size, num_waiting) if ready else 0
        return self._left

    def moved(self, started: int) -> None:
        self._left -= started


class _Lane:
    """Queued requests in policy order, of one tenant if tenants share the engine."""

    __slots__ = ("account", "heap", "key")

    def __init__(self, key: tuple[int, TenantAccount | None]) -> None:
        self.key = key
        self.account = key[1]
        self.heap: list[tuple[tuple[int, ...], Request]] = []

    @property
    def counter(self) -> float:
        return 0.0 if self.account is None else self.account.counter


class WaitingQueue:
    """The queued requests: tenants in order of their counters, and each tenant's requests in policy order.

    Owns the heaps. Removal is lazy, and so is the order of lanes: counters only grow, so a lane that
    has the smallest key and is up to date is the first.
    """

    def __init__(self, policy: Policy, by_tenant: bool = True) -> None:
        self._policy = policy
        self._by_tenant = by_tenant
        self._lanes: dict[tuple[int, TenantAccount | None], _Lane] = {}
        self._order: list[tuple[int, float, int, _Lane]] = []  # heap of (class, counter, age, lane)
        self._num_lanes = 0
        self._waiting: dict[str, Request] = {}
        self._aside: list[Request] = []
        # The state of adapters and grammars at which no queued request could start; None: unknown.
        self.stuck_at: object = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        self.stuck_at = None
        self._waiting[request.request_id] = request
        order = CLASSES.get(request.priority, 0) if self._by_tenant else 0
        key = (order, request.account if self._by_tenant else None)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
            heapq.heappush(self._order, (order, lane.counter, self._num_lanes, lane))
            self._num_lanes += 1
        heapq.heappush(lane.heap, (self._policy.key(request), request))

    def _first(self) -> _Lane | None:
        """The first lane; its head is a queued request."""
        lanes = self._order
        while lanes:
            order, counter, age, lane = lanes[0]
            heap = lane.heap
            while heap and self._waiting.get(heap[0][1].request_id) is not heap[0][1]:
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(lanes)
                del self._lanes[lane.key]
            elif counter != lane.counter:
                heapq.heapreplace(lanes, (order, lane.counter, age, lane))
            else:
                return lane
        return None

    def peek(self) -> Request | None:
        lane = self._first()
        return None if lane is None else lane.heap[0][1]

    def pop(self) -> Request:
        lane = self._first()
        assert lane is not None, "no request is queued"
        request = heapq.heappop(lane.heap)[1]
        del self._waiting[request.request_id]
        return request

    def set_aside(self) -> Request:
        """Pass over the head until `restore`."""
        self._aside.append(self.pop())
        return self._aside[-1]

    def restore(self, stuck_at: object = None) -> None:
        """Put passed-over requests back. `stuck_at`: the state that must change before they can start."""
        for request in self._aside:
            self.push(request)
        self._aside.clear()
        self.stuck_at = stuck_at

    def remove(self, request: Request) -> None:
        self._waiting.pop(request.request_id, None)


class InflightPrefixes:
    """Blocks that running requests are computing, by hash, until they are sealed.

    A request that needs the same blocks waits a step or two for them instead of computing them a
    second time.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._by_hash: dict[bytes, Request] = {}

    def add(self, request: Request, start: int) -> None:
        """Register the full blocks that `request` computes from position `start` on."""
        count = len(request.tokens) // self._size
        for digest in request.hashes(count, self._size)[start // self._size :]:
            self._by_hash.setdefault(digest, request)

    def sealed(self, digest: bytes) -> None:
        """Remove a block that was sealed."""
        self._by_hash.pop(digest, None)

    def drop(self, request: Request) -> None:
        """Remove the blocks of a request that was released before it computed them."""
        if self._by_hash:
            for digest in request.hashes(len(request.tokens) // self._size, self._size):
                if self._by_hash.get(digest) is request:
                    del self._by_hash[digest]

    def should_wait(self, request: Request, num_cached: int) -> bool:
        """Whether other requests are computing at least half of the blocks that `request` still needs."""
        if not self._by_hash or not request.may_read_cache:
            return False
        count = len(request.tokens) // self._size
        num_inflight = 0
        for digest in request.hashes(count, self._size)[num_cached:]:
            if digest not in self._by_hash:
                break
            num_inflight += 1
        left = len(request.tokens) - num_cached * self._size
        return num_inflight > 0 and 2 * num_inflight * self._size >= left
