"""Starts what serves a model: the engine processes of its replicas, the server, the ranks of a machine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

from windlass.build import build_for_process, import_torch, open_files, open_model
from windlass.build_peers import RemotePeers, SharedRings
from windlass.build_rank import Source, build_worker
from windlass.config import AUTO, EngineConfig, ServeConfig, check_server, flag
from windlass.core.card import EngineReport, ModelCard
from windlass.errors import ConfigError
from windlass.machine.device import check_cpu_replicas, runs_on_cpu
from windlass.machine.topology import CpuSlot
from windlass.models.file_digest import file_digest
from windlass.models.source import ModelFiles, resolve
from windlass.models.stages import check_ranks
from windlass.parallel.segment import Segment
from windlass.parallel_config import ParallelConfig, split_address
from windlass.version import __version__

if TYPE_CHECKING:
    from windlass.serve.client import EngineClient
    from windlass.serve.fallback import FallbackStep
    from windlass.serve.loop import Build
    from windlass.serve.prefill_listener import PrefillListener

_TRANSFER_ROWS_GB = 0.25


def make_client(
    config: EngineConfig, hang_timeout: float = 120.0, retry_on_restart: bool = False
) -> EngineClient:
    """The client of the config's replicas; `build_replicas` makes what they build."""
    from windlass.serve.client import EngineClient
    from windlass.serve.handover import SplitPolicy

    parallel, split, secret = config.parallel, None, b""
    if runs_on_cpu(config.model.device):
        check_cpu_replicas(parallel.data_parallel_size)
    if parallel.hands_over and not config.cache.prefix_caching:
        raise ConfigError(
            "--prefill-replicas and --role hand cached KV blocks over. Leave out --no-prefix-caching."
        )
    if "prefill" in parallel.roles:
        split = SplitPolicy(parallel.roles, parallel.min_prefill_tokens)
    if parallel.prefill_addresses:
        secret = _prefill_secret(parallel)
    return EngineClient(
        None,
        hang_timeout,
        prepare=import_torch,
        num_replicas=parallel.data_parallel_size,
        retry_on_restart=retry_on_restart,
        split=split,
        prefill_servers=parallel.prefill_addresses,
        secret=secret,
    )


def _prefill_secret(parallel: ParallelConfig) -> bytes:
    """The secret that prefill and decode servers share; raises where they need one."""
    from windlass.handshake import read_secret

    if parallel.role == "prefill":
        name, addresses = "--prefill-listen", [parallel.prefill_listen]
    else:
        name, addresses = "--prefill-servers", parallel.prefill_addresses
    return read_secret(parallel, name, *(split_address(name, each)[0] for each in addresses))


def open_prefill_port(parallel: ParallelConfig) -> tuple[PrefillListener, list[Segment]]:
    """Bind the port of --role prefill; returns the memory that the ranks of its engine write, too."""
    from windlass.serve.prefill_listener import PrefillListener, listen

    rings, secret = _rings(parallel), _prefill_secret(parallel)
    listener = listen(parallel.prefill_listen)
    return PrefillListener(listener, [ring.map for ring in rings], secret), rings


def _rings(parallel: ParallelConfig) -> list[Segment]:
    """Memory for the KV blocks that one engine hands over: a segment of each rank."""
    return [Segment(parallel.transfer_bytes) for _ in range(parallel.num_ranks)]


def build_replicas(
    config: EngineConfig,
    source: Source,
    cpus: CpuSlot | None = None,
    rings: Sequence[Segment] = (),
) -> list[Build]:
    """The build function of each replica. With several machines, opens the port where they join.

    `cpus`: of replica 0 among all engine processes of the machine; None: there is no other engine.
    `rings`: memory of each rank for the KV blocks that --role prefill hands over.
    """
    parallel, master = config.parallel, None
    if parallel.role == "prefill" and not rings:
        raise ConfigError(
            "role is prefill: only `windlass serve` computes prompts for other servers."
        )
    if parallel.node_rank > 0:
        raise ConfigError(
            f"node_rank is {parallel.node_rank}: only node 0 has an engine. Start the other machines with "
            "`windlass serve`."
        )
    if parallel.nnodes > 1:
        from windlass.parallel.rendezvous import listen

        master = listen(parallel, _facts(config, source))
    builds: list[Build] = []
    if parallel.hands_over and not config.cache.has_tiers:
        # Blocks pass through host memory on their way to another engine.
        config = replace(config, cache=replace(config.cache, kv_offload_gb=_TRANSFER_ROWS_GB))
    shares = {index: _rings(parallel) for index in range(parallel.prefill_replicas)}
    for replica in range(parallel.data_parallel_size):
        shared: SharedRings | RemotePeers | None = None
        if parallel.role != "both":
            shared = RemotePeers(rings, _prefill_secret(parallel))
        elif shares:
            seen = {replica: shares[replica]} if replica in shares else shares
            shared = SharedRings(replica, seen)
        builds.append(partial(build_for_process, config, source, replica, master, shared, cpus))
    return builds


# Options that may differ between the machines of a replica.
_OWN_OPTIONS = {
    *("model", "served_model_name", "tokenizer", "download_dir", "hf_token"),
    *("num_threads", "memory_share"),
    *("node_rank", "master_addr", "master_port", "node_timeout"),
    *("cluster_secret", "cluster_secret_file"),
}


