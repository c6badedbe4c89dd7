"""The composition root: builds an engine from a config, around the runner of rank 0.

Only this module and build_rank.py import both the scheduler's side and the runner's side. Torch is
imported when an engine is built, because the server process does not need it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from windlass.build_peers import RemotePeers, SharedRings, engine_peers
from windlass.build_rank import (
    BuildLog,
    BuiltRank,
    NoSpeculation,
    Source,
    build_rank,
    build_worker,
    join_peers,
    owners,
    resolve_speculation,
)
from windlass.config import EngineConfig, Limits, SchedulerConfig
from windlass.core.adapters import Adapters
from windlass.core.card import Choice, EngineReport, ModelCard
from windlass.core.expert_load import ExpertLoadMonitor, Placements
from windlass.core.make_scheduler import DraftLimits, make_scheduler
from windlass.core.scheduler import Scheduler, SchedulerParts
from windlass.core.speculation.planner import DraftPlanner, NoDrafts, make_draft_planner
from windlass.engine import Engine
from windlass.errors import ConfigError, EngineError
from windlass.garbage import tune_garbage_collector
from windlass.machine.topology import CpuSlot
from windlass.models.card import read_headers
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles, resolve
from windlass.models.stages import check_ranks

if TYPE_CHECKING:
    from windlass.parallel.launch import Ranks
    from windlass.parallel.rendezvous import Master
    from windlass.runner.assemble import Assembled
    from windlass.runner.load import Loaded
    from windlass.runner.runner import Runner
    from windlass.runner.worker import Followers
    from windlass.speculative.runner import SpeculativeRunner
    from windlass.speculative.setup import SpeculationSetup

_TORCH_SIDE = "windlass.runner.assemble"  # importing it imports torch
_MEASURED = ("graphs", "activations")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model with its files located and its headers read. No weights are read yet."""

    files: ModelFiles
    card: ModelCard
    hparams: HParams

    @property
    def source(self) -> Source:
        return Source(self.files, self.hparams, self.card.tokenizer.eos_ids)


@dataclass(frozen=True, slots=True)
class Built:
    """A ready engine, its report, and its network, whose weights another engine may share.

    Each engine has its own network, kernels, thread pool and adapters: engines may run at the same
    time in different threads. `close` ends the other ranks and the grammar sandbox, which otherwise live
    as long as the engine.
    """

    engine: Engine
    report: EngineReport
    weights: Loaded
    close: Callable[[], None] = lambda: None


def open_model(config: EngineConfig) -> OpenModel:
    """Locate a model's files, downloading them if necessary, and read its card and hparams."""
    return open_files(resolve(config.model), config)


def open_files(files: ModelFiles, config: EngineConfig) -> OpenModel:
    hparams, card = read_headers(files, config.model)
    return OpenModel(files, card, hparams)


def import_torch() -> None:
    """Import torch and the runner once, and freeze the imported objects in the garbage collector."""
    if _TORCH_SIDE in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()  # the import makes hundreds of thousands of permanent objects
    try:
        # In a thread: torch keeps a frame of its import, and with it the frames of all callers, such
        # as that of LLM.__init__, whose engine would never be freed.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(importlib.import_module, _TORCH_SIDE).result()
        gc.freeze()
    finally:
        if collecting:
            gc.enable()


def build_engine(config: EngineConfig, source: Source, weights: Loaded | None = None) -> Built:
    """Build an engine in this process. `weights`: share another engine's instead of loading."""
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.parallel.data_parallel_size}, and this runs one engine in "
            "its own process. Use `windlass serve` or AsyncLLM, which start a process per replica."
        )
    if config.parallel.role != "both":
        raise ConfigError(
            f"role is {config.parallel.role}, and this runs one engine in its own process, which no other "
            "server reaches. Use `windlass serve`."
        )
    if config.parallel.nnodes > 1:
        raise ConfigError(
            f"nnodes is {config.parallel.nnodes}, and this runs the engine in its own process, which "
            "would end with every failure of another machine. Use `windlass serve` or AsyncLLM, which "
            "restart it."
        )
    return _build_engine(config, source, weights)


