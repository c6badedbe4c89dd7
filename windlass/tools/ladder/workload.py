"""The ladder's requests: a mix of workloads in token ids, at low load and at saturation.

Every rung gets the same requests. Output lengths vary, since uneven lengths slow static batching.
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
from windlass.tools.common.requests import Request, TextRequest, max_request_len
from windlass.tools.common.text_workload import TEXT_WORKLOADS, Sizes, make_requests

LOAD_NAMES = {"low": "low load", "sat": "saturation"}  # by the prefix of their figures
_LOADS_BY_FLAG = {"low": "low", "saturation": "sat"}
_PROMPT_FACTOR = 4  # prompts without a system prompt are this many times input_len
_SPREAD = 0.5  # output lengths vary by this ratio around the mean


@dataclass(frozen=True, slots=True)
class LadderLoad:
    """Requests of one load and their concurrency limit."""

    name: str
    requests: list[Request]
    max_concurrency: int | None = None

    def first(self, count: int | None) -> LadderLoad:
        """The first `count` requests, or all; requests only follow earlier ones."""
        return self if count is None else replace(self, requests=self.requests[:count])

    @property
    def max_request_len(self) -> int:
        return max_request_len(self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(item.prompt) + item.num_output for item in self.requests)


@dataclass(frozen=True, slots=True)
class WorkloadMix:
    """Sizes of the generated requests. Lengths are in tokens."""

    workload: str = "chat:3,random:1"
    num_requests: int = 16
    low_requests: int = 4
    prefix_len: int = 448
    input_len: int = 24
    output_len: int = 32
    turns: int = 1  # of a chat; later turns wait for the answer, which lowers the concurrency
    low_rate: float | None = None  # Poisson; None: one request at a time
    naive_requests: int | None = None  # requests of the naive rung; None: all

    def __post_init__(self) -> None:
        self.shares()
        sizes = ("num_requests", "low_requests", "prefix_len", "input_len", "output_len", "turns")
        at_least(self, 1, *sizes)
        if self.naive_requests is not None:
            at_least(self, 1, "naive_requests")
        if self.low_rate is not None:
            Arrivals("poisson", self.low_rate)

    def shares(self) -> list[tuple[str, int]]:
        """The workloads and their relative shares of the requests."""
        found = []
        for part in filter(None, (part.strip() for part in self.workload.split(","))):
            name, colon, share = part.partition(":")
            if name not in TEXT_WORKLOADS:
                raise ConfigError(
                    f"--workload: the workload {name!r} is not known. Known: {', '.join(TEXT_WORKLOADS)}; "
                    "several with commas and relative shares, such as chat:3,random:1."
                )
            if colon and (not share.isdigit() or int(share) < 1):
                raise ConfigError(f"--workload {part!r}: expected an integer share above 0.")
            found.append((name, int(share) if colon else 1))
        if not found:
            raise ConfigError(f"--workload is empty. Known: {', '.join(TEXT_WORKLOADS)}.")
        return found

    def loads(self, card: ModelCard) -> dict[str, LadderLoad]:
        """Low load and saturation. At saturation all requests arrive at once, but later turns."""
        texts = self._text_requests(card, self.low_requests, "low")
        if self.low_rate is None:
            low = LadderLoad("one at a time", _tokens(texts, card), max_concurrency=1)
        else:
            timed = Arrivals("poisson", self.low_rate).set(texts, "low")
            low = LadderLoad(f"{self.low_rate:g} req/s", _tokens(timed, card))
        texts = self._text_requests(card, self.num_requests, "saturation")
        return {"low": low, "sat": LadderLoad("all at once", _tokens(texts, card))}

    def _text_requests(self, card: ModelCard, count: int, seed: str) -> list[TextRequest]:
        writer = writer_for(card)
        shares = self.shares()
        total = sum(share for _, share in shares)
        lists = []
        for name, share in shares:
            num = max(1, round(count * share / total))
            lists.append(make_requests(name, self._sizes(name, num), writer=writer, seed=seed))
        random = Random(f"lengths {seed}")
        low, high = self.output_len * (1 - _SPREAD), self.output_len * (1 + _SPREAD)
        return [
            replace(request, max_tokens=max(1, random.randint(round(low), round(high))))
            for request in _merged(lists)
        ]

    def _sizes(self, name: str, count: int) -> Sizes:
        takes = TEXT_WORKLOADS[name].takes
        if "prefix_len" not in takes or name == "random":
            return Sizes(count, _PROMPT_FACTOR * self.input_len, self.output_len)
        return Sizes(
            num_prompts=count,
            input_len=self.input_len,
            output_len=self.output_len,
            prefix_len=self.prefix_len,
            turns=self.turns if "turns" in takes else None,
        )


def find_loads(names: Sequence[str]) -> tuple[str, ...]:
    """The loads of these names; without names, both."""
    known = ", ".join(_LOADS_BY_FLAG)
    unknown = [name for name in names if name not in _LOADS_BY_FLAG]
    if unknown:
        raise ConfigError(f"--loads: {unknown[0]!r} is not known. Known: {known}.")
    return tuple(key for name, key in _LOADS_BY_FLAG.items() if not names or name in names)


def _merged(lists: Sequence[list[TextRequest]]) -> list[TextRequest]:
    """Interleave the lists evenly. Each keeps its order, and `follows` is renumbered."""
    positions = sorted(
        ((index + 0.5) / len(requests), source, index)
        for source, requests in enumerate(lists)
        for index in range(len(requests))
    )
    number = {(source, index): at for at, (_, source, index) in enumerate(positions)}
    merged = []
    for _, source, index in positions:
        request = lists[source][index]
        before = None if request.follows is None else number[source, request.follows]
        merged.append(replace(request, follows=before))
    return merged


def _tokens(requests: Sequence[TextRequest], card: ModelCard) -> list[Request]:
    return tokenize(requests, card, template_prompts=False)
