"""Runs `bench serve`: waits for the server, runs the load once per point, makes the record.

The record keeps what was measured before a server failure or ctrl-C.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from windlass.tools.common.load import Load
from windlass.tools.common.record import Record
from windlass.tools.common.requests import TextRequest, fingerprint
from windlass.tools.common.summary import METRICS, PERCENTILES, Summary, summarise
from windlass.tools.common.text_workload import Sizes, make_requests
from windlass.tools.common.texts import Scale, Writer
from windlass.tools.load.client import Client, RequestOptions
from windlass.tools.load.generator import INTERRUPTED, LoadGenerator, Outcome
from windlass.tools.load.monitor import MetricsPoller, Probes, ProgressLine
from windlass.tools.load.rate_search import RateSearch
from windlass.tools.load.rows import details, make_row
from windlass.tools.load.server import Server, ServerError, choose_model

NOTES = (
    "Times measured by the client over successful requests. TTFT and E2EL: from sending to the first "
    "and the last token. TPOT: time after the first token per further token. ITL: between chunks. "
    "Percentiles are interpolated."
)


@dataclass(frozen=True, slots=True)
class ServeBenchConfig:
    """Settings of `bench serve`. An empty model in `options` selects the server's first."""

    base_url: str
    options: RequestOptions
    loads: tuple[Load, ...]  # one run each: the same workload with other arrivals
    label: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    num_warmups: int = 0
    ready_timeout_s: float = 10.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = PERCENTILES
    metrics: Sequence[str] = METRICS
    tokens_per_word: float | None = None  # None: measured with the server's tokenizer
    adapters: tuple[str, ...] = ()  # each request uses one of these, chosen at random
    is_detailed: bool = False
    search_share: float | None = None  # search the rate at which this share meets the targets
    probe_rate: float = 0.0  # single-token requests per second beside the load


@dataclass(frozen=True, slots=True)
class ServeResult:
    """The measurements. `stopped` is the reason if they are incomplete."""

    record: Record
    stopped: str | None
    is_good: bool  # requests succeeded, and a rate search found a rate


def measure(config: ServeBenchConfig, log: Callable[[str], None]) -> ServeResult:
    """Run every point. Ctrl-C ends the current run; pressing it twice ends everything."""
    factory = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_ServeBench(config, log).run())


