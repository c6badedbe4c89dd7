"""The offline API: `LLM("default").generate(["Hello"], SamplingParams(max_tokens=32))`.

`LLM` runs the engine's loop in the caller's process. `AsyncLLM` runs it in a process of its own, as
the server does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import weakref
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig, ModelConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.core.pooling import PoolingParams
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import RequestError
from windlass.lora.locate import locate
from windlass.lora_config import check_adapter_name
from windlass.outputs import (
    BeamSearchOutput,
    BeamSequence,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestGroup,
    RequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from windlass.start import build_replicas, make_client
from windlass.text.beam_search import BeamSearch, BeamSearchParams, FinishedBeam, output_of
from windlass.text.chat_output import ChatOutput, chat_output
from windlass.text.chat_template import ChatTemplate
from windlass.text.completion import Completion, Delta
from windlass.text.grammar.schema import unsupported_keywords
from windlass.text.parsing.output import ToolSet
from windlass.text.parsing.registry import AUTO, choose_format
from windlass.text.request_builder import EncodedPrompt, Prompt, RequestBuilder, RequestOptions
from windlass.text.scoring import ScoreTemplate, Scoring, as_pairs

Messages = Sequence[Mapping[str, Any]]

_log = logging.getLogger("windlass")
_LOADING_S = 0.001  # pause between looks at an adapter that is being loaded


class LLM:
    """Usage: `LLM("default", max_num_seqs=8).generate(prompts, SamplingParams(max_tokens=32))`.

    Options are those of the command line, with underscores. Not thread-safe. `price_per_hour` is
    the machine's price in dollars; with it, results have a cost.
    """

    def __init__(
        self, model: str = "default", price_per_hour: float | None = None, **options: Any
    ) -> None:
        config = EngineConfig.of(model=model, **options)
        opened = open_model(config)
        self._take(opened.card, build_engine(config, opened.source))
        self._model = config.model
        self._price: float | None = price_per_hour

    @classmethod
    def over(cls, card: ModelCard, built: Built) -> LLM:
        """Make an LLM over an engine that is already built, for example with shared weights."""
        llm = cls.__new__(cls)
        llm._take(card, built)
        return llm

    def _take(self, card: ModelCard, built: Built) -> None:
        self.report: EngineReport = built.report
        self.card: ModelCard = card
        self.engine = built.engine
        # Reference cycles may keep the engine, which the garbage collector does not look at.
        weakref.finalize(self, built.close)
        self._template: ChatTemplate | None = None
        if card.chat_template is not None:
            self._template = ChatTemplate(card.chat_template, card.special_tokens)
        self._requests = _GroupBuilder(card, built.report)
        self._model = ModelConfig()
        self._price = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        adapter: str | Sequence[str] = "",
        prediction: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids) in one batch; results have the prompts' order.

        `adapter` is one name for all prompts, or one per prompt; "" is the base model. `prediction`,
        also one or one per prompt, is text that the output repeats in large parts: its tokens are
        draft tokens, so that the same output takes fewer steps.
        """
        many = _as_list(prompts)
        groups = self._requests.groups(
            many,
            _sampling_per_prompt(sampling, len(many)),
            _one_per_prompt("adapter", adapter, len(many)),
            _one_per_prompt("prediction", prediction, len(many)),
        )
        with progress_bar(len(groups), progress) as advance:
            for group, _ in self._drive(groups, whole=True):
                if group.done:
                    advance()
        self.engine.update_expert_load()
        return [group.result(self._price) for group in groups]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        adapter: str | Sequence[str] = "",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Each output's `message` has reasoning and tool calls apart.

        `tools` and the options after it are those of the chat API, for all conversations.
        """
        from windlass.serve.tools import read_tools, tool_use

        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        use = tool_use(read_tools(tools or ()), tool_choice, parallel_tool_calls)
        shown = () if use is None else use.for_template()
        texts = self._render(conversations, shown, chat_template_kwargs)
        outputs = [
            self._chat_output(text, given, None if use is None else use.tool_set)
            for text, given in zip(texts, _sampling_per_prompt(sampling, len(texts)), strict=True)
        ]
        params = [
            replace(each.sampling, skip_special_tokens=False)
            if each.parsing.special_tokens
            else each.sampling
            for each in outputs
        ]
        prompts = self._requests.builder.encode_rendered(texts)
        results = self.generate(prompts, params, progress, adapter)
        return [
            result.with_messages(each.parsing)
            for result, each in zip(results, outputs, strict=True)
        ]

    def _chat_output(
        self, prompt: str, sampling: SamplingParams | None, tools: ToolSet | None = None
    ) -> ChatOutput:
        """How the output of a rendered chat is constrained and read."""
        return chat_output(
            choose_format(self.card.chat_template or "", AUTO, AUTO),
            tools,
            sampling or self._requests.builder.sampling({}),
            prompt=prompt,
            tokenizer=self.card.tokenizer,
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None = None,
        use_activation: bool | None = None,
        progress: bool = False,
        adapter: str = "",
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts (text or token ids) in one batch; results have the prompts' order.

        `dimensions` cuts the vectors of a Matryoshka model. `use_activation` False returns them as they
        are pooled, not of unit length.
        """
        pooling = self.card.pooling
        pooling.check("embed")
        encoded = self._requests.builder.encode_prompts(_as_list(prompts))
        params = pooling.params(dimensions, use_activation)
        return self._pool(encoded, params, progress=progress, adapter=adapter)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        progress: bool = False,
        adapter: str = "",
        template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score one query against each document, or each query against its document.

        `template`: a file as for --score-template.
        """
        pairs = as_pairs(queries, documents)
        scoring = Scoring(self.card, None if template is None else ScoreTemplate(template))
        scoring.check()
        prompts = scoring.prompts(pairs, self._requests.builder)
        params = self.card.pooling.params()
        found = self._pool(prompts, params, progress=progress, adapter=adapter)
        vectors = [array("f", each.outputs.embedding).tobytes() for each in found]
        scores = scoring.scores(pairs, vectors)
        return [
            ScoringRequestOutput(f"score-{i}", ScoringOutput(score))
            for i, score in enumerate(scores)
        ]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        adapter: str = "",
        template: str | None = None,
    ) -> list[RerankResult]:
        """Sort documents by their score for a query; `top_n`: return only the best."""
        found = self.score(query, documents, adapter=adapter, template=template)
        ranked = sorted(enumerate(found), key=lambda item: -item[1].outputs.score)
        return [
            RerankResult(index, documents[index], each.outputs.score)
            for index, each in ranked[: top_n or None]
        ]

    def _pool(
        self,
        prompts: Sequence[EncodedPrompt],
        params: PoolingParams,
        *,
        progress: bool,
        adapter: str,
    ) -> list[EmbeddingRequestOutput]:
        """Step until all vectors are made. On every exit, none of the requests stays in the engine."""
        fitted = [self._requests.builder.fit_pooled(prompt) for prompt in prompts]
        requests = self._requests.pooling_requests(fitted, params, RequestOptions(adapter=adapter))
        texts = {
            request.request_id: prompt.text
            for request, prompt in zip(requests, fitted, strict=True)
        }
        running = {request.request_id: request for request in requests}
        results: dict[str, EmbeddingRequestOutput] = {}
        try:
            with progress_bar(len(requests), progress) as advance:
                for request in requests:
                    self.engine.add(request)
                while running:
                    for output in self.engine.step():
                        if output.pooled is None:
                            raise output.exception()
                        name, request = output.request_id, running.pop(output.request_id)
                        results[name] = EmbeddingRequestOutput(
                            request_id=name,
                            prompt=texts[name],
                            prompt_token_ids=request.prompt,
                            outputs=EmbeddingOutput(list(array("f", output.pooled))),
                            num_cached=output.timeline.num_cached if output.timeline else 0,
                            timeline=output.timeline,
                        )
                        advance()
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        for trace in self.engine.traces():
            if trace.request_id in results:
                results[trace.request_id].traces.append(trace)
        return [results[request.request_id] for request in requests]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, adapter: str = ""
    ) -> list[BeamSearchOutput]:
        """Search the most likely continuations of each prompt; results have the prompts' order."""
        many, sampling = _as_list(prompts), params.sampling()
        groups = self._requests.groups(
            many, [sampling] * len(many), [adapter] * len(many), [""] * len(many)
        )
        eos_ids, vocab_size = self.card.tokenizer.eos_ids, self.report.vocab_size
        searches = [
            BeamSearch(group.requests[0], params, eos_ids=eos_ids, vocab_size=vocab_size)
            for group in groups
        ]
        self._search(searches)
        return [
            BeamSearchOutput(
                [_sequence(found, group.requests[0], self.card) for found in search.results()]
            )
            for search, group in zip(searches, groups, strict=True)
        ]

    def _search(self, searches: Sequence[BeamSearch]) -> None:
        """Step until all searches are done; each goes on as soon as its own beams are ready."""
        ready = list(searches)
        owners: dict[str, BeamSearch] = {}
        try:
            while ready or owners:
                for search in ready:
                    for request in search.requests():
                        self.engine.add(request)
                        owners[request.request_id] = search
                ready = []
                for output in self.engine.step():
                    search = owners.pop(output.request_id)
                    if search.receive(output) and not search.done:
                        ready.append(search)
                self.engine.traces()  # those of single beams are of no use
        finally:
            for request_id in owners:
                self.engine.abort(request_id)

    def explain(self, result: RequestOutput | EmbeddingRequestOutput) -> list[dict[str, Any]]:
        """Explain where the time of each completion went, as `windlass explain` does."""
        from windlass.serve.explain import explain_trace, trace_json

        starts = ((trace, trace.timeline.arrived) for trace in result.traces)
        return [
            explain_trace(trace, began, self.report) | trace_json(trace, began)
            for trace, began in starts
        ]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> Iterator[str]:
        """Stream the text of one completion. Closing the iterator aborts the request."""
        group = self._requests.group(prompt, sampling, adapter)
        if len(group.requests) > 1:
            raise RequestError("stream() gives one completion; n must be 1.", "n")
        return (delta.text for _, delta in self._drive([group]) if delta.text)

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> Iterator[str]:
        """Stream the answer to one conversation."""
        (text,) = self._render([messages])
        (prompt,) = self._requests.builder.encode_rendered([text])
        return self.stream(prompt, self._chat_output(text, sampling).sampling, adapter)

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder or the hub. Raises when it does not fit the model."""
        check_adapter_name(name)
        adapters = self.engine.adapters
        adapters.load(name, str(locate(path, self._model)))
        while not adapters.loaded(name):
            time.sleep(_LOADING_S)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self.engine.adapters.unload(name)

    def _render(
        self,
        conversations: Sequence[Messages],
        tools: Messages = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Render conversations with the model's chat template."""
        if self._template is None:
            raise RequestError(
                f"the model {self.card.name!r} has no chat template; use generate() instead.",
                "messages",
            )
        from windlass.serve.tools import with_decoded_calls

        return [
            self._template.render(
                [with_decoded_calls(message) for message in messages], options, tools=tools
            )
            for messages in conversations
        ]

    def _drive(
        self, groups: list[RequestGroup], whole: bool = False
    ) -> Iterator[tuple[RequestGroup, Delta]]:
        """Step until all groups are done. On every exit, none of their requests stays in the engine.

        `whole`: yield a completion as one delta, unless its text can end it.
        """
        running: dict[str, RequestGroup] = {}
        owners = {request.request_id: group for group in groups for request in group.requests}
        buffered: dict[str, list[int]] = {}  # tokens of completions that become one delta
        try:
            for group in groups:
                for request in group.requests:
                    self.engine.add(request)
                    running[request.request_id] = group
                    if whole and request.sampling.is_only_tokens:
                        buffered[request.request_id] = []
            while running:
                outputs = self.engine.step()
                for output in outputs:
                    tokens = buffered.get(output.request_id)
                    if tokens is not None:
                        tokens += output.tokens
                        if output.finish is None:
                            continue
                        output = output._replace(tokens=tokens)
                    group = running[output.request_id]
                    delta = group.feed(output)
                    if delta.finish_reason is not None:
                        del running[output.request_id]
                        self.engine.abort(output.request_id)  # the engine knows no stop strings
                        self._collect_traces(owners)
                    yield group, delta
        finally:
            for request_id in running:
                self.engine.abort(request_id)

    def _collect_traces(self, owners: dict[str, RequestGroup]) -> None:
        for trace in self.engine.traces():
            if trace.request_id in owners:  # else it belongs to a stream that was closed
                owners[trace.request_id].traces.append(trace)


