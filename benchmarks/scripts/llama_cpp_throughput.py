"""Runs `windlass bench throughput` in alternation with llama.cpp, on the same token ids.

    python benchmarks/scripts/llama_cpp_throughput.py MODEL.gguf --workload decode_b1,decode_b8 -o FILE

Takes the engine options of `windlass bench throughput`. The library is called as in llama.cpp's own
benchmarks: the prompts of all rows first, then one token of each row per step. The next token is the
argmax of the logits, computed in numpy, which is cheaper than llama.cpp's samplers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from llama_library import LlamaCpp, find_library

from windlass.build import OpenModel
from windlass.cli.command import Options, register
from windlass.cli.flags import JsonOutput, Repeat, log, option, split_names
from windlass.cli.options import ENGINE_OPTIONS
from windlass.cli.results import check_path, finish
from windlass.config import EngineConfig
from windlass.core.types import Timeline
from windlass.errors import ConfigError, EngineError
from windlass.runner.device import choose_threads
from windlass.tools.bench.throughput import ThroughputConfig, measure
from windlass.tools.common.device import Traffic
from windlass.tools.common.drive import EngineRun, Window, timing_of
from windlass.tools.common.requests import Request, max_request_len
from windlass.tools.common.workload import Sizes, find_all

_STEP_TOKENS = 512  # llama.cpp's default batch size in tokens


class LlamaEngine:
    """A GGUF file in llama.cpp. Each run creates a context as large as its requests need."""

    name = "llama.cpp"

    def __init__(self, config: EngineConfig, library: Path, model: Path) -> None:
        if model.suffix != ".gguf":
            raise ConfigError("llama.cpp reads GGUF files. Set one as MODEL or with --gguf.")
        self._library = LlamaCpp(library)
        self._threads = choose_threads(config.model).count
        self._model = self._library.load(model)
        self.vocab_size = self._library.vocab_size(self._model)
        self.device = torch.device("cpu")
        self.traffic = Traffic(model.stat().st_size, 0)

    def reset(self) -> None:
        """Do nothing: no state is kept between runs."""

    def run(self, requests: Sequence[Request]) -> EngineRun:
        rows = _Rows(
            self._library,
            self._model,
            count=len(requests),
            max_len=max_request_len(requests),
            threads=self._threads,
        )
        try:
            return rows.run(requests)
        finally:
            rows.close()


class _Rows:
    """A batch of sequences."""

    def __init__(
        self, library: LlamaCpp, model: int, *, count: int, max_len: int, threads: int
    ) -> None:
        self._library = library
        self._vocab_size = library.vocab_size(model)
        self._context = library.context(
            model, rows=count, max_len=max_len, step_tokens=_STEP_TOKENS, threads=threads
        )
        self._batch = library.batch(max(_STEP_TOKENS, count))
        self.steps = 0

    def close(self) -> None:
        self._library.free(self._context, self._batch)

    def run(self, requests: Sequence[Request]) -> EngineRun:
        start = time.perf_counter()
        prompts = [
            (row, at, token, at == len(request.prompt) - 1)
            for row, request in enumerate(requests)
            for at, token in enumerate(request.prompt)
        ]
        timelines = [Timeline(arrived=0.0, num_prompt=len(request.prompt)) for request in requests]
        last = [0] * len(requests)
        for at in range(0, len(prompts), _STEP_TOKENS):
            for row, token in self._decode(prompts[at : at + _STEP_TOKENS]):
                last[row] = token
                timelines[row].first_token = time.perf_counter() - start
                timelines[row].num_output = 1
        window = None
        max_output = max(request.num_output for request in requests)
        min_output = min(request.num_output for request in requests)
        began = time.perf_counter()
        for step in range(1, max_output):
            active = [row for row, request in enumerate(requests) if request.num_output > step]
            tokens = [
                (row, len(requests[row].prompt) + step - 1, last[row], True) for row in active
            ]
            for row, token in self._decode(tokens):
                last[row] = token
                timelines[row].num_output += 1
                timelines[row].last_token = time.perf_counter() - start
            if step == min_output - 1:
                seconds = time.perf_counter() - began
                window = Window(seconds, step, step * len(requests), 0.0)
        seconds = time.perf_counter() - start
        timings = [timing_of(line) for line in timelines]
        return EngineRun(timings, seconds, self.steps, len(prompts), window=window)

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute (row, position, token, sample) tuples; returns the sampled (row, token) pairs."""
        batch = self._batch
        batch.num_tokens = len(tokens)
        for i, (row, position, token, sample) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = row
            batch.logits[i] = sample
        failed = self._library.decode(self._context, batch)
        if failed:
            raise EngineError(f"llama_decode failed: it returned {failed}.")
        self.steps += 1
        rows = [row for row, _, _, sample in tokens if sample]
        if not rows:
            return []
        logits = self._library.logits(self._context, len(rows), self._vocab_size)
        return list(zip(rows, np.argmax(logits, axis=1).tolist(), strict=True))


def llama_cpp_throughput(
    options: Options,
    workload: Annotated[
        str, option("NAMES", "As for windlass bench throughput.")
    ] = "decode_b1,decode_b8,io512x1x1",
    engine: Annotated[
        str, option("NAMES", "windlass, llama.cpp, or both, comma-separated.")
    ] = "windlass,llama.cpp",
    llama_cpp: Annotated[
        Path | None, option("FILE", "llama.cpp shared library; default: the installed one.")
    ] = None,
    gguf: Annotated[
        Path | None, option("FILE", "GGUF file for llama.cpp; default: the model's own.")
    ] = None,
    repeat: Repeat = 1,
    output: JsonOutput = None,
) -> int:
    """Measure the throughput of Windlass and llama.cpp on the same token ids, in alternation."""
    check_path("-o", output)
    library = llama_cpp or find_library()

    def make(config: EngineConfig, opened: OpenModel) -> LlamaEngine:
        return LlamaEngine(config, library, gguf or opened.files.path)

    bench = ThroughputConfig(find_all(workload, Sizes()), split_names(engine), repeat)
    record = measure(options.engine_values(), bench, log, engines={"llama.cpp": make})
    about = {"library": library.name, "gguf": gguf.name if gguf is not None else None}
    record.settings["llama.cpp"] = about
    finish(record, output)
    return 0


app = typer.Typer(rich_markup_mode=None)
register(app, llama_cpp_throughput, ENGINE_OPTIONS)

if __name__ == "__main__":
    app()
