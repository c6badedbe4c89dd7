"""Decides whether packed weights also have a 16-bit copy (kernels/copied.py).

A start, `windlass plan` and `windlass inspect` ask the same rule, `why_no_copies`, with the same estimate of
a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.core.kv_layout import KVLayout
from windlass.kernels.copied import MAX_PACKED_ROWS
from windlass.layers.stored import StoredWeight
from windlass.models.hparams import HParams
from windlass.models.loader import outline
from windlass.models.network import Network, Parts, make_network
from windlass.models.rank_weights import count_copies
from windlass.parallel.groups import least
from windlass.quant.packed_method import PackedMethod
from windlass.runner.device import free_bytes, gib, whole_bytes

_MEMORY_PART = 8  # copies take at most one part in so many of the GPU's memory,
_KV_PART = 4  # and of the memory that the KV cache could have without them


@dataclass(frozen=True, slots=True)
class Copies:
    """Whether the weights of an engine have copies, and why."""

    made: bool
    reason: str
    on_gpu: bool = True

    def choices(self, network: Network) -> list[Choice]:
        """The start-up line; a CPU, and weights that cannot have copies, have none."""
        num_bytes = count_copies([network])
        if not self.on_gpu or not num_bytes:
            return []
        return [Choice("16-bit copies", gib(num_bytes) if self.made else "none", self.reason)]


def why_no_copies(num_bytes: int, *, memory: int, left: int) -> str | None:
    """Why copies of `num_bytes` are not made unless --dequantized-copies is set, or None.

    `memory`: of the GPU. `left`: of it for the KV cache without copies, or beside a KV cache of a set size.
    """
    if num_bytes == 0:
        return None
    if num_bytes > memory // _MEMORY_PART:
        return f"{gib(num_bytes)} would be more than an eighth of the GPU's {gib(memory)}"
    if num_bytes > left // _KV_PART:
        return f"{gib(num_bytes)} would be more than a quarter of the {gib(max(0, left))} left for the KV cache"
    return None


def step_bytes(hparams: HParams, *, tokens: int, rows: int, itemsize: int) -> int:
    """An estimate of the largest tensors of a step: residual stream, feed-forward and logits."""
    width = 2 * hparams.hidden_size + 3 * hparams.intermediate_size
    # Logits in the compute dtype, and in float32 for the sampler.
    return tokens * width * itemsize + rows * hparams.vocab_size * (itemsize + 4)


def choose_copies(
    config: EngineConfig, hparams: HParams, network: Network, *, parts: Parts, layout: KVLayout
) -> Copies:
    """Choose before weights are read; all ranks do so at the same time, and alike.

    `layout`: of the KV cache of the layers that this rank computes.
    """
    wanted, device = config.model.dequantized_copies, parts.device
    if device.type == "cpu":
        return Copies(False, "this is a CPU", on_gpu=False)
    if wanted is not None:
        return Copies(wanted, "as set")
    num_bytes, why = 0, None
    if any(isinstance(each, StoredWeight) and _is_packed(each) for each in network.modules()):
        counted = make_network(hparams, replace(parts, device=torch.device("cpu")))
        outline(counted)
        num_bytes = count_copies([counted])
        limits = config.limits("cuda")
        steps = step_bytes(
            hparams,
            tokens=limits.max_num_batched_tokens,
            rows=limits.max_num_seqs,
            itemsize=parts.dtype.itemsize,
        )
        left = _room(config, layout, device) - counted.weight_bytes - steps
        why = why_no_copies(num_bytes, memory=whole_bytes(device), left=left)
    all_fit = least(parts.mesh.world, why is None)
    if not num_bytes:
        return Copies(False, "no weight can have one")
    if not all_fit:
        why = why or "another rank has too little memory"
        return Copies(False, f"{why}; --dequantized-copies makes them")
    return Copies(
        True, f"for steps of more than {MAX_PACKED_ROWS} tokens: there is memory for them"
    )


def _is_packed(weight: StoredWeight) -> bool:
    return weight.multiplied and isinstance(weight.method, PackedMethod)


def _room(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    """Memory for weights and steps, and for the KV cache if its size is not set."""
    cache, free = config.cache, free_bytes(device)
    if cache.num_blocks is not None:
        return free - cache.num_blocks * layout.block_bytes
    if cache.kv_cache_memory_bytes is not None:
        return free - cache.kv_cache_memory_bytes
    memory = whole_bytes(device)
    return int(memory * config.limits("cuda").memory_share) - (memory - free)
