"""Builds the requests of `LLM` and `AsyncLLM`: completions, chats, embeddings and scores."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.core.card import EngineReport, ModelCard
from windlass.core.pooling import PoolingParams
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output
from windlass.errors import RequestError
from windlass.outputs import (
    BeamSearchOutput,
    BeamSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestGroup,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from windlass.text.beam_search import BeamSearch, BeamSearchParams, FinishedBeam, output_of
from windlass.text.chat_output import ChatOutput, chat_output
from windlass.text.chat_template import ChatTemplate
from windlass.text.completion import Completion
from windlass.text.grammar.schema import unsupported_keywords
from windlass.text.parsing.output import ToolSet
from windlass.text.parsing.parser import ParsingOptions
from windlass.text.parsing.registry import AUTO, choose_format
from windlass.text.request_builder import EncodedPrompt, Prompt, RequestBuilder, RequestOptions
from windlass.text.scoring import ScoreTemplate, Scoring, as_pairs

Messages = Sequence[Mapping[str, Any]]

_log = logging.getLogger("windlass")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of the chat API that `LLM.chat` and `AsyncLLM.chat` take."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered conversation, and how its answer is sampled and read."""

    prompt: Prompt
    sampling: SamplingParams
    parsing: ParsingOptions


class PoolingBatch:
    """The requests for the vectors of some prompts, and the results so far."""

    def __init__(self, requests: Sequence[NewRequest], prompts: Sequence[EncodedPrompt]) -> None:
        self.requests = requests
        self.running = {request.request_id: request for request in requests}
        self.found: dict[str, EmbeddingRequestOutput] = {}
        self._texts = {
            request.request_id: prompt.text
            for request, prompt in zip(requests, prompts, strict=True)
        }

    def feed(self, output: Output) -> None:
        """Add a vector. Raises when its request failed."""
        if output.pooled is None:
            raise output.exception()
        name, request = output.request_id, self.running.pop(output.request_id)
        self.found[name] = EmbeddingRequestOutput(
            request_id=name,
            prompt=self._texts[name],
            prompt_token_ids=request.prompt,
            outputs=EmbeddingOutput(list(array("f", output.pooled))),
            num_cached=output.timeline.num_cached if output.timeline else 0,
            timeline=output.timeline,
        )

    @property
    def results(self) -> list[EmbeddingRequestOutput]:
        """The vectors in the order of the prompts."""
        return [self.found[request.request_id] for request in self.requests]


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """The vectors that the scores of some pairs need, and how scores are made of them."""

    scoring: Scoring
    pairs: Sequence[tuple[str, str]]
    pooling: PoolingBatch

    @property
    def results(self) -> list[ScoringRequestOutput]:
        found = self.pooling.results
        vectors = [array("f", each.outputs.embedding).tobytes() for each in found]
        return [
            ScoringRequestOutput(f"score-{i}", ScoringOutput(score))
            for i, score in enumerate(self.scoring.scores(self.pairs, vectors))
        ]