def _build_engine(
    config: EngineConfig,
    source: Source,
    weights: Loaded | None = None,
    *,
    exit_when_lost: bool = False,
    master: Master | None = None,
    shared: SharedRings | RemotePeers | None = None,
) -> Built:
    """`exit_when_lost`: end this process soon after another rank of the engine died or hung.

    `master`: how further machines join. `shared`: how KV blocks pass between engines.
    """
    log = BuildLog()
    requested_spec = config.speculation.spec
    parallel = config.parallel
    check_ranks(
        source.hparams, tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size
    )
    with _ranks(config, weights, exit_when_lost=exit_when_lost, master=master) as ranks:
        if _TORCH_SIDE not in sys.modules:
            with log.phase("import torch"):
                import_torch()
        from windlass.runner.device import choose_device

        config = resolve_speculation(config, source, choose_device(config.model).type)
        if ranks is None:
            rank = build_rank(config, source, log, weights=weights)
            rank = join_peers(rank, source, shared)
            return _finish(rank, source, log, requested_spec)
        from windlass.parallel.groups import connect
        from windlass.runner.device import claim_gpu, claimed_cpus
        from windlass.runner.worker import Followers

        own = claim_gpu(config, ranks.place)
        cpus = claimed_cpus(config.parallel)
        ranks.build(partial(build_worker, config, source, cpus, shared=shared))
        ranks.wait_until_ready()
        mesh = connect(ranks.place)
        ranks.interrupts = mesh.interrupts
        rank = join_peers(build_rank(own, source, log, mesh=mesh), source, shared)
        ranks.wait_until_ready()
        followers = Followers(ranks, last=config.parallel.last_stage)
        rank.made.runner.lead(followers)
        if rank.adapters is not None:
            rank.adapters.store.announce = followers.start_call
        if rank.tiers is not None:
            rank.tiers.lead(followers)
        built = _finish(rank, source, log, requested_spec, followers)
        return replace(built, close=_closing(ranks, built.close))


def _closing(ranks: Ranks, close_rank: Callable[[], None]) -> Callable[[], None]:
    """Ends the ranks; does not keep them, since they also end with the engine."""
    found = weakref.ref(ranks)

    def close() -> None:
        try:
            close_rank()
        finally:
            ranks = found()
            if ranks is not None:
                ranks.close()

    return close


@contextmanager
def _ranks(
    config: EngineConfig, weights: Loaded | None, *, exit_when_lost: bool, master: Master | None
) -> Iterator[Ranks | None]:
    """Start the other ranks of the config, and end them if this one cannot be built."""
    if config.parallel.num_ranks == 1:
        yield None
        return
    from windlass.parallel.launch import Ranks

    if weights is not None:
        raise ConfigError("the weights of another engine cannot be shared by several ranks.")
    if config.parallel.pipeline_parallel_size > 1 and config.speculation.spec == "self":
        raise ConfigError(
            "--spec self drafts with the first layers and the head, which are on different pipeline "
            "stages. Use another --spec, or --tensor-parallel-size."
        )
    ranks = Ranks(config.parallel, import_torch, exit_when_lost=exit_when_lost, master=master)
    try:
        yield ranks
    except BaseException as error:
        found = error if isinstance(error, EngineError) else ranks.lost(error)
        ranks.close(str(found))
        raise found from error


def _adapter_versions(rank: BuiltRank) -> dict[str, str]:
    """What identifies the adapters on all hosts, if other servers use them, too."""
    if rank.adapters is None or rank.config.parallel.role == "both":
        return {}
    store = rank.adapters.store
    return {name: store.version(name) for name in store.names}


def _finish(
    rank: BuiltRank,
    source: Source,
    log: BuildLog,
    requested_spec: str,
    followers: Followers | None = None,
) -> Built:
    """Start speculation, and make the scheduler and the engine around the runner."""
    files, hparams = source.files, source.hparams
    limits, made, adapters, weights = rank.limits, rank.made, rank.adapters, rank.weights
    capacity = made.capacity
    log.choices += [
        Choice("model", f"{files.name} ({hparams.architecture})", f"{files.kind}: {files.path}"),
        *weights.choices,
        Choice("sequences", f"{limits.max_num_seqs:,}", limits.seqs_reason),
        Choice("tokens per step", f"{limits.max_num_batched_tokens:,}", limits.tokens_reason),
        *_latency_target(rank.config.scheduler, limits),
        made.kv_format.choice,
        *made.choices,
        Choice("KV cache", f"{capacity.num_tokens:,} tokens", capacity.reason),
        *([adapters.choice] if adapters is not None else []),
        *([] if rank.tiers is None else rank.tiers.choices),
    ]
    with log.phase("speculation"):
        runner, drafts, choice = _start_speculation(
            rank.speculation,
            made=made,
            limits=limits,
            requested=requested_spec,
            enabled=rank.config.speculation.spec_enabled,
        )
    log.choices.append(choice)
    if rank.tiers is not None:
        from windlass.runner.prompt_rate import measure_prompt_token_s

        with log.phase("speed of prompts"):
            rank.tiers.prompt_token_s = measure_prompt_token_s(
                made.runner,
                capacity,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=made.max_model_len,
            )
    scheduler = make_scheduler(
        rank.config,
        limits,
        capacity=capacity,
        max_model_len=made.max_model_len,
        eos_ids=source.eos_ids,
        why_not_batch_invariant=weights.why_not_batch_invariant,
        draft_limits=DraftLimits(
            lookahead=rank.speculation.lookahead,
            lookahead_after_drafts=rank.speculation.lookahead_after_drafts,
            drop_drafts_below=made.runner.max_mixed_tokens,
        ),
        parts=SchedulerParts(
            adapters=(
                Adapters()
                if adapters is None
                else Adapters(rank.config.lora.max_loras, adapters.store)
            ),
            grammars=rank.grammars,
            drafts=drafts or NoDrafts(),
            tiers=rank.tiers,
        ),
    )
    adapter_memory = {} if adapters is None else {"adapters": adapters.bank.num_bytes}
    report = EngineReport(
        max_model_len=made.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=hparams.vocab_size,
        capacity=capacity,
        choices=log.choices,
        seconds=log.seconds,
        memory={**made.memory, **adapter_memory},
        adapters=adapters.store.folders if adapters is not None else {},
        adapter_versions=_adapter_versions(rank),
        prefix_caching=rank.config.cache.prefix_caching,
        default_tpot_ms=limits.default_tpot_ms,
        kv_facts=rank.kv_facts,
    )
    tune_garbage_collector()
    engine = _make_engine(rank, scheduler=scheduler, runner=runner, followers=followers)
    return Built(engine, report, weights=weights, close=_closing_parts(engine, rank))


