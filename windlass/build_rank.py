"""Builds one rank of an engine: the weights, the runner, and all else that its plans need.

Every rank of a replica does so at the same time; build.py builds the engine around rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from windlass.build_peers import Peer, RemotePeers, SharedRings, join_hosts, join_replicas
from windlass.config import EngineConfig, Limits
from windlass.core.card import Capacity, Choice
from windlass.core.tokenizer import Tokenizer
from windlass.garbage import tune_garbage_collector
from windlass.machine.topology import CpuSlot
from windlass.models.card import load_card, open_checkpoint
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.start_log import start_log
from windlass.text.grammar.backend import GrammarBackend
from windlass.text.grammar.compiler import GrammarCompiler
from windlass.text.grammar.matchers import RequestMatchers
from windlass.tiers.disk_files import open_directory

if TYPE_CHECKING:
    from windlass.kernels.storages import Owner
    from windlass.lora.start import AdapterSetup
    from windlass.parallel.mesh import Mesh
    from windlass.parallel.place import Place
    from windlass.parallel.rank_process import Handler
    from windlass.runner.assemble import Assembled
    from windlass.runner.kv_tiers import KVTiers
    from windlass.runner.load import Loaded
    from windlass.runner.runner import Runner
    from windlass.speculative.runner import SpeculativeRunner
    from windlass.speculative.setup import SpeculationSetup


@dataclass(frozen=True, slots=True)
class Source:
    """What an engine is built from beside the config; small enough to send to another process."""

    files: ModelFiles
    hparams: HParams
    eos_ids: tuple[int, ...]


@dataclass(slots=True)
class BuildLog:
    """Collects choices and the duration of each phase while an engine is built."""

    choices: list[Choice] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)  # phases, each inside the one before
    _since: float = 0.0  # when the last phase began or ended

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Log a phase. The time of one inside another counts for the inner one only."""
        start_log.info(name)
        self._count()
        self._open.append(name)
        yield
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def split_off(self, name: str, seconds: float, whole: str) -> None:
        """Make a phase of the part of `whole` that took `seconds`; 0: there was none."""
        if seconds:
            rest = self.seconds.pop(whole) - seconds
            self.seconds |= {name: seconds, whole: rest}


class NoSpeculation:
    """Speculation is off."""

    token_bytes = lookahead = lookahead_after_drafts = 0

    def make_kv(self, capacity: Capacity) -> None:
        """Allocate nothing: there is no drafter."""


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """The parts of one rank that run plans. The scheduler and the measurements are rank 0's alone."""

    config: EngineConfig  # with the proposer that `--spec auto` stands for
    limits: Limits
    weights: Loaded
    adapters: AdapterSetup | None
    speculation: SpeculationSetup | NoSpeculation
    made: Assembled
    grammars: GrammarCompiler
    tiers: KVTiers | None
    peer: Peer | None = None  # the store that it shares with other engines
    kv_facts: dict[str, str] = field(default_factory=dict)  # see EngineReport

    @property
    def number(self) -> int:
        return self.weights.parts.mesh.world.rank


