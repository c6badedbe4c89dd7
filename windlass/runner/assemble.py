"""Puts the computing side together: device, arithmetic, network with weights, KV pages, runner."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from windlass.config import AUTO, EngineConfig, Limits
from windlass.core.card import Capacity, Choice
from windlass.errors import ConfigError
from windlass.kernels.batch import KVCache
from windlass.kernels.select import Need, select
from windlass.models.checkpoint import Checkpoint
from windlass.models.loader import load
from windlass.models.network import Network, Parts, make_network
from windlass.models.spec import ModelSpec
from windlass.quant.plain import Plain
from windlass.runner import device as found
from windlass.runner.runner import Runner
from windlass.runner.sampler import Sampler
from windlass.runner.slots import SlotTables


@dataclass(frozen=True, slots=True)
class Loaded:
    """A network with its weights, and the choices that led to it."""

    network: Network
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    weight_bytes: int
    choices: list[Choice]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A runner with its KV pages, and what it may be asked for."""

    runner: Runner
    capacity: Capacity
    max_model_len: int
    memory: dict[str, int]


def load_network(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> Loaded:
    """Choose device, arithmetic and kernels, and read the weights."""
    where = found.choose_device(config.model)
    device = where.device
    dtype, dtype_choice = found.choose_dtype(config.model, spec, device)
    threads = found.choose_threads(config.model)
    attention = select("attention", Need(device, dtype))
    longest, length_choice = _longest(config, spec)
    method = Plain(dtype)
    parts = Parts(dtype, device, longest, attention, lambda _: method)
    network = make_network(spec, parts)
    load(network, checkpoint, device)
    num_bytes = sum(p.nbytes for p in network.parameters())
    kernel = Choice("attention kernel", attention.name, attention.reason)
    choices = [where.choice, dtype_choice, threads, kernel, length_choice]
    return Loaded(network, dtype, device, longest, num_bytes, choices)


def make_runner(config: EngineConfig, spec: ModelSpec, loaded: Loaded, limits: Limits) -> Assembled:
    """Size and make the KV pages, now that the weights are in place."""
    size = config.cache.block_size
    row_bytes = spec.num_kv_heads * spec.head_dim * loaded.dtype.itemsize
    block_bytes = 2 * spec.num_layers * size * row_bytes
    per_request = -(-loaded.max_positions // size)
    capacity = found.size_cache(
        config.cache,
        block_bytes,
        loaded.device,
        limits.memory_share,
        limits.max_num_seqs * per_request,
    )
    max_model_len = loaded.max_positions
    if config.model.max_model_len == AUTO:
        max_model_len = min(max_model_len, capacity.num_tokens)
    shape = (capacity.num_blocks, spec.num_kv_heads, size, spec.head_dim)
    cache = KVCache(spec.num_layers, shape, loaded.dtype, loaded.device)
    runner = Runner(
        loaded.network,
        cache,
        SlotTables(limits.max_num_seqs, per_request, size),
        Sampler(spec.vocab_size, loaded.device),
    )
    memory = {
        "weights": loaded.weight_bytes,
        "KV cache": cache.num_bytes,
        "process": psutil.Process().memory_info().rss,
    }
    return Assembled(runner, capacity, max_model_len, memory)


def _longest(config: EngineConfig, spec: ModelSpec) -> tuple[int, Choice]:
    """The longest context; one beyond the model's own is refused, since it was never trained."""
    wish = config.model.max_model_len
    if wish is None or wish == AUTO:
        reason = "the model's own" if wish is None else "as much as the KV cache holds"
        return spec.max_positions, Choice("context", f"{spec.max_positions:,}", reason)
    if wish > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {wish} is more than the model's {spec.max_positions} positions. "
            f"Lower it, or set max_position_embeddings with --hf-overrides if you know better."
        )
    return wish, Choice("context", f"{wish:,}", "as set")
