"""Decides whether packed weights also have a 16-bit copy (kernels/copied.py).

A start, `windlass plan` and `windlass inspect` ask the same rule, `why_no_copies`, with the same estimate of
a step.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """Whether the weights of an engine have copies if they can, and why."""

    made: bool
    reason: str
    on_gpu: bool = True

    def loaded(self, network: Network) -> Copies:
        """The choice for a network with its weights, of which none may have a copy."""
        return self if count_copies([network]) else replace(self, made=False)

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
    stored = [each for each in network.modules() if isinstance(each, StoredWeight)]
    packed = [each for each in stored if each.multiplied and isinstance(each.method, PackedMethod)]
    why = None
    if packed:
        limits = config.limits("cuda")
        steps = step_bytes(
            hparams,
            tokens=limits.max_num_batched_tokens,
            rows=limits.max_num_seqs,
            itemsize=parts.dtype.itemsize,
        )
        memory, room = whole_bytes(device), _room(config, layout, device) - steps
        most = parts.dtype.itemsize * _num_weights(stored)
        most += sum(each.nbytes for each in network.parameters())
        most_copies = parts.dtype.itemsize * _num_weights(packed)
        if why_no_copies(most_copies, memory=memory, left=room - most) is not None:
            # Only exact sizes can tell. The first operation with meta tensors takes a second.
            counted = make_network(hparams, replace(parts, device=torch.device("cpu")))
            outline(counted)
            left = room - counted.weight_bytes
            why = why_no_copies(count_copies([counted]), memory=memory, left=left)
    if not least(parts.mesh.world, why is None):
        why = why or "another rank has too little memory"
        return Copies(False, f"{why}; --dequantized-copies makes them")
    return Copies(
        True, f"for steps of more than {MAX_PACKED_ROWS} tokens: there is memory for them"
    )


def _num_weights(layers: Iterable[StoredWeight]) -> int:
    return sum(sum(each.parts.values()) * each.num_in for each in layers)


def _room(config: EngineConfig, layout: KVLayout, device: torch.device) -> int:
    """Memory for weights and steps, and for the KV cache if its size is not set."""
    cache, free = config.cache, free_bytes(device)
    if cache.num_blocks is not None:
        return free - cache.num_blocks * layout.block_bytes
    if cache.kv_cache_memory_bytes is not None:
        return free - cache.kv_cache_memory_bytes
    memory = whole_bytes(device)
    return int(memory * config.limits("cuda").memory_share) - (memory - free)
