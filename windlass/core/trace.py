"""What is told of one request when it has ended: where its time went, and what it used.

Plain values that travel to the server. Who fills them in while the request runs is accounting.py;
what follows from them, in words, is serve/explain.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from windlass.core.types import FinishReason, Timeline

# What a waiting request can be kept by, in the order of `RequestTrace.blocked_s`.
BLOCKERS = (
    "sequences",  # as many requests run as may
    "tokens",  # the steps were full
    "blocks",  # the KV cache was full
    "adapter",  # its adapter was being read, or had no slot on the device
    "shared prefix",  # another request was computing most of what it needs
    "batch",  # static batching: the batch before it had not ended, or its own not formed
    "sample",  # interrupted, with its last sample still on its way
    "grammar",  # its grammar was being compiled
)
SEQUENCES, TOKENS, BLOCKS, ADAPTER, PREFIX, BATCH, SAMPLE, GRAMMAR = range(len(BLOCKERS))

MAX_CHUNKS = 64


class Chunk(NamedTuple):
    """A step that computed several tokens of the request, or its first."""

    start: int
    num_tokens: int
    step_tokens: int  # of all requests in that step
    step_rows: int
    seconds: float  # that the step took


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Facts about one request, in seconds of the engine's clock and in counts."""

    request_id: str
    timeline: Timeline
    finish: FinishReason | None  # None: it has not ended
    ended: float  # or when this was told
    num_ahead: int  # requests that waited when it came
    num_running: int  # and that ran
    blocked_s: tuple[float, ...]  # one for each of BLOCKERS
    short_blocks: int  # the most that it lacked to start, when it was first in the queue
    first_miss: int | None  # the first position that was not found in the cache
    why_missed: str
    chunks: list[Chunk]  # the first MOST_CHUNKS of the prompt's
    batch: tuple[int, int, int] | None  # rows of its decode steps: least, median, most
    beside_prompts_s: float  # of the time after its first token: steps with prompts in them
    drafted: list[int]  # how many of its rows had so many guesses,
    accepted: list[int]  # and so many right ones
    waited_again_s: float  # after preemptions
    num_redone: int  # tokens computed again after preemptions
    redone_s: float
    # Its share of the steps' time.
    prefill_s: float
    decode_s: float
    saved_s: float  # what its cached tokens would have taken


_NOTHING_BLOCKED = (0.0,) * len(BLOCKERS)


class RequestAccounting:
    """What is noted of a request while it is in the engine. Few objects: there may be many of it."""

    __slots__ = (
        "accepted",
        "blocked",
        "blocked_before",
        "chunks",
        "decodes_from",
        "drafted",
        "first_miss",
        "mixed_before",
        "num_ahead",
        "num_redone",
        "num_running",
        "paid_from",
        "placed_at",
        "prefill_s",
        "queued_at",
        "redo_to",
        "redone_s",
        "seconds",
        "short_blocks",
        "waited_again_s",
        "why_missed",
    )

    def __init__(self) -> None:
        self.blocked = self.blocked_before = _NOTHING_BLOCKED
        self.chunks: list[Chunk] | None = None
        self.drafted: list[int] | None = None
        self.accepted: list[int] | None = None
        self.num_ahead = self.num_running = self.short_blocks = 0
        self.first_miss: int | None = None
        self.why_missed = ""
        self.queued_at = self.placed_at = self.mixed_before = 0.0
        self.waited_again_s = self.redone_s = 0.0
        self.num_redone = 0
        self.redo_to = 0  # how far it had got when it was interrupted
        self.decodes_from = 0  # the step
        self.prefill_s = 0.0
        self.seconds = 0.0  # of steps, apart from those since `paid_from`
        self.paid_from: float | None = None

    def block(self, blocker: int, seconds: float) -> None:
        sums = list(self.blocked)
        sums[blocker] += seconds
        self.blocked = tuple(sums)

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Add a row with guesses."""
        if self.drafted is None or self.accepted is None:
            self.drafted, self.accepted = [], []
        for counts, number in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            if number >= len(counts):
                counts += [0] * (number + 1 - len(counts))
            counts[number] += 1
