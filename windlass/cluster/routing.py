"""Which replica of a fleet computes a request: the policy of serve/routing.py, by replica ids.

Ray Serve's router asks for a choice in a thread of its own, and the ingress reports the progress of
requests from its event loop. A router that starts anew knows no prefixes: requests of a conversation
may go to another replica once, which computes the prompt again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from windlass.core.types import NewRequest
from windlass.serve.routing import PrefixRouter


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica of any machine."""

    request: NewRequest
    remaining_s: float | None = None  # until its deadline: clocks of machines differ
    tracked: bool = True
    replica: str = ""  # must compute it; "": any
    avoid: str = ""  # a replica that has lost it


class FleetRouting:
    """Owns the router of one deployment in this process. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._router = PrefixRouter(1, ())
        self._max_blocks = 0
        self._is_configured = False
        self._numbers: dict[str, int] = {}  # of replicas, by id
        self._next_number = 0
        self._down: set[str] = set()  # replicas whose engine is being restarted
        self._placed: dict[str, str] = {}  # replica ids by request

    def configure(self, block_size: int, max_blocks: int) -> None:
        """Set the size of the replicas' prefix caches; 0 blocks: they have none."""
        with self._lock:
            if not self._is_configured:
                self._is_configured = True
                self._router, self._max_blocks = PrefixRouter(block_size, ()), max_blocks
                for number in self._numbers.values():
                    self._router.add(number, max_blocks)
                self._placed.clear()

    def set_replicas(self, ids: Collection[str]) -> None:
        """Set the replicas that run now."""
        with self._lock:
            for gone in self._numbers.keys() - set(ids):
                self._router.remove(self._numbers.pop(gone))
                self._down.discard(gone)
            for each in ids:
                self._number(each)

    def _number(self, replica: str) -> int:
        if replica not in self._numbers:
            self._numbers[replica] = self._next_number
            self._router.add(self._next_number, self._max_blocks)
            self._next_number += 1
        return self._numbers[replica]

    def choose(self, call: Call, ids: Sequence[str]) -> list[str]:
        """The replicas, best first; counts the request at the first of them."""
        request = call.request
        with self._lock:
            ids = [each for each in ids if each != call.avoid] or ids
            ids = [each for each in ids if each not in self._down] or ids
            by_number = {self._number(each): each for each in ids}
            if self._placed.pop(request.request_id, None) is not None:  # it was full
                self._router.ended(request.request_id)
            order = self._router.rank(request, by_number)
            self._router.place(request, order[0])
            self._placed[request.request_id] = by_number[order[0]]
            return [by_number[each] for each in order]

    def routed(self, request: NewRequest, replica: str) -> None:
        """The request was accepted by `replica`, perhaps after the first choice had refused it."""
        with self._lock:
            placed = self._placed.get(request.request_id)
            if placed is not None and placed != replica:
                self._router.ended(request.request_id)
                self._router.place(request, self._number(replica))
                self._placed[request.request_id] = replica

    def prompt_computed(self, request_id: str) -> None:
        with self._lock:
            self._router.prompt_computed(request_id)

    def ended(self, request_id: str, num_output: int | None = None) -> None:
        """Remove a request. `num_output`: its length; None: it did not end by itself."""
        with self._lock:
            if self._placed.pop(request_id, None) is not None:
                self._router.ended(request_id, num_output)

    def observe(self, replica: str, num_outstanding: float, *, is_up: bool) -> None:
        """A replica reports its engine's state, and the outstanding tokens of all ingresses."""
        with self._lock:
            if replica in self._numbers:
                self._router.observe(self._numbers[replica], num_outstanding)
                (self._down.discard if is_up else self._down.add)(replica)

    def replica_of(self, request_id: str) -> str | None:
        """Where a request is; None: it is not known."""
        with self._lock:
            return self._placed.get(request_id)

    def caches_lost(self) -> None:
        """The prefix caches of all replicas were emptied."""
        with self._lock:
            for number in self._numbers.values():
                self._router.cache_lost(number)


# Ray Serve makes its routers itself, one per process and deployment: both sides find theirs here.
_ROUTINGS: dict[str, FleetRouting] = {}


def routing_of(deployment: str) -> FleetRouting:
    return _ROUTINGS.setdefault(deployment, FleetRouting())
