"""The trace of one request: where its time went, and what it used.

Plain values that travel to the server. accounting.py fills them in while the request runs;
serve/explain.py turns them into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from windlass.core.types import FinishReason, Timeline

# What can block a queued request, in the order of `RequestTrace.blocked_s`.
BLOCKERS = (
    "sequences",  # max_num_seqs requests are running
    "tokens",  # the token budget of the steps was used up
    "blocks",  # the KV cache was full
    "adapter",  # its adapter was loading, or no device slot was free
    "shared prefix",  # another request was computing most of its prefix
    "batch",  # static batching: the previous batch was running, or its own was not full
    "sample",  # preempted while its last sample was in flight
    "grammar",  # its grammar was being compiled
    "slo",  # the SLO controller kept the steps short
    "tenants",  # the head of the queue belonged to a tenant that had been served less
    "kv",  # its KV blocks were being loaded from a tier
)
SEQUENCES, TOKENS, BLOCKS, ADAPTER, PREFIX, BATCH, SAMPLE, GRAMMAR, SLO, TENANTS, KV = range(
    len(BLOCKERS)
)
NEXT_STEP = "next step"  # queued requests that arrived since the last plan have no blocker yet

MAX_CHUNKS = 64


class Chunk(NamedTuple):
    """One step's part of a prompt."""

    start: int
    num_tokens: int
    step_tokens: int  # of all rows of that step
    step_rows: int
    seconds: float  # duration of the step


class HandoverTrace(NamedTuple):
    """How prefill and decode engines shared a request."""

    is_split: bool  # False: one engine has computed it
    num_blocks: int  # handed over
    seconds: float  # from the first token to the admission in the decode engine
    reason: str  # why one engine has computed it, or what failed; "": nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Facts about one request, in seconds of the engine's clock and in counts."""

    request_id: str
    timeline: Timeline
    finish: FinishReason | None  # None: still running
    ended: float  # or the time of this snapshot
    num_ahead: int  # queued requests at arrival
    num_running: int  # running requests at arrival
    blocked_s: tuple[float, ...]  # one entry per BLOCKERS
    short_blocks: int  # maximum shortage of KV blocks while it was the head of the queue
    first_miss: int | None  # first position without a prefix-cache hit
    why_missed: str
    chunks: list[Chunk]  # of the prompt, at most MAX_CHUNKS
    batch: tuple[int, int, int] | None  # rows of its decode steps: min, median, max
    mixed_steps_s: float  # after the first token: seconds of steps that also computed prompts
    drafted: list[int]  # [k]: rows with k draft tokens
    accepted: list[int]  # [k]: rows with k accepted draft tokens
    waited_again_s: float  # queue time after preemptions
    num_recomputed: int  # tokens computed again after preemptions
    recomputed_s: float
    # Its share of the step time.
    prefill_s: float
    decode_s: float
    saved_s: float  # estimated time to compute its cached tokens
    why_ended: str = ""  # set if its deadline ended it
    # Tokens whose KV was loaded, by tier; also after preemptions.
    loaded: dict[str, int] = field(default_factory=dict)
    tier_decision: str = ""  # "" if no tier had more of its prefix than the device
    handover: HandoverTrace | None = None  # None: all engines compute prompts and outputs


def merge_rounds(first: RequestTrace, later: RequestTrace) -> RequestTrace:
    """Add the request of a later round to the trace of a search, such as beam search.

    The first round computes the prompt: queue, blockers and prompt are its own.
    """
    times = replace(
        first.timeline,
        last_token=later.timeline.last_token,
        num_output=first.timeline.num_output + later.timeline.num_output,
    )
    return replace(
        first,
        timeline=times,
        finish=later.finish,
        ended=max(first.ended, later.ended),
        prefill_s=first.prefill_s + later.prefill_s,
        decode_s=first.decode_s + later.decode_s,
    )


_NOTHING_BLOCKED = (0.0,) * len(BLOCKERS)
_NOTHING_LOADED: Mapping[str, int] = {}


class RequestAccounting:
    """Running counters of one request. Kept small: there may be thousands of requests."""

    __slots__ = (
        "accepted",
        "admitted_at",
        "blocked",
        "blocked_before",
        "charged_from",
        "chunks",
        "decodes_from",
        "drafted",
        "first_miss",
        "loaded",
        "mixed_before",
        "num_ahead",
        "num_recomputed",
        "num_running",
        "prefill_s",
        "queued_at",
        "recompute_to",
        "recomputed_s",
        "seconds",
        "short_blocks",
        "tier_decision",
        "waited_again_s",
        "why_ended",
        "why_missed",
    )

    def __init__(self) -> None:
        self.blocked = self.blocked_before = _NOTHING_BLOCKED
        self.chunks: list[Chunk] | None = None
        self.drafted: list[int] | None = None
        self.accepted: list[int] | None = None
        self.num_ahead = self.num_running = self.short_blocks = 0
        self.first_miss: int | None = None
        self.why_missed = self.why_ended = self.tier_decision = ""
        self.loaded = _NOTHING_LOADED
        self.queued_at = self.admitted_at = self.mixed_before = 0.0
        self.waited_again_s = self.recomputed_s = 0.0
        self.num_recomputed = 0
        self.recompute_to = 0  # computed tokens at the last preemption
        self.decodes_from = 0  # index of its first decode step
        self.prefill_s = 0.0
        self.seconds = 0.0  # step time, without the steps since `charged_from`
        self.charged_from: float | None = None

    def block(self, blocker: int, seconds: float) -> None:
        sums = list(self.blocked)
        sums[blocker] += seconds
        self.blocked = tuple(sums)

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count a row with draft tokens."""
        if self.drafted is None or self.accepted is None:
            self.drafted, self.accepted = [], []
        for counts, number in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            if number >= len(counts):
                counts += [0] * (number + 1 - len(counts))
            counts[number] += 1
