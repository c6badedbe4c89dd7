"""The composition root: builds an engine from a config.

Only this module imports both the scheduler's side and the runner's side. Torch is imported when an
engine is built, because the server process does not need it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from windlass.build_peers import (
    Peer,
    RemotePeers,
    SharedRings,
    engine_peers,
    join_hosts,
    join_replicas,
)
from windlass.config import EngineConfig, Limits
from windlass.core.adapters import Adapters
from windlass.core.card import Capacity, Choice, EngineReport, ModelCard
from windlass.core.expert_load import ExpertLoadMonitor, Placements
from windlass.core.make_scheduler import DraftLimits, make_scheduler
from windlass.core.scheduler import Scheduler
from windlass.core.speculation.planner import DraftPlanner, make_draft_planner
from windlass.core.tokenizer import Tokenizer
from windlass.engine import Engine
from windlass.errors import ConfigError, EngineError
from windlass.machine.topology import CpuSlot
from windlass.models.card import load_card, open_checkpoint, read_headers
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles, resolve
from windlass.models.stages import check_stages
from windlass.start_log import start_log
from windlass.text.grammar.backend import GrammarBackend
from windlass.text.grammar.compiler import GrammarCompiler
from windlass.text.grammar.matchers import RequestMatchers

if TYPE_CHECKING:
    from windlass.kernels.storages import Owner
    from windlass.lora.start import AdapterSetup
    from windlass.parallel.launch import Ranks
    from windlass.parallel.mesh import Mesh
    from windlass.parallel.place import Place
    from windlass.parallel.rank_process import Handler
    from windlass.parallel.rendezvous import Master
    from windlass.runner.assemble import Assembled
    from windlass.runner.kv_tiers import KVTiers
    from windlass.runner.load import Loaded
    from windlass.runner.runner import Runner
    from windlass.runner.scoring import Scorer, ScoringLimits
    from windlass.runner.worker import Followers
    from windlass.speculative.runner import SpeculativeRunner
    from windlass.speculative.setup import SpeculationSetup

_TORCH_SIDE = "windlass.runner.assemble"  # importing it imports torch
_MEASURED = ("graphs", "activations")
# Net allocations between two collections. A step with hundreds of rows allocates thousands of
# objects, and reference counting frees all of them.
_GC_THRESHOLD = 50_000


@dataclass(frozen=True, slots=True)
class Source:
    """The inputs of `build_engine` beside the config; small enough to send to another process."""

    files: ModelFiles
    hparams: HParams
    eos_ids: tuple[int, ...]


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


@dataclass(slots=True)
class _Log:
    """Collects choices and the duration of each phase while an engine is built."""

    choices: list[Choice] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start_log.info(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def split_off(self, name: str, seconds: float, whole: str) -> None:
        """Make a phase of the part of `whole` that took `seconds`; 0: there was none."""
        if seconds:
            rest = self.seconds.pop(whole) - seconds
            self.seconds |= {name: seconds, whole: rest}

    def import_torch(self) -> None:
        """Time the import as a phase, unless the server imported torch earlier."""
        if _TORCH_SIDE not in sys.modules:
            with self.phase("import torch"):
                import_torch()


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


@dataclass(frozen=True, slots=True)
class _Rank:
    """What every rank of a replica builds; the scheduler and the measurements are rank 0's alone."""

    config: EngineConfig  # with the proposer that `--spec auto` stands for
    limits: Limits
    weights: Loaded
    adapters: AdapterSetup | None
    speculation: SpeculationSetup | _NoSpeculation
    made: Assembled
    grammars: GrammarCompiler
    tiers: KVTiers | None
    peer: Peer | None = None  # the store that it shares with other engines
    kv_facts: dict[str, str] = field(default_factory=dict)  # see EngineReport

    @property
    def number(self) -> int:
        return self.weights.parts.mesh.world.rank


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
    log = _Log()
    requested_spec = config.speculation.spec
    check_stages(source.hparams, config.parallel.pipeline_parallel_size)
    with _ranks(config, weights, exit_when_lost=exit_when_lost, master=master) as ranks:
        log.import_torch()
        from windlass.runner.device import choose_device

        config = _resolve_speculation(config, source, choose_device(config.model).type)
        if ranks is None:
            rank = _build_rank(config, source, log, weights=weights)
            rank = _join_peers(rank, source, shared)
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
        rank = _join_peers(_build_rank(own, source, log, mesh=mesh), source, shared)
        ranks.wait_until_ready()
        followers = Followers(ranks, last=config.parallel.last_stage)
        rank.made.runner.lead(followers)
        if rank.adapters is not None:
            rank.adapters.store.announce = followers.tell
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


