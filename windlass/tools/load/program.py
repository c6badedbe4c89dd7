"""`bench serve` as a whole: a server that is ready, a load, one run for every point, a record.

What was measured before a server died or somebody pressed ctrl-C is in the record like the rest.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from windlass.errors import ConfigError
from windlass.tools.common.arrivals import Arrivals
from windlass.tools.common.load import read_requests
from windlass.tools.common.record import Record
from windlass.tools.common.request_files import FILE_LOADS
from windlass.tools.common.requests import TextRequest, fingerprint
from windlass.tools.common.summary import METRICS, PERCENTILES, Summary, summarise
from windlass.tools.common.text_workload import LOADS, Sizes, check_sizes, make_load
from windlass.tools.common.texts import Scale, Writer
from windlass.tools.load.client import Client, RequestOptions
from windlass.tools.load.drive import INTERRUPTED, Drive, Outcome
from windlass.tools.load.gauges import Gauges
from windlass.tools.load.live import Progress, View
from windlass.tools.load.probes import Probes
from windlass.tools.load.rows import details, make_row
from windlass.tools.load.seek import Seek
from windlass.tools.load.server import Server, ServerError, choose_model

NOTES = (
    "Times as the client saw them, over requests that ended well: TTFT and E2EL from sending to the "
    "first and the last token, TPOT the time after the first token over the tokens after it, ITL "
    "between chunks. Percentiles lie between neighbours."
)


@dataclass(frozen=True, slots=True)
class Point:
    """One run: how requests come, and how many may be under way at once."""

    arrivals: Arrivals
    max_concurrency: int | None = None

    @property
    def title(self) -> str:
        rate = self.arrivals.rate
        parts = [f"{rate:g} req/s" if math.isfinite(rate) else self.arrivals.pattern]
        if self.arrivals.ramp is not None:
            parts = [f"{self.arrivals.ramp.start:g} to {self.arrivals.ramp.end:g} req/s"]
        elif math.isinf(rate) and self.arrivals.pattern != "trace":
            parts = ["all at once"]
        if self.max_concurrency is not None:
            parts.append(f"at most {self.max_concurrency} at once")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests: a load by name, or a file."""

    name: str = "random"
    sizes: Sizes = field(default_factory=Sizes)
    path: Path | None = None
    skip_bad_lines: bool = False
    tokens_per_word: float | None = None  # None: the server is asked
    adapters: tuple[str, ...] = ()  # each request gets one of these

    def __post_init__(self) -> None:
        if self.name in LOADS:
            check_sizes(self.name, self.sizes, LOADS[self.name].takes)
            if self.path is not None or self.skip_bad_lines:
                raise ConfigError(
                    "--dataset-path and --skip-bad-lines mean nothing for --dataset-name "
                    f"{self.name}, which is no file."
                )
        elif self.name not in FILE_LOADS:
            known = ", ".join((*LOADS, *FILE_LOADS))
            raise ConfigError(f"--dataset-name {self.name!r} is not known. Known: {known}.")
        elif self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs --dataset-path FILE.")
        elif self.sizes.input_len is not None:
            raise ConfigError(f"--input-len means nothing for --dataset-name {self.name}.")
        if self.tokens_per_word is not None and self.name == "custom":
            raise ConfigError("--tokens-per-word means nothing for --dataset-name custom.")
        if self.tokens_per_word is not None and not self.tokens_per_word > 0:
            raise ConfigError(f"--tokens-per-word must be above 0, got {self.tokens_per_word}.")


@dataclass(frozen=True, slots=True)
class ServeOrder:
    """What `bench serve` was asked for. The model of `options` may be empty: the server's first."""

    base_url: str
    options: RequestOptions
    load: Load
    points: tuple[Point, ...]
    label: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    num_warmups: int = 0
    ready_timeout_s: float = 10.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = PERCENTILES
    metrics: Sequence[str] = METRICS
    seed: int = 0
    is_detailed: bool = False
    seek_share: float | None = None  # the rate is looked for, at which so many meet their targets
    probe_rate: float = 0.0  # requests of one token a second, beside the load


