"""llama.cpp as an engine to measure: the same token ids, in batches that start and end together.

Its library is called as its own benchmarks do: prompts of all rows first, then a token of each in
every step. The likeliest token is chosen here, which costs it less than its own samplers would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from windlass.build import OpenModel
from windlass.config import EngineConfig
from windlass.core.types import Timeline
from windlass.errors import ConfigError, EngineError
from windlass.models.source import resolve
from windlass.runner.device import choose_threads
from windlass.tools.bench.device import Traffic
from windlass.tools.bench.llama_cpp import LlamaCpp
from windlass.tools.bench.measure import Measured, Window
from windlass.tools.bench.workloads import Job

_STEP_TOKENS = 512  # its own default of tokens computed together


class LlamaEngine:
    """A GGUF in llama.cpp. Each run has a context of its own, as large as the jobs need."""

    name = "llama.cpp"

    def __init__(self, config: EngineConfig, opened: OpenModel, library: Path, model: Path) -> None:
        del opened
        if resolve(config.model).kind != "gguf":
            raise ConfigError("--engine llama.cpp: llama.cpp reads GGUF files. Give one as MODEL.")
        self._library = LlamaCpp(library)
        self._threads = int(choose_threads(config.model).value)
        self._model = self._library.load(model)
        self.vocab_size = self._library.vocab_size(self._model)
        self.device = torch.device("cpu")
        self.traffic = Traffic(model.stat().st_size, 0)

    def reset(self) -> None:
        """Nothing is kept between runs."""

    def run(self, jobs: Sequence[Job]) -> Measured:
        longest = max(len(job.prompt) + job.num_output for job in jobs)
        rows = _Rows(self._library, self._model, len(jobs), longest, self._threads)
        try:
            return rows.run(jobs)
        finally:
            rows.close()


class _Rows:
    """Sequences that are computed side by side."""

    def __init__(
        self, library: LlamaCpp, model: int, count: int, longest: int, threads: int
    ) -> None:
        self._library = library
        self._vocab_size = library.vocab_size(model)
        self._context = library.context(model, count, longest, _STEP_TOKENS, threads)
        self._batch = library.batch(max(_STEP_TOKENS, count))
        self.steps = 0

    def close(self) -> None:
        self._library.free(self._context, self._batch)

    def run(self, jobs: Sequence[Job]) -> Measured:
        start = time.perf_counter()
        prompts = [
            (row, at, token, at == len(job.prompt) - 1)
            for row, job in enumerate(jobs)
            for at, token in enumerate(job.prompt)
        ]
        timelines = [Timeline(arrived=0.0, num_prompt=len(job.prompt)) for job in jobs]
        last = [0] * len(jobs)
        for at in range(0, len(prompts), _STEP_TOKENS):
            for row, token in self._decode(prompts[at : at + _STEP_TOKENS]):
                last[row] = token
                timelines[row].first_token = time.perf_counter() - start
                timelines[row].num_output = 1
        window, most = None, max(job.num_output for job in jobs)
        all_decode = min(job.num_output for job in jobs)
        began = time.perf_counter()
        for step in range(1, most):
            going = [row for row, job in enumerate(jobs) if job.num_output > step]
            tokens = [(row, len(jobs[row].prompt) + step - 1, last[row], True) for row in going]
            for row, token in self._decode(tokens):
                last[row] = token
                timelines[row].num_output += 1
                timelines[row].last_token = time.perf_counter() - start
            if step == all_decode - 1:
                seconds = time.perf_counter() - began
                window = Window(seconds, step, step * len(jobs), 0.0)
        seconds = time.perf_counter() - start
        num_prompt = len(prompts)
        made = sum(job.num_output for job in jobs)
        return Measured(seconds, num_prompt, made, timelines, self.steps, num_prompt, window=window)

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute (row, position, token, whether it is followed); returns the followers."""
        batch = self._batch
        batch.num_tokens = len(tokens)
        for i, (row, position, token, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = row
            batch.logits[i] = wanted
        failed = self._library.decode(self._context, batch)
        if failed:
            raise EngineError(f"llama.cpp does not compute a step: it returned {failed}.")
        self.steps += 1
        rows = [row for row, _, _, wanted in tokens if wanted]
        if not rows:
            return []
        logits = self._library.logits(self._context, len(rows), self._vocab_size)
        return list(zip(rows, np.argmax(logits, axis=1).tolist(), strict=True))


def find_library() -> Path:
    """That of an installed package, when there is one."""
    from importlib.util import find_spec

    for package, pattern in (("llama_cpp", "lib/libllama.so*"), ("xllamacpp", "*.so")):
        found = find_spec(package)
        if found is not None and found.origin is not None:
            for path in sorted(Path(found.origin).parent.glob(pattern)):
                return path
    raise ConfigError(
        "--engine llama.cpp needs a library that holds it: pip install llama-cpp-python or "
        "xllamacpp, or name one with --llama-cpp FILE."
    )
