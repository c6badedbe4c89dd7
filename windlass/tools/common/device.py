"""Measures a device's read bandwidth and int8 rate, and the memory that a run uses."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from windlass.core.moe import Routing
from windlass.kernels.copied import CopiedGemm
from windlass.kernels.native.pool import Workers
from windlass.layers.linear import Linear
from windlass.layers.moe import Experts
from windlass.models.network import Network
from windlass.runner.device import free_bytes

# Far larger than any cache.
_BUFFER = {"cuda": 2**30, "cpu": 2**28}
_READS = 8
_INT8_ROUNDS = 20_000  # some milliseconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """Minimum bytes that a decode step reads."""

    weight_bytes: int  # without experts
    kv_bytes_per_token: float
    expert_bytes: int = 0
    routing: Routing | None = None  # of the experts
    copied: tuple[CopiedGemm, ...] = ()  # a step reads either the packed weight or the copy

    def step_bytes(self, mean_kv: float, num_rows: int) -> float:
        """Bytes of one step; `mean_kv` is the number of KV tokens read over all rows."""
        share = 0.0 if self.routing is None else self.routing.share_read(num_rows)
        read = self.weight_bytes + share * self.expert_bytes
        read -= sum(each.num_bytes - each.read_bytes(num_rows) for each in self.copied)
        return read + mean_kv * self.kv_bytes_per_token


def device_of(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


def traffic_of(network: Network, kv_bytes_per_token: float) -> Traffic:
    """Count all weights but a separate embedding table, of which a step reads only a few rows."""
    experts = [module for module in network.modules() if isinstance(module, Experts)]
    expert_bytes = sum(each.num_bytes for each in experts)
    linears = [module for module in network.modules() if isinstance(module, Linear)]
    prepared = [gemm.prepared for linear in linears for gemm in linear.gemms]
    return Traffic(
        weight_bytes=network.weight_bytes - network.table_bytes - expert_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        expert_bytes=expert_bytes,
        routing=experts[0].routing if experts else None,
        copied=tuple(each for each in prepared if isinstance(each, CopiedGemm)),
    )


def read_bandwidth(device: torch.device) -> float:
    """Measure bytes per second while summing a large buffer; the best of several runs."""
    count = min(_BUFFER[device.type], free_bytes(device) // 2) // 4
    buffer = torch.ones(count, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(_READS):
        synchronise(device)
        started = time.perf_counter()
        buffer.sum()
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return buffer.nbytes / best


def int8_rate(device: torch.device) -> float | None:
    """Measure int8 operations per second (two per multiply-add) of a CPU's dot products, in the L1 cache.

    The best of several runs with as many threads as torch uses. None: a GPU, or no native library, or AMX,
    whose tiles are faster than dot products.
    """
    workers = Workers()
    if device.type != "cpu" or workers.refuse() is not None or "AMX" in workers.pool.native.simd:
        return None
    best = 0.0
    for _ in range(_READS):
        started = time.perf_counter()
        num_macs = workers.pool.multiply_int8(_INT8_ROUNDS)
        best = max(best, 2 * num_macs / (time.perf_counter() - started))
    return best


def prompt_macs(network: Network) -> int | None:
    """Multiply-adds of the layers' GEMMs per token of a prompt. None: a token is multiplied with some experts."""
    if any(isinstance(module, Experts) for module in network.modules()):
        return None
    return num_weights(
        module
        for name, module in network.named_modules()
        if isinstance(module, Linear) and "layers" in name
    )


def num_weights(layers: Iterable[Linear]) -> int:
    """Weights of these layers, with which each of their tokens is multiplied."""
    total = 0
    for layer in layers:
        total += sum(math.prod(gemm.shape) for gemm in layer.gemms)
        total += layer.weight.numel() if layer.weight is not None else 0
    return total


def weight_kernels(network: Network) -> list[str]:
    """Forms and kernels of the decoder's quantised matrices."""
    gemms = (gemm for m in network.modules() if isinstance(m, Linear) for gemm in m.gemms)
    return list(dict.fromkeys(f"{gemm.form}, kernel: {gemm.kernel}" for gemm in gemms))


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory counter of a GPU. A CPU process has no such counter."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_bytes(device: torch.device) -> int:
    """Peak allocated bytes of a GPU; on a CPU, the current resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def release_memory() -> None:
    """Free the memory of deleted engines, since the next engine sizes its cache by free memory."""
    gc.unfreeze()  # building an engine freezes its objects
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
