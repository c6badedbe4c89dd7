"""Beam search: keeps the most likely sequences of several, one token at a time.

The algorithm alone, with the definitions of transformers' `generate(num_beams=…)`. In every round the
caller runs one engine request per beam: the beams are in the same batch, and share the blocks of their
common prefix through the prefix cache. Other requests run beside them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output, TokenLogprob
from windlass.errors import RequestError

EarlyStopping = bool | Literal["never"]

MAX_BEAM_WIDTH = 64
_MAX_CANDIDATES = 1024  # log probabilities per beam and round


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Usage: `BeamSearchParams(beam_width=4, max_tokens=64)`.

    A sequence's score is its log probability divided by `length ** length_penalty`. `early_stopping`:
    True ends when `beam_width` sequences have ended; False also when no running sequence is likely to
    have a better score; "never" when none can have one.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise RequestError(
                f"the beam width must be between 1 and {MAX_BEAM_WIDTH}, got {self.beam_width}.",
                "best_of",
            )
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1 with beam search, got {self.max_tokens}.",
                "max_tokens",
            )
        if not math.isfinite(self.length_penalty):
            raise RequestError("length_penalty must be a finite number.", "length_penalty")

    def sampling(self) -> SamplingParams:
        """How the tokens of the result become text."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=self.logprobs,
        )


class Beam(NamedTuple):
    """One sequence of generated tokens."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cum_logprob: float = 0.0


class FinishedBeam(NamedTuple):
    beam: Beam
    score: float
    stop_token: int | None  # None: it has the maximum length


class _Candidate(NamedTuple):
    cum_logprob: float
    parent: int
    token: int


class BeamSearch:
    """The beams of one prompt: run its `requests`, and `receive` their outputs, until it is `done`."""

    def __init__(
        self,
        prompt: NewRequest,
        params: BeamSearchParams,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        """`prompt`: the request whose prompt is continued; its sampling params are not used."""
        self.prompt = prompt
        self._params = params
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= frozenset(eos_ids)
        # So many that beam_width of them do not end, whatever the others are.
        width = params.beam_width
        self._num_candidates = min(vocab_size, max(2, 1 + len(self._stop_ids)) * width)
        if self._num_candidates > _MAX_CANDIDATES:
            raise RequestError(
                f"a beam width of {width} with {len(self._stop_ids)} tokens that end a sequence needs "
                f"{self._num_candidates:,} log probabilities per beam; at most {_MAX_CANDIDATES:,} are "
                "computed. Lower the width, or send fewer stop_token_ids.",
                "stop_token_ids",
            )
        self._sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            logprobs=self._num_candidates,
        )
        self._running = [Beam()]
        self._finished: list[FinishedBeam] = []  # the best first
        self._received: dict[int, TokenLogprob] = {}  # by beam, of the current round
        self._length = 0
        self.done = False

    def requests(self) -> list[NewRequest]:
        """One request per beam, for its next token."""
        prompt = self.prompt
        return [
            NewRequest(
                request_id=f"{prompt.request_id}-{self._length}-{i}",  # see `search_of`
                prompt=[*prompt.prompt, *beam.tokens],
                sampling=self._sampling,
                priority=prompt.priority,
                cache_salt=prompt.cache_salt,
                adapter=prompt.adapter,
                tenant=prompt.tenant,
                weight=prompt.weight,
                deadline=prompt.deadline,
            )
            for i, beam in enumerate(self._running)
        ]

    def receive(self, output: Output) -> bool:
        """Take the output of one request; returns whether it was the last of this round."""
        if output.error is not None:
            raise output.exception()
        assert output.logprobs, "each request samples one token, with log probabilities"
        self._received[int(output.request_id.rpartition("-")[2])] = output.logprobs[0]
        if len(self._received) < len(self._running):
            return False
        results = [self._received[i] for i in range(len(self._running))]
        self._received.clear()
        self._advance(results)
        return True

    def _advance(self, results: Sequence[TokenLogprob]) -> None:
        """Continue with the most likely next tokens."""
        self._length += 1
        params, width = self._params, self._params.beam_width
        candidates = (
            _Candidate(beam.cum_logprob + logprob, i, token)
            for i, (beam, result) in enumerate(zip(self._running, results, strict=True))
            for token, logprob in result.top
        )
        likeliest = heapq.nlargest(self._num_candidates, candidates, key=lambda each: each[0])
        running: list[Beam] = []
        at_end = self._length == params.max_tokens
        for rank, candidate in enumerate(likeliest):
            if not at_end and candidate.token not in self._stop_ids:
                if len(running) < width:
                    running.append(self._continued(candidate, results))
            elif rank < width:
                self._finish(self._continued(candidate, results))
        self._finished = heapq.nlargest(width, self._finished, key=lambda each: each.score)
        self._running = running
        self.done = not running or self._may_stop(running[0])

    def _continued(self, candidate: _Candidate, results: Sequence[TokenLogprob]) -> Beam:
        parent, top = self._running[candidate.parent], results[candidate.parent].top
        rank, (token, logprob) = next(
            (rank, pair) for rank, pair in enumerate(top, 1) if pair[0] == candidate.token
        )
        found = TokenLogprob(token, logprob, rank=rank, top=top[: self._params.logprobs or 0])
        return Beam((*parent.tokens, token), (*parent.logprobs, found), candidate.cum_logprob)

    def _finish(self, beam: Beam) -> None:
        stop_token = beam.tokens[-1] if beam.tokens[-1] in self._stop_ids else None
        score = beam.cum_logprob / self._length**self._params.length_penalty
        self._finished.append(FinishedBeam(beam, score, stop_token))

    def _may_stop(self, best: Beam) -> bool:
        """Whether the running sequences, of which `best` is the likeliest, change the result no more."""
        params = self._params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        length = self._length
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        return best.cum_logprob / length**params.length_penalty <= self._finished[-1].score

    def results(self) -> list[FinishedBeam]:
        """The sequences with the highest scores, at most `beam_width`; the best first."""
        return self._finished


def search_of(request_id: str) -> str:
    """The id of the search that a request of one of its rounds belongs to."""
    return request_id.rsplit("-", 2)[0]


def output_of(finished: FinishedBeam, request_id: str) -> Output:
    """A finished sequence as the output of one request."""
    return Output(
        request_id,
        tokens=list(finished.beam.tokens),
        logprobs=list(finished.beam.logprobs),
        finish="length" if finished.stop_token is None else "stop",
        stop_token=finished.stop_token,
    )
