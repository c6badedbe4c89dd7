"""The offline API: `LLM("default").generate(["Hello"], SamplingParams(max_tokens=32))`.

`LLM` runs the engine's loop in the caller's process.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig, ModelConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.core.sampling import SamplingParams
from windlass.errors import RequestError
from windlass.llm_requests import (
    ChatOptions,
    LLMRequests,
    Messages,
    PoolingBatch,
    as_list,
    conversations_of,
    one_per_prompt,
    ranked,
    sampling_per_prompt,
)
from windlass.lora.locate import locate
from windlass.lora_config import check_adapter_name
from windlass.outputs import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    RequestGroup,
    RequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from windlass.text.beam_search import BeamSearch, BeamSearchParams
from windlass.text.completion import Delta
from windlass.text.request_builder import Prompt

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
        self._requests = LLMRequests(card, built.report)
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
        many = as_list(prompts)
        groups = self._requests.groups(
            many,
            sampling_per_prompt(sampling, len(many)),
            adapters=one_per_prompt("adapter", adapter, len(many)),
            predictions=one_per_prompt("prediction", prediction, len(many)),
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
        conversations = conversations_of(messages)
        options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            chat_template_kwargs=chat_template_kwargs,
        )
        given = sampling_per_prompt(sampling, len(conversations))
        chats = self._requests.chats(conversations, given, options)
        results = self.generate(
            [chat.prompt for chat in chats], [chat.sampling for chat in chats], progress, adapter
        )
        return [
            result.with_messages(chat.parsing) for result, chat in zip(results, chats, strict=True)
        ]

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
        batch = self._requests.embeddings(prompts, dimensions, use_activation, adapter)
        self._pool(batch, progress)
        return batch.results

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
        batch = self._requests.scores(queries, documents, adapter, template)
        self._pool(batch.pooling, progress)
        return batch.results

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        adapter: str = "",
        template: str | None = None,
    ) -> list[RerankResult]:
        """Sort documents by their score for a query; `top_n`: return only the best."""
        scores = self.score(query, documents, adapter=adapter, template=template)
        return ranked(documents, scores, top_n)

    def _pool(self, batch: PoolingBatch, progress: bool) -> None:
        """Step until all vectors are made. On every exit, none of the requests stays in the engine."""
        try:
            with progress_bar(len(batch.requests), progress) as advance:
                for request in batch.requests:
                    self.engine.add(request)
                while batch.running:
                    for output in self.engine.step():
                        batch.feed(output)
                        advance()
        finally:
            for request_id in batch.running:
                self.engine.abort(request_id)
        for trace in self.engine.traces():
            if trace.request_id in batch.found:
                batch.found[trace.request_id].traces.append(trace)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, adapter: str = ""
    ) -> list[BeamSearchOutput]:
        """Search the most likely continuations of each prompt; results have the prompts' order."""
        searches = self._requests.beam_searches(prompts, params, adapter)
        self._search(searches)
        return [self._requests.beams_of(search) for search in searches]

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
        chat = self._requests.chat_stream(messages, sampling)
        return self.stream(chat.prompt, chat.sampling, adapter)

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