class LLMRequests:
    """Builds requests for one engine. Owns the counter that makes their ids unique."""

    def __init__(self, card: ModelCard, report: EngineReport) -> None:
        self.builder = RequestBuilder(card, report)
        self._card = card
        self._vocab_size = report.vocab_size
        self._template: ChatTemplate | None = None
        if card.chat_template is not None:
            self._template = ChatTemplate(card.chat_template, card.special_tokens)
        self._ids = itertools.count()

    def groups(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams | None],
        adapters: Sequence[str],
        predictions: Sequence[str],
    ) -> list[RequestGroup]:
        """Build one group per prompt. Sampling params of None are the model's defaults."""
        builder, groups = self.builder, []
        encoded = builder.encode_prompts(prompts)
        expected = builder.encode_predictions(predictions)
        for prompt, given, adapter, prediction in zip(
            encoded, sampling, adapters, expected, strict=True
        ):
            params = builder.resolve(builder.sampling({}) if given is None else given)
            for keyword in unsupported_keywords(params.structured_outputs):
                _log.warning("the JSON schema has %s, which is not enforced", keyword)
            fitted = builder.fit(prompt, params)
            options = RequestOptions(adapter=adapter, prediction=prediction)
            requests = builder.requests(str(next(self._ids)), [fitted], params, options)
            groups.append(RequestGroup(prompt.text, requests, self._card.tokenizer))
        return groups

    def group(
        self, prompt: Prompt, sampling: SamplingParams | None, adapter: str = ""
    ) -> RequestGroup:
        return self.groups([prompt], [sampling], adapters=[adapter], predictions=[""])[0]

    def chats(
        self,
        conversations: Sequence[Messages],
        sampling: Sequence[SamplingParams | None],
        options: ChatOptions,
    ) -> list[Chat]:
        """Render conversations with the model's chat template, for `groups` to complete."""
        from windlass.serve.tools import read_tools, tool_use

        tools = read_tools(options.tools or ())
        use = tool_use(tools, options.tool_choice, options.parallel_tool_calls)
        shown = () if use is None else use.for_template()
        texts = self._render(conversations, shown, options.chat_template_kwargs)
        prompts = self.builder.encode_rendered(texts)
        chats = []
        for text, prompt, given in zip(texts, prompts, sampling, strict=True):
            output = self._chat_output(text, given, None if use is None else use.tool_set)
            params = output.sampling
            if output.parsing.special_tokens:
                params = replace(params, skip_special_tokens=False)
            chats.append(Chat(prompt, params, output.parsing))
        return chats

    def chat_stream(self, messages: Messages, sampling: SamplingParams | None) -> Chat:
        """Render a conversation whose answer is streamed as text, special tokens left out."""
        (text,) = self._render([messages])
        (prompt,) = self.builder.encode_rendered([text])
        output = self._chat_output(text, sampling)
        return Chat(prompt, output.sampling, output.parsing)

    def _chat_output(
        self, prompt: str, sampling: SamplingParams | None, tools: ToolSet | None = None
    ) -> ChatOutput:
        """How the output of a rendered chat is constrained and read."""
        return chat_output(
            choose_format(self._card.chat_template or "", AUTO, AUTO),
            tools,
            sampling or self.builder.sampling({}),
            prompt=prompt,
            tokenizer=self._card.tokenizer,
        )

    def _render(
        self,
        conversations: Sequence[Messages],
        tools: Messages = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Render conversations with the model's chat template."""
        from windlass.serve.tools import with_decoded_calls

        if self._template is None:
            raise RequestError(
                f"the model {self._card.name!r} has no chat template; use generate() instead.",
                "messages",
            )
        return [
            self._template.render(
                [with_decoded_calls(message) for message in messages], options, tools=tools
            )
            for messages in conversations
        ]

    def embeddings(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None,
        use_activation: bool | None,
        adapter: str,
    ) -> PoolingBatch:
        pooling = self._card.pooling
        pooling.check("embed")
        encoded = self.builder.encode_prompts(as_list(prompts))
        return self._pooling_batch(encoded, pooling.params(dimensions, use_activation), adapter)

    def scores(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        adapter: str,
        template: str | None,
    ) -> ScoringBatch:
        """`template`: a file as for --score-template."""
        pairs = as_pairs(queries, documents)
        scoring = Scoring(self._card, None if template is None else ScoreTemplate(template))
        scoring.check()
        prompts = scoring.prompts(pairs, self.builder)
        batch = self._pooling_batch(prompts, self._card.pooling.params(), adapter)
        return ScoringBatch(scoring, pairs, batch)

    def beam_searches(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, adapter: str
    ) -> list[BeamSearch]:
        many, sampling = as_list(prompts), params.sampling()
        groups = self.groups(
            many,
            [sampling] * len(many),
            adapters=[adapter] * len(many),
            predictions=[""] * len(many),
        )
        eos_ids = self._card.tokenizer.eos_ids
        return [
            BeamSearch(group.requests[0], params, eos_ids=eos_ids, vocab_size=self._vocab_size)
            for group in groups
        ]

    def beams_of(self, search: BeamSearch) -> BeamSearchOutput:
        """The result of a search that is done."""
        found = search.results()
        return BeamSearchOutput([self._sequence(each, search.prompt) for each in found])

    def _sequence(self, found: FinishedBeam, request: NewRequest) -> BeamSequence:
        completion = Completion(0, request, self._card.tokenizer)
        completion.feed(output_of(found, request.request_id))
        return BeamSequence(
            text=completion.text,
            tokens=completion.tokens,
            cum_logprob=found.beam.cum_logprob,
            score=found.score,
            finish_reason=completion.finish_reason,
            logprobs=completion.logprobs if request.sampling.logprobs is not None else None,
        )

    def _pooling_batch(
        self, prompts: Sequence[EncodedPrompt], params: PoolingParams, adapter: str
    ) -> PoolingBatch:
        fitted = [self.builder.fit_pooled(prompt) for prompt in prompts]
        name, options = f"pool-{next(self._ids)}", RequestOptions(adapter=adapter)
        return PoolingBatch(
            self.builder.pooling_requests(name, fitted, params=params, options=options), fitted
        )


def ranked(
    documents: Sequence[str], scores: Sequence[ScoringRequestOutput], top_n: int | None
) -> list[RerankResult]:
    """Documents by their scores, the best first; `top_n`: only so many."""
    order = sorted(enumerate(scores), key=lambda item: -item[1].outputs.score)
    return [
        RerankResult(index, documents[index], each.outputs.score)
        for index, each in order[: top_n or None]
    ]


def conversations_of(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """A list of messages is one conversation; any other list has several."""
    single = bool(messages) and isinstance(messages[0], Mapping)
    return [messages] if single else messages  # type: ignore[list-item, return-value]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string or a list of token ids is one prompt; any other list has several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def sampling_per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(f"{count} prompts, but {len(sampling)} SamplingParams.", "sampling")
    return sampling


def one_per_prompt(name: str, value: str | Sequence[str], count: int) -> Sequence[str]:
    if isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts, but {len(value)} {name}s.", name)
    return value