def build_worker(
    config: EngineConfig,
    source: Source,
    cpus: CpuSlot,
    place: Place,
    ready: Callable[[], object],
    shared: SharedRings | RemotePeers | None = None,
) -> Handler:
    """Build a rank beside rank 0, in its own process. `cpus`: of the machine's first rank of this engine."""
    from windlass.parallel.groups import connect
    from windlass.runner.device import choose_device, claim_cpus, claim_gpu
    from windlass.runner.expert_load import NetworkLoad
    from windlass.runner.memory import RunnerMemory
    from windlass.runner.worker import Worker

    config = _resolve_speculation(config, source, choose_device(config.model).type)
    config = claim_gpu(config, place)
    claim_cpus(config.model, CpuSlot(cpus.index + place.local_rank, cpus.count))
    sends_results = place.rank == config.parallel.last_stage
    if (
        not sends_results
    ):  # only the clock of the rank whose results count decides about slow grammars
        config = replace(config, grammar=replace(config.grammar, grammar_step_timeout=math.inf))
    ready()
    rank = _build_rank(config, source, _Log(), mesh=connect(place))
    rank = _join_peers(rank, source, shared)
    _tune_garbage_collector()
    made, adapters, speculation = rank.made, rank.adapters, rank.speculation
    memory = RunnerMemory(_owners(made.runner, adapters), rank.weights.parts.device, {})
    load = NetworkLoad(rank.weights.network)
    worker = Worker(made.runner, sends_results=sends_results)
    worker.calls |= {"sleep": memory.sleep, "wake": memory.wake, "expert_load": load.encode}
    if adapters is not None:
        store = adapters.store
        worker.calls |= {
            "register": store.register,
            "unregister": store.unregister,
            "read": store.ready,
        }
    if rank.tiers is not None:
        tiers = rank.tiers
        worker.calls |= {
            "kv_loads": tiers.encode_ended,
            "kv_clear": tiers.clear,
            "kv_close": tiers.close,
        }
    if rank.peer is not None:
        from windlass.tiers.peer_ranks import follower_calls

        worker.calls |= follower_calls(rank.peer, rank.number)
    if not isinstance(speculation, _NoSpeculation):
        worker.calls |= speculation.follow(made, worker)
    return worker.handle


def _build_rank(
    config: EngineConfig,
    source: Source,
    log: _Log,
    *,
    mesh: Mesh | None = None,
    weights: Loaded | None = None,
) -> _Rank:
    """Build this rank's runner with everything that plans need. All ranks do this at the same time."""
    from windlass.runner.assemble import make_runner
    from windlass.runner.device import choose_device
    from windlass.runner.expert_load import NetworkLoad
    from windlass.runner.load import load_network
    from windlass.runner.pooling import load_pooler

    files, hparams = source.files, source.hparams
    limits = config.limits(choose_device(config.model).type)
    with log.phase("load weights"):
        checkpoint = open_checkpoint(files, config.model)
        weights = load_network(config, hparams, checkpoint, weights=weights, mesh=mesh)
    log.split_off("compile CPU kernels", weights.parts.workers.compile_s, "load weights")
    with log.phase("adapters"):
        adapters = _open_adapters(config, source, weights)
    with log.phase("load proposer"):
        speculation = _open_speculation(
            config, source, weights, rank=0 if mesh is None else mesh.world.rank
        )
    with log.phase("KV cache"):
        pooler = load_pooler(files, config.model, hparams, weights.parts.device)
        made = make_runner(
            config, hparams, weights, limits, beside=speculation.token_bytes, pooler=pooler
        )
        made = replace(made, drafter_kv=speculation.make_kv(made.capacity))
    if adapters is not None:
        # Rank 0 plans with adapters that are in its memory; those of other ranks may take longer.
        made.runner.attach_adapters(adapters.bank, adapters.store.wait_for)
    with log.phase("KV tiers"):
        tiers = _open_tiers(config, source, weights=weights, made=made)
    NetworkLoad(weights.network).reset()
    grammars = _grammars(config, source)
    matchers = RequestMatchers(grammars.built, config.grammar, hparams.vocab_size)
    made.runner.attach_grammars(matchers)
    return _Rank(
        config=config,
        limits=limits,
        weights=weights,
        adapters=adapters,
        speculation=speculation,
        made=made,
        grammars=grammars,
        tiers=tiers,
    )