def build_rank(
    config: EngineConfig,
    source: Source,
    log: BuildLog,
    *,
    mesh: Mesh | None = None,
    weights: Loaded | None = None,
) -> BuiltRank:
    """Build this rank's runner with everything that plans need. All ranks do this at the same time."""
    from windlass.runner.assemble import make_runner
    from windlass.runner.device import choose_device
    from windlass.runner.expert_load import NetworkLoad
    from windlass.runner.load import load_network
    from windlass.runner.pooling import load_pooler

    files, hparams = source.files, source.hparams
    limits = config.limits(choose_device(config.model).type)
    if config.cache.prefix_cache_dir is not None:
        open_directory(config.cache.prefix_cache_dir)  # refuse a bad one before minutes of loading
    with log.phase("load weights"):
        checkpoint = open_checkpoint(files, config.model)
        weights = load_network(
            config, hparams, checkpoint, weights=weights, mesh=mesh, phase=log.phase
        )
    log.split_off("compile CPU kernels", weights.parts.workers.compile_s, "load weights")
    if config.lora.enable_lora:
        from windlass.lora.packing import compiled_code

        with log.phase("adapter loader"):
            compiled_code()
    with log.phase("adapters"):
        adapters = _open_adapters(config, source, weights)
    with log.phase("load proposer"):
        speculation = _open_speculation(
            config, source, weights, rank=0 if mesh is None else mesh.world.rank
        )
    with log.phase("KV cache"):
        pooler = load_pooler(files, config.model, hparams=hparams, device=weights.parts.device)
        made = make_runner(
            config,
            hparams,
            loaded=weights,
            limits=limits,
            beside=speculation.token_bytes,
            pooler=pooler,
            phase=log.phase,
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
    return BuiltRank(
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


def _open_adapters(config: EngineConfig, source: Source, weights: Loaded) -> AdapterSetup | None:
    if not config.lora.enable_lora:
        return None
    from windlass.lora.start import open_adapters
    from windlass.runner.device import free_bytes

    free = free_bytes(weights.parts.device)
    return open_adapters(
        config,
        source.hparams,
        network=weights.network,
        parts=weights.parts,
        gemm=weights.gemm,
        free=free,
    )


def _open_speculation(
    config: EngineConfig, source: Source, weights: Loaded, rank: int
) -> SpeculationSetup | NoSpeculation:
    if config.speculation.spec == "none":
        return NoSpeculation()
    from windlass.speculative.registry import ON_EVERY_RANK
    from windlass.speculative.setup import SpeculationSetup

    if rank > 0 and config.speculation.spec not in ON_EVERY_RANK:
        return NoSpeculation()
    return SpeculationSetup(
        config=config, files=source.files, hparams=source.hparams, loaded=weights
    )


def resolve_speculation(config: EngineConfig, source: Source, device: str) -> EngineConfig:
    """Replace `--spec auto` by one proposer; refuse an impossible one before weights are read."""
    if config.speculation.spec == "none":
        return config
    from windlass.speculative.registry import resolve_method

    return resolve_method(config, source.files, hparams=source.hparams, device=device)


def _grammars(config: EngineConfig, source: Source) -> GrammarCompiler:
    """Make the compiler of structured outputs. It opens the tokenizer for the first grammar."""

    def open_tokenizer() -> Tokenizer:
        return load_card(source.files, config.model).tokenizer

    backend = GrammarBackend(open_tokenizer, source.hparams.vocab_size, config.grammar)
    return GrammarCompiler(backend, config.grammar)


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

    config = resolve_speculation(config, source, choose_device(config.model).type)
    config = claim_gpu(config, place)
    claim_cpus(config.model, CpuSlot(cpus.index + place.local_rank, cpus.count))
    sends_results = place.rank == config.parallel.last_stage
    if not sends_results:
        # Only the clock of the rank whose results count decides about slow grammars.
        config = replace(config, grammar=replace(config.grammar, grammar_step_timeout=math.inf))
    ready()
    rank = build_rank(config, source, BuildLog(), mesh=connect(place))
    rank = join_peers(rank, source, shared)
    tune_garbage_collector()
    made, adapters, speculation = rank.made, rank.adapters, rank.speculation
    memory = RunnerMemory(owners(made.runner, adapters), rank.weights.parts.device, {})
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
    if not isinstance(speculation, NoSpeculation):
        worker.calls |= speculation.follow(made, worker)
    return worker.handle


def join_peers(
    rank: BuiltRank, source: Source, shared: SharedRings | RemotePeers | None
) -> BuiltRank:
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


def owners(runner: Runner | SpeculativeRunner, adapters: AdapterSetup | None) -> list[Owner]:
    return [runner] if adapters is None else [runner, adapters.store]
