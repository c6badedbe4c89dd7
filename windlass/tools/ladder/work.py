"""The requests of the rungs: a mix of workloads in tokens, at low load and at saturation.

Every rung gets the same requests. Output lengths differ from request to request, since this is what
static batches suffer from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.settings import at_least
from windlass.tools.common.arrivals import Arrivals
from windlass.tools.common.load import tokenize, writer_for
from windlass.tools.common.requests import Request, TextRequest
from windlass.tools.common.requests import longest as longest_of
from windlass.tools.common.text_workload import LOADS, Sizes, make_load

LOAD_NAMES = {"low": "low load", "sat": "saturation"}  # by the name that their figures begin with
_ASKED_AS = {"low": "low", "saturation": "sat"}
_OWN_TEXT = 4  # prompts without a system prompt are so many questions long
_SPREAD = 0.5  # answers are so much shorter or longer than their mean


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one load, and how many of them may be under way at once."""

    name: str
    requests: list[Request]
    at_once: int | None = None

    def first(self, count: int | None) -> Work:
        """So many of the requests, or all; none follows one that is left out."""
        return self if count is None else replace(self, requests=self.requests[:count])

    @property
    def longest(self) -> int:
        return longest_of(self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(item.prompt) + item.num_output for item in self.requests)


@dataclass(frozen=True, slots=True)
class Mix:
    """How the requests are made. Lengths are in tokens."""

    workload: str = "chat:3,random:1"
    num_requests: int = 16
    low_requests: int = 4
    prefix_len: int = 448
    input_len: int = 24
    output_len: int = 32
    turns: int = 1  # of a chat; later ones wait for their answers, so that fewer are under way
    low_rate: float | None = None  # Poisson; None: one client, that waits for its answer
    naive_requests: int | None = None  # for one at a time, the first; None: all

    def __post_init__(self) -> None:
        self.shares()
        sizes = ("num_requests", "low_requests", "prefix_len", "input_len", "output_len", "turns")
        at_least(self, 1, *sizes)
        if self.naive_requests is not None:
            at_least(self, 1, "naive_requests")
        if self.low_rate is not None:
            Arrivals("poisson", self.low_rate)

    def shares(self) -> list[tuple[str, int]]:
        """The loads, and how many parts of the requests each has."""
        found = []
        for part in filter(None, (part.strip() for part in self.workload.split(","))):
            name, colon, share = part.partition(":")
            if name not in LOADS:
                raise ConfigError(
                    f"--workload: the load {name!r} is not known. Known: {', '.join(LOADS)}; "
                    "several with commas, and their parts: chat:3,random:1."
                )
            if colon and (not share.isdigit() or int(share) < 1):
                raise ConfigError(f"--workload {part!r}: expected a whole number of parts.")
            found.append((name, int(share) if colon else 1))
        if not found:
            raise ConfigError(f"--workload names none. Known: {', '.join(LOADS)}.")
        return found

    def works(self, card: ModelCard) -> tuple[Work, Work]:
        """Low load, and saturation: all at once, but later turns after their answers."""
        low = self._text_requests(card, self.low_requests, "low")
        if self.low_rate is None:
            slow = Work("one at a time", _tokens(low, card), 1)
        else:
            timed = Arrivals("poisson", self.low_rate).set(low, "low")
            slow = Work(f"{self.low_rate:g} req/s", _tokens(timed, card))
        full = self._text_requests(card, self.num_requests, "saturation")
        return slow, Work("all at once", _tokens(full, card))

    def _text_requests(self, card: ModelCard, count: int, seed: str) -> list[TextRequest]:
        writer = writer_for(card)
        shares = self.shares()
        whole = sum(share for _, share in shares)
        lists = []
        for name, share in shares:
            num = max(1, round(count * share / whole))
            lists.append(make_load(name, self._sizes(name, num), writer, seed))
        random = Random(f"lengths {seed}")
        low, high = self.output_len * (1 - _SPREAD), self.output_len * (1 + _SPREAD)
        return [
            replace(request, max_tokens=max(1, random.randint(round(low), round(high))))
            for request in _merged(lists)
        ]

    def _sizes(self, name: str, count: int) -> Sizes:
        takes = LOADS[name].takes
        if "prefix_len" not in takes or name == "random":
            return Sizes(count, _OWN_TEXT * self.input_len, self.output_len)
        turns = self.turns if "turns" in takes else None
        return Sizes(count, self.input_len, self.output_len, self.prefix_len, turns)


def find_loads(names: Sequence[str]) -> tuple[str, ...]:
    """The loads of these names, or both."""
    unknown = [name for name in names if name not in _ASKED_AS]
    if unknown:
        raise ConfigError(f"--loads: {unknown[0]!r} is not known. Known: {', '.join(_ASKED_AS)}.")
    return tuple(key for name, key in _ASKED_AS.items() if not names or name in names)


def _merged(lists: Sequence[list[TextRequest]]) -> list[TextRequest]:
    """All of them, evenly mixed; each list keeps its order, and what follows what."""
    places = [
        ((index + 0.5) / len(requests), which, index)
        for which, requests in enumerate(lists)
        for index in range(len(requests))
    ]
    number = {(which, index): at for at, (_, which, index) in enumerate(sorted(places))}
    merged = []
    for _, which, index in sorted(places):
        request = lists[which][index]
        before = None if request.follows is None else number[which, request.follows]
        merged.append(replace(request, follows=before))
    return merged


def _tokens(requests: Sequence[TextRequest], card: ModelCard) -> list[Request]:
    return tokenize(requests, card, template_prompts=False)