def _open_tiers(
    config: EngineConfig, source: Source, *, weights: Loaded, made: Assembled
) -> KVTiers | None:
    """Open the KV tiers of this rank, if there are any, and give them to its runner."""
    if not config.cache.has_tiers:
        return None
    from windlass.runner.disk_tier import open_disk
    from windlass.runner.kv_tiers import open_tiers

    stores = open_disk(config, source.files, source.hparams, loaded=weights, made=made)
    tiers = open_tiers(config, made.caches, stores)
    made.runner.attach_tiers(tiers)
    return tiers


def _join_peers(rank: _Rank, source: Source, shared: SharedRings | RemotePeers | None) -> _Rank:
    """Add the store of KV blocks that this rank shares with other engines to its tiers."""
    from windlass.runner.disk_tier import kv_fingerprint

    if shared is None:
        return rank
    assert rank.tiers is not None
    record_bytes = rank.made.record_bytes
    if isinstance(shared, SharedRings):
        peer = join_replicas(shared, rank.number, record_bytes)
        rank.tiers.share(peer)
        return replace(rank, peer=peer)
    fingerprint = kv_fingerprint(
        rank.config,
        source.files,
        source.hparams,
        loaded=rank.weights,
        made=rank.made,
        on_many_hosts=True,
    )
    facts = fingerprint.facts()
    peer = join_hosts(
        shared,
        rank.number,
        record_bytes=record_bytes,
        facts=facts,
        limit_s=rank.config.parallel.kv_transfer_timeout,
    )
    rank.tiers.share(peer)
    return replace(rank, peer=peer, kv_facts=facts)


def _adapter_versions(rank: _Rank) -> dict[str, str]:
    """What identifies the adapters on all hosts, if other servers use them, too."""
    if rank.adapters is None or rank.config.parallel.role == "both":
        return {}
    store = rank.adapters.store
    return {name: store.version(name) for name in store.names}


def _finish(
    rank: _Rank, source: Source, log: _Log, requested_spec: str, followers: Followers | None = None
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
                made.runner, capacity, limits.max_num_batched_tokens, made.max_model_len
            )
    scheduler = make_scheduler(
        rank.config,
        limits,
        capacity,
        made.max_model_len,
        source.eos_ids,
        why_not_batch_invariant=weights.why_not_batch_invariant,
        draft_limits=DraftLimits(
            lookahead=rank.speculation.lookahead,
            lookahead_after_drafts=rank.speculation.lookahead_after_drafts,
            drop_drafts_below=made.runner.max_mixed_tokens,
        ),
        adapters=None if adapters is None else Adapters(rank.config.lora.max_loras, adapters.store),
        grammars=rank.grammars,
        drafts=drafts,
        tiers=rank.tiers,
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
        kv_facts=rank.kv_facts,
    )
    _tune_garbage_collector()
    engine = _make_engine(rank, scheduler=scheduler, runner=runner, followers=followers)
    return Built(engine, report, weights, _closing_parts(engine, rank))


def _closing_parts(engine: Engine, rank: _Rank) -> Callable[[], None]:
    """Ends the grammar sandbox, and the KV tiers after their last saves."""
    close_grammars = rank.grammars.close
    if rank.tiers is None:
        return close_grammars

    def close() -> None:
        close_grammars()
        engine.close()

    return close


def _tune_garbage_collector() -> None:
    """Exempt the engine's permanent objects from collection, and collect less often."""
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < _GC_THRESHOLD:
        gc.set_threshold(_GC_THRESHOLD, *others)


def _grammars(config: EngineConfig, source: Source) -> GrammarCompiler:
    """Make the compiler of structured outputs. It opens the tokenizer for the first grammar."""

    def open_tokenizer() -> Tokenizer:
        return load_card(source.files, config.model).tokenizer

    backend = GrammarBackend(open_tokenizer, source.hparams.vocab_size, config.grammar)
    return GrammarCompiler(backend, config.grammar)