def _facts(config: EngineConfig, source: Source) -> dict[str, str]:
    """What must be the same on all machines of a replica."""
    facts = {
        "the Windlass version": __version__,
        "the torch version": importlib.metadata.version("torch"),
        "the digest of the model's files": file_digest(source.files, config.model),
    }
    for section in fields(config):
        part = getattr(config, section.name)
        for item in fields(part):
            if item.name not in _OWN_OPTIONS:
                facts[flag(item.name)] = str(getattr(part, item.name))
    return facts


def _serve_node(config: EngineConfig) -> int:
    """Run the ranks of a machine beside node 0. Returns the exit code."""
    from windlass.parallel.node import NodeWork, serve_node

    opened = open_model(config)
    parallel = config.parallel
    check_ranks(
        opened.hparams, tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size
    )
    cpus = CpuSlot(0, config.parallel.processes_per_node)
    build = partial(build_worker, config, opened.source, cpus)
    work = NodeWork(config.parallel, import_torch, build)
    return serve_node(work, _facts(config, opened.source))


def serve(
    config: EngineConfig,
    serve_config: ServeConfig,
    on_ready: Callable[[EngineReport, str], None],
    *,
    sources: Mapping[str, str] | None = None,
    fallbacks: Sequence[tuple[FallbackStep, EngineConfig | None]] = (),
) -> int:
    """Run the server until it ends, or with --node-rank only ranks. Returns the exit code.

    `sources`: where each option that is set comes from, for GET /admin/config. `fallbacks`: the steps of
    --fallback, with the config of each that has a model.
    """
    if config.parallel.node_rank > 0:
        return _serve_node(config)
    from windlass.serve.launch import FallbackParts, num_http_workers
    from windlass.serve.launch import serve as run_server
    from windlass.serve.live_config import StartConfig

    check_server(serve_config, config)
    files = resolve(config.model)  # a download can take minutes; a signal ends it
    for name in {files.name, *config.model.served_model_name} & config.lora.modules().keys():
        raise ConfigError(
            f"--lora-modules names {name!r}, which is a name of the base model in the API. "
            "Choose another name, or rename the base model with --served-model-name."
        )
    if fallbacks:
        _check_fallbacks(config, fallbacks)
    if serve_config.http_workers == AUTO:
        serve_config = replace(serve_config, http_workers=num_http_workers(config.model.device))
    prefill, rings = None, list[Segment]()
    if config.parallel.role == "prefill":
        prefill, rings = open_prefill_port(config.parallel)
    slots = iter(cpu_slots([config, *(other for _, other in fallbacks if other is not None)]))
    client, open_card = _served(
        config, files, serve_config=serve_config, cpus=next(slots), rings=rings
    )
    started = StartConfig(engine=config, sources=sources or {})
    parts = []
    for step, other in fallbacks:
        if other is None:
            parts.append(FallbackParts(step))
        else:
            served = _served(
                other, resolve(other.model), serve_config=serve_config, cpus=next(slots)
            )
            parts.append(FallbackParts(step, *served))
    return run_server(
        client,
        open_card,
        serve_config,
        on_ready,
        started=started,
        fallbacks=parts,
        prefill=prefill,
    )


def cpu_slots(engines: Sequence[EngineConfig]) -> list[CpuSlot]:
    """The place of each engine's first process among the processes that it divides the cores with.

    The server's own model comes first. It divides the cores among its own processes only, since models of
    --fallback are idle while it answers in time. Each of those gets its part of the cores of all engines.
    """
    counts = [each.parallel.processes_per_node for each in engines]
    own, *others = [CpuSlot(sum(counts[:i]), sum(counts)) for i in range(len(counts))]
    return [replace(own, count=counts[0]), *others]


def _served(
    config: EngineConfig,
    files: ModelFiles,
    serve_config: ServeConfig,
    cpus: CpuSlot,
    rings: Sequence[Segment] = (),
) -> tuple[EngineClient, Callable[[], ModelCard]]:
    """The client of a model's engine, and the function that opens the model and builds the engine."""
    client = make_client(config, serve_config.hang_timeout, serve_config.retry_on_restart)

    def open_card() -> ModelCard:
        opened = open_files(files, config)
        client.build_with(*build_replicas(config, opened.source, cpus=cpus, rings=rings))
        return opened.card

    return client, open_card


def _check_fallbacks(
    config: EngineConfig, fallbacks: Sequence[tuple[FallbackStep, EngineConfig | None]]
) -> None:
    """Refuse engines whose memory is not planned."""
    from windlass.serve.fallback import check_memory

    engines = [("the model", config)]
    for step, other in fallbacks:
        if other is not None:
            engines.append((f"--fallback {step.text}", other))
            if not _has_memory(other):
                raise ConfigError(
                    f"--fallback {step.text!r} does not say how much memory it gets. Add an option, such "
                    f"as {step.text},memory_share=0.2 or {step.text},kv_cache_memory_bytes=1GiB."
                )
    on_cpu = runs_on_cpu(config.model.device)
    shares = [
        (name, each.limits("cpu" if on_cpu else "cuda").memory_share)
        for name, each in engines
        if _by_share(each)
    ]
    check_memory(shares)


def _by_share(config: EngineConfig) -> bool:
    return config.cache.num_blocks is None and config.cache.kv_cache_memory_bytes is None


def _has_memory(config: EngineConfig) -> bool:
    return not _by_share(config) or config.cache.memory_share is not None
