"""Runs a workload through transformers' `generate` in static batches, as a baseline.

A batch is left-padded to its longest prompt and runs until its longest output is complete. The
surplus tokens of shorter outputs are computed but not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from windlass.build import OpenModel
from windlass.config import EngineConfig
from windlass.core.types import Timeline
from windlass.errors import ConfigError, UnsupportedError
from windlass.models.json_file import merged, read_json
from windlass.models.network import kv_layout
from windlass.runner.device import choose_device, choose_dtype, choose_threads
from windlass.tools.common.device import Traffic, synchronise
from windlass.tools.common.drive import EngineRun, Window, timing_of
from windlass.tools.common.requests import Request


class TransformersEngine:
    """A transformers model with the interface of BenchEngine."""

    name = "transformers"

    def __init__(self, config: EngineConfig, opened: OpenModel, batch: int | None) -> None:
        self._library = _transformers()
        self.device = choose_device(config.model).device
        choose_threads(config.model)
        dtype, _ = choose_dtype(config.model, opened.hparams, self.device)
        self._batch = batch
        self._model = self._make(config, opened, dtype).eval()
        hparams = opened.hparams
        self.vocab_size = hparams.vocab_size
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        if not hparams.tie_embeddings:
            weights -= hparams.vocab_size * hparams.hidden_size * dtype.itemsize
        self.traffic = Traffic(weights, kv_layout(hparams, block_size=1, dtype=dtype).token_bytes)

    def _make(self, config: EngineConfig, opened: OpenModel, dtype: torch.dtype) -> Any:
        files, auto = opened.files, self._library.AutoModelForCausalLM
        settings = {"dtype": dtype, "attn_implementation": "sdpa"}
        if config.model.load_format == "dummy":
            values = merged(read_json(files.path / "config.json"), config.model.hf_overrides)
            if "model_type" not in values:
                raise UnsupportedError(
                    f"{files.path / 'config.json'}: transformers needs a model_type. Add one, "
                    'such as --hf-overrides \'{"model_type": "llama"}\'.'
                )
            model_type = values.pop("model_type")
            model_config = self._library.AutoConfig.for_model(model_type, **values)
            with torch.device(self.device):
                return auto.from_config(model_config, **settings)
        if files.kind == "gguf":
            model = auto.from_pretrained(files.path.parent, gguf_file=files.path.name, **settings)
        else:
            model = auto.from_pretrained(files.path, **settings)
        return model.to(self.device)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> EngineRun:
        """Run the batches one after another; all requests arrive when the first batch starts."""
        size = self._batch or len(requests)
        batches = [requests[at : at + size] for at in range(0, len(requests), size)]
        started = time.perf_counter()
        times = [self._generate(batch) for batch in batches]
        seconds = time.perf_counter() - started
        timings = [
            timing_of(_timeline(request, started, stamps))
            for batch, stamps in zip(batches, times, strict=True)
            for request in batch
        ]
        return EngineRun(
            timings,
            seconds,
            num_steps=sum(len(stamps) for stamps in times),
            prompt_tokens_computed=sum(len(request.prompt) for request in requests),
            window=_window(requests, times[0]) if len(batches) == 1 else None,
        )

    def reset(self) -> None:
        """Do nothing: no state is kept between runs."""

    def _generate(self, requests: Sequence[Request]) -> list[float]:
        """Run one batch; returns the end time of each step."""
        width, count = (
            max(len(request.prompt) for request in requests),
            max(request.num_output for request in requests),
        )
        ids = [[0] * (width - len(request.prompt)) + request.prompt for request in requests]
        mask = [
            [0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in requests
        ]
        stamps: list[float] = []

        def record_step(tokens: Tensor, _scores: object, **_: object) -> Tensor:
            synchronise(self.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        temperature = requests[0].temperature
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        )
        generation_config = self._library.GenerationConfig(
            max_new_tokens=count, eos_token_id=None, pad_token_id=0, **sampling
        )
        self._model.generation_config = generation_config
        self._model.generate(
            torch.tensor(ids, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            generation_config=generation_config,
            stopping_criteria=self._library.StoppingCriteriaList([record_step]),
        )
        return stamps


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"--engine transformers: {error}. Install it with: pip install transformers"
        ) from error


def _timeline(request: Request, arrived: float, stamps: list[float]) -> Timeline:
    return Timeline(
        arrived=arrived,
        first_token=stamps[0],
        last_token=stamps[request.num_output - 1],
        num_prompt=len(request.prompt),
        num_output=request.num_output,
    )


def _window(requests: Sequence[Request], stamps: list[float]) -> Window | None:
    steps = min(request.num_output for request in requests) - 1
    if steps < 1:
        return None
    num_prompt = sum(len(request.prompt) for request in requests)
    mean_kv = num_prompt + len(requests) * (1 + steps / 2)
    return Window(stamps[steps] - stamps[0], steps, steps * len(requests), mean_kv)