class _ServeBench:
    """Owns the rows measured so far."""

    def __init__(self, config: ServeBenchConfig, log: Callable[[str], None]) -> None:
        self._config = config
        self._log = log
        self._rows: list[dict[str, Any]] = []
        self._search = None if config.search_share is None else RateSearch(config.search_share)

    async def run(self) -> ServeResult:
        config = self._config
        async with Server(config.base_url, dict(config.headers)) as server:
            served = await server.wait_until_ready(config.ready_timeout_s)
            model = choose_model(config.options.model or None, served, server.base_url)
            for adapter in config.adapters:
                choose_model(adapter, served, server.base_url)
            options = replace(config.options, model=model)
            writer = Writer(await self._scale(server, options))
            # Invalid requests are rejected before anything is sent.
            options.check(self._text_requests(writer, 0, config.loads[0], log_skipped=True))
            await self._warm_up(Client(server, options), writer)
            sent, stopped = await self._run_loads(server, options, writer)
        return self._result(model, fingerprint(sent), stopped)

    async def _run_loads(
        self, server: Server, options: RequestOptions, writer: Writer
    ) -> tuple[list[TextRequest], str | None]:
        """Measure all loads; returns all requests, and the reason if it ended early."""
        sent: list[TextRequest] = []
        while (load := self._next_load()) is not None:
            requests = self._text_requests(writer, len(self._rows), load)
            sent += requests
            stopped = await self._run_load(server, options, load=load, requests=requests)
            if stopped is not None:
                return sent, stopped
            if self._search is not None:
                share = self._rows[-1]["goodput_share"]
                self._search.add(load.arrivals.rate, share)
                self._log(f"{load.arrivals_title}: {share:.0%} of the requests meet the targets")
        return sent, None

    def _next_load(self) -> Load | None:
        loads, done = self._config.loads, len(self._rows)
        if self._search is None:
            return loads[done] if done < len(loads) else None
        rate = self._search.next_rate()
        if rate is None:
            return None
        return replace(loads[0], arrivals=replace(loads[0].arrivals, rate=rate))

    async def _scale(self, server: Server, options: RequestOptions) -> Scale:
        config = self._config
        if config.tokens_per_word is not None:
            return Scale(config.tokens_per_word, config.tokens_per_word)
        if config.loads[0].name == "custom":
            return Scale()  # prompts are given, not generated
        return await server.scale(options.model, options.endpoint)

    def _text_requests(
        self, writer: Writer, index: int, load: Load, log_skipped: bool = False
    ) -> list[TextRequest]:
        """Make the requests of a run. Every run has new texts, so a prefix cache has no hits."""
        adapters, seed = self._config.adapters, f"{load.seed} {index}"
        requests = load.texts(writer, index, self._log if log_skipped else lambda _: None)
        if adapters:
            random = Random(f"adapters {seed}")
            requests = [replace(request, adapter=random.choice(adapters)) for request in requests]
        return load.arrivals.set(requests, seed)

    async def _warm_up(self, client: Client, writer: Writer) -> None:
        if self._config.num_warmups < 1:
            return
        sizes = Sizes(num_prompts=self._config.num_warmups, input_len=64, output_len=16)
        seed = f"{self._config.loads[0].seed} warm-up"
        requests = make_requests("random", sizes, writer=writer, seed=seed)
        outcome = await LoadGenerator(requests, client.send).run(client.dead)
        error = next((timing.error for timing in outcome.timings if timing.error), None)
        if outcome.stopped == INTERRUPTED:
            raise asyncio.CancelledError
        if error is not None:
            raise ServerError(f"a warm-up request failed: {error}")

    async def _run_load(
        self, server: Server, options: RequestOptions, load: Load, requests: list[TextRequest]
    ) -> str | None:
        """Measure one load; returns the reason if the run ended early."""
        client = Client(server, options)
        self._log(f"{load.arrivals_title}: {len(requests)} requests")
        generator = LoadGenerator(requests, client.send, load.max_concurrency)
        metrics = MetricsPoller(server)
        line = ProgressLine(
            title=load.arrivals_title,
            generator=generator,
            samples=metrics.samples,
            num_chunks=lambda: client.num_chunks,
        )
        tasks = [metrics.run(), line.show()]
        probes = None
        if self._config.probe_rate:
            probes = Probes(Client(server, options).send, self._config.probe_rate)
            tasks.append(probes.run())
        async with _running(*tasks):
            outcome = await generator.run(client.dead)
        if outcome.stopped is None:
            await metrics.read()
        summary = summarise(
            outcome.timings, outcome.duration, self._config.goodput, self._config.percentiles
        )
        row = self._row_head(load, len(requests)) | make_row(summary, outcome, metrics.samples)
        changes = load.arrivals.rate_changes(requests)
        if changes:
            row["rps_change_events"] = changes
        if self._config.is_detailed:
            row |= details(outcome.timings, outcome.began)
        self._rows.append(row)
        self._log_summary(load, summary, outcome)
        if probes is not None:
            self._rows[-1] |= probes.row()
            for text in probes.lines():
                self._log(text)
        return outcome.stopped

    def _row_head(self, load: Load, num_prompts: int) -> dict[str, Any]:
        rate = load.arrivals.rate
        return {
            "label": self._config.label,
            "workload": load.name,
            "arrivals": load.arrivals.pattern,
            "request_rate": rate if math.isfinite(rate) else "inf",
            "burstiness": load.arrivals.burstiness,
            "max_concurrency": load.max_concurrency,
            "num_prompts": num_prompts,
        }

    def _log_summary(self, load: Load, summary: Summary, outcome: Outcome) -> None:
        rate = load.arrivals.rate
        for line in summary.lines(self._config.metrics, load.max_concurrency, rate):
            self._log(line)
        for error, count in sorted(summary.errors.items(), key=lambda item: -item[1]):
            self._log(f"{count} failed: {error}")
        if outcome.stopped is not None:
            self._log(
                f"Ended early: {outcome.stopped}. {len(outcome.timings)} of "
                f"{len(outcome.timings) + outcome.num_left} requests had finished."
            )

    def _result(self, model: str, requests_hash: str, stopped: str | None) -> ServeResult:
        config = self._config
        settings = {
            "model": Path(model).name,
            "endpoint": config.options.endpoint,
            "dataset": config.loads[0].name,
            "fingerprint": requests_hash,
            "seed": config.loads[0].seed,
            "temperature": config.options.temperature,
            "ignore_eos": config.options.ignore_eos,
            "goodput": dict(config.goodput),
            "points": len(config.loads),
        }
        rows, notes = self._rows, NOTES
        is_good = any(row["completed"] for row in rows)
        if self._search is not None:
            verdict = self._search.verdict()
            self._log(verdict)
            rows, notes = sorted(rows, key=lambda row: row["request_rate"]), f"{NOTES} {verdict}"
            settings |= {"goodput_share": self._search.min_share, "found_rate": self._search.best}
            is_good = self._search.best is not None
        return ServeResult(
            Record(name="serve", rows=rows, notes=notes, settings=settings), stopped, is_good
        )


@asynccontextmanager
async def _running(*coroutines: Any) -> AsyncIterator[None]:
    """Run coroutines as long as the block runs."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
