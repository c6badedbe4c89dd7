"""The offline API: `LLM("default").generate(["Hello"], SamplingParams(max_tokens=32))`.

The engine's loop runs in the caller's process. `AsyncLLM` runs it in a process of its own, as the
server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from windlass.build import Built, build_engine, build_for_process, open_model
from windlass.config import EngineConfig, ModelConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.core.sampling import SamplingParams
from windlass.errors import RequestError
from windlass.front import Front, Job, Messages, Prompt, RequestOutput
from windlass.lora.locate import locate
from windlass.lora_config import check_adapter_name
from windlass.text.completion import Delta

_LOADING_S = 0.001


class LLM:
    """Usage: `LLM("default", max_num_seqs=8).generate(prompts, SamplingParams(max_tokens=32))`.

    Options are those of the command line, with underscores. Not thread-safe. With
    `price_per_hour`, what the machine costs in dollars, results say what they cost.
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
        """Over an engine that was built already, perhaps with shared weights."""
        llm = cls.__new__(cls)
        llm._take(card, built)
        return llm

    def _take(self, card: ModelCard, built: Built) -> None:
        self.report: EngineReport = built.report
        self.card: ModelCard = card
        self.engine = built.engine
        self._front = Front(card, built.report.vocab_size)
        self._model = ModelConfig()
        self._price = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        adapter: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), all at once; results in the order of prompts.

        `adapter` names one for all prompts, or one for each; "" is the model itself.
        """
        many = _as_list(prompts)
        wishes = _as_wishes(sampling, len(many))
        names = _as_adapters(adapter, len(many))
        jobs = self._front.jobs(many, wishes, names)
        with progress_bar(len(jobs), progress) as advance:
            for job, _ in self._drive(jobs, whole=True):
                if job.done:
                    advance()
        return [job.result(self._price) for job in jobs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        adapter: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer one conversation or several."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        rendered = self._front.render(conversations)
        return self.generate(rendered, sampling, progress, adapter)

    def explain(self, result: RequestOutput) -> list[dict[str, Any]]:
        """Where the time of each completion went, in a sentence and in figures, as `explain` has them."""
        from windlass.serve.explain import explained, trace_json

        told = ((trace, trace.timeline.arrived) for trace in result.traces)
        return [
            explained(trace, began, self.report) | trace_json(trace, began) for trace, began in told
        ]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> Iterator[str]:
        """The text of one completion, piece by piece. Closing the iterator aborts it."""
        job = self._front.job(prompt, sampling, adapter)
        if len(job.requests) > 1:
            raise RequestError("stream() gives one completion; n must be 1.", "n")
        return (delta.text for _, delta in self._drive([job]) if delta.text)

    def stream_chat(
        self, messages: Messages, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> Iterator[str]:
        """The answer to one conversation, piece by piece."""
        return self.stream(self._front.render([messages])[0], sampling, adapter)

    def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder or the hub; one that does not fit raises, and is not there."""
        check_adapter_name(name)
        adapters = self.engine.adapters
        adapters.load(name, str(locate(path, self._model)))
        while not adapters.loaded(name):
            time.sleep(_LOADING_S)

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self.engine.adapters.unload(name)

    def _drive(self, jobs: list[Job], whole: bool = False) -> Iterator[tuple[Job, Delta]]:
        """Step until the jobs are done; whatever happens, nothing of them stays in the engine.

        `whole`: a completion comes in one piece, if its text cannot end it.
        """
        left: dict[str, Job] = {}
        owners = {request.request_id: job for job in jobs for request in job.requests}
        kept: dict[str, list[int]] = {}  # tokens of completions that come so
        try:
            for job in jobs:
                for request in job.requests:
                    self.engine.add(request)
                    left[request.request_id] = job
                    if whole and request.sampling.is_only_tokens:
                        kept[request.request_id] = []
            while left:
                outputs = self.engine.step()
                if not outputs and self.engine.is_loading:
                    time.sleep(_LOADING_S)  # lets the thread work that reads the adapter
                for output in outputs:
                    tokens = kept.get(output.request_id)
                    if tokens is not None:
                        tokens += output.tokens
                        if output.finish is None:
                            continue
                        output = output._replace(tokens=tokens)
                    job = left[output.request_id]
                    delta = job.feed(output)
                    if delta.finish_reason is not None:
                        del left[output.request_id]
                        self.engine.abort(output.request_id)  # a stop string is found only here
                        self._keep_stories(owners)
                    yield job, delta
        finally:
            for request_id in left:
                self.engine.abort(request_id)

    def _keep_stories(self, owners: dict[str, Job]) -> None:
        for trace in self.engine.traces():
            if trace.request_id in owners:  # else of a stream that was closed before
                owners[trace.request_id].traces.append(trace)


class AsyncLLM:
    """Usage: `async with AsyncLLM("default") as llm: async for piece in llm.stream("Hello"): ...`

    The engine runs in a process of its own and serves many coroutines at once.
    """

    def __init__(self, model: str = "default", **options: Any) -> None:
        self._config = EngineConfig.of(model=model, **options)

    async def __aenter__(self) -> AsyncLLM:
        from windlass.serve.client import EngineClient

        opened = open_model(self._config)
        self.card = opened.card
        self._client = EngineClient(partial(build_for_process, self._config, opened.source))
        self.report = await self._client.start()
        self._front = Front(self.card, self.report.vocab_size)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> RequestOutput:
        """Complete one prompt; call it many times at once."""
        job = self._front.job(prompt, sampling, adapter)
        async for _ in self._drive(job):
            pass
        return job.result()

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, adapter: str = ""
    ) -> AsyncIterator[Delta]:
        """What is new in each completion of one prompt, as it comes."""
        job = self._front.job(prompt, sampling, adapter)
        async for delta in self._drive(job):
            yield delta

    async def add_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder or the hub; one that does not fit raises, and is not there."""
        from windlass.serve.messages import LoadAdapter

        check_adapter_name(name)
        folder = await asyncio.to_thread(locate, path, self._config.model)
        await self._client.change_adapter(LoadAdapter(name, str(folder)))

    async def remove_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it end as they began."""
        from windlass.serve.messages import UnloadAdapter

        await self._client.change_adapter(UnloadAdapter(name))

    async def _drive(self, job: Job) -> AsyncIterator[Delta]:
        async for output in self._client.generate(*job.requests):
            delta = job.feed(output)
            if delta.finish_reason is not None:
                self._client.abort(output.request_id, completed=True)  # a stop string
            yield delta


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text or a list of whole numbers; anything else is several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_wishes(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(f"{count} prompts, but {len(sampling)} SamplingParams.", "sampling")
    return sampling


def _as_adapters(adapter: str | Sequence[str], count: int) -> Sequence[str]:
    if isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise RequestError(f"{count} prompts, but {len(adapter)} adapters.", "adapter")
    return adapter


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr that the yielded function moves by one."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
