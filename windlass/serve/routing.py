"""Chooses the replica that computes a request: cached prefix tokens against outstanding tokens.

The router knows what it sent: the prompts, as block hashes, and the requests that have not ended. It
has no I/O and no clock, and asks no replica. What a replica evicted or never cached is an error of its
estimates that costs time and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from windlass.core.blocks import block_hash, root_hash
from windlass.core.types import NewRequest

# Prompt tokens of one request share a step, generated tokens do not: they count more.
DECODE_WEIGHT = 4
# A cached token saves the time of its request and that of the requests behind it.
CACHED_WEIGHT = 2
MAX_IMBALANCE = 8192  # outstanding tokens above the least loaded replica's, for a cached prefix
_FIRST_OUTPUT = 128  # expected output tokens, before any request has ended
_SMOOTHING = 1 / 16


class PrefixIndex:
    """The block hashes of the prompts that one replica got; the least recently used ones are dropped."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_found(self, hashes: Sequence[bytes]) -> int:
        """The number of leading hashes that are here."""
        known = self._hashes
        return next((at for at, each in enumerate(hashes) if each not in known), len(hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """Add a prompt. Its tail is dropped before its head, as the block pool evicts."""
        known = self._hashes
        for each in reversed(hashes):
            known[each] = None
            known.move_to_end(each)
        while len(known) > self.max_blocks:
            known.popitem(last=False)

    def num_evicted(self, num_new: int) -> int:
        """The hashes that `num_new` further ones would replace."""
        return max(0, min(num_new, len(self._hashes) + num_new - self.max_blocks))

    def clear(self) -> None:
        self._hashes.clear()


@dataclass(slots=True)
class _Replica:
    index: PrefixIndex
    num_own: float = 0.0  # outstanding tokens of requests that this router has sent
    num_others: float = 0.0  # of other routers, as the replica has reported
    chosen_at: int = 0  # number of the choice

    @property
    def num_outstanding(self) -> float:
        return self.num_own + self.num_others


@dataclass(slots=True)
class _Placed:
    """A request that has not ended, and its share of the outstanding tokens of its replica."""

    replica: int
    num_uncached: int
    num_decode: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may be chosen. Token counts are estimates."""

    replica: int
    num_outstanding: float
    num_cached: int  # tokens of the request's prompt
    chosen_at: int
    num_evicted: int = 0  # cached tokens of other prompts that this one would evict


def ranked(
    candidates: Sequence[Candidate], max_imbalance: float = MAX_IMBALANCE
) -> list[Candidate]:
    """All candidates, best first: those that `choose` would return if the ones before were absent."""
    limit = min(each.num_outstanding for each in candidates) + max_imbalance
    return sorted(candidates, key=lambda each: (each.num_outstanding > limit, *_rank(each)))


def choose(candidates: Sequence[Candidate], max_imbalance: float = MAX_IMBALANCE) -> Candidate:
    """The candidate with the fewest outstanding and evicted tokens, less its weighted cached tokens.

    A candidate is never chosen if it is ahead of the least loaded one by more outstanding tokens than
    its weighted cached tokens and those that the other would evict, or than `max_imbalance`. Equals
    take turns.
    """
    limit = min(each.num_outstanding for each in candidates) + max_imbalance
    eligible = (each for each in candidates if each.num_outstanding <= limit)
    return min(eligible, key=_rank)


def _rank(each: Candidate) -> tuple[float, int]:
    num_tokens = each.num_outstanding + each.num_evicted - CACHED_WEIGHT * each.num_cached
    return num_tokens, each.chosen_at


class PrefixRouter:
    """Owns the index and the outstanding tokens of every replica.

    `max_blocks`: of each replica's prefix cache; 0: it has none.
    """

    def __init__(self, block_size: int, max_blocks: Sequence[int]) -> None:
        self._block_size = block_size
        self._replicas = {
            number: _Replica(PrefixIndex(count)) for number, count in enumerate(max_blocks)
        }
        self._placed: dict[str, _Placed] = {}
        self._num_choices = 0
        self._mean_output = float(_FIRST_OUTPUT)
        self._last_hashed: tuple[str, list[int], list[bytes]] = "", [], []

    def add(self, replica: int, max_blocks: int) -> None:
        """Add a replica that has just started."""
        self._replicas[replica] = _Replica(PrefixIndex(max_blocks))

    def remove(self, replica: int) -> None:
        """Forget a replica that is gone."""
        del self._replicas[replica]

    def route(self, request: NewRequest, replicas: Iterable[int]) -> int:
        """Choose one of `replicas` for a request and count it there until `ended`."""
        hashes = self._hashes(request)
        chosen = choose([self._candidate(request, hashes, replica) for replica in replicas])
        self._place(request, hashes, chosen)
        return chosen.replica

    def rank(self, request: NewRequest, replicas: Iterable[int]) -> list[int]:
        """All `replicas`, best first, for a caller that may find some of them full, and then calls `place`."""
        hashes = self._hashes(request)
        candidates = [self._candidate(request, hashes, replica) for replica in replicas]
        return [each.replica for each in ranked(candidates)]

    def place(self, request: NewRequest, replica: int) -> None:
        """Count a request at `replica` until `ended`."""
        hashes = self._hashes(request)
        self._place(request, hashes, self._candidate(request, hashes, replica))

    def _place(self, request: NewRequest, hashes: Sequence[bytes], chosen: Candidate) -> None:
        self._num_choices += 1
        replica = self._replicas[chosen.replica]
        replica.chosen_at = self._num_choices
        replica.index.add(hashes)
        max_tokens = request.sampling.max_tokens
        num_output = self._mean_output
        placed = _Placed(
            replica=chosen.replica,
            num_uncached=len(request.prompt) - chosen.num_cached,
            num_decode=DECODE_WEIGHT * min(num_output, max_tokens or num_output),
        )
        self._placed[request.request_id] = placed
        replica.num_own += placed.num_uncached + placed.num_decode

    def num_cached(self, request: NewRequest, replicas: Iterable[int]) -> int:
        """The most prompt tokens of a request that one of these replicas has cached."""
        hashes = self._hashes(request)
        found = (self._replicas[each].index.num_found(hashes) for each in replicas)
        return max(found, default=0) * self._block_size

    def _hashes(self, request: NewRequest) -> list[bytes]:
        """The hashes of the prompt's full blocks. Salt and adapter separate prefixes, as in the engine."""
        size, prompt = self._block_size, request.prompt
        mode = "fixed" if request.sampling.deterministic else ""
        salt = f"{request.adapter}\0{request.cache_salt}\0{mode}"
        last_salt, last_prompt, hashes = self._last_hashed
        if prompt is last_prompt and salt == last_salt:  # completions of one prompt share its list
            return hashes
        parent, hashes = root_hash(salt), []
        for start in range(0, len(prompt) - size + 1, size):
            parent = block_hash(parent, prompt[start : start + size])
            hashes.append(parent)
        self._last_hashed = salt, prompt, hashes
        return hashes

    def _candidate(self, request: NewRequest, hashes: Sequence[bytes], number: int) -> Candidate:
        replica = self._replicas[number]
        num_found = replica.index.num_found(hashes)
        num_cached = 0
        if request.sampling.prompt_logprobs is None:  # else every prompt token is computed
            # The last token is always computed.
            num_cached = min(num_found * self._block_size, len(request.prompt) - 1)
        num_evicted = replica.index.num_evicted(len(hashes) - num_found)
        return Candidate(
            replica=number,
            num_outstanding=replica.num_outstanding,
            num_cached=num_cached,
            chosen_at=replica.chosen_at,
            num_evicted=num_evicted * self._block_size,
        )

    def prompt_computed(self, request_id: str) -> None:
        """The first token of a request has arrived."""
        placed = self._placed.get(request_id)
        if placed is not None and placed.replica in self._replicas:
            self._replicas[placed.replica].num_own -= placed.num_uncached
            placed.num_uncached = 0

    def ended(self, request_id: str, num_output: int | None = None) -> None:
        """Remove a request. `num_output`: its length; None: it did not end by itself."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        replica = self._replicas.get(placed.replica)
        if replica is not None:  # else it was removed
            replica.num_own -= placed.num_uncached + placed.num_decode
        if num_output is not None:
            self._mean_output += _SMOOTHING * (num_output - self._mean_output)

    def cache_lost(self, replica: int, max_blocks: int | None = None) -> None:
        """Forget the prefixes of a replica whose cache was emptied; `max_blocks`: its new size."""
        index = self._replicas[replica].index
        index.clear()
        if max_blocks is not None:
            index.max_blocks = max_blocks

    def observe(self, replica: int, num_outstanding: float) -> None:
        """A replica reports its outstanding tokens, of which other routers may have sent some."""
        found = self._replicas[replica]
        found.num_others = max(0.0, num_outstanding - found.num_own)

    def outstanding(self, replica: int) -> float:
        """The outstanding tokens of a replica: uncomputed prompt tokens, and weighted decode tokens."""
        return self._replicas[replica].num_outstanding
