"""The composition root: from a config to an engine or a server. The one file that knows both sides.

Torch is imported when an engine is built, not before: the server's own process never needs it.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from windlass.config import EngineConfig, Limits, ServeConfig
from windlass.core.adapters import Adapters
from windlass.core.blocks import BlockPool
from windlass.core.card import Capacity, Choice, EngineReport, ModelCard
from windlass.core.grammars import Grammars
from windlass.core.limits import SchedulerLimits
from windlass.core.policy import Continuous, Fcfs, Gate, Policy, Priority, Static
from windlass.core.scheduler import Scheduler
from windlass.core.tokenizer import Tokenizer
from windlass.engine import Engine
from windlass.engine import Runner as EngineRunner
from windlass.errors import ConfigError
from windlass.models.card import load_card, open_checkpoint, read_headers
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles, resolve
from windlass.text.grammar.backend import GrammarBackend
from windlass.text.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    from windlass.lora.start import AdapterSetup
    from windlass.runner.assemble import Assembled, Loaded
    from windlass.runner.scoring import Scorer, ScoringLimits
    from windlass.speculative.speculation import Known
    from windlass.speculative.start import Speculating

_COMPUTING = "windlass.runner.assemble"
_MEASURED = ("graphs", "activations")
# Net, between two collections: a step of hundreds of rows makes thousands, and all of them go by themselves.
_MANY_OBJECTS = 50_000
_POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


@dataclass(frozen=True, slots=True)
class Source:
    """What an engine is built from, small enough to travel to another process."""

    files: ModelFiles
    hparams: HParams
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose files were found and whose headers were read, but no weight."""

    files: ModelFiles
    card: ModelCard
    hparams: HParams

    @property
    def source(self) -> Source:
        return Source(self.files, self.hparams, self.card.tokenizer.eos_ids)


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine, what it says of itself, and its weights, which another engine may share."""

    engine: Engine
    report: EngineReport
    weights: Loaded


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

    def import_torch(self) -> None:
        """A phase of its own, but where it was done before: in a server."""
        if _COMPUTING not in sys.modules:
            with self.phase("import torch"):
                import_torch()


def open_model(config: EngineConfig) -> OpenModel:
    """Find a model's files (fetching them if need be), its tokenizer, template and shape."""
    return _open(resolve(config.model), config)


def _open(files: ModelFiles, config: EngineConfig) -> OpenModel:
    hparams, card = read_headers(files, config.model)
    return OpenModel(files, card, hparams)


def import_torch() -> None:
    """Load what computes. Once: the collector is told to leave alone what came with it."""
    if _COMPUTING in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of objects that stay would be looked at in vain
    try:
        importlib.import_module(_COMPUTING)
        gc.freeze()
    finally:
        if collecting:
            gc.enable()


def build_engine(config: EngineConfig, source: Source, weights: Loaded | None = None) -> Built:
    """Load the weights, or take those of another engine, and put an engine together here."""
    log = _Log()
    log.import_torch()
    from windlass.runner.assemble import load_network, make_runner
    from windlass.runner.device import choose_device

    files, hparams = source.files, source.hparams
    device = choose_device(config.model)
    limits = config.limits(device.type)
    asked, config = config.speculation.spec, _settled(config, source, device.type)
    with log.phase("load weights"):
        if weights is None:
            weights = load_network(config, hparams, open_checkpoint(files, config.model))
    with log.phase("adapters"):
        adapting = _adapting(config, source, weights)
    with log.phase("load proposer"):
        speculating = _speculating(config, source, weights)
    with log.phase("KV cache"):
        made = make_runner(config, hparams, weights, limits, speculating.token_bytes)
    if adapting is not None:
        made.runner.attach_adapters(adapting.bank, adapting.store.get)
    grammars = _grammars(config, source)
    made.runner.attach_grammars(grammars)
    capacity = made.capacity
    log.choices += [
        Choice("model", f"{files.name} ({hparams.architecture})", f"{files.kind}: {files.path}"),
        *weights.choices,
        Choice("sequences", f"{limits.max_num_seqs:,}", limits.seqs_reason),
        Choice("tokens per step", f"{limits.max_num_batched_tokens:,}", limits.tokens_reason),
        made.kv_format.choice,
        *made.choices,
        Choice("KV cache", f"{capacity.num_tokens:,} tokens", capacity.reason),
        *([adapting.choice] if adapting is not None else []),
    ]
    scheduler = make_scheduler(
        config,
        limits,
        capacity,
        made.max_model_len,
        source.eos_ids,
        why_not_batch_invariant=weights.why_not_batch_invariant,
        guessing=(
            speculating.lookahead,
            speculating.lookahead_after_drafts,
            made.runner.max_mixed_tokens,
        ),
        adapting=adapting,
        grammars=grammars,
    )
    with log.phase("speculation"):
        runner, choice = speculating.start(made, limits, asked, scheduler.known)
    log.choices.append(choice)
    report = EngineReport(
        made.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        hparams.vocab_size,
        capacity,
        log.choices,
        log.seconds,
        made.memory if adapting is None else {**made.memory, "adapters": adapting.bank.num_bytes},
        adapting.store.folders if adapting is not None else {},
    )
    _calm_collector()
    return Built(_engine(config, scheduler, runner, made, weights), report, weights)


