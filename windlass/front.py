"""Text in front of an engine: prompts to jobs, and what came of them to results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.core.card import ModelCard
from windlass.core.sampling import SamplingParams
from windlass.core.trace import RequestTrace
from windlass.core.types import NewRequest, Output, Timeline, TokenLogprob
from windlass.errors import EngineError, RequestError
from windlass.text.chat_template import ChatTemplate
from windlass.text.completion import Completion, Delta, check_ids, resolve_words

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's `n` completions."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything that came of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprob] | None = None
    timeline: Timeline | None = None
    traces: list[RequestTrace] = field(
        default_factory=list
    )  # where the time of each completion went
    cost: float | None = None  # in dollars, where `LLM` knows a price


class Job:
    """One prompt under way: its requests, and what has come of them."""

    def __init__(self, prompt: str | None, requests: list[NewRequest], card: ModelCard) -> None:
        self.prompt = prompt
        self.requests = requests
        self.timeline: Timeline | None = None
        self.traces: list[RequestTrace] = []
        self._completions = {
            request.request_id: Completion(i, request, card.tokenizer)
            for i, request in enumerate(requests)
        }

    @property
    def done(self) -> bool:
        return all(c.finish_reason is not None for c in self._completions.values())

    def feed(self, output: Output) -> Delta:
        if output.error is not None:
            if output.param is not None:
                raise output.exception()
            raise EngineError(f"request {output.request_id} failed: {output.error}")
        self.timeline = output.timeline or self.timeline
        return self._completions[output.request_id].feed(output)

    def result(self, price_per_hour: float | None = None) -> RequestOutput:
        first = self.requests[0]
        wish = first.sampling
        outputs = [
            CompletionOutput(
                c.index,
                c.text,
                c.tokens,
                c.finish_reason,
                c.stop_reason,
                c.logprobs if wish.logprobs is not None else None,
            )
            for c in self._completions.values()
        ]
        scores = self._completions[first.request_id].prompt_logprobs
        return RequestOutput(
            first.request_id.rpartition("-")[0],
            self.prompt,
            list(first.prompt),
            outputs,
            self.timeline.num_cached if self.timeline else 0,
            scores if wish.prompt_logprobs is not None else None,
            self.timeline,
            self.traces,
            None if price_per_hour is None else price_per_hour / 3600 * self._seconds(),
        )

    def _seconds(self) -> float:
        """Its share of the engine's time."""
        return sum(trace.prefill_s + trace.decode_s for trace in self.traces)


class Front:
    """Knows a model's tokens and template. Shared by LLM and AsyncLLM."""

    def __init__(self, card: ModelCard, vocab_size: int) -> None:
        self._card = card
        self._vocab_size = vocab_size
        self._template: ChatTemplate | None = None
        if card.chat_template is not None:
            self._template = ChatTemplate(card.chat_template, card.special_tokens)
        self._numbers = itertools.count()

    def render(self, conversations: Sequence[Messages]) -> list[list[int]]:
        """Conversations as the model's template spells them, in tokens."""
        if self._template is None:
            raise RequestError(
                f"the model {self._card.name!r} has no chat template; use generate() instead.",
                "messages",
            )
        texts = [self._template.render(messages) for messages in conversations]
        return self._card.tokenizer.encode_all(texts, add_special=False)

    def jobs(
        self,
        prompts: Sequence[Prompt],
        wishes: Sequence[SamplingParams | None],
        adapters: Sequence[str],
    ) -> list[Job]:
        """A job for each prompt, with its wish and the name of its adapter."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        spelled = iter(self._card.tokenizer.encode_all(texts))
        jobs = []
        for prompt, wish, adapter in zip(prompts, wishes, adapters, strict=True):
            if isinstance(prompt, str):
                jobs.append(self._job(prompt, next(spelled), wish, adapter))
            else:
                jobs.append(self._job(None, list(prompt), wish, adapter))
        return jobs

    def job(self, prompt: Prompt, sampling: SamplingParams | None, adapter: str = "") -> Job:
        return self.jobs([prompt], [sampling], [adapter])[0]

    def _job(
        self, text: str | None, tokens: list[int], sampling: SamplingParams | None, adapter: str
    ) -> Job:
        """One request per completion that is asked for."""
        if sampling is None:
            sampling = SamplingParams(**self._card.default_sampling)
        check_ids("prompt", tokens, self._vocab_size)
        sampling = resolve_words(sampling, self._card.tokenizer, self._vocab_size)
        number = next(self._numbers)
        requests = [
            NewRequest(f"{number}-{i}", tokens, sampling.child(i), adapter=adapter)
            for i in range(sampling.n)
        ]
        return Job(text, requests, self._card)
