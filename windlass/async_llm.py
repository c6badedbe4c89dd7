"""The offline API for coroutines: the engine runs in a process of its own, as the server's does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.llm_requests import ChatOptions, LLMRequests, Messages, PoolingBatch, ranked
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
from windlass.serve.messages import LoadAdapter, UnloadAdapter
from windlass.start import build_replicas, make_client
from windlass.text.beam_search import BeamSearchParams
from windlass.text.completion import Delta
from windlass.text.request_builder import Prompt


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
        self._requests = LLMRequests(self.card, self.report)
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

    async def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        adapter: str = "",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Answer one conversation, as `LLM.chat` does."""
        options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            chat_template_kwargs=chat_template_kwargs,
        )
        (chat,) = self._requests.chats([messages], [sampling], options)
        result = await self.generate(chat.prompt, chat.sampling, adapter)
        return result.with_messages(chat.parsing)

    async def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> AsyncIterator[Delta]:
        """Stream the deltas of the answer to one conversation."""
        chat = self._requests.chat_stream(messages, sampling)
        async for delta in self.stream(chat.prompt, chat.sampling, adapter):
            yield delta

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None = None,
        use_activation: bool | None = None,
        adapter: str = "",
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts, as `LLM.embed` does."""
        batch = self._requests.embeddings(prompts, dimensions, use_activation, adapter)
        await self._pool(batch)
        return batch.results

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        adapter: str = "",
        template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score queries against documents, as `LLM.score` does."""
        batch = self._requests.scores(queries, documents, adapter, template)
        await self._pool(batch.pooling)
        return batch.results

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        adapter: str = "",
        template: str | None = None,
    ) -> list[RerankResult]:
        """Sort documents by their score for a query; `top_n`: return only the best."""
        return ranked(documents, await self.score(query, documents, adapter, template), top_n)

    async def _pool(self, batch: PoolingBatch) -> None:
        async for output in self._client.generate(*batch.requests):
            batch.feed(output)

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, adapter: str = ""
    ) -> BeamSearchOutput:
        """Search the most likely continuations of one prompt."""
        (search,) = self._requests.beam_searches([prompt], params, adapter)
        while not search.done:
            async for output in self._client.generate(*search.requests()):
                search.receive(output)
        return self._requests.beams_of(search)

    async def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder or the hub. Raises when it does not fit the model."""
        check_adapter_name(name)
        folder = await asyncio.to_thread(locate, path, self._config.model)
        await self._client.change_adapter(LoadAdapter(name, str(folder)))

    async def remove_adapter(self, name: str) -> None:
        """Unload an adapter. Running requests keep it until they end."""
        await self._client.change_adapter(UnloadAdapter(name))

    async def _drive(self, group: RequestGroup) -> AsyncIterator[Delta]:
        async for output in self._client.generate(*group.requests):
            delta = group.feed(output)
            if delta.finish_reason is not None:
                self._client.abort(output.request_id, completed=True)  # a stop string
            yield delta