def _calm_collector() -> None:
    """Let it look neither at what was built, which stays, nor at what each step makes and drops."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < _MANY_OBJECTS:
        gc.set_threshold(_MANY_OBJECTS, *others)


def _grammars(config: EngineConfig, source: Source) -> GrammarCompiler:
    """What compiles grammars of structured outputs; it opens the tokenizer when the first one comes."""

    def open_tokenizer() -> Tokenizer:
        return load_card(source.files, config.model).tokenizer

    backend = GrammarBackend(open_tokenizer, source.hparams.vocab_size, config.grammar)
    return GrammarCompiler(backend, config.grammar)


def _engine(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: EngineRunner,
    made: Assembled,
    weights: Loaded,
) -> Engine:
    from windlass.runner.memory import RunnerMemory

    device = weights.parts.device
    # What steps take on a GPU was found when the cache was sized; no tensor shows it.
    steps = {name: size for name, size in made.memory.items() if name in _MEASURED}
    overlap = config.scheduler.overlap and device.type == "cuda"
    memory = RunnerMemory((runner,), device, steps)
    return Engine(scheduler, runner, overlap=overlap, memory=memory)


@dataclass(frozen=True, slots=True)
class BuiltScorer:
    """A scorer and its weights, which another scorer or an engine may share."""

    scorer: Scorer
    weights: Loaded
    choices: list[Choice]
    memory: dict[str, int]


def build_scorer(
    config: EngineConfig, source: Source, limits: ScoringLimits, weights: Loaded | None = None
) -> BuiltScorer:
    """Load the weights, or share them, and make what scores given tokens: pages for one group."""
    from windlass.runner.assemble import load_network, make_runner
    from windlass.runner.device import choose_device
    from windlass.runner.scoring import Scorer

    size = config.cache.block_size
    config = replace(
        config,
        model=replace(config.model, enforce_eager=True),
        cache=replace(config.cache, num_blocks=limits.num_blocks(size)),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=limits.rows,
            max_num_batched_tokens=max(limits.step_tokens, limits.rows),
        ),
    )
    if weights is None:
        weights = load_network(config, source.hparams, open_checkpoint(source.files, config.model))
    steps = config.limits(choose_device(config.model).type)
    made = make_runner(config, source.hparams, weights, steps)
    scorer = Scorer(made.runner, weights.network, limits, size, source.hparams.vocab_size)
    choices = [*weights.choices, made.kv_format.choice]
    return BuiltScorer(scorer, weights, choices, made.memory)


def build_for_process(config: EngineConfig, source: Source) -> tuple[Engine, EngineReport]:
    """What a server's engine process runs first; its arguments travel there."""
    built = build_engine(config, source)
    return built.engine, built.report


def serve(
    config: EngineConfig,
    serve_config: ServeConfig,
    on_ready: Callable[[EngineReport, str], None],
) -> int:
    """Run the server until it ends; returns the exit code."""
    from windlass.serve.client import EngineClient
    from windlass.serve.launch import serve as run_server

    if serve_config.lora_root and not config.lora.enable_lora:
        raise ConfigError("--lora-root does nothing without --enable-lora.")
    files = resolve(config.model)  # may take minutes, and a signal ends it
    if files.name in config.lora.modules():
        raise ConfigError(
            f"--lora-modules names {files.name!r}, which is the model's own name in the API. "
            "Choose another, or give the model one with --served-model-name."
        )
    client = EngineClient(None, serve_config.hang_timeout, prepare=import_torch)

    def open_card() -> ModelCard:
        opened = _open(files, config)
        client.build_with(partial(build_for_process, config, opened.source))
        return opened.card

    return run_server(client, open_card, serve_config, on_ready)


def _adapting(config: EngineConfig, source: Source, weights: Loaded) -> AdapterSetup | None:
    if not config.lora.enable_lora:
        return None
    from windlass.lora.start import open_adapters
    from windlass.runner.device import free_bytes

    free = free_bytes(weights.parts.device)
    return open_adapters(config, source.hparams, weights.network, weights.gemm, free)


class _Plain:
    """Nobody guesses: the runner as it is."""

    token_bytes = lookahead = lookahead_after_drafts = 0

    def start(
        self, made: Assembled, _limits: Limits, _asked: str, _known: Known
    ) -> tuple[EngineRunner, Choice]:
        return made.runner, Choice("speculation", "none", "as set")


def _settled(config: EngineConfig, source: Source, device: str) -> EngineConfig:
    """With one certain way to guess; what cannot be is refused before a weight is read."""
    if config.speculation.spec == "none":
        return config
    from windlass.speculative.registry import settle

    return settle(config, source.files, source.hparams, device)


def _speculating(config: EngineConfig, source: Source, weights: Loaded) -> Speculating | _Plain:
    if config.speculation.spec == "none":
        return _Plain()
    from windlass.speculative.start import Speculating

    return Speculating(config, source.files, source.hparams, weights)


def make_scheduler(
    config: EngineConfig,
    limits: Limits,
    capacity: Capacity,
    max_model_len: int,
    eos_ids: tuple[int, ...] = (),
    why_not_batch_invariant: str | None = None,
    guessing: tuple[int, int, int] = (0, 0, 0),
    adapting: AdapterSetup | None = None,
    grammars: Grammars | None = None,
) -> Scheduler:
    """What decides, as the config wants it; needs no model."""
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
            why_not_batch_invariant=why_not_batch_invariant,
            lookahead=guessing[0],
            lookahead_after_drafts=guessing[1],
            drop_drafts_below=guessing[2],
        ),
        BlockPool(capacity.num_blocks, config.cache.prefix_caching),
        eos_ids,
        _POLICIES[wish.scheduling_policy](),
        _gate(config),
        config.cache.prefix_caching,
        config.model.seed,
        Adapters(config.lora.max_loras, adapting.store) if adapting is not None else None,
        grammars,
    )


def _gate(config: EngineConfig) -> Gate:
    wish = config.scheduler
    if wish.batching == "continuous":
        return Continuous()
    if wish.batching == "none":
        return Static(1, 0.0)
    return Static(wish.max_batch_size, wish.max_wait_ms / 1000)