class AsyncLLM:
    """Usage: `async with AsyncLLM("default") as llm: async for delta in llm.stream("Hello"): ...`

    The engine, or each replica of it, runs in a process of its own and serves many coroutines at once.
    """

    def __init__(self, model: str = "default", **options: Any) -> None:
        self._config = EngineConfig.of(model=model, **options)

    async def __aenter__(self) -> AsyncLLM:
        opened = open_model(self._config)
        self.card = opened.card
        self._client = make_client(self._config)
        self._client.build_with(*build_replicas(self._config, opened.source))
        self.report = await self._client.start()
        self._requests = _GroupBuilder(self.card, self.report)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> RequestOutput:
        """Complete one prompt. Concurrent calls share batches."""
        group = self._requests.group(prompt, sampling, adapter)
        async for _ in self._drive(group):
            pass
        return group.result()

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> AsyncIterator[Delta]:
        """Stream the deltas of all completions of one prompt."""
        group = self._requests.group(prompt, sampling, adapter)
        async for delta in self._drive(group):
            yield delta

    async def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder or the hub. Raises when it does not fit the model."""
        from windlass.serve.messages import LoadAdapter

        check_adapter_name(name)
        folder = await asyncio.to_thread(locate, path, self._config.model)
        await self._client.change_adapter(LoadAdapter(name, str(folder)))

    async def remove_adapter(self, name: str) -> None:
        """Unload an adapter. Running requests keep it until they end."""
        from windlass.serve.messages import UnloadAdapter

        await self._client.change_adapter(UnloadAdapter(name))

    async def _drive(self, group: RequestGroup) -> AsyncIterator[Delta]:
        async for output in self._client.generate(*group.requests):
            delta = group.feed(output)
            if delta.finish_reason is not None:
                self._client.abort(output.request_id, completed=True)  # a stop string
            yield delta


class _GroupBuilder:
    """Builds request groups. Owns the counter that makes their ids unique."""

    def __init__(self, card: ModelCard, report: EngineReport) -> None:
        self.builder = RequestBuilder(card, report)
        self._tokenizer = card.tokenizer
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
            groups.append(RequestGroup(prompt.text, requests, self._tokenizer))
        return groups

    def pooling_requests(
        self, prompts: Sequence[EncodedPrompt], params: PoolingParams, options: RequestOptions
    ) -> list[NewRequest]:
        return self.builder.pooling_requests(f"pool-{next(self._ids)}", prompts, params, options)

    def group(
        self, prompt: Prompt, sampling: SamplingParams | None, adapter: str = ""
    ) -> RequestGroup:
        return self.groups([prompt], [sampling], [adapter], [""])[0]


def _sequence(found: FinishedBeam, request: NewRequest, card: ModelCard) -> BeamSequence:
    completion = Completion(0, request, card.tokenizer)
    completion.feed(output_of(found, request.request_id))
    return BeamSequence(
        text=completion.text,
        tokens=completion.tokens,
        cum_logprob=found.beam.cum_logprob,
        score=found.score,
        finish_reason=completion.finish_reason,
        logprobs=completion.logprobs if request.sampling.logprobs is not None else None,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string or a list of token ids is one prompt; any other list has several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _sampling_per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(f"{count} prompts, but {len(sampling)} SamplingParams.", "sampling")
    return sampling


def _one_per_prompt(name: str, value: str | Sequence[str], count: int) -> Sequence[str]:
    if isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts, but {len(value)} {name}s.", name)
    return value


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr. The yielded function advances it by one."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
