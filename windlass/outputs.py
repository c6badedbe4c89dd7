"""Results of the offline API, and the requests of one prompt while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from windlass.core.tokenizer import Tokenizer
from windlass.core.trace import RequestTrace
from windlass.core.types import NewRequest, Output, Timeline, TokenLogprob
from windlass.errors import EngineError
from windlass.text.completion import Completion, Delta
from windlass.text.parsing.output import ParsedMessage
from windlass.text.parsing.parser import ParsingOptions, parse


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's `n` completions."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    message: ParsedMessage | None = None  # of a chat: reasoning, content and tool calls


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None  # None: the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprob] | None = None
    timeline: Timeline | None = None
    traces: list[RequestTrace] = field(default_factory=list)  # one per completion
    cost: float | None = None  # in dollars; None: `LLM` has no price

    def with_messages(self, options: ParsingOptions) -> RequestOutput:
        """The result with parsed messages."""
        outputs = [replace(each, message=parse(each.text, options)) for each in self.outputs]
        return replace(self, outputs=outputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt."""

    request_id: str
    prompt: str | None  # None: the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached: int = 0
    timeline: Timeline | None = None
    traces: list[RequestTrace] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair of texts."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair."""

    request_id: str
    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class RerankResult:
    """A document of `LLM.rerank`; results are sorted by their score."""

    index: int  # in the documents as they were given
    document: str
    relevance_score: float


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One sequence that beam search found."""

    text: str
    tokens: list[int]  # generated, with the token that ended it
    cum_logprob: float
    score: float  # cum_logprob with the length penalty
    finish_reason: str | None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, the best first."""

    sequences: list[BeamSequence]


class RequestGroup:
    """The `n` requests of one prompt, and their completions so far."""

    def __init__(
        self, prompt: str | None, requests: Sequence[NewRequest], tokenizer: Tokenizer
    ) -> None:
        self.prompt = prompt
        self.requests = requests
        self.timeline: Timeline | None = None
        self.traces: list[RequestTrace] = []
        self._completions = {
            request.request_id: Completion(i, request, tokenizer)
            for i, request in enumerate(requests)
        }

    @property
    def done(self) -> bool:
        return all(c.finish_reason is not None for c in self._completions.values())

    def feed(self, output: Output) -> Delta:
        """Add a step's output. Raises when the request failed."""
        if output.error is not None:
            if output.param is not None:
                raise output.exception()
            raise EngineError(f"request {output.request_id} failed: {output.error}")
        self.timeline = output.timeline or self.timeline
        return self._completions[output.request_id].feed(output)

    def result(self, price_per_hour: float | None = None) -> RequestOutput:
        first = self.requests[0]
        sampling = first.sampling
        outputs = [
            CompletionOutput(
                index=completion.index,
                text=completion.text,
                token_ids=completion.tokens,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                logprobs=completion.logprobs if sampling.logprobs is not None else None,
            )
            for completion in self._completions.values()
        ]
        prompt_logprobs = self._completions[first.request_id].prompt_logprobs
        return RequestOutput(
            request_id=first.request_id.rpartition("-")[0],
            prompt=self.prompt,
            prompt_token_ids=list(first.prompt),
            outputs=outputs,
            num_cached=self.timeline.num_cached if self.timeline else 0,
            prompt_logprobs=prompt_logprobs if sampling.prompt_logprobs is not None else None,
            timeline=self.timeline,
            traces=self.traces,
            cost=None if price_per_hour is None else price_per_hour / 3600 * self._seconds(),
        )

    def _seconds(self) -> float:
        """The group's share of the engine's time."""
        return sum(trace.prefill_s + trace.decode_s for trace in self.traces)
