"""Requests of which one engine computes the prompt and another one generates the output.

    prefill     the prefill engine computes the prompt and samples the first token
    transfer    the client has that token; the engine stores the blocks where others can read them
    decode      a decode engine loads the blocks and goes on after the first token

client.py sends the requests; this module decides which of them are split, and keeps the state of each. A
request that cannot be split, or whose split fails, is computed by one engine: the reason is counted and
part of its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from windlass.config import Role
from windlass.core.handover import HandedBlocks
from windlass.core.trace import HandoverTrace, RequestTrace
from windlass.core.types import NewRequest, Output, Timeline

Stage = Literal["whole", "prefill", "transfer", "decode"]

HANDED_OVER = "handed over"
# Why a request was computed by one engine.
SHORT = "short prompt"  # by its uncached tokens
ONE_TOKEN = "one token"  # it has no output after its first token
NO_PREFILL = "no prefill engine"
NO_DECODE = "no decode engine"
OTHER_ADAPTER = "adapter of this server"  # another host may have other weights of that name
PREFILL_REFUSED = "prefill engine refused"  # its queue is full, for example
# Why the decode engine computed blocks of the prompt again, or the whole prompt.
PREFILL_DIED = "prefill engine died"
NOT_STORED = "blocks not stored"


@dataclass(slots=True)
class SplitRequest:
    """The state of one request."""

    stage: Stage
    reason: str = ""  # why it is whole, or what failed
    generated: tuple[int, ...] = ()
    timeline: Timeline | None = None  # of the prefill engine
    trace: RequestTrace | None = None  # of the prefill engine
    handed: HandedBlocks | None = None
    prefill_replica: int | None = None
    has_ended: bool = False  # its client has all outputs, or has gone
    is_traced: bool = False  # its last trace has arrived


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """Which replicas compute prompts, and which prompts are worth a transfer."""

    roles: tuple[Role, ...]  # of each replica
    min_tokens: int  # a decode engine computes prompts with fewer uncached tokens itself

    def prefill(self, replicas: Sequence[int]) -> list[int]:
        return [each for each in replicas if self.roles[each] == "prefill"]

    def decode(self, replicas: Sequence[int]) -> list[int]:
        return [each for each in replicas if self.roles[each] != "prefill"]


class Handovers:
    """Owns the state of the requests in flight that may be split."""

    def __init__(self, policy: SplitPolicy) -> None:
        self.policy = policy
        self._requests: dict[str, SplitRequest] = {}
        # Called for each request with HANDED_OVER, or the reason why one engine computes it or a part of
        # its prompt is computed twice, and with the number of blocks that were handed over.
        self.on_result: Callable[[str, int], None] = _ignore

    def begin(
        self, request: NewRequest, up: Sequence[int], num_cached: int, *, own_adapter: bool = False
    ) -> tuple[NewRequest, list[int]]:
        """Decide how to compute a request: what to send, and the replicas to choose from.

        `num_cached`: prompt tokens that a decode engine has. `own_adapter`: only decode engines have it.
        """
        prefill, decode = self.policy.prefill(up), self.policy.decode(up)
        state = self._requests[request.request_id] = SplitRequest("whole")
        num_uncached = len(request.prompt) - num_cached
        if not decode:
            state.reason, chosen = NO_DECODE, prefill
        elif not prefill:
            state.reason, chosen = NO_PREFILL, decode
        elif own_adapter:
            state.reason, chosen = OTHER_ADAPTER, decode
        elif num_uncached < self.policy.min_tokens:
            state.reason, chosen = SHORT, decode
        elif request.pooling is not None or request.sampling.max_tokens in (0, 1):
            state.reason, chosen = ONE_TOKEN, prefill
        else:
            state.stage = "prefill"
            return replace(request, hand_over=True), prefill
        self.on_result(state.reason, 0)
        return request, chosen

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> SplitRequest | None:
        return self._requests.get(request_id)

    def in_transfer(self, replica: int) -> list[str]:
        """The requests whose first token has arrived, and whose blocks this replica still stores."""
        return [
            name
            for name, each in self._requests.items()
            if each.stage == "transfer" and each.prefill_replica == replica
        ]

    def on_output(self, output: Output, replica: int) -> Output:
        """The output as the client sees it: of one request with one timeline."""
        state = self._requests.get(output.request_id)
        if state is None or state.stage == "whole":
            return output
        if output.finish == "handover":
            state.stage, state.prefill_replica = "transfer", replica
            state.generated, state.timeline = tuple(output.tokens), output.timeline
            return output._replace(finish=None)
        if state.stage == "decode" and output.timeline is not None and state.timeline is not None:
            return output._replace(timeline=_joined(state.timeline, output.timeline))
        return output

    def decode(self, request: NewRequest, handed: HandedBlocks | None, reason: str) -> NewRequest:
        """The request that a decode engine goes on with. `reason`: why it has no blocks, if so."""
        state = self._requests[request.request_id]
        if state.stage != "transfer":  # the prefill engine gave no token
            state.stage, state.reason, state.trace = "whole", reason, None
            self.on_result(reason, 0)
            return request
        state.stage, state.handed = "decode", handed
        state.reason = NOT_STORED if handed is not None and handed.num_failed else reason
        self.on_result(state.reason or HANDED_OVER, 0 if handed is None else len(handed.records))
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:  # sent by the prefill engine
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(request, sampling=sampling, generated=state.generated)

    def on_trace(self, trace: RequestTrace) -> RequestTrace | None:
        """The trace of the whole request; None: that of the decode engine follows."""
        state = self._requests.get(trace.request_id)
        if state is None:
            return trace
        if trace.finish == "handover":
            state.trace = trace
            return self._cut_off(trace.request_id) if state.has_ended else None
        shared = HandoverTrace(
            is_split=state.stage == "decode",
            num_blocks=0 if state.handed is None else len(state.handed.records),
            seconds=_between(state.trace, trace),
            reason=state.reason,
        )
        if state.trace is not None:
            trace = _joined_traces(state.trace, trace)
        state.is_traced = True
        if state.has_ended:
            del self._requests[trace.request_id]
        return replace(trace, handover=shared)

    def end(self, request_id: str) -> RequestTrace | None:
        """Forget a request when its trace has arrived; returns the trace if no engine has it any more."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        state.has_ended = True
        if state.is_traced:
            del self._requests[request_id]
        elif state.stage == "transfer" and state.trace is not None:
            return self._cut_off(request_id)
        return None

    def _cut_off(self, request_id: str) -> RequestTrace | None:
        """The trace of a request whose client left between the engines."""
        trace = self._requests.pop(request_id).trace
        return None if trace is None else replace(trace, finish="abort")

    def lose(self, request_ids: Collection[str]) -> None:
        """Forget requests whose trace was lost with their engine."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)


def _ignore(_result: str, _num_blocks: int) -> None:
    """Default of `on_result`."""


def _joined(first: Timeline, later: Timeline) -> Timeline:
    """The timeline of a request: up to the first token that of the prefill engine."""
    return replace(
        first,
        last_token=later.last_token,
        num_output=later.num_output,
        num_preemptions=first.num_preemptions + later.num_preemptions,
        num_drafted=later.num_drafted,
        num_accepted=later.num_accepted,
    )


def _between(first: RequestTrace | None, later: RequestTrace) -> float:
    """Seconds from the first token to the admission in the decode engine."""
    if first is None or first.timeline.first_token is None or later.timeline.admitted is None:
        return 0.0
    return later.timeline.admitted - first.timeline.first_token


def _joined_traces(first: RequestTrace, later: RequestTrace) -> RequestTrace:
    return replace(
        later,
        timeline=_joined(first.timeline, later.timeline),
        num_ahead=first.num_ahead,
        num_running=first.num_running,
        blocked_s=first.blocked_s,
        short_blocks=first.short_blocks,
        first_miss=first.first_miss,
        why_missed=first.why_missed,
        chunks=first.chunks,
        prefill_s=first.prefill_s + later.prefill_s,
        decode_s=first.decode_s + later.decode_s,
        saved_s=first.saved_s,
        waited_again_s=first.waited_again_s + later.waited_again_s,
        num_recomputed=first.num_recomputed + later.num_recomputed,
        recomputed_s=first.recomputed_s + later.recomputed_s,
    )
