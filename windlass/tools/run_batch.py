"""Runs a file of requests in OpenAI's batch format, without a server; resumes an interrupted run.

The requests go through the server's endpoints, without HTTP, and results are kept as the server does
(serve/batch/).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path

from windlass.build import open_model
from windlass.config import EngineConfig, ServeConfig
from windlass.errors import ConfigError, RequestError, WorkerDied, file_errors
from windlass.llm import progress_bar
from windlass.serve.abbreviate import abbreviate
from windlass.serve.batch.database import Database
from windlass.serve.batch.dispatch import Dispatcher, Endpoint, run_lines
from windlass.serve.batch.lines import LineRules, Scan, read_lines, scan
from windlass.serve.batch.results import (
    SCHEMA,
    Counts,
    LineResult,
    add_results,
    count_results,
    finished_lines,
    write_results,
)
from windlass.serve.client import EngineClient
from windlass.serve.cost import NO_KEY
from windlass.serve.generation import Generation
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.pooling import Pooling
from windlass.serve.reload import Reloads
from windlass.serve.routes import batch_endpoints
from windlass.serve.services import make_services
from windlass.start import build_replicas, make_client
from windlass.tools.resumable import ResumableOutput

_BATCH = "run-batch"
_DATABASE = "results.sqlite"
_RESULTS = "results.jsonl"
_FILES = (_DATABASE, f"{_DATABASE}-wal", f"{_DATABASE}-shm", _RESULTS)
_SHOWN_ERRORS = 10
# Requests in flight per slot: a free slot finds the next request in the engine's queue.
_REQUESTS_PER_SLOT = 2


@dataclass(frozen=True, slots=True)
class RunBatch:
    """What to run. `progress`: show a bar on stderr."""

    input_file: Path
    output_file: Path
    progress: bool


class _PartialResults(ResumableOutput):
    """Owns OUT.partial with the database of the results so far."""

    def __init__(self, run: RunBatch, model: str) -> None:
        with run.input_file.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        super().__init__(run.output_file, {"input_sha256": digest, "model": model}, _FILES)
        self.database = Database(self.folder / _DATABASE, SCHEMA)

    def _progress_text(self) -> str:
        return f"The results so far are in {self.folder}"

    async def finished(self) -> set[int]:
        return await self.database.run(partial(finished_lines, batch_id=_BATCH))

    async def save(self, results: Sequence[LineResult]) -> None:
        await self.database.run(partial(add_results, batch_id=_BATCH, results=results))

    async def publish(self) -> Counts:
        """Write the output file in the order of the input, and remove the partial results."""
        counts = await self.database.run(partial(count_results, batch_id=_BATCH))
        path = self.folder / _RESULTS
        await write_results(self.database, _BATCH, path)
        try:
            os.replace(path, self._output)
        except OSError as error:
            raise self._write_error(self._output, error) from error
        self.close()
        shutil.rmtree(self.folder)
        return counts

    def close(self) -> None:
        """May be called twice."""
        self.database.close()
        super().close()


def run_batch(run: RunBatch, config: EngineConfig, serve_config: ServeConfig) -> Counts:
    """Run all requests of the input file that have no result yet, and write the output file."""
    opened = open_model(config)
    client = make_client(config)
    client.build_with(*build_replicas(config, opened.source))
    services = make_services(
        client,
        opened.card,
        LiveConfig(serve_config),
        reloads=Reloads(),
        started=StartConfig(engine=config),
    )
    try:
        endpoints = batch_endpoints(Generation(services), Pooling(services))
        rules = LineRules(
            urls=endpoints,
            max_body_bytes=serve_config.max_body_bytes,
            check_model=partial(_check_model, [opened.card.name, *config.lora.modules()]),
        )
        found = _scan(run.input_file, rules)
        results = _PartialResults(run, opened.card.name)
        try:
            asyncio.run(_run_all(run, client, endpoints, found=found, rules=rules, results=results))
            return asyncio.run(results.publish())
        finally:
            results.close()
    finally:
        services.close()


def _check_model(known: Sequence[str], name: str | None) -> None:
    if name not in known:
        raise RequestError(
            f"the model {abbreviate(name)} does not exist here. This run has "
            f"{' and '.join(map(repr, known))}; --served-model-name gives the model another name."
        )


def _scan(path: Path, rules: LineRules) -> Scan:
    """Find the requests of the input file; raises ConfigError with the lines that are none."""
    with file_errors(f"-i {path}"):
        found = scan(path, rules)
    if not found.errors:
        return found
    lines = [
        f"line {error.line}: {error.message}" if error.line is not None else error.message
        for error in found.errors
    ]
    more = len(lines) - _SHOWN_ERRORS
    rest = [f"and {more} or more others"] if more > 0 else []
    shown = "\n  ".join([*lines[:_SHOWN_ERRORS], *rest])
    raise ConfigError(f"-i {path} has lines that are not requests:\n  {shown}")


async def _run_all(
    run: RunBatch,
    client: EngineClient,
    endpoints: Mapping[str, Endpoint],
    *,
    found: Scan,
    rules: LineRules,
    results: _PartialResults,
) -> None:
    """Start the engine and run the requests without a result; a failed engine ends the run."""
    done = await results.finished()
    missing = [index for index in range(len(found.offsets)) if index not in done]
    if not missing:
        return
    try:
        await client.start()
        dispatcher = Dispatcher(endpoints, _REQUESTS_PER_SLOT * client.max_num_seqs)
        with progress_bar(len(found.offsets), run.progress) as advance:
            for _ in done:
                advance()

            async def save(finished: Sequence[LineResult]) -> None:
                await results.save(finished)
                for _ in finished:
                    advance()

            running = asyncio.create_task(
                run_lines(
                    missing,
                    read=lambda chosen: read_lines(
                        run.input_file,
                        found.offsets,
                        indices=chosen,
                        max_line_bytes=rules.max_line_bytes,
                    ),
                    run=lambda line: dispatcher.run(line, NO_KEY),
                    save=save,
                    limit=dispatcher.limit,
                )
            )
            failed = asyncio.create_task(client.failed.wait())
            await asyncio.wait({running, failed}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
                raise WorkerDied(
                    f"{client.health().reason} The same command resumes the run: the results so far "
                    f"are in {results.folder}."
                )
            running.result()
    finally:
        await client.close()