def _make_engine(
    rank: _Rank,
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
    memory = RunnerMemory(_owners(runner, rank.adapters), device, steps, followers)
    return Engine(
        scheduler,
        runner,
        overlap=overlap,
        memory=memory,
        expert_load=_monitor_experts(rank, followers),
        peers=engine_peers(rank.peer, rank.tiers, followers),
        capture_next=made.runner.capture_next,
    )


def _monitor_experts(rank: _Rank, followers: Followers | None) -> ExpertLoadMonitor | None:
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


def _owners(runner: Runner | SpeculativeRunner, adapters: AdapterSetup | None) -> list[Owner]:
    return [runner] if adapters is None else [runner, adapters.store]


@dataclass(frozen=True, slots=True)
class BuiltScorer:
    """A scorer and its network, whose weights another scorer or engine may share."""

    scorer: Scorer
    weights: Loaded
    choices: list[Choice]
    memory: dict[str, int]


def build_scorer(
    config: EngineConfig, source: Source, limits: ScoringLimits, weights: Loaded | None = None
) -> BuiltScorer:
    """Build a scorer of given tokens, with a KV cache for one group. `weights`: share them."""
    from windlass.runner.assemble import make_runner
    from windlass.runner.device import choose_device
    from windlass.runner.load import kv_format_of, load_network
    from windlass.runner.scoring import Scorer

    if config.parallel.num_ranks > 1:
        raise ConfigError("tokens are scored on one device. Leave out --tensor-parallel-size.")
    config = replace(
        config,
        model=replace(config.model, enforce_eager=True),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=limits.rows,
            max_num_batched_tokens=max(limits.step_tokens, limits.rows),
        ),
    )
    checkpoint = open_checkpoint(source.files, config.model)
    weights = load_network(config, source.hparams, checkpoint, weights=weights)
    layout = kv_format_of(config, source.hparams, weights.parts).layout.without_windows()
    cache = replace(config.cache, num_blocks=limits.num_blocks(layout))
    config = replace(config, cache=cache)
    steps = config.limits(choose_device(config.model).type)
    made = make_runner(config, source.hparams, weights, steps, one_table=True)
    scorer = Scorer(
        runner=made.runner,
        network=weights.network,
        limits=limits,
        layout=layout,
        vocab_size=source.hparams.vocab_size,
    )
    choices = [*weights.choices, made.kv_format.choice]
    return BuiltScorer(scorer=scorer, weights=weights, choices=choices, memory=made.memory)


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


def _open_adapters(config: EngineConfig, source: Source, weights: Loaded) -> AdapterSetup | None:
    if not config.lora.enable_lora:
        return None
    from windlass.lora.start import open_adapters
    from windlass.runner.device import free_bytes

    free = free_bytes(weights.parts.device)
    return open_adapters(config, source.hparams, weights.network, weights.gemm, free)


class _NoSpeculation:
    """Speculation is off."""

    token_bytes = lookahead = lookahead_after_drafts = 0

    def make_kv(self, capacity: Capacity) -> None:
        """Allocate nothing: there is no drafter."""


def _start_speculation(
    setup: SpeculationSetup | _NoSpeculation,
    *,
    made: Assembled,
    limits: Limits,
    requested: str,
    enabled: bool,
) -> tuple[Runner | SpeculativeRunner, DraftPlanner | None, Choice]:
    """The runner, with a proposer if there is one, and what decides on drafts for the scheduler."""
    if isinstance(setup, _NoSpeculation):
        return made.runner, None, Choice("speculation", "none", "as set")
    started = setup.start(made, limits, requested)
    drafts = None
    if started.facts is not None:
        drafts = make_draft_planner(started.facts, setup.check_costs)
        if not enabled:
            drafts.cap(0)
    return started.runner, drafts, started.choice


def _resolve_speculation(config: EngineConfig, source: Source, device: str) -> EngineConfig:
    """Replace `--spec auto` by one proposer; refuse an impossible one before weights are read."""
    if config.speculation.spec == "none":
        return config
    from windlass.speculative.registry import resolve_method

    return resolve_method(config, source.files, source.hparams, device)


def _open_speculation(
    config: EngineConfig, source: Source, weights: Loaded, rank: int
) -> SpeculationSetup | _NoSpeculation:
    if config.speculation.spec == "none":
        return _NoSpeculation()
    from windlass.speculative.registry import ON_EVERY_RANK
    from windlass.speculative.setup import SpeculationSetup

    if rank > 0 and config.speculation.spec not in ON_EVERY_RANK:
        return _NoSpeculation()
    return SpeculationSetup(
        config=config, files=source.files, hparams=source.hparams, loaded=weights
    )