@dataclass(frozen=True, slots=True)
class Served:
    """What was measured. `stopped` says why it is not all that was asked for."""

    record: Record
    stopped: str | None
    is_good: bool  # requests ended well, and a rate that was looked for was found


def measure(order: ServeOrder, log: Callable[[str], None], progress: Progress) -> Served:
    """Run every point. Ctrl-C ends the run at hand; a second one ends everything."""
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_Program(order, log, progress).run())


class _Program:
    """Owns the rows that were measured so far."""

    def __init__(self, order: ServeOrder, log: Callable[[str], None], progress: Progress) -> None:
        self._order = order
        self._log = log
        self._progress = progress
        self._rows: list[dict[str, Any]] = []
        self._seek = None if order.seek_share is None else Seek(order.seek_share)

    async def run(self) -> Served:
        order = self._order
        async with Server(order.base_url, dict(order.headers)) as server:
            served = await server.wait_until_ready(order.ready_timeout_s)
            model = choose_model(order.options.model or None, served, server.base_url)
            for adapter in order.load.adapters:
                choose_model(adapter, served, server.base_url)
            options = replace(order.options, model=model)
            writer = Writer(await self._scale(server, options))
            # What cannot be asked is refused before anything is sent.
            options.check(self._text_requests(writer, 0, order.points[0], log_skipped=True))
            await self._warm_up(Client(server, options), writer)
            asked, stopped = await self._points(server, options, writer)
        return self._served(model, fingerprint(asked), stopped)

    async def _points(
        self, server: Server, options: RequestOptions, writer: Writer
    ) -> tuple[list[TextRequest], str | None]:
        """Measure one after the other: all that was asked, and why it ended early."""
        asked: list[TextRequest] = []
        while (point := self._next_point()) is not None:
            requests = self._text_requests(writer, len(self._rows), point)
            asked += requests
            stopped = await self._point(server, options, point, requests)
            if stopped is not None:
                return asked, stopped
            if self._seek is not None:
                share = self._rows[-1]["goodput_share"]
                self._seek.note(point.arrivals.rate, share)
                self._log(f"{point.title}: {share:.0%} of the requests meet the targets")
        return asked, None

    def _next_point(self) -> Point | None:
        points, done = self._order.points, len(self._rows)
        if self._seek is None:
            return points[done] if done < len(points) else None
        rate = self._seek.next_rate()
        if rate is None:
            return None
        return replace(points[0], arrivals=replace(points[0].arrivals, rate=rate))

    async def _scale(self, server: Server, options: RequestOptions) -> Scale:
        load = self._order.load
        if load.tokens_per_word is not None:
            return Scale(load.tokens_per_word, load.tokens_per_word)
        if load.name == "custom":
            return Scale()  # its prompts are as they are
        return await server.scale(options.model, options.endpoint)

    def _text_requests(
        self, writer: Writer, index: int, point: Point, log_skipped: bool = False
    ) -> list[TextRequest]:
        """Every point has texts of its own, so that no prefix cache knows them from the last."""
        load, seed = self._order.load, f"{self._order.seed} {index}"
        if load.path is not None:
            requests = read_requests(
                load.name,
                load.path,
                load.sizes,
                writer,
                seed=self._order.seed,
                skip_bad_lines=load.skip_bad_lines,
                log=self._log if log_skipped else lambda _: None,
            )
        else:
            requests = make_load(load.name, load.sizes, writer, seed)
        if load.adapters:
            random = Random(f"adapters {seed}")
            requests = [
                replace(request, adapter=random.choice(load.adapters)) for request in requests
            ]
        return point.arrivals.set(requests, seed)

    async def _warm_up(self, client: Client, writer: Writer) -> None:
        if self._order.num_warmups < 1:
            return
        sizes = Sizes(self._order.num_warmups, input_len=64, output_len=16)
        requests = make_load("random", sizes, writer, f"{self._order.seed} warm-up")
        outcome = await Drive(requests, client.send).run(client.dead)
        bad = next((timing.error for timing in outcome.timings if timing.error), None)
        if outcome.stopped == INTERRUPTED:
            raise asyncio.CancelledError
        if bad is not None:
            raise ServerError(f"a warm-up request failed: {bad}")

    async def _point(
        self, server: Server, options: RequestOptions, point: Point, requests: list[TextRequest]
    ) -> str | None:
        """Measure one; the reason when the run ended early."""
        client = Client(server, options)
        self._log(f"{point.title}: {len(requests)} requests")
        drive = Drive(requests, client.send, point.max_concurrency)
        gauges = Gauges(server)
        view = View(point.title, drive, gauges.readings, lambda: client.num_chunks)
        beside = [gauges.watch(), self._progress.follow(view)]
        probes = None
        if self._order.probe_rate:
            probes = Probes(Client(server, options).send, self._order.probe_rate)
            beside.append(probes.watch())
        async with _beside(*beside):
            outcome = await drive.run(client.dead)
        if outcome.stopped is None:
            await gauges.read()
        summary = summarise(
            outcome.timings, outcome.duration, self._order.goodput, self._order.percentiles
        )
        self._rows.append(self._row(point, requests, summary, outcome, gauges))
        self._tell(point, summary, outcome)
        if probes is not None:
            self._rows[-1] |= probes.row()
            for line in probes.lines():
                self._log(line)
        return outcome.stopped

    def _row(
        self,
        point: Point,
        requests: list[TextRequest],
        summary: Summary,
        outcome: Outcome,
        gauges: Gauges,
    ) -> dict[str, Any]:
        rate = point.arrivals.rate
        head = {
            "label": self._order.label,
            "workload": self._order.load.name,
            "arrivals": point.arrivals.pattern,
            "request_rate": rate if math.isfinite(rate) else "inf",
            "burstiness": point.arrivals.burstiness,
            "max_concurrency": point.max_concurrency,
            "num_prompts": len(requests),
        }
        row = head | make_row(summary, outcome, gauges.readings)
        changes = point.arrivals.rate_changes(requests)
        if changes:
            row["rps_change_events"] = changes
        if self._order.is_detailed:
            row |= details(outcome.timings, outcome.began)
        return row

    def _tell(self, point: Point, summary: Summary, outcome: Outcome) -> None:
        rate = point.arrivals.rate
        for line in summary.lines(self._order.metrics, point.max_concurrency, rate):
            self._log(line)
        for error, count in sorted(summary.errors.items(), key=lambda item: -item[1]):
            self._log(f"{count} failed: {error}")
        if outcome.stopped is not None:
            self._log(
                f"Ended early: {outcome.stopped}. {len(outcome.timings)} of "
                f"{len(outcome.timings) + outcome.num_left} requests had ended."
            )

    def _served(self, model: str, asked: str, stopped: str | None) -> Served:
        order = self._order
        settings = {
            "model": Path(model).name,
            "endpoint": order.options.endpoint,
            "dataset": order.load.name,
            "fingerprint": asked,
            "seed": order.seed,
            "temperature": order.options.temperature,
            "ignore_eos": order.options.ignore_eos,
            "goodput": dict(order.goodput),
            "points": len(order.points),
        }
        rows, notes = self._rows, NOTES
        is_good = any(row["completed"] for row in rows)
        if self._seek is not None:
            found = self._seek.verdict()
            self._log(found)
            rows, notes = sorted(rows, key=lambda row: row["request_rate"]), f"{NOTES} {found}"
            settings |= {"goodput_share": self._seek.wanted, "found_rate": self._seek.best}
            is_good = self._seek.best is not None
        return Served(Record("serve", rows, notes, settings), stopped, is_good)


@asynccontextmanager
async def _beside(*works: Any) -> AsyncIterator[None]:
    """Coroutines that run as long as the block does."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
