"""The composition root: from a config to an engine or a server. The one file that knows both sides.

Torch is imported when an engine is built, not before: the server's own process never needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from windlass.config import EngineConfig, Limits, ServeConfig
from windlass.core.blocks import BlockPool
from windlass.core.card import Capacity, Choice, EngineReport, ModelCard
from windlass.core.limits import SchedulerLimits
from windlass.core.policy import Continuous, Fcfs, Gate, Policy, Priority, Static
from windlass.core.scheduler import Scheduler
from windlass.engine import Engine
from windlass.models.card import load_card, load_spec, open_checkpoint
from windlass.models.source import ModelFiles, resolve
from windlass.models.spec import ModelSpec

_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose files were found and whose headers were read, but no weight."""

    files: ModelFiles
    card: ModelCard
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine, and what it says of itself."""

    engine: Engine
    report: EngineReport


@dataclass(slots=True)
class _Log:
    """What was chosen and how long each phase took, while an engine is built."""

    choices: list[Choice] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def open_model(config: EngineConfig) -> OpenModel:
    """Find a model's files (fetching them if need be), its tokenizer, template and shape."""
    files = resolve(config.model)
    spec = load_spec(files, config.model)
    return OpenModel(files, load_card(files, config.model), spec)


def build_engine(config: EngineConfig, opened: OpenModel) -> Built:
    """Load the weights and put the engine together, in this process."""
    return _assemble(config, opened.files, opened.spec, opened.card.tokenizer.eos_ids)


def serve(
    config: EngineConfig,
    serve_config: ServeConfig,
    on_ready: Callable[[EngineReport, str], None],
) -> int:
    """Run the server until it ends; returns the exit code."""
    from windlass.serve.client import EngineClient
    from windlass.serve.launch import serve as run_server

    opened = open_model(config)
    client = EngineClient(
        partial(
            engine_in_process, config, opened.files, opened.spec, opened.card.tokenizer.eos_ids
        ),
        serve_config.hang_timeout,
    )
    return run_server(client, opened.card, serve_config, on_ready)


def engine_in_process(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, eos_ids: tuple[int, ...]
) -> tuple[Engine, EngineReport]:
    """What a server's engine process runs first; its arguments travel there."""
    built = _assemble(config, files, spec, eos_ids)
    return built.engine, built.report


def _assemble(
    config: EngineConfig, files: ModelFiles, spec: ModelSpec, eos_ids: tuple[int, ...]
) -> Built:
    log = _Log()
    with log.phase("import torch"):
        from windlass.runner.assemble import load_network, make_runner
    limits = config.limits()
    with log.phase("load weights"):
        loaded = load_network(config, spec, open_checkpoint(files, config.model))
    with log.phase("KV cache"):
        made = make_runner(config, spec, loaded, limits)
    capacity = made.capacity
    log.choices += [
        Choice("model", f"{files.name} ({spec.architecture})", f"{files.kind}: {files.path}"),
        *loaded.choices,
        Choice("sequences", f"{limits.max_num_seqs:,}", limits.reason),
        Choice("tokens per step", f"{limits.max_num_batched_tokens:,}", limits.reason),
        Choice("KV cache", f"{capacity.num_tokens:,} tokens", capacity.reason),
    ]
    scheduler = _scheduler(config, limits, capacity, made.max_model_len, eos_ids)
    report = EngineReport(
        made.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        spec.vocab_size,
        capacity,
        log.choices,
        log.seconds,
        made.memory,
    )
    return Built(Engine(scheduler, made.runner), report)


def _scheduler(
    config: EngineConfig,
    limits: Limits,
    capacity: Capacity,
    max_model_len: int,
    eos_ids: tuple[int, ...],
) -> Scheduler:
    wish = config.scheduler
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=capacity.block_size,
            num_blocks=capacity.num_blocks,
            long_prefill_token_threshold=wish.long_prefill_token_threshold,
            chunked_prefill=wish.enable_chunked_prefill,
        ),
        BlockPool(capacity.num_blocks, config.cache.prefix_caching),
        eos_ids,
        _POLICIES[wish.scheduling_policy](),
        _gate(config),
        config.cache.prefix_caching,
        config.model.seed,
    )


def _gate(config: EngineConfig) -> Gate:
    wish = config.scheduler
    if wish.batching == "continuous":
        return Continuous()
    if wish.batching == "none":
        return Static(1, 0.0)
    return Static(wish.max_batch_size, wish.max_wait_ms / 1000)