def _latency_target(settings: SchedulerConfig, limits: Limits) -> list[Choice]:
    """The start-up line of a target that the profile sets."""
    if limits.default_tpot_ms is None or settings.slo_tpot_ms is not None:
        return []
    value = f"{limits.default_tpot_ms:g} ms per output token"
    return [
        Choice("latency target", value, f"profile {settings.profile}; --slo-tpot-ms sets another")
    ]


def _closing_parts(engine: Engine, rank: BuiltRank) -> Callable[[], None]:
    """Ends the grammar sandbox, and the KV tiers after their last saves."""
    close_grammars = rank.grammars.close
    if rank.tiers is None:
        return close_grammars

    def close() -> None:
        close_grammars()
        engine.close()

    return close


def _make_engine(
    rank: BuiltRank,
    *,
    scheduler: Scheduler,
    runner: Runner | SpeculativeRunner,
    followers: Followers | None,
) -> Engine:
    from windlass.runner.memory import RunnerMemory

    device, made = rank.weights.parts.device, rank.made
    # Measured on a GPU when the cache was sized: no tensor owns this memory.
    steps = {name: size for name, size in made.memory.items() if name in _MEASURED}
    overlap = rank.config.scheduler.overlap and device.type == "cuda"
    memory = RunnerMemory(owners(runner, rank.adapters), device, steps, followers)
    return Engine(
        scheduler,
        runner,
        overlap=overlap,
        memory=memory,
        expert_load=_monitor_experts(rank, followers),
        peers=engine_peers(rank.peer, rank.tiers, followers),
        capture_next=made.runner.capture_next,
    )


def _monitor_experts(rank: BuiltRank, followers: Followers | None) -> ExpertLoadMonitor | None:
    """Make the monitor of the experts' load, if it is counted."""
    from windlass.runner.expert_load import NetworkLoad

    parallel, weights = rank.config.parallel, rank.weights
    if not parallel.counts_expert_load:
        return None
    # Ranks of one stage have the same counts.
    others = followers if parallel.pipeline_parallel_size > 1 else None
    load = NetworkLoad(weights.network, others)
    placements: Placements = {}
    if parallel.enable_expert_parallel:
        given = weights.parts.placements
        placements = {**load.read().spread(parallel.tensor_parallel_size), **given}
    return ExpertLoadMonitor(load.read, placements, parallel.record_expert_load)


def build_for_process(
    config: EngineConfig,
    source: Source,
    replica: int,
    master: Master | None = None,
    shared: SharedRings | RemotePeers | None = None,
    cpus: CpuSlot | None = None,
) -> tuple[Engine, EngineReport]:
    """Build a replica in its engine process. The arguments are sent to that process.

    `cpus`: of replica 0 among all engine processes of the machine; None: there is no other engine.
    """
    import_torch()
    from windlass.runner.device import claim_cpus, claim_devices

    claim_devices(config, replica)
    cpus = cpus or CpuSlot(0, config.parallel.processes_per_node)
    index = cpus.index + replica * config.parallel.ranks_per_node
    claim_cpus(config.model, CpuSlot(index, cpus.count))
    built = _build_engine(config, source, exit_when_lost=True, master=master, shared=shared)
    return built.engine, built.report


def _start_speculation(
    setup: SpeculationSetup | NoSpeculation,
    *,
    made: Assembled,
    limits: Limits,
    requested: str,
    enabled: bool,
) -> tuple[Runner | SpeculativeRunner, DraftPlanner | None, Choice]:
    """The runner, with a proposer if there is one, and what decides on drafts for the scheduler."""
    if isinstance(setup, NoSpeculation):
        return made.runner, None, Choice("speculation", "none", "as set")
    started = setup.start(made, limits, requested)
    drafts = None
    if started.facts is not None:
        drafts = make_draft_planner(started.facts, setup.check_costs)
        if not enabled:
            drafts.cap(0)
    return started.runner, drafts, started.choice
